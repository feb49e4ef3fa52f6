"""Writes pictures to files; the suffix says in which format. One is Chrome's trace event format (JSON), for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.spec.operations import OpKind
from megatron_lab.schedule_plots.figure import require_matplotlib, write_figure
from megatron_lab.schedule_plots.panel import KIND_NAMES, Panel
from megatron_lab.schedule_plots.text import draw_text

_TEXT_WIDTH = 200

# chrome://tracing knows colours only by such names. Perfetto takes one for each name without its digits: F0 and F1 look the same.
_COLOURS = {
    OpKind.FORWARD: "rail_response",
    OpKind.RECOMPUTE: "rail_load",
    OpKind.BACKWARD: "terrible",
    OpKind.INPUT_GRAD: "rail_idle",
    OpKind.WEIGHT_GRAD: "grey",
}
_MICROSECONDS = 1000.0
"""Microseconds in a millisecond."""


def chrome_trace(panels: Sequence[Panel]) -> dict[str, Any]:
    """A Chrome trace: a process for each panel, a thread for each stage, an event for each operation. Every panel begins at 0."""
    return {"displayTimeUnit": "ms", "traceEvents": [event for pid, panel in enumerate(panels, 1) for event in _events(pid, panel)]}


def write_trace(panels: Sequence[Panel], path: Path) -> None:
    """Write the trace as JSON.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(chrome_trace(panels)) + "\n", encoding="utf-8")


def _events(pid: int, panel: Panel) -> Iterator[dict[str, Any]]:
    yield _about("process_name", pid, 0, name=panel.caption)
    yield _about("process_sort_index", pid, 0, sort_index=pid)
    for stage, spans in enumerate(panel.timeline.spans):
        tid = stage + 1  # 0 is the idle thread of the operating system
        yield _about("thread_name", pid, tid, name=f"stage {stage}")
        yield _about("thread_sort_index", pid, tid, sort_index=stage)
        for span in spans:
            op = span.op
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": f"{op.kind.value}{op.microbatch} chunk {op.chunk}",
                "cat": KIND_NAMES[op.kind],
                "cname": _COLOURS[op.kind],
                "ts": round((span.start - panel.timeline.start) * _MICROSECONDS, 3),
                "dur": round((span.end - span.start) * _MICROSECONDS, 3),
                "args": {"chunk": op.chunk, "microbatch": op.microbatch},
            }


def _about(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _write_text(panels: Sequence[Panel], path: Path) -> None:
    path.write_text(draw_text(panels, width=_TEXT_WIDTH) + "\n", encoding="utf-8")


WRITERS: dict[str, Callable[[Sequence[Panel], Path], None]] = {
    ".svg": write_figure,
    ".png": write_figure,
    ".json": write_trace,
    ".txt": _write_text,
}
"""The function that writes a picture, by the suffix of the file."""


def check_output(path: Path) -> None:
    """Check that a picture can be written there, before the work that it shows.

    Raises:
        ValueError: the suffix stands for no kind of picture, or there is no such folder.
        ModuleNotFoundError: the picture needs matplotlib, which is not installed.
    """
    if path.suffix.lower() not in WRITERS:
        raise ValueError(f"{path}: a picture is a {', '.join(WRITERS)} file, not {path.suffix or 'one without a suffix'}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if WRITERS[path.suffix.lower()] is write_figure:
        require_matplotlib()


def write_picture(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels in the format that the suffix says: .svg and .png a figure, .json a Chrome trace, .txt text of 200 columns.

    Raises:
        ValueError, ModuleNotFoundError: as in `check_output`; or nothing in the panels takes any time.
        OSError: the file cannot be written.
    """
    check_output(path)
    WRITERS[path.suffix.lower()](panels, path)
