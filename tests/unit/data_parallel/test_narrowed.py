"""A reduction of gradients in fewer bits, on CUDA: several streams may wait for its result, which one of them takes in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.data_parallel.bucket import Narrowed


@pytest.mark.parametrize("adds", [False, True])
def test_a_second_stream_waits_until_the_first_has_taken_the_result_in(monkeypatch: pytest.MonkeyPatch, *, adds: bool) -> None:
    """An event is recorded after the result is written, and every later wait is for that event."""
    events: list[object] = []

    def record_event() -> str:
        events.append("recorded")
        return "event"

    stream = SimpleNamespace(record_event=record_event, wait_event=lambda event: events.append(f"waits for {event}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    into: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        add_=lambda _: events.append("added"),
        copy_=lambda _: events.append("copied"),
    )
    reduction: Any = SimpleNamespace(wait=lambda: torch.zeros(1))
    narrowed = Narrowed(reduction, into, adds=adds)
    assert narrowed.wait() is into
    assert events == ["added" if adds else "copied", "recorded"]
    assert narrowed.wait() is into and events[2:] == ["waits for event"]
