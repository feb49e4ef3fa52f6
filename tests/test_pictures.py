"""Pictures of timelines, and the papers' formulas: drawn is what the timeline says, and no formula is shown where it is wrong."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.formulas import BUBBLE, PEAK_LIVE, expected
from megatron.pipeline_parallel.pictures.files import WRITERS, check_output, write_picture
from megatron.pipeline_parallel.pictures.palette import NUM_SHADES, Colour, colour_of
from megatron.pipeline_parallel.pictures.panel import Panel, number, tick_step
from megatron.pipeline_parallel.pictures.table import Row, draw_table, peak_live
from megatron.pipeline_parallel.pictures.terminal import Terminal
from megatron.pipeline_parallel.pictures.text import draw_text
from megatron.pipeline_parallel.pictures.trace import chrome_trace
from megatron.pipeline_parallel.schedule import Op, OpKind
from megatron.pipeline_parallel.schedules.registry import GENERATORS, make_schedule
from megatron.pipeline_parallel.schedules.select import forward_only
from megatron.pipeline_parallel.simulate import Costs, Span, Timeline, simulate
from megatron.pipeline_parallel.validate import validate

F, B, I, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD


def chunks_of(name: str, chunks: int) -> int:
    """Chunks a stage that a schedule can have."""
    return GENERATORS[name].chunks_per_stage or chunks


def timeline(name: str, stages: int, microbatches: int, chunks: int = 2, costs: Costs = Costs(10, 10, 10)) -> Timeline:  # noqa: B008
    """Simulated, at costs of a whole stage."""
    chunks = chunks_of(name, chunks)
    return simulate(make_schedule(name, stages, microbatches, chunks), costs.divided(chunks))


def panel(name: str, stages: int, microbatches: int, chunks: int = 2) -> Panel:
    return Panel(name, timeline(name, stages, microbatches, chunks))


def moved(before: Timeline, by: float) -> Timeline:
    """The same on another clock."""
    spans = tuple(tuple(Span(span.op, span.start + by, span.end + by) for span in stage) for stage in before.spans)
    return replace(before, spans=spans)


names = st.sampled_from(list(GENERATORS))
# Twelve has all numbers of chunks as divisors, so costs of chunks are whole and sums of them exact.
durations = st.integers(0, 9).map(lambda n: 12.0 * n)
costs_of_a_stage = st.one_of(st.builds(Costs, durations, durations, durations), durations.map(lambda n: Costs(n, n, n)))


# ---- the formulas


def test_every_schedule_has_its_formulas() -> None:
    assert set(BUBBLE) == set(PEAK_LIVE) == set(GENERATORS)
    nothing = expected("of my own", 4, 8, 1, Costs())
    assert (nothing.bubble_time, nothing.peak_live, nothing.formulas) == (None, None, ())


@given(names, st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), costs_of_a_stage)
def test_a_formula_that_is_given_is_exact(name: str, stages: int, microbatches: int, chunks: int, costs: Costs) -> None:
    said = expected(name, stages, microbatches, chunks_of(name, chunks), costs)
    if said.bubble_time is not None:
        step = microbatches * (costs.forward + costs.input_grad + costs.weight_grad) + said.bubble_time
        assert timeline(name, stages, microbatches, chunks, costs).step_time == step
    if said.peak_live is not None:
        schedule = make_schedule(name, stages, microbatches, chunks_of(name, chunks))
        assert said.peak_live == validate(schedule).peak_live_activations


@given(st.integers(2, 10), st.integers(0, 20), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_bubble_of_zb_h1_needs_weight_gradients_that_are_not_the_longest(
    stages: int, more: int, f: int, i: int, w: int
) -> None:
    """W <= F and W <= I are not only enough: wherever one is missing the simulator has another bubble."""
    costs, microbatches = Costs(f, i, w), stages + more
    said = expected("zb-h1", stages, microbatches, 1, costs).bubble_time
    assert (said is not None) == (w <= f and w <= i)
    bubble = timeline("zb-h1", stages, microbatches, 1, costs).step_time - microbatches * (f + i + w)
    assert (bubble == (stages - 1) * (f + i - w)) == (said is not None)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "costs"),
    [
        ("gpipe", 4, 8, 1, Costs(1, 1, 1, p2p=0.1)),
        ("1f1b", 4, 8, 1, Costs(1, 1, 1, p2p=0.1)),
        ("interleaved", 4, 3, 2, Costs()),
        ("zb-h1", 4, 3, 1, Costs()),
        ("zb-v", 4, 6, 2, Costs()),
        ("zb-v", 4, 8, 2, Costs(2, 2, 1)),
    ],
)
def test_no_formula_is_stretched(name: str, stages: int, microbatches: int, chunks: int, costs: Costs) -> None:
    assert expected(name, stages, microbatches, chunks, costs).bubble_time is None


def test_few_microbatches_of_zb_v_have_no_formula_of_memory() -> None:
    assert expected("zb-v", 4, 6, 2, Costs()).peak_live is None
    assert expected("zb-v", 4, 7, 2, Costs()).peak_live == (8, 8, 8, 8)


def test_messages_between_no_stages_take_no_time() -> None:
    assert expected("zb-v", 1, 3, 2, Costs(1, 2, 3, p2p=9)).bubble_time == 0


# ---- text


def rows_of(text: str) -> list[str]:
    """The rows of the stages without their names."""
    return [re.sub(r"^stage \d+ +", "", line) for line in text.splitlines() if re.match(r"stage \d+  ", line)]


def test_a_timeline_by_hand() -> None:
    """1F1B of 2 stages and 3 microbatches: a column is 10/3 ms."""
    text = draw_text([Panel("1f1b", timeline("1f1b", 2, 3))], width=45, ascii_only=True)
    assert text.splitlines() == [
        "1f1b: step 120 ms, bubble 25.0%",
        "stage 0  F0-F1-......B0----F2-B1----...B2----",
        "stage 1  ...F0-B0----F1-B1----F2-B2----......",
        "         |0 ms          |50 ms",
        "",
        "F forward, B backward, . waiting; the number is the microbatch",
    ]


@given(names, st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(40, 250))
def test_every_operation_stands_where_it_runs(name: str, stages: int, microbatches: int, chunks: int, width: int) -> None:
    drawn = timeline(name, stages, microbatches, chunks)
    text = draw_text([Panel(name, drawn)], width=width)
    assert all(len(line) <= width for line in text.splitlines() if line.startswith(("stage", " ")))
    lines = rows_of(text)
    parts = len(lines) // stages
    assert ("(part 1 of" in text) == (parts > 1)
    if "coarse" in text:
        return
    for stage, spans in enumerate(drawn.spans):
        row = "".join(lines[part * stages + stage] for part in range(parts))
        upper = [span.op.kind.value + str(span.op.microbatch) for span in spans]
        assert re.findall(r"[A-Z]\d+", row.upper()) == upper
        first_chunk = min(span.op.chunk for span in spans)
        second = {span.op.chunk for span in spans} - {first_chunk}
        assert all(
            letter.isupper()
            for letter, span in zip(re.findall("[A-Za-z]", row), spans, strict=True)
            if span.op.chunk == first_chunk
        )
        assert any(letter.islower() for letter in row) == bool(second)
        # Equal costs are whole columns, so waiting has its exact share of the row (but for the end of the last part).
        busy = len(row.rstrip("·")) - row.rstrip("·").count("·")
        waits_inside = row.strip("·").count("·")
        assert waits_inside / busy == pytest.approx(drawn.idle_inside[stage] / drawn.busy[stage])


@pytest.mark.parametrize("costs", [Costs(10, 10, 10, 5 / 3), Costs(0.1, 0.1, 0.1), Costs(0.7, 0.7, 0.7, 0.1)])
def test_equal_operations_are_equally_long_wherever_they_fall(costs: Costs) -> None:
    """Half a column later, or off by the last digit of a number that is not exact."""
    drawn = timeline("zb-h1", 4, 12, costs=costs)
    rows = rows_of(draw_text([Panel("zb-h1", drawn)], width=400))
    lengths = {len(found) for row in rows for found in re.findall(r"[A-Z]\d+─*", row)}
    assert len(rows) == 4 and len(lengths) == 1
    assert sum(len(re.findall(r"[A-Z]\d+", row)) for row in rows) == 4 * 12 * 3


def test_a_folded_timeline_is_the_long_one_in_parts() -> None:
    long, folded = draw_text([panel("zb-v", 3, 9)], width=400), draw_text([panel("zb-v", 3, 9)], width=120)
    assert "(part 2 of 2)" in folded
    lines, cells = rows_of(folded), [row.rstrip("·") for row in rows_of(draw_text([panel("zb-v", 3, 9)], width=175))]
    assert [(lines[stage] + lines[3 + stage]).rstrip("·") for stage in range(3)] == cells
    assert len(rows_of(long)) == 3
    # The axis goes on where it was.
    ticks = [int(found) for found in re.findall(r"\|(\d+) ms", folded)]
    assert ticks == sorted(set(ticks)) and ticks[0] == 0 and len(ticks) > 4


def test_the_axis_says_when() -> None:
    text = draw_text([panel("1f1b", 4, 8)], width=140)
    row, axis = rows_of(text)[0], next(line for line in text.splitlines() if line.startswith(" "))[len("stage 0  ") :]
    per_ms = row.index("F2") / 20
    for tick in re.finditer(r"\|(\d+) ms", axis):
        assert tick.start() == round(int(tick[1]) * per_ms)


def test_what_has_no_room_is_coarse_and_says_so() -> None:
    text = draw_text([panel("1f1b", 16, 64)], width=60)
    row = rows_of(text)[0]
    assert len(row) <= 60 and not re.search(r"\d", row)
    assert set(row) == set("FB·") and row.startswith("FFF") and row.endswith("B")
    wide = int(re.search(r"numbers need ([\d,]+) columns", text)[1].replace(",", ""))  # type: ignore[index]
    assert "coarse" not in draw_text([panel("1f1b", 16, 64)], width=wide)
    assert "F63" in draw_text([panel("1f1b", 16, 64)], width=wide)


def test_a_coarse_column_shows_what_took_most_of_it() -> None:
    """A thousand operations in forty columns: long forwards, then short backwards with more waiting between."""
    spans = [Span(Op(F, 0, m), 10.0 * m, 10.0 * m + 9) for m in range(500)]
    spans += [Span(Op(B, 0, m), 10.0 * (m + 500), 10.0 * (m + 500) + 4) for m in range(500)]
    wide = [Panel(str(n), Timeline("long", (tuple(spans),) * 30)) for n in range(2)]
    row = rows_of(draw_text(wide, width=50))[0]
    assert re.fullmatch(r"F{20}·{20}", row)


def test_operations_too_short_to_be_seen_are_counted() -> None:
    costs = Costs(10, 10, 0.01)
    text = draw_text([Panel("zb-h1", timeline("zb-h1", 4, 8, 1, costs))])
    assert "of 96 operations are too short to be seen here" in text and "coarse" not in text
    assert "too short" not in draw_text([panel("zb-h1", 4, 8)])


def test_a_measured_timeline_is_drawn_from_its_own_start() -> None:
    planned = panel("zb-v", 2, 4)
    late = Panel("zb-v", moved(planned.timeline, 123456.0))
    assert draw_text([late]) == draw_text([planned])
    assert chrome_trace([late]) == chrome_trace([planned])


def test_panels_share_one_axis() -> None:
    """Planned and measured: an operation of the same length is as long in both, though the measured step is longer."""
    planned = timeline("1f1b", 2, 3)
    last = planned.spans[1][-1]
    slow = Timeline("1f1b", (planned.spans[0], (*planned.spans[1][:-1], Span(last.op, last.start, 160))))
    lines = rows_of(draw_text([Panel("planned", planned), Panel("measured", slow)]))
    assert lines[0] == lines[2]
    assert lines[3].startswith(lines[1].rstrip("·")) and lines[3].endswith("B2" + "─" * (len(lines[3]) - lines[3].index("B2") - 2))


def test_an_empty_stage_is_an_empty_row() -> None:
    only = timeline("gpipe", 1, 2)
    assert set(rows_of(draw_text([Panel("half", Timeline("half", (*only.spans, ())))]))[1]) == {"·"}


def test_colours_change_nothing_but_colours() -> None:
    panels = [panel("zb-v", 2, 4), panel("1f1b", 2, 4)]
    plain, coloured = draw_text(panels), draw_text(panels, colour=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    codes = set(re.findall(r"48;5;(\d+)m", coloured))
    assert len(codes) == 7, "F, I and W of two chunks, and B"
    assert all(line.endswith("\x1b[0m") or line.count("\x1b") % 2 == 0 for line in coloured.splitlines())


def test_ascii_terminals_get_ascii() -> None:
    text = draw_text([panel("zb-v", 2, 4)], ascii_only=True)
    assert text.isascii()
    assert (
        text.translate(str.maketrans("-.", "─·")).split("\n\n")[0].splitlines()[1:]
        == draw_text([panel("zb-v", 2, 4)]).split("\n\n")[0].splitlines()[1:]
    )


def test_nothing_cannot_be_drawn() -> None:
    for nothing in ([], [Panel("free", timeline("gpipe", 1, 1, 1, Costs(0, 0, 0)))]):
        with pytest.raises(ValueError, match="nothing takes any time"):
            draw_text(nothing)


class _Stream(io.TextIOWrapper):
    def __init__(self, encoding: str, tty: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "77")
    assert Terminal.of(_Stream("utf-8", tty=True)) == Terminal(77, colour=True, ascii_only=False)
    assert Terminal.of(_Stream("ascii", tty=False)) == Terminal(77, colour=False, ascii_only=True)
    assert Terminal.of(io.StringIO()).colour is False
    monkeypatch.setenv("TERM", "dumb")
    assert not Terminal.of(_Stream("utf-8", tty=True)).colour
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Terminal.of(_Stream("utf-8", tty=True)).colour


# ---- colours

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: linear RGB to what is seen.
SIGHT = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(colour: Colour, sight: str) -> tuple[float, float, float]:
    """CIELAB of what an eye sees."""
    linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in (part / 255 for part in colour)]
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in SIGHT[sight])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(("kinds", "shades"), [((F, B), NUM_SHADES), ((F, I, W), 2)], ids=["F B, 4 chunks", "F I W, 2 chunks"])
def test_colours_of_a_schedule_can_be_told_apart(kinds: tuple[OpKind, ...], shades: int, sight: str) -> None:
    """A difference of about 2 in CIELAB can just be seen side by side."""
    colours = [seen(colour_of(kind, depth), sight) for kind in kinds for depth in range(shades)]
    distances = [sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5 for a, b in itertools.combinations(colours, 2)]
    assert min(distances) > 12


def test_text_on_a_colour_can_be_read() -> None:
    """Contrast of at least 3 (WCAG 2, large text) with the black or white that is chosen."""

    def light(colour: Colour) -> float:
        levels = (part / 255 for part in colour)
        linear = (level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels)
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for kind, depth in itertools.product(OpKind, range(NUM_SHADES)):
        colour = colour_of(kind, depth)
        text = Colour(255, 255, 255) if colour.is_dark else Colour(0, 0, 0)
        dark, bright = sorted((light(colour), light(text)))
        assert (bright + 0.05) / (dark + 0.05) >= 3, (kind, depth)


# ---- figures

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(svg: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in svg.iter(f"{SVG}text")]


def boxes_of(svg: ElementTree.Element) -> list[tuple[float, float, str]]:
    """Left edge, width and colour of every operation."""
    found = []
    for group in svg.iter(f"{SVG}g"):
        if group.get("id", "").startswith("PolyCollection"):
            for path in group.iter(f"{SVG}path"):
                across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path.get("d", ""))]
                colour = re.search(r"fill: (#\w+)", path.get("style", ""))
                assert colour is not None
                found.append((min(across), max(across) - min(across), colour[1]))
    return found


def draw_svg(panels: list[Panel], folder: Path) -> ElementTree.Element:
    write_picture(panels, folder / "picture.svg")
    return ElementTree.parse(folder / "picture.svg").getroot()


def test_a_figure_has_every_operation_its_number_and_its_words(tmp_path: Path) -> None:
    drawn = panel("zb-v", 3, 6)
    svg = draw_svg([drawn], tmp_path)
    texts, ops = texts_of(svg), [span.op for spans in drawn.timeline.spans for span in spans]
    assert len(boxes_of(svg)) == len(ops) == 108
    assert sum(text.isdigit() for text in texts) == len(ops) + sum(text.isdigit() for text in texts[: texts.index("time (ms)")])
    words = {text for text in texts if not text.isdigit()}
    assert words == {
        *(f"stage {stage}" for stage in range(3)),
        drawn.caption,
        "time (ms)",
        "forward",
        "input gradient",
        "weight gradient",
        "1st chunk of a stage",
        "2nd chunk of a stage",
    }
    assert drawn.caption == "zb-v: step 190 ms, bubble 5.3%"
    assert {colour for _, _, colour in boxes_of(svg)} == {colour_of(kind, depth).hex for kind in (F, I, W) for depth in (0, 1)}


def test_panels_of_a_figure_share_one_axis(tmp_path: Path) -> None:
    """The same operation is at the same place and as wide in a panel that is shorter."""
    both = draw_svg([panel("gpipe", 2, 3), panel("gpipe", 2, 2)], tmp_path)
    boxes = [(round(left, 2), round(width, 2), colour) for left, width, colour in boxes_of(both)]
    lengths = {width for _, width, colour in boxes if colour == colour_of(F, 0).hex}
    assert len(boxes) == 20 and len(lengths) == 1
    forwards = sorted(left for left, _, colour in boxes if colour == colour_of(F, 0).hex)
    assert forwards.count(forwards[0]) == 2 and forwards.count(forwards[-1]) == 1


def test_a_long_figure_is_wide_and_leaves_numbers_out_at_last(tmp_path: Path) -> None:
    widths = {}
    for microbatches in (8, 64, 700):
        svg = draw_svg([panel("1f1b", 2, microbatches)], tmp_path)
        widths[microbatches] = float(svg.get("width", "").removesuffix("pt"))
        texts = texts_of(svg)
        assert (str(microbatches - 1) in texts) == (microbatches < 700)
    assert widths[8] < widths[64] < widths[700] == 50 * 72


def test_a_figure_is_the_same_every_time(tmp_path: Path) -> None:
    for suffix in ("svg", "png"):
        for name in ("a", "b"):
            write_picture([panel("interleaved", 2, 4, 4)], tmp_path / f"{name}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    svg = (tmp_path / "a.svg").read_text()
    assert "dc:date" not in svg and "matplotlib.org" not in svg
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_fifth_chunk_looks_as_the_first(tmp_path: Path) -> None:
    texts = texts_of(draw_svg([panel("interleaved", 2, 2, 5)], tmp_path))
    assert "1st, 5th chunk of a stage" in texts and "4th chunk of a stage" in texts


def test_without_matplotlib_the_rest_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    for suffix in ("svg", "png"):
        with pytest.raises(ModuleNotFoundError, match=r'pip install "megatron-3d\[matplotlib\]"'):
            write_picture([panel("1f1b", 2, 2)], tmp_path / f"a.{suffix}")
    for suffix in ("json", "txt"):
        write_picture([panel("1f1b", 2, 2)], tmp_path / f"a.{suffix}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.txt"]


# ---- traces


def test_a_trace_has_every_operation_when_it_ran(tmp_path: Path) -> None:
    panels = [
        Panel("planned", timeline("zb-v", 2, 3)),
        Panel("measured", moved(timeline("zb-v", 2, 3, costs=Costs(9, 8, 7)), 55.5)),
    ]
    write_picture(panels, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    called = {(event["pid"], event["tid"], event["name"]): event["args"] for event in events if event["ph"] == "M"}
    assert [called[pid, 0, "process_name"]["name"].split(":")[0] for pid in (1, 2)] == ["planned", "measured"]
    for pid, drawn in enumerate(panels, 1):
        for stage, spans in enumerate(drawn.timeline.spans):
            tid = next(
                t for (p, t, what), args in called.items() if (p, what, args.get("name")) == (pid, "thread_name", f"stage {stage}")
            )
            assert called[pid, tid, "thread_sort_index"] == {"sort_index": stage}
            ran = [event for event in events if (event["ph"], event["pid"], event["tid"]) == ("X", pid, tid)]
            assert [event["name"] for event in ran] == [
                f"{span.op.kind.value}{span.op.microbatch} chunk {span.op.chunk}" for span in spans
            ]
            for event, span in zip(ran, spans, strict=True):
                assert event["ts"] / 1000 == pytest.approx(span.start - drawn.timeline.start)
                assert event["dur"] / 1000 == pytest.approx(span.end - span.start)
                assert event["cat"] == {F: "forward", I: "input gradient", W: "weight gradient"}[span.op.kind]


# ---- tables


@given(names, st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_live_activations_of_a_timeline_are_those_of_its_schedule(name: str, stages: int, microbatches: int, chunks: int) -> None:
    schedule = make_schedule(name, stages, microbatches, chunks_of(name, chunks))
    assert peak_live(simulate(schedule)) == validate(schedule).peak_live_activations


def test_forwards_alone_keep_nothing() -> None:
    drawn = Panel("evaluation", simulate(forward_only(make_schedule("1f1b", 2, 3))))
    assert peak_live(drawn.timeline) is None
    assert draw_table([Row(drawn)]).splitlines()[1].split() == ["evaluation", "4", "25.0%", "0", "-", "-"]


def test_measured_timelines_alone_have_no_columns_of_papers() -> None:
    assert "paper" not in draw_table([Row(panel("1f1b", 2, 2)), Row(panel("zb-v", 2, 2))])


def test_a_table_by_hand() -> None:
    rows = [
        Row(panel(name, 4, 8), expected(name, 4, 8, chunks_of(name, 2), Costs(10, 10, 10)))
        for name in ("1f1b", "interleaved", "zb-h1", "zb-v")
    ]
    rows.append(Row(panel("1f1b", 6, 8), None))
    lines = draw_table(rows).splitlines()
    cells = [re.split(r"  +", line) for line in lines]
    assert cells[1] == ["1f1b", "330", "330", "27.3%", "27.3%", "90 60 30 0", "4 3 2 1", "4 3 2 1", "4 3 2 1"]
    assert cells[2] == ["interleaved", "285", "285", "15.8%", "15.8%", "45 30 15 0", "11 9 7 5", "11 9 7 5", "5.5 4.5 3.5 2.5"]
    assert cells[3] == ["zb-h1", "270", "270", "11.1%", "11.1%", "30 20 10 0", "4", "4", "4"]
    assert cells[4] == ["zb-v", "255", "255", "5.9%", "5.9%", "0", "8", "8", "4"]
    assert cells[5] == ["1f1b", "390", "-", "38.5%", "-", "0..150", "1..6", "-", "1..6"]
    assert len({len(line) for line in lines[:6]}) == 1
    assert "zb-h1        bubble (p-1)(F+I-W) where W <= F, W <= I and m >= p (Qi et al. 2023, section 2.3)" in lines


def test_a_row_without_a_formula_that_holds_says_so() -> None:
    costs = Costs(10, 12, 8)
    row = Row(Panel("zb-v", timeline("zb-v", 4, 8, 2, costs)), expected("zb-v", 4, 8, 2, costs))
    assert draw_table([row]).splitlines()[1].split()[2] == "-"


# ---- files, numbers


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a.pdf", r"a picture is a .svg, .png, .json, .txt file, not .pdf"),
        ("a", "not one without a suffix"),
        ("nowhere/a.svg", "there is no folder"),
        ("folder.svg", "is a folder"),
    ],
)
def test_where_no_picture_can_be_written(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ValueError, match=message):
        check_output(tmp_path / path)
    with pytest.raises(ValueError, match=message):
        write_picture([panel("1f1b", 1, 1)], tmp_path / path)


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_picture_of_every_kind_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture{suffix.upper()}"
    check_output(path)
    write_picture([panel("1f1b", 2, 2)], path)
    assert path.stat().st_size > 100
    if suffix == ".txt":
        assert path.read_text() == draw_text([panel("1f1b", 2, 2)], width=200) + "\n"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12, "12"), (12.3456, "12.35"), (0.012345, "0.01235"), (1234.5, "1,234"), (1e6, "1,000,000")]
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


@given(st.fractions(Fraction(1, 1000), 10**6))
def test_ticks_are_round_and_far_enough_apart(least: Fraction) -> None:
    step = tick_step(float(least))
    assert float(least) * (1 - 1e-6) <= step <= float(least) * 2.5 * (1 + 1e-6)
    assert f"{step:e}"[0] in "125"
