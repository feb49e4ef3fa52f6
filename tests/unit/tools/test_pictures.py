"""Pictures of timelines as text, trace and table: what is drawn is what the timeline says."""

from __future__ import annotations

import io
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.simulate import OpSpan, Timeline, simulate
from megatron.pipeline_parallel.validate import compute_peak_live_activations
from megatron.spec.operations import Op, OpCosts, OpType, extract_forwards
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.commands.plot_schedule import Terminal
from megatron_lab.schedule_plots.files import WRITERS, build_chrome_trace, check_output, write_picture
from megatron_lab.schedule_plots.formulas import compute_expected
from megatron_lab.schedule_plots.panel import Panel, choose_tick_step, format_number
from megatron_lab.schedule_plots.table import TimelineRow, compute_idle_times, compute_max_activations, format_table
from megatron_lab.schedule_plots.text import render_text
from tests.support.timelines import chunks_of, moved, panel, timeline

F, R, B, I, W = OpType.FORWARD, OpType.RECOMPUTE, OpType.BACKWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD

names = st.sampled_from(list(SCHEDULES))


# ---- text


def rows_of(text: str) -> list[str]:
    """The rows of the stages without their names."""
    return [re.sub(r"^stage \d+ +", "", line) for line in text.splitlines() if re.match(r"stage \d+  ", line)]


def test_a_timeline_by_hand() -> None:
    """1F1B of 2 stages and 3 microbatches: a column is 10/3 ms."""
    text = render_text([Panel("1f1b", timeline("1f1b", 2, 3))], width=45, ascii_only=True)
    assert text.splitlines() == [
        "1f1b: step 120 ms, bubble 25.0%",
        "stage 0  F0-F1-......B0----F2-B1----...B2----",
        "stage 1  ...F0-B0----F1-B1----F2-B2----......",
        "         |0 ms          |50 ms",
        "",
        "F forward, B backward, . waiting",
        "the number is the microbatch",
    ]


def test_recompute_by_hand() -> None:
    """It runs before the gradient has come, where the stage would wait; and a column of text and a row of the table say so."""
    drawn = Panel("1f1b", timeline("1f1b", 2, 3, costs=OpCosts(10, 10, 10, recompute=10)))
    text = render_text([drawn], width=58, ascii_only=True)
    assert text.splitlines()[1:3] == [
        "stage 0  F0-F1-R0-......B0----F2-R1-B1----R2-...B2----",
        "stage 1  ...F0-R0-B0----F1-R1-B1----F2-R2-B2----......",
    ]
    assert "F forward, R recompute, B backward, . waiting" in text
    told = format_table([TimelineRow(drawn, compute_expected("1f1b", 2, 3, 1, OpCosts(10, 10, 10, recompute=10)))])
    assert told.splitlines()[1].split()[:5] == ["1f1b", "150", "150", "20.0%", "20.0%"]
    note = "with recomputation (R), an activation is only what the layers keep until they are recomputed"
    assert note in told and note not in format_table([TimelineRow(panel("1f1b", 2, 3))])


@given(names, st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(40, 250), st.sampled_from([0, 10]))
def test_every_operation_stands_where_it_runs(
    name: str, stages: int, microbatches: int, chunks: int, width: int, recompute: int
) -> None:
    drawn = timeline(name, stages, microbatches, chunks, OpCosts(10, 10, 10, recompute=recompute))
    text = render_text([Panel(name, drawn)], width=width)
    assert all(len(line) <= width for line in text.splitlines() if line.startswith(("stage", " ")))
    lines = rows_of(text)
    parts = len(lines) // stages
    assert ("(part 1 of" in text) == (parts > 1)
    if "coarse" in text:
        return
    for stage, spans in enumerate(drawn.spans):
        row = "".join(lines[part * stages + stage] for part in range(parts))
        upper = [span.op.type.value + str(span.op.microbatch) for span in spans]
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
        assert waits_inside / busy == pytest.approx(compute_idle_times(drawn)[stage] / drawn.busy_times[stage])


@pytest.mark.parametrize("costs", [OpCosts(10, 10, 10, 5 / 3), OpCosts(0.1, 0.1, 0.1), OpCosts(0.7, 0.7, 0.7, 0.1)])
def test_equal_operations_are_equally_long_wherever_they_fall(costs: OpCosts) -> None:
    """Half a column later, or off by the last digit of a number that is not exact."""
    drawn = timeline("zb-h1", 4, 12, costs=costs)
    rows = rows_of(render_text([Panel("zb-h1", drawn)], width=400))
    lengths = {len(found) for row in rows for found in re.findall(r"[A-Z]\d+─*", row)}
    assert len(rows) == 4 and len(lengths) == 1
    assert sum(len(re.findall(r"[A-Z]\d+", row)) for row in rows) == 4 * 12 * 3


def test_a_folded_timeline_is_the_long_one_in_parts() -> None:
    long, folded = render_text([panel("zb-v", 3, 9)], width=400), render_text([panel("zb-v", 3, 9)], width=120)
    assert "(part 2 of 2)" in folded
    lines, cells = rows_of(folded), [row.rstrip("·") for row in rows_of(render_text([panel("zb-v", 3, 9)], width=175))]
    assert [(lines[stage] + lines[3 + stage]).rstrip("·") for stage in range(3)] == cells
    assert len(rows_of(long)) == 3
    # The axis goes on where it was.
    ticks = [int(found) for found in re.findall(r"\|(\d+) ms", folded)]
    assert ticks == sorted(set(ticks)) and ticks[0] == 0 and len(ticks) > 4


def test_the_axis_says_when() -> None:
    text = render_text([panel("1f1b", 4, 8)], width=140)
    row, axis = rows_of(text)[0], next(line for line in text.splitlines() if line.startswith(" "))[len("stage 0  ") :]
    per_ms = row.index("F2") / 20
    for tick in re.finditer(r"\|(\d+) ms", axis):
        assert tick.start() == round(int(tick[1]) * per_ms)


def test_what_has_no_room_is_coarse_and_says_so() -> None:
    text = render_text([panel("1f1b", 16, 64)], width=60)
    row = rows_of(text)[0]
    assert len(row) <= 60 and not re.search(r"\d", row)
    assert set(row) == set("FB·") and row.startswith("FFF") and row.endswith("B")
    wide = int(re.search(r"numbers need ([\d,]+) columns", text)[1].replace(",", ""))  # type: ignore[index]
    assert "coarse" not in render_text([panel("1f1b", 16, 64)], width=wide)
    assert "F63" in render_text([panel("1f1b", 16, 64)], width=wide)


def test_a_coarse_column_shows_what_took_most_of_it() -> None:
    """A thousand operations in forty columns: long forwards, then short backwards with more waiting between."""
    spans = [OpSpan(Op(F, 0, m), 10.0 * m, 10.0 * m + 9) for m in range(500)]
    spans += [OpSpan(Op(B, 0, m), 10.0 * (m + 500), 10.0 * (m + 500) + 4) for m in range(500)]
    wide = [Panel(str(n), Timeline("long", (tuple(spans),) * 30)) for n in range(2)]
    row = rows_of(render_text(wide, width=50))[0]
    assert re.fullmatch(r"F{20}·{20}", row)


def test_operations_too_short_to_be_seen_are_counted() -> None:
    costs = OpCosts(10, 10, 0.01)
    text = render_text([Panel("zb-h1", timeline("zb-h1", 4, 8, 1, costs))])
    assert "of 96 operations are too short to be seen here" in text and "coarse" not in text
    assert "too short" not in render_text([panel("zb-h1", 4, 8)])


def test_a_measured_timeline_is_drawn_from_its_own_start() -> None:
    planned = panel("zb-v", 2, 4)
    late = Panel("zb-v", moved(planned.timeline, 123456.0))
    assert render_text([late]) == render_text([planned])
    assert build_chrome_trace([late]) == build_chrome_trace([planned])


def test_panels_share_one_axis() -> None:
    """Planned and measured: an operation of the same length is as long in both, though the measured step is longer."""
    planned = timeline("1f1b", 2, 3)
    last = planned.spans[1][-1]
    slow = Timeline("1f1b", (planned.spans[0], (*planned.spans[1][:-1], OpSpan(last.op, last.start, 160))))
    lines = rows_of(render_text([Panel("planned", planned), Panel("measured", slow)]))
    assert lines[0] == lines[2]
    assert lines[3].startswith(lines[1].rstrip("·")) and lines[3].endswith("B2" + "─" * (len(lines[3]) - lines[3].index("B2") - 2))


def test_an_empty_stage_is_an_empty_row() -> None:
    only = timeline("gpipe", 1, 2)
    assert set(rows_of(render_text([Panel("half", Timeline("half", (*only.spans, ())))]))[1]) == {"·"}


def test_colours_change_nothing_but_colours() -> None:
    panels = [panel("zb-v", 2, 4), panel("1f1b", 2, 4)]
    plain, coloured = render_text(panels), render_text(panels, uses_colour=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    codes = set(re.findall(r"48;5;(\d+)m", coloured))
    assert len(codes) == 7, "F, I and W of two chunks, and B"
    assert all(line.endswith("\x1b[0m") or line.count("\x1b") % 2 == 0 for line in coloured.splitlines())


def test_ascii_terminals_get_ascii() -> None:
    text = render_text([panel("zb-v", 2, 4)], ascii_only=True)
    assert text.isascii()
    assert (
        text.translate(str.maketrans("-.", "─·")).split("\n\n")[0].splitlines()[1:]
        == render_text([panel("zb-v", 2, 4)]).split("\n\n")[0].splitlines()[1:]
    )


def test_nothing_cannot_be_drawn() -> None:
    for nothing in ([], [Panel("free", timeline("gpipe", 1, 1, 1, OpCosts(0, 0, 0)))]):
        with pytest.raises(ValueError, match="nothing takes any time"):
            render_text(nothing)


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
    assert Terminal.of(_Stream("utf-8", tty=True)) == Terminal(77, uses_colour=True, ascii_only=False)
    assert Terminal.of(_Stream("ascii", tty=False)) == Terminal(77, uses_colour=False, ascii_only=True)
    assert Terminal.of(io.StringIO()).uses_colour is False
    monkeypatch.setenv("TERM", "dumb")
    assert not Terminal.of(_Stream("utf-8", tty=True)).uses_colour
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Terminal.of(_Stream("utf-8", tty=True)).uses_colour


# ---- traces


def test_a_trace_has_every_operation_when_it_ran(tmp_path: Path) -> None:
    panels = [
        Panel("planned", timeline("zb-v", 2, 3)),
        Panel("measured", moved(timeline("zb-v", 2, 3, costs=OpCosts(9, 8, 7, recompute=6)), 55.5)),
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
                f"{span.op.type.value}{span.op.microbatch} chunk {span.op.chunk}" for span in spans
            ]
            for event, span in zip(ran, spans, strict=True):
                assert event["ts"] / 1000 == pytest.approx(span.start - drawn.timeline.start)
                assert event["dur"] / 1000 == pytest.approx(span.end - span.start)
                assert event["cat"] == {F: "forward", R: "recompute", I: "input gradient", W: "weight gradient"}[span.op.type]


# ---- tables


@given(names, st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_live_activations_of_a_timeline_are_those_of_its_schedule(name: str, stages: int, microbatches: int, chunks: int) -> None:
    schedule = build_schedule(name, stages, microbatches, chunks_of(name, chunks))
    assert compute_max_activations(simulate(schedule)) == compute_peak_live_activations(schedule)


def test_forwards_alone_keep_nothing() -> None:
    drawn = Panel("evaluation", simulate(extract_forwards(build_schedule("1f1b", 2, 3))))
    assert compute_max_activations(drawn.timeline) is None
    assert format_table([TimelineRow(drawn)]).splitlines()[1].split() == ["evaluation", "4", "25.0%", "0", "-", "-"]


def test_measured_timelines_alone_have_no_columns_of_papers() -> None:
    assert "paper" not in format_table([TimelineRow(panel("1f1b", 2, 2)), TimelineRow(panel("zb-v", 2, 2))])


def test_a_table_by_hand() -> None:
    rows = [
        TimelineRow(panel(name, 4, 8), compute_expected(name, 4, 8, chunks_of(name, 2), OpCosts(10, 10, 10)))
        for name in ("1f1b", "interleaved", "zb-h1", "zb-v")
    ]
    rows.append(TimelineRow(panel("1f1b", 6, 8), None))
    lines = format_table(rows).splitlines()
    cells = [re.split(r"  +", line) for line in lines]
    assert cells[1] == ["1f1b", "330", "330", "27.3%", "27.3%", "90 60 30 0", "4 3 2 1", "4 3 2 1", "4 3 2 1"]
    assert cells[2] == ["interleaved", "285", "285", "15.8%", "15.8%", "45 30 15 0", "11 9 7 5", "11 9 7 5", "5.5 4.5 3.5 2.5"]
    assert cells[3] == ["zb-h1", "270", "270", "11.1%", "11.1%", "30 20 10 0", "4", "4", "4"]
    assert cells[4] == ["zb-v", "255", "255", "5.9%", "5.9%", "0", "8", "8", "4"]
    assert cells[5] == ["1f1b", "390", "-", "38.5%", "-", "0..150", "1..6", "-", "1..6"]
    assert len({len(line) for line in lines[:6]}) == 1
    assert "zb-h1        bubble (p-1)(F+I-W) where W <= F, W <= I and m >= p (Qi et al. 2023, section 2.3)" in lines


def test_a_row_without_a_formula_that_holds_says_so() -> None:
    costs = OpCosts(10, 12, 8)
    row = TimelineRow(Panel("zb-v", timeline("zb-v", 4, 8, 2, costs)), compute_expected("zb-v", 4, 8, 2, costs))
    assert format_table([row]).splitlines()[1].split()[2] == "-"


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
        assert path.read_text() == render_text([panel("1f1b", 2, 2)], width=200) + "\n"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12, "12"), (12.3456, "12.35"), (0.012345, "0.01235"), (1234.5, "1,234"), (1e6, "1,000,000")]
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.fractions(Fraction(1, 1000), 10**6))
def test_ticks_are_round_and_far_enough_apart(least: Fraction) -> None:
    step = choose_tick_step(float(least))
    assert float(least) * (1 - 1e-6) <= step <= float(least) * 2.5 * (1 + 1e-6)
    assert f"{step:e}"[0] in "125"
