// Draws the charts of a report: each `figure.chart` gets the curves of the JSON in it. All charts share one range of x.
// Drag over a chart to zoom, double click to see all again; the buttons choose what x is.
(() => {
  "use strict";
  const LEFT = 62, RIGHT = 10, TOP = 10, BOTTOM = 26, HEIGHT = 260, STRIP = 130;
  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    figure, area: figure.querySelector(".area"), said: figure.querySelector(".said"),
    ...JSON.parse(figure.querySelector("script").textContent),
  }));
  let axis = "iteration", range = null; // all charts show this part; null for all of it
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };
  const short = (value) => {
    for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= size) return `${+(value / size).toPrecision(4)}${unit}`;
    return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2).replace("e-", "e-") : `${+value.toPrecision(4)}`;
  };
  const ticks = (low, high, wanted) => {
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at++) found.push(at * step);
    return found;
  };
  const bounds = () => {
    let low = Infinity, high = -Infinity;
    for (const chart of charts) for (const one of chart.curves) if (one[axis].length) {
      low = Math.min(low, one[axis][0]); high = Math.max(high, one[axis].at(-1));
    }
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  };
  const draw = (chart) => {
    const [x0, x1] = range ?? bounds(), width = chart.area.clientWidth, height = chart.strip ? STRIP : HEIGHT;
    chart.area.textContent = "";
    const svg = make("svg", { width, height, role: "img", "aria-label": chart.title }, chart.area);
    let low = Infinity, high = -Infinity;
    for (const one of chart.curves) one[axis].forEach((x, at) => {
      const y = one.y[at];
      if (x >= x0 && x <= x1 && y !== null && (!one.faint || at > one.y.length * 0.02)) { low = Math.min(low, y); high = Math.max(high, y); }
    });
    if (!(high >= low)) return;
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    [low, high] = [chart.from_zero ? Math.min(0, low) : low - margin, high + margin];
    const across = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const up = (y) => TOP + ((high - y) / (high - low)) * (height - TOP - BOTTOM);
    for (const y of ticks(low, high, chart.strip ? 3 : 6)) {
      make("line", { x1: LEFT, x2: width - RIGHT, y1: up(y), y2: up(y), stroke: "var(--line)" }, svg);
      make("text", { x: LEFT - 6, y: up(y) + 4, "text-anchor": "end" }, svg, short(y));
    }
    for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 110))))
      make("text", { x: across(x), y: height - 8, "text-anchor": "middle" }, svg, short(x));
    const clip = `clip-${charts.indexOf(chart)}`;
    make("rect", { x: LEFT, y: TOP, width: Math.max(0, width - LEFT - RIGHT), height: height - TOP - BOTTOM },
      make("clipPath", { id: clip }, make("defs", {}, svg)));
    const inside = make("g", { "clip-path": `url(#${clip})` }, svg);
    for (const one of chart.curves) {
      let path = "", pen = "M";
      one[axis].forEach((x, at) => {
        if (one.y[at] === null) { pen = "M"; return; }
        path += `${pen}${across(x).toFixed(1)} ${up(one.y[at]).toFixed(1)}`; pen = "L";
        if (one.dots) make("circle", { cx: across(x), cy: up(one.y[at]), r: 3, fill: one.colour }, inside);
      });
      make("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": one.faint ? 1 : 1.8, opacity: one.faint ? 0.35 : 1,
        ...(one.dashed ? { "stroke-dasharray": "5 3" } : {}) }, inside);
    }
    const line = make("line", { y1: TOP, y2: height - BOTTOM, stroke: "var(--faint)", visibility: "hidden" }, svg);
    const shade = make("rect", { y: TOP, height: height - TOP - BOTTOM, fill: "var(--faint)", opacity: 0.2, visibility: "hidden" }, svg);
    const at = (event) => {
      const x = Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left, LEFT), width - RIGHT);
      return [x, x0 + ((x - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0)];
    };
    let from = null;
    svg.addEventListener("pointermove", (event) => {
      const [pixel, x] = at(event);
      line.setAttribute("x1", pixel); line.setAttribute("x2", pixel); line.setAttribute("visibility", "visible");
      if (from) {
        shade.setAttribute("x", Math.min(from[0], pixel)); shade.setAttribute("width", Math.abs(pixel - from[0]));
        shade.setAttribute("visibility", "visible");
      }
      const near = chart.curves.filter((one) => !one.faint && one.y.length).map((one) => {
        let best = 0;
        one[axis].forEach((each, number) => { if (Math.abs(each - x) < Math.abs(one[axis][best] - x)) best = number; });
        return `${one.name} ${one.y[best] === null ? "-" : short(one.y[best])}`;
      });
      chart.said.textContent = `${axis} ${short(Math.round(x))}: ${near.join(", ")}`;
    });
    svg.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); });
    svg.addEventListener("pointerdown", (event) => { from = at(event); svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointerup", (event) => {
      const to = at(event), wide = from && Math.abs(to[0] - from[0]) > 8;
      if (wide) range = [Math.min(from[1], to[1]), Math.max(from[1], to[1])];
      from = null;
      shade.setAttribute("visibility", "hidden");
      if (wide) drawAll();
    });
    svg.addEventListener("dblclick", () => { range = null; drawAll(); });
  };
  const drawAll = () => charts.forEach(draw);
  for (const button of document.querySelectorAll("button[data-axis]")) button.addEventListener("click", () => {
    axis = button.dataset.axis; range = null;
    for (const other of document.querySelectorAll("button[data-axis]")) other.setAttribute("aria-pressed", other === button);
    drawAll();
  });
  document.querySelector("button[data-all]")?.addEventListener("click", () => { range = null; drawAll(); });
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 100); });
  drawAll();
})();
