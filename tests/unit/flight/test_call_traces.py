"""The trace of the last collective calls comes from the library that made some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lab.flight import rank_monitor

_EMPTY, _NCCL, _GLOO = b'{"version": "2.10"}', b'{"entries": [{"name": "nccl"}]}', b'{"entries": [{"name": "gloo"}]}'


@pytest.mark.parametrize(
    ("traces", "name"),
    [([_NCCL, _GLOO], "nccl"), ([_EMPTY, _GLOO], "gloo"), ([_GLOO], "gloo"), ([_EMPTY, _EMPTY], None), ([], None)],
)
def test_a_recorder_without_calls_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: list[bytes], name: str | None
) -> None:
    """A torch that is built with NCCL has its recorder on a CPU too, without entries."""
    monkeypatch.setattr(rank_monitor, "find_flight_recorder_dumps", lambda: [lambda trace=trace: trace for trace in traces])
    file = tmp_path / "rank-0.calls.json"
    rank_monitor._write_trace(str(file))
    assert file.exists() == (name is not None)
    assert name is None or json.loads(file.read_text())["entries"][0]["name"] == name
