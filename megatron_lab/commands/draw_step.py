"""Draw how a batch flows through a training step: samples, pipeline stages, a layer on tensor ranks, gradients, update.

    python tools/draw_step.py docs/images/step.svg

The job in the picture has 8 ranks: tensor 2 x pipeline 2 x data 2, with 4 microbatches per data rank. The simulator computes the
timeline of the schedule `1f1b`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.operations import OpType
from megatron.spec.schedules import build_schedule
from megatron_lab.commands.parser import ToolParser

WIDTH, HEIGHT, LEFT = 800, 588, 20
STAGES, MICROBATCHES, SAMPLES_OF_MICROBATCH = 2, 4, 4

# Colours of Okabe and Ito 2008, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY, LIGHT = "#0072b2", "#d55e00", "#007a5a", "#555555", "#eef1f4"
DATA_RANK_COLOURS = (BLUE, "#9a5b8c")


class Drawing:
    """SVG picture under construction: its elements in drawing order."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def add_rect(
        self, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = LIGHT, ink: str = "#222"
    ) -> None:
        """Add a rectangle with centred text. `fill` is the colour of the rectangle, `ink` that of the text."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{GREY}" stroke-width="0.8"/>'
        )
        if text:
            self.add_text(x + width / 2, y + height / 2 + 4.5, text, ink=ink, anchor="middle")

    def add_text(
        self, x: float, y: float, text: str, *, ink: str = "#222", anchor: str = "start", size: int = 13, bold: bool = False
    ) -> None:
        """Add one line of text. `x` is its start, middle or end, as `anchor` says; `y` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def add_arrow(self, *points: tuple[float, float], ink: str = GREY) -> None:
        """Add a line through the points, with an arrowhead at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        name = {GREY: "grey", BLUE: "blue", ORANGE: "orange", GREEN: "green"}[ink]
        self.elements.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.6" marker-end="url(#{name})"/>')

    def to_svg(self) -> str:
        """Return the complete SVG file."""
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
    """Draw the samples of the global batch, coloured by data-parallel rank.

    Args:
        top: y coordinate of the section's heading.
    """
    drawing.add_text(
        LEFT, top, "1  A global batch: consecutive samples, shared out over data ranks (which ones is arithmetic)", bold=True
    )
    for i in range(2 * MICROBATCHES):
        first = SAMPLES_OF_MICROBATCH * i
        label = f"{first} ... {first + SAMPLES_OF_MICROBATCH - 1}"
        drawing.add_rect(LEFT + i * 95.7, top + 12, 90, 24, label, fill=DATA_RANK_COLOURS[i % len(DATA_RANK_COLOURS)], ink="white")
    drawing.add_text(
        LEFT, top + 54, "8 microbatches of 4 samples, in turn to data rank 0, data rank 1, data rank 0, ...: 4 microbatches each"
    )


def draw_pipeline(drawing: Drawing, top: float) -> None:
    """Draw the timeline of the pipeline stages of one data-parallel rank.

    Args:
        top: y coordinate of the section's heading.
    """
    drawing.add_text(LEFT, top, "2  Data rank 0: its microbatches pass the pipeline stages (schedule 1f1b)", bold=True)
    timeline = simulate(build_schedule("1f1b", STAGES, MICROBATCHES, 1))
    left, scale = LEFT + 70, (WIDTH - 2 * LEFT - 70) / timeline.end
    stage_tops = [top + 14 + 46 * stage for stage in range(STAGES)]
    bar_ends: dict[tuple[OpType, int, int], tuple[float, float]] = {}
    for stage, spans in enumerate(timeline.spans):
        drawing.add_text(LEFT, stage_tops[stage] + 19, f"stage {stage}")
        for span in spans:
            is_forward = span.op.type is OpType.FORWARD
            width = (span.end - span.start) * scale
            x = left + span.start * scale
            drawing.add_rect(
                x,
                stage_tops[stage],
                width - 3,
                28,
                f"{span.op.type.value}{span.op.microbatch}",
                fill=BLUE if is_forward else ORANGE,
                ink="white",
            )
            bar_ends[span.op.type, stage, span.op.microbatch] = (x, x + width - 3)
    for microbatch in range(MICROBATCHES):
        send_x, receive_x = bar_ends[OpType.FORWARD, 0, microbatch][1], bar_ends[OpType.FORWARD, 1, microbatch][0]
        drawing.add_arrow((send_x - 6, stage_tops[0] + 28), (receive_x + 8, stage_tops[1]), ink=BLUE)
        send_x, receive_x = bar_ends[OpType.BACKWARD, 1, microbatch][1], bar_ends[OpType.BACKWARD, 0, microbatch][0]
        drawing.add_arrow((send_x - 6, stage_tops[1]), (receive_x + 8, stage_tops[0] + 28), ink=ORANGE)
    legend_top = stage_tops[-1] + 46
    drawing.add_text(left, legend_top, "F forward: activations go to the next stage", ink=BLUE)
    drawing.add_text(
        WIDTH - LEFT, legend_top, "B backward: gradients come back; loss is on the last stage", ink=ORANGE, anchor="end"
    )


def draw_layer(drawing: Drawing, top: float) -> None:
    """Draw the operations of one layer on two tensor-parallel ranks with sequence parallelism.

    Args:
        top: y coordinate of the section's heading.
    """
    drawing.add_text(
        LEFT, top, "3  Inside a forward: one layer on two tensor ranks, each with half of every large weight", bold=True
    )
    blocks = [("norm", 52), ("", 26), ("q, k, v", 62), ("attention", 74), ("output", 58), ("", 26)]
    blocks += [("+", 22), ("norm", 52), ("", 26), ("up", 46), ("act", 40), ("down", 52), ("", 26), ("+", 22)]
    gap = (WIDTH - 2 * LEFT - 60 - sum(width for _, width in blocks)) / (len(blocks) - 1)
    rank_tops = (top + 14, top + 52)
    for rank, y in enumerate(rank_tops):
        drawing.add_text(LEFT, y + 19, f"rank {rank}")
    x, is_gather = LEFT + 60.0, True
    for name, width in blocks:
        if name:
            is_split = name not in ("norm", "+")
            for y in rank_tops:
                drawing.add_rect(x, y, width, 28, name, fill="#cfe3f1" if is_split else LIGHT)
        else:
            label = "gather" if is_gather else "scatter"
            drawing.add_rect(x, rank_tops[0], width, rank_tops[1] + 28 - rank_tops[0], fill="#d9efe6")
            drawing.elements.append(
                f'<text transform="translate({x + width / 2 + 4.5:g},{(rank_tops[0] + rank_tops[1] + 28) / 2:g}) rotate(-90)" '
                f'font-size="12" fill="{GREEN}" text-anchor="middle">{label}</text>'
            )
            is_gather = not is_gather
        x += width + gap
    drawing.add_text(LEFT + 60, rank_tops[1] + 46, "blue: split over ranks; grey: each rank has its part of the sequence")
    drawing.add_text(WIDTH - LEFT, rank_tops[1] + 46, "all-gather before, reduce-scatter after", ink=GREEN, anchor="end")


def draw_update(drawing: Drawing, top: float) -> None:
    """Draw the path from gradients to updated parameters, sharded over the data-parallel ranks.

    Args:
        top: y coordinate of the section's heading.
    """
    drawing.add_text(
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
            is_collective = name in ("reduce-scatter", "all-gather")
            if is_collective and rank:
                continue
            height = 114 if is_collective else 48
            drawing.add_rect(x, y, width, height, fill="#d9efe6" if is_collective else LIGHT)
            middle = y + height / 2
            drawing.add_text(x + width / 2, middle - 4, name, anchor="middle", bold=True, ink=GREEN if is_collective else "#222")
            drawing.add_text(x + width / 2, middle + 13, detail, anchor="middle", size=11)
        for i in range(5):
            x = LEFT + i * (width + gap) + width
            drawing.add_arrow((x + 1, y + 24), (x + gap - 1, y + 24))
    drawing.add_text(
        LEFT,
        top + 146,
        "upper row: data rank 0, lower row: data rank 1; loss, token count, norm and finiteness travel in one reduction a step",
    )


def build_svg() -> str:
    """Return the complete picture of a training step as SVG."""
    drawing = Drawing()
    draw_batch(drawing, 28)
    drawing.add_arrow((WIDTH / 2, 88), (WIDTH / 2, 104))
    draw_pipeline(drawing, 122)
    drawing.add_arrow((WIDTH / 2, 244), (WIDTH / 2, 260))
    draw_layer(drawing, 280)
    drawing.add_arrow((WIDTH / 2, 388), (WIDTH / 2, 404))
    draw_update(drawing, 424)
    return drawing.to_svg()


def main(arguments: list[str] | None = None) -> int:
    """Write the picture of a training step to a file. Return the exit status: 0, or 1 if the file cannot be written."""
    parser = ToolParser(description="Draw how a batch flows through a training step.")
    parser.add_argument("output", type=Path, metavar="FILE.svg", help="Write the picture to this file.")
    args = parser.parse_args(arguments)
    try:
        args.output.write_text(build_svg())
    except OSError as error:
        print(f"draw_step.py: error: {args.output} cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    print(f"wrote {args.output}", file=sys.stderr)
    return 0
