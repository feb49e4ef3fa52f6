"""Draw how a batch flows through a training step: samples, pipeline stages, a layer on tensor ranks, gradients, update.

    python tools/draw_step.py docs/images/step.svg

The job drawn has 8 ranks: tensor 2 x pipeline 2 x data 2, and 4 microbatches a data rank. The timeline in it is that of the
schedule which trains, `1f1b`, by the simulator.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.operations import OpKind
from megatron.spec.schedules import make_schedule
from megatron_lab.commands.parser import ToolParser

WIDTH, HEIGHT, LEFT = 800, 588, 20
STAGES, MICROBATCHES, SAMPLES_OF_MICROBATCH = 2, 4, 4

# Colours of Okabe and Ito 2008, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY, LIGHT = "#0072b2", "#d55e00", "#007a5a", "#555555", "#eef1f4"
DATA_RANK = (BLUE, "#9a5b8c")


class Drawing:
    """The elements of an SVG picture, in the order in which they are drawn."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = LIGHT, ink: str = "#222") -> None:
        """A rectangle with text in its middle."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{GREY}" stroke-width="0.8"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4.5, text, ink=ink, anchor="middle")

    def text(
        self, x: float, y: float, text: str, *, ink: str = "#222", anchor: str = "start", size: int = 13, bold: bool = False
    ) -> None:
        """One line of text, its baseline at y."""
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], ink: str = GREY) -> None:
        """A line through the points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        name = {GREY: "grey", BLUE: "blue", ORANGE: "orange", GREEN: "green"}[ink]
        self.elements.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.6" marker-end="url(#{name})"/>')

    def svg(self) -> str:
        """The whole file."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{ink}"/></marker>'
            for name, ink in (("grey", GREY), ("blue", BLUE), ("orange", ORANGE), ("green", GREEN))
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
                'font-family="Helvetica, Arial, sans-serif">',
                f'<defs>{heads}</defs><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def draw_batch(drawing: Drawing, top: float) -> None:
    """The samples of the global batch, and which data rank takes them."""
    drawing.text(
        LEFT, top, "1  A global batch: consecutive samples, shared out over data ranks (which ones is arithmetic)", bold=True
    )
    for i in range(2 * MICROBATCHES):
        first = SAMPLES_OF_MICROBATCH * i
        label = f"{first} ... {first + SAMPLES_OF_MICROBATCH - 1}"
        drawing.box(LEFT + i * 95.7, top + 12, 90, 24, label, fill=DATA_RANK[i % len(DATA_RANK)], ink="white")
    drawing.text(
        LEFT, top + 54, "8 microbatches of 4 samples, in turn to data rank 0, data rank 1, data rank 0, ...: 4 microbatches each"
    )


def draw_pipeline(drawing: Drawing, top: float) -> None:
    """The timeline of the stages of one data rank."""
    drawing.text(LEFT, top, "2  Data rank 0: its microbatches pass the pipeline stages (schedule 1f1b)", bold=True)
    timeline = simulate(make_schedule("1f1b", STAGES, MICROBATCHES, 1))
    left, scale = LEFT + 70, (WIDTH - 2 * LEFT - 70) / timeline.end
    rows = [top + 14 + 46 * stage for stage in range(STAGES)]
    middle: dict[tuple[OpKind, int, int], tuple[float, float]] = {}
    for stage, spans in enumerate(timeline.spans):
        drawing.text(LEFT, rows[stage] + 19, f"stage {stage}")
        for span in spans:
            forward = span.op.kind is OpKind.FORWARD
            width = (span.end - span.start) * scale
            x = left + span.start * scale
            drawing.box(
                x,
                rows[stage],
                width - 3,
                28,
                f"{span.op.kind.value}{span.op.microbatch}",
                fill=BLUE if forward else ORANGE,
                ink="white",
            )
            middle[span.op.kind, stage, span.op.microbatch] = (x, x + width - 3)
    for microbatch in range(MICROBATCHES):
        sent, taken = middle[OpKind.FORWARD, 0, microbatch][1], middle[OpKind.FORWARD, 1, microbatch][0]
        drawing.arrow((sent - 6, rows[0] + 28), (taken + 8, rows[1]), ink=BLUE)
        sent, taken = middle[OpKind.BACKWARD, 1, microbatch][1], middle[OpKind.BACKWARD, 0, microbatch][0]
        drawing.arrow((sent - 6, rows[1]), (taken + 8, rows[0] + 28), ink=ORANGE)
    below = rows[-1] + 46
    drawing.text(left, below, "F forward: activations go to the next stage", ink=BLUE)
    drawing.text(WIDTH - LEFT, below, "B backward: gradients come back; loss is on the last stage", ink=ORANGE, anchor="end")


def draw_layer(drawing: Drawing, top: float) -> None:
    """What one layer does on two tensor ranks, under sequence parallelism."""
    drawing.text(LEFT, top, "3  Inside a forward: one layer on two tensor ranks, each with half of every large weight", bold=True)
    parts = [("norm", 52), ("", 26), ("q, k, v", 62), ("attention", 74), ("output", 58), ("", 26)]
    parts += [("+", 22), ("norm", 52), ("", 26), ("up", 46), ("act", 40), ("down", 52), ("", 26), ("+", 22)]
    gap = (WIDTH - 2 * LEFT - 60 - sum(width for _, width in parts)) / (len(parts) - 1)
    rows = (top + 14, top + 52)
    for rank, y in enumerate(rows):
        drawing.text(LEFT, y + 19, f"rank {rank}")
    x, gathers = LEFT + 60.0, True
    for name, width in parts:
        if name:
            split = name not in ("norm", "+")
            for y in rows:
                drawing.box(x, y, width, 28, name, fill="#cfe3f1" if split else LIGHT)
        else:
            label = "gather" if gathers else "scatter"
            drawing.box(x, rows[0], width, rows[1] + 28 - rows[0], fill="#d9efe6")
            drawing.elements.append(
                f'<text transform="translate({x + width / 2 + 4.5:g},{(rows[0] + rows[1] + 28) / 2:g}) rotate(-90)" font-size="12" '
                f'fill="{GREEN}" text-anchor="middle">{label}</text>'
            )
            gathers = not gathers
        x += width + gap
    drawing.text(LEFT + 60, rows[1] + 46, "blue: split over ranks; grey: each rank has its part of the sequence")
    drawing.text(WIDTH - LEFT, rows[1] + 46, "all-gather before, reduce-scatter after", ink=GREEN, anchor="end")


def draw_update(drawing: Drawing, top: float) -> None:
    """From gradients to updated parameters, sharded over the data ranks."""
    drawing.text(
        LEFT,
        top,
        "4  After the last backward: gradients are summed, each data rank updates its share, all get the result",
        bold=True,
    )
    names = [
        ("main_grad", "float32 buckets"),
        ("reduce-scatter", "over data ranks"),
        ("global norm", "clip, skip if inf"),
        ("optimizer", "main params"),
        ("all-gather", "over data ranks"),
        ("parameters", "bf16, next step"),
    ]
    width, gap = 112, (WIDTH - 2 * LEFT - 6 * 112) / 5
    for rank in range(2):
        y = top + 14 + rank * 66
        for i, (name, detail) in enumerate(names):
            x = LEFT + i * (width + gap)
            communicates = name in ("reduce-scatter", "all-gather")
            if communicates and rank:
                continue
            height = 114 if communicates else 48
            drawing.box(x, y, width, height, fill="#d9efe6" if communicates else LIGHT)
            middle = y + height / 2
            drawing.text(x + width / 2, middle - 4, name, anchor="middle", bold=True, ink=GREEN if communicates else "#222")
            drawing.text(x + width / 2, middle + 13, detail, anchor="middle", size=11)
        for i in range(5):
            x = LEFT + i * (width + gap) + width
            drawing.arrow((x + 1, y + 24), (x + gap - 1, y + 24))
    drawing.text(
        LEFT,
        top + 146,
        "upper row: data rank 0, lower row: data rank 1; loss, token count, norm and finiteness travel in one reduction a step",
    )


def draw() -> str:
    """The picture as SVG."""
    drawing = Drawing()
    draw_batch(drawing, 28)
    drawing.arrow((WIDTH / 2, 88), (WIDTH / 2, 104))
    draw_pipeline(drawing, 122)
    drawing.arrow((WIDTH / 2, 244), (WIDTH / 2, 260))
    draw_layer(drawing, 280)
    drawing.arrow((WIDTH / 2, 388), (WIDTH / 2, 404))
    draw_update(drawing, 424)
    return drawing.svg()


def main(arguments: list[str] | None = None) -> int:
    """Write the picture; returns the exit code."""
    flags = ToolParser(description="Draw how a batch flows through a training step.")
    flags.add_argument("output", type=Path, metavar="FILE.svg", help="where the picture goes")
    given = flags.parse_args(arguments)
    try:
        given.output.write_text(draw())
    except OSError as error:
        print(f"draw_step.py: error: {given.output} cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    print(f"wrote {given.output}", file=sys.stderr)
    return 0
