// Charts of a report. Each `figure.chart` contains the data of its curves as JSON; `curves.py` describes the fields. All charts of the
// page show the same range of the horizontal axis. The first half of the file computes, and the second half draws.
"use strict";

// ---- Axes and numbers. These functions need no browser; tests/unit/tools/test_curves.py calls them.

const MIN_TICKS = 5, MAX_TICKS = 8;

// Returns the positions of ticks at multiples of 1, 2, 2.5 or 5 times a power of ten: about `wanted`, if possible `least` to `most`.
function linearTicks(low, high, wanted = 6, least = MIN_TICKS, most = MAX_TICKS) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / wanted));
  let best = null;
  for (const factor of [0.5, 1, 2, 2.5, 5, 10]) {
    const step = factor * power, first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    const count = last - first + 1, distance = Math.abs(count - wanted) + (count < least || count > most ? 100 : 0);
    if (best === null || distance < best.distance) best = { step, first, count, distance };
  }
  return Array.from({ length: best.count }, (_, index) => (best.first + index) * best.step);
}

// Returns the positions of ticks of a logarithmic axis: powers of ten, or also 2 and 5 times these. A range that contains few of them
// has the ticks of a linear axis.
function logTicks(low, high) {
  const positions = (factors) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) found.push(value);
      }
    return found;
  };
  const decades = positions([1]);
  if (decades.length > MAX_TICKS) return decades.filter((_, index) => index % Math.ceil(decades.length / MAX_TICKS) === 0);
  if (decades.length >= MIN_TICKS) return decades;
  const halves = positions([1, 2, 5]);
  return halves.length >= 4 ? halves : linearTicks(low, high).filter((value) => value > 0);
}

// Formats the ticks of an axis with one unit and as few digits as tell them apart: 0, 5k, 10k; 2.5e-4, 5e-4; 0.5, 1, 1.5.
function formatTicks(values) {
  const largest = Math.max(...values.map(Math.abs), 0);
  return values.map((value) => (value === 0 ? "0" : formatNumber(value, 4, largest)));
}

// Formats a number with at most `digits` significant digits and without trailing zeros: 12k, 1.5B, 0.25, 3e-4.
function formatNumber(value, digits = 4, scale = Math.abs(value)) {
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (scale >= size) return `${+(value / size).toPrecision(digits)}${unit}`;
  if (value === 0 || Math.abs(value) >= 1e-2 || (scale >= 1e-2 && Math.abs(value) >= 1e-3)) return `${+value.toPrecision(digits)}`;
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  return `${+mantissa}e${+exponent}`;
}

// Returns the range of the vertical axis for values in view. Outliers, which lie beyond `limits`, do not count, unless most values in
// view lie beyond the limits, as at the start of a run into which the reader zooms.
function findRange(values, limits, fromZero) {
  const inner = values.filter((value) => value >= limits[0] && value <= limits[1]);
  const counted = inner.length * 2 >= values.length ? inner : values;
  if (!counted.length) return null;
  const low = counted.reduce((a, b) => Math.min(a, b)), high = counted.reduce((a, b) => Math.max(a, b));
  const bottom = fromZero ? Math.min(0, low) : low, margin = (high - bottom) * 0.05 || Math.abs(high) * 0.05 || 1;
  return fromZero ? [bottom, high + margin] : [low - margin, high + margin];
}

// Returns the index of the number in the ascending list `sorted` that is nearest to `value`; -1 for an empty list.
function findNearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low < sorted.length ? low : -1;
}

// Merges outliers that are closer than `distance` pixels into one, which has the largest deviation and the number of points.
function mergeOutliers(outliers, distance) {
  const merged = [];
  for (const outlier of outliers) {
    const last = merged[merged.length - 1];
    if (!last || outlier.pixel - last.pixel >= distance) merged.push({ ...outlier, count: 1 });
    else {
      last.count += 1;
      if (Math.abs(outlier.value) > Math.abs(last.value)) Object.assign(last, { value: outlier.value, x: outlier.x });
    }
  }
  return merged;
}

// ---- Drawing.

const LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 38, TRIANGLE = 5;

function startCharts() {
  const readData = (element) => JSON.parse(element.textContent);
  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    figure, area: figure.querySelector(".area"), spoken: figure.querySelector(".spoken"), isLog: false, cursor: null,
    ...readData(figure.querySelector("script")),
  }));
  const marks = readData(document.getElementById("marks"));
  const shownMarks = new Set();
  const state = { charts, axis: "iteration", range: null }; // range of the horizontal axis; null for all of it
  const drawAll = () => charts.forEach((chart) => drawChart(chart, state, marks.filter((mark) => shownMarks.has(mark.type)), zoom));
  const zoom = (range) => { state.range = range; drawAll(); };
  const fullRange = () => findFullRange(charts, state.axis);

  connectButtons("axis", (value, button) => {
    state.axis = value; state.range = null;
    press(document.querySelectorAll("button[data-axis]"), button);
    drawAll();
  });
  connectButtons("last", (value) => {
    const [low, high] = fullRange();
    zoom(+value === 1 ? null : [high - (high - low) * +value, high]);
  });
  connectButtons("mark", (value, button) => {
    const isShown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", isShown);
    if (isShown) shownMarks.add(value); else shownMarks.delete(value);
    drawAll();
  });
  for (const button of document.querySelectorAll('button[data-mark][aria-pressed="true"]')) shownMarks.add(button.dataset.mark);
  for (const chart of charts) {
    chart.figure.querySelector("button[data-scale]")?.addEventListener("click", (event) => {
      chart.isLog = !chart.isLog;
      event.currentTarget.setAttribute("aria-pressed", chart.isLog);
      drawAll();
    });
    watchPointer(chart, state, zoom);
    watchKeys(chart, state, zoom, fullRange);
  }
  let timer;
  window.addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(drawAll, 100); });
  drawAll();
}

function connectButtons(name, react) {
  for (const button of document.querySelectorAll(`button[data-${name}]`))
    button.addEventListener("click", () => react(button.dataset[name], button));
}

function press(buttons, pressed) {
  for (const button of buttons) button.setAttribute("aria-pressed", button === pressed);
}

function findFullRange(charts, axis) {
  const curves = charts.flatMap((chart) => chart.curves).filter((curve) => curve[axis].length);
  const low = Math.min(...curves.map((curve) => curve[axis][0])), high = Math.max(...curves.map((curve) => curve[axis].at(-1)));
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

function makeSvg(name, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

// Draws a chart into its area, and stores in `chart.view` how pixels and values belong together.
function drawChart(chart, state, marks) {
  const width = chart.area.clientWidth, height = chart.is_wide && width > 640 ? 340 : 240;
  const view = chart.view = buildView(chart, state, width, height);
  chart.area.querySelector("svg")?.remove();
  const svg = chart.svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describeChart(chart) }, chart.area);
  if (view === null) {
    makeSvg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "axis" }, svg, "no values in this range");
    return;
  }
  drawAxes(svg, view, state.axis);
  const clip = `clip-${document.querySelectorAll("clipPath").length}`;
  makeSvg("rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM }, makeSvg("clipPath", { id: clip }, svg));
  drawMarks(svg, view, state.axis, marks);
  const inside = makeSvg("g", { "clip-path": `url(#${clip})` }, svg);
  for (const curve of chart.curves) drawCurve(inside, view, curve, state.axis);
  drawOutliers(svg, view, chart, state.axis);
  chart.line = makeSvg("line", { y1: TOP, y2: height - BOTTOM, class: "cursor", visibility: "hidden" }, svg);
  chart.shade = makeSvg("rect", { y: TOP, height: height - TOP - BOTTOM, class: "shade", visibility: "hidden" }, svg);
  chart.marksInView = marks.filter((mark) => view.contains(mark[state.axis]));
}

function describeChart(chart) {
  const last = chart.curves.filter((curve) => !curve.faint && curve.y.length).map((curve) => `${curve.name} ends at ${formatValue(curve.y.at(-1))}`);
  return `${chart.title}. ${last.join(", ")}`;
}

const formatValue = (value) => (value === null || value === undefined ? "-" : formatNumber(value, 5));

function buildView(chart, state, width, height) {
  const [x0, x1] = state.range ?? findFullRange(state.charts, state.axis);
  const toScale = chart.isLog ? Math.log10 : (value) => value, fromScale = chart.isLog ? (value) => 10 ** value : (value) => value;
  const values = [];
  for (const curve of chart.curves)
    curve[state.axis].forEach((x, index) => {
      if (x < x0 || x > x1) return;
      for (const list of [curve.y, curve.low, curve.high]) {
        const value = list?.[index];
        if (value !== null && value !== undefined && (!chart.isLog || value > 0)) values.push(toScale(value));
      }
    });
  const limits = chart.isLog ? [-Infinity, Infinity] : [chart.limits[0] ?? -Infinity, chart.limits[1] ?? Infinity];
  const range = findRange(values, limits, chart.from_zero && !chart.isLog);
  if (range === null) return null;
  const [low, high] = range, plotWidth = width - LEFT - RIGHT, plotHeight = height - TOP - BOTTOM;
  return {
    width, height, x0, x1, low: fromScale(low), high: fromScale(high), isLog: chart.isLog, isZoomed: state.range !== null,
    contains: (x) => x >= x0 && x <= x1,
    toX: (x) => LEFT + ((x - x0) / (x1 - x0)) * plotWidth,
    toY: (y) => TOP + ((high - (chart.isLog && y <= 0 ? -99 : toScale(y))) / (high - low)) * plotHeight,
    fromX: (pixel) => x0 + ((pixel - LEFT) / plotWidth) * (x1 - x0),
  };
}

function drawAxes(svg, view, axis) {
  const bottom = view.height - BOTTOM, right = view.width - RIGHT;
  const yTicks = view.isLog ? logTicks(view.low, view.high) : linearTicks(view.low, view.high, view.height > 300 ? 7 : 5);
  const yLabels = formatTicks(yTicks), isNarrow = view.width < 460;
  const xTicks = isNarrow ? linearTicks(view.x0, view.x1, 5, 3, 6) : linearTicks(view.x0, view.x1, view.width > 640 ? 8 : 6);
  const xLabels = formatTicks(xTicks);
  yTicks.forEach((value, index) => {
    const y = view.toY(value);
    makeSvg("line", { x1: LEFT, x2: right, y1: y, y2: y, class: "grid" }, svg);
    makeSvg("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end", class: "axis" }, svg, yLabels[index]);
  });
  xTicks.forEach((value, index) => {
    const x = view.toX(value);
    makeSvg("line", { x1: x, x2: x, y1: TOP, y2: bottom, class: "grid" }, svg);
    makeSvg("text", { x: Math.min(x, right - 6), y: bottom + 16, "text-anchor": "middle", class: "axis" }, svg, xLabels[index]);
  });
  makeSvg("line", { x1: LEFT, x2: right, y1: bottom, y2: bottom, class: "base" }, svg);
  makeSvg("text", { x: (LEFT + right) / 2, y: view.height - 6, "text-anchor": "middle", class: "axis faint" }, svg, axis);
}

function drawCurve(parent, view, curve, axis) {
  if (curve.high) { drawBand(parent, view, curve, axis); return; }
  let path = "", pen = "M";
  curve[axis].forEach((x, index) => {
    const y = curve.y[index];
    if (y === null) { pen = "M"; return; }
    path += `${pen}${view.toX(x).toFixed(1)} ${view.toY(y).toFixed(1)}`;
    pen = "L";
    if (curve.dots || curve.y.length === 1) makeSvg("circle", { cx: view.toX(x), cy: view.toY(y), r: 3, fill: curve.colour }, parent);
  });
  makeSvg("path", { d: path, class: curve.faint ? "curve pale" : "curve", stroke: curve.colour, "stroke-dasharray": curve.dash ?? "" }, parent);
}

// Draws the range between the smallest and the largest value of the steps that a point of a thinned curve stands for.
function drawBand(parent, view, curve, axis) {
  const forward = [], backward = [];
  curve[axis].forEach((x, index) => {
    if (curve.high[index] === null) return;
    forward.push(`${view.toX(x).toFixed(1)} ${view.toY(curve.high[index]).toFixed(1)}`);
    backward.push(`${view.toX(x).toFixed(1)} ${view.toY(curve.low[index]).toFixed(1)}`);
  });
  if (forward.length) makeSvg("path", { d: `M${forward.join("L")}L${backward.reverse().join("L")}Z`, class: "band", fill: curve.colour }, parent);
}

// Draws a triangle at the edge for each value above or below the visible range. Pointing at it shows the value.
function drawOutliers(svg, view, chart, axis) {
  for (const isAbove of [true, false]) {
    const outliers = [];
    for (const curve of chart.curves) curve[axis].forEach((x, index) => {
      const value = (isAbove ? curve.high : curve.low)?.[index] ?? curve.y[index];
      if (view.contains(x) && value !== null && (isAbove ? value > view.high : value < view.low && (!view.isLog || value > 0)))
        outliers.push({ pixel: view.toX(x), x, value, name: curve.name, colour: curve.colour });
    });
    outliers.sort((a, b) => a.pixel - b.pixel);
    const y = isAbove ? TOP : view.height - BOTTOM, tip = isAbove ? -TRIANGLE : TRIANGLE;
    const merged = mergeOutliers(outliers, 9);
    for (const outlier of merged) {
      const triangle = makeSvg("path", { d: `M${outlier.pixel - TRIANGLE} ${y}h${2 * TRIANGLE}l${-TRIANGLE} ${tip * 1.6}Z`, fill: outlier.colour, class: "outlier" }, svg);
      const points = outlier.count > 1 ? `${outlier.count} points, the farthest: ` : "";
      makeSvg("title", {}, triangle, `${points}${formatValue(outlier.value)} at ${axis} ${Math.round(outlier.x).toLocaleString("en")}`);
    }
    const early = merged.filter((outlier) => outlier.pixel < LEFT + 0.05 * view.width).at(-1);
    if (isAbove && early && chart.start > view.high && !view.isZoomed)
      makeSvg("text", { x: early.pixel + 10, y: TOP + 11, class: "axis note" }, svg, `starts at ${formatNumber(chart.start, 4)}`);
  }
}

function drawMarks(svg, view, axis, marks) {
  for (const mark of marks) if (view.contains(mark[axis])) {
    const x = view.toX(mark[axis]), isShort = mark.type === "save" || mark.type === "loss spike";
    const [y1, y2] = mark.type === "save" ? [view.height - BOTTOM - 6, view.height - BOTTOM] : [TOP, isShort ? TOP + 12 : view.height - BOTTOM];
    const group = makeSvg("g", { class: `mark ${mark.type.replace(" ", "-")}` }, svg);
    makeSvg("line", { x1: x, x2: x, y1, y2 }, group);
    makeSvg("line", { x1: x, x2: x, y1, y2, class: "target" }, group);
    makeSvg("title", {}, group, mark.text);
  }
}

// ---- Reading values and zooming.

// Shows the values of all curves at the point that is nearest to `x`. Returns the position of this point.
function showValues(chart, state, x) {
  const { view, area } = chart, axis = state.axis;
  if (!view) return null;
  const curves = chart.curves.filter((curve) => curve.y.length && !curve.faint);
  const points = curves.map((curve) => ({ curve, index: findNearest(curve[axis], x) }));
  const distance = (point) => Math.abs(point.curve[axis][point.index] - x);
  const nearest = points.reduce((best, point) => (distance(point) < distance(best) ? point : best), points[0]);
  const position = nearest.curve[axis][nearest.index], pixel = view.toX(position);
  const rows = points.map(({ curve, index }) => ({
    colour: curve.colour, name: curve.name, value: formatValue(curve.y[index]),
    at: curve[axis][index] === position ? "" : ` at ${Math.round(curve[axis][index]).toLocaleString("en")}`,
  }));
  const heading = `${axis} ${Math.round(position).toLocaleString("en")}`;
  const near = chart.marksInView.filter((mark) => Math.abs(view.toX(mark[axis]) - view.toX(x)) < 7);
  fillTip(chart, heading, rows, near.map((mark) => mark.text));
  for (const name of ["x1", "x2"]) chart.line.setAttribute(name, pixel);
  chart.line.setAttribute("visibility", view.contains(position) ? "visible" : "hidden");
  const tip = chart.tip, space = area.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(space, pixel > area.clientWidth / 2 ? pixel - tip.offsetWidth - 12 : pixel + 12))}px`;
  return { position, words: `${heading}: ${rows.map((row) => `${row.name} ${row.value}${row.at}`).join(", ")}` };
}

function fillTip(chart, heading, rows, texts) {
  const tip = chart.tip ??= chart.area.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  const make = (tag, text, parent) => parent.appendChild(Object.assign(document.createElement(tag), { textContent: text }));
  tip.textContent = "";
  make("b", heading, tip);
  for (const row of rows) {
    const line = make("div", "", tip);
    make("i", "", line).style.background = row.colour;
    make("span", row.name, line);
    make("strong", row.value, line);
    if (row.at) make("small", row.at, line);
  }
  for (const text of texts) make("p", text, tip);
  tip.hidden = false;
}

function hideValues(chart) {
  chart.line?.setAttribute("visibility", "hidden");
  chart.shade?.setAttribute("visibility", "hidden");
  if (chart.tip) chart.tip.hidden = true;
}

// A mouse reads values while it moves, and zooms into the range over which it is dragged. A finger reads values.
function watchPointer(chart, state, zoom) {
  let start = null;
  const locate = (event) => {
    const { width } = chart.view, pixel = event.clientX - chart.area.getBoundingClientRect().left;
    return Math.min(Math.max(pixel, LEFT), width - RIGHT);
  };
  chart.area.addEventListener("pointermove", (event) => {
    if (!chart.view) return;
    const pixel = locate(event);
    showValues(chart, state, chart.view.fromX(pixel));
    if (start === null) return;
    const edges = { x: Math.min(start, pixel), width: Math.abs(pixel - start), visibility: "visible" };
    for (const [name, value] of Object.entries(edges)) chart.shade.setAttribute(name, value);
  });
  chart.area.addEventListener("pointerdown", (event) => {
    if (!chart.view) return;
    showValues(chart, state, chart.view.fromX(locate(event)));
    if (event.pointerType !== "mouse") return;
    start = locate(event);
    chart.area.setPointerCapture(event.pointerId);
  });
  chart.area.addEventListener("pointerup", (event) => {
    const end = chart.view ? locate(event) : null, begin = start;
    start = null;
    chart.shade?.setAttribute("visibility", "hidden");
    if (begin !== null && end !== null && Math.abs(end - begin) > 8)
      zoom([chart.view.fromX(Math.min(begin, end)), chart.view.fromX(Math.max(begin, end))]);
  });
  chart.area.addEventListener("pointerleave", (event) => {
    start = null;
    if (event.pointerType === "mouse") hideValues(chart); // a finger that is lifted leaves the values for reading
  });
  document.addEventListener("pointerdown", (event) => { if (!chart.area.contains(event.target)) hideValues(chart); });
  chart.area.addEventListener("dblclick", () => zoom(null));
}

// Arrow keys move through the points, + and - zoom, 0 shows all. A live region speaks the values.
function watchKeys(chart, state, zoom, fullRange) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
  chart.area.addEventListener("keydown", (event) => {
    const curve = chart.curves.find((each) => !each.faint && each.y.length), view = chart.view;
    if (!curve || !view) return;
    const xs = curve[state.axis];
    if (event.key in steps) {
      const index = chart.cursor === null ? xs.length - 1 : findNearest(xs, chart.cursor);
      chart.cursor = xs[Math.min(xs.length - 1, Math.max(0, index + steps[event.key]))];
    } else if (event.key === "+" || event.key === "-") {
      const [low, high] = fullRange(), centre = chart.cursor ?? (view.x0 + view.x1) / 2;
      const half = ((view.x1 - view.x0) / 2) * (event.key === "+" ? 0.5 : 2);
      zoom(2 * half >= high - low ? null : [Math.max(low, centre - half), Math.min(high, centre + half)]);
    } else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
    if (chart.cursor !== null) chart.spoken.textContent = showValues(chart, state, chart.cursor)?.words ?? "";
  });
  chart.area.addEventListener("blur", () => hideValues(chart));
}

if (typeof document !== "undefined") startCharts();
