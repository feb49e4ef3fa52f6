"""Writing of pipeline timelines to files.

The suffix of the file selects the format: an SVG or PNG figure, text, or Chrome's trace event format (JSON), which ui.perfetto.dev
shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config import regular_file
from megatron.spec.operations import OpType
from megatron_lab.schedule_plots.figure import require_matplotlib, write_figure
from megatron_lab.schedule_plots.panel import OP_TYPE_NAMES, Panel
from megatron_lab.schedule_plots.text import render_text

_TEXT_WIDTH = 200

# chrome://tracing accepts colours only by these names. Perfetto ignores them: it derives the colour from an event's name without
# digits, so that F0 and F1 have the same colour.
_COLOURS = {
    OpType.FORWARD: "rail_response",
    OpType.RECOMPUTE: "rail_load",
    OpType.BACKWARD: "terrible",
    OpType.INPUT_GRAD: "rail_idle",
    OpType.WEIGHT_GRAD: "grey",
}
_US_PER_MS = 1000.0


def build_chrome_trace(panels: Sequence[Panel]) -> dict[str, Any]:
    """Build a trace of pipeline timelines in Chrome's trace event format.

    Each panel (timeline with a title) is a process of the trace and starts at time 0. Each stage is a thread, and each operation an
    event.
    """
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [event for pid, panel in enumerate(panels, 1) for event in _iter_events(pid, panel)],
    }


def write_trace(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels (timelines with titles) as a Chrome trace in JSON.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(build_chrome_trace(panels)) + "\n", encoding="utf-8")


def _iter_events(pid: int, panel: Panel) -> Iterator[dict[str, Any]]:
    yield _build_metadata_event("process_name", pid, 0, name=panel.caption)
    yield _build_metadata_event("process_sort_index", pid, 0, sort_index=pid)
    for stage, spans in enumerate(panel.timeline.spans):
        tid = stage + 1  # 0 is the idle thread of the operating system
        yield _build_metadata_event("thread_name", pid, tid, name=f"stage {stage}")
        yield _build_metadata_event("thread_sort_index", pid, tid, sort_index=stage)
        for span in spans:
            op = span.op
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": f"{op.type.value}{op.microbatch} chunk {op.chunk}",
                "cat": OP_TYPE_NAMES[op.type],
                "cname": _COLOURS[op.type],
                "ts": round((span.start - panel.timeline.start) * _US_PER_MS, 3),
                "dur": round((span.end - span.start) * _US_PER_MS, 3),
                "args": {"chunk": op.chunk, "microbatch": op.microbatch},
            }


def _build_metadata_event(event_name: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": event_name, "args": args}


def _write_text(panels: Sequence[Panel], path: Path) -> None:
    path.write_text(render_text(panels, width=_TEXT_WIDTH) + "\n", encoding="utf-8")


WRITERS: dict[str, Callable[[Sequence[Panel], Path], None]] = {
    ".svg": write_figure,
    ".png": write_figure,
    ".json": write_trace,
    ".txt": _write_text,
}
"""Function that writes the panels to a file, by the suffix of the file."""


def check_output(path: Path) -> None:
    """Check that a picture can be written to a path. Call this function before a long computation whose result the picture shows.

    Raises:
        ValueError: the suffix belongs to no format, the folder does not exist, or the path is a folder.
        ModuleNotFoundError: the format needs matplotlib, which is not installed.
    """
    if path.suffix.lower() not in WRITERS:
        raise ValueError(
            f"{path}: a picture is a {', '.join(WRITERS)} file, not {path.suffix or 'one without a suffix'}. Change the suffix"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    regular_file.check_output("picture", path)
    if WRITERS[path.suffix.lower()] is write_figure:
        require_matplotlib()


def write_picture(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels (timelines with titles) to a file.

    The suffix of the path selects the format: .svg or .png a figure, .json a Chrome trace, .txt text of 200 columns.

    Raises:
        ValueError: the suffix belongs to no format, the folder does not exist, or all operations of the panels have a duration of
            0.
        ModuleNotFoundError: the format needs matplotlib, which is not installed.
        OSError: the file cannot be written.
    """
    check_output(path)
    WRITERS[path.suffix.lower()](panels, path)
