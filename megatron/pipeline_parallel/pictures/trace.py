"""A timeline for ui.perfetto.dev and chrome://tracing, in Chrome's trace event format (JSON)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.pipeline_parallel.pictures.panel import KIND_NAMES, Panel
from megatron.spec.operations import OpKind

# chrome://tracing knows colours only by such names. Perfetto takes one for each name without its digits: F0 and F1 look the same.
_COLOURS = {
    OpKind.FORWARD: "rail_response",
    OpKind.BACKWARD: "terrible",
    OpKind.INPUT_GRAD: "rail_idle",
    OpKind.WEIGHT_GRAD: "grey",
}
_MICROSECONDS = 1000.0
"""In a millisecond."""


def chrome_trace(panels: Sequence[Panel]) -> dict[str, Any]:
    """The trace: a process for each panel, a thread for each stage, an event for each operation; every panel begins at 0."""
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
