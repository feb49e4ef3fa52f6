"""Pictures of memory over a step: what is drawn is what is held."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import Op, OpType
from megatron_lab.memory_plots.figure import MemoryPanel, write_figure
from megatron_lab.memory_plots.measure import MeasuredStep
from megatron_lab.memory_plots.step_memory import format_panel_table
from megatron_lab.planner.peak import OpMemory
from megatron_lab.schedule_plots.panel import get_colour

F, R, B = (Op(kind, 0, 0) for kind in (OpType.FORWARD, OpType.RECOMPUTE, OpType.BACKWARD))
MB = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"
HELD = [OpMemory(F, 5 * MB, 2 * MB, 0), OpMemory(R, 4 * MB, 4 * MB, 0), OpMemory(B, 9 * MB, 0, 0)]
SPANS = (OpSpan(F, 0.0, 10.0), OpSpan(R, 10.0, 15.0), OpSpan(B, 20.0, 40.0))
RUN = MeasuredStep(
    times=(0.5, 1.0, 1.5, 2.5, 4.0, 8.0),
    allocated=(3 * MB, 5 * MB, 2 * MB, 4 * MB, 9 * MB, 0),
    spans=(OpSpan(F, 0.0, 2.0), OpSpan(R, 2.0, 3.0), OpSpan(B, 3.5, 9.0)),
    last_layer_grad_ms=4.0,
)
STATE = {"parameters": 10 * MB, "inputs": MB}


def test_what_is_held_between_two_times() -> None:
    assert RUN.peak_bytes == 9 * MB
    assert [RUN.compute_max_allocated(span.start, span.end) for span in RUN.spans] == [5 * MB, 4 * MB, 9 * MB]
    assert [RUN.get_allocated_after(span) for span in RUN.spans] == [2 * MB, 4 * MB, 0]
    assert RUN.compute_max_allocated(-1.0, 0.2) == 0


def height(svg: Path, kind: OpType) -> float:
    """Of the area of a kind of operation, in points of the picture."""
    root = ElementTree.parse(svg).getroot()
    (group,) = [
        group
        for group in root.iter(f"{SVG}g")
        if "PolyCollection" in group.get("id", "")
        and any(get_colour(kind, 0).hex in use.get("style", "") for use in group.iter(f"{SVG}use"))
    ]
    (area,) = group.iter(f"{SVG}path")
    numbers = [float(word) for word in re.findall(r"-?\d+\.?\d*", area.get("d", ""))]
    return max(numbers[1::2]) - min(numbers[1::2])


@pytest.mark.parametrize("measured", [None, RUN])
def test_areas_are_as_high_as_what_is_held(measured: MeasuredStep | None, tmp_path: Path) -> None:
    """Of the planned step the most of each operation; of a measured one, stretched to the plan's times, the same here."""
    write_figure([MemoryPanel("a step", STATE, HELD, SPANS, measured)], tmp_path / "memory.svg")
    forward, recompute, backward = (height(tmp_path / "memory.svg", op.type) for op in (F, R, B))
    assert (forward / backward, recompute / backward) == (pytest.approx(5 / 9, rel=0.01), pytest.approx(4 / 9, rel=0.01))
    text = (tmp_path / "memory.svg").read_text()
    for word in ("parameters", "inputs", "forward", "recompute", "backward", "waiting", "predicted: peak, and what remains"):
        assert f">{word}<" in text
    assert ("measured 9 MB" in text) == (measured is not None)
    write_figure([MemoryPanel("a step", STATE, HELD, SPANS, measured)], tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "memory.svg").read_bytes()


def test_the_table() -> None:
    away = [*HELD[:-1], OpMemory(B, 8 * MB, 0, 3 * MB)]
    lines = format_panel_table(
        [MemoryPanel("one", STATE, HELD, SPANS), MemoryPanel("two", {"parameters": 10 * MB}, away, SPANS, RUN)]
    )
    assert lines[0].split() == "parameters inputs activations measured difference in host memory".split()
    assert lines[1].split() == "one 10 MB 1 MB 9 MB 0 bytes".split()
    assert lines[2].split() == "two 10 MB 0 bytes 8 MB 9 MB +12.50% 3 MB".split()
