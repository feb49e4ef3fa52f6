"""A save in the background: the writer is told of its copies when they have ended, which on CUDA run beside the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.rank_writer import _copy_slices


def test_copies_of_a_device_have_ended_before_the_writer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of each device is waited for once, after the last copy."""
    events: list[object] = []

    class Target:
        def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
            events.append(("copy", non_blocking))

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: events.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)

    def state(name: str, device: torch.device) -> Any:
        slices = [SimpleNamespace(slice=0), SimpleNamespace(slice=1)]
        local = SimpleNamespace(device=device)
        return SimpleNamespace(name=name, slices=slices, local=local, get_local_view=lambda _: torch.zeros(1))

    gpu = torch.device("cuda", 0)
    targets: Any = {(name, box): Target() for name in ("weight", "moment") for box in (0, 1)}
    _copy_slices([state("weight", gpu), state("moment", gpu)], targets)
    assert events == [("copy", True)] * 4 + [gpu]
    events.clear()
    _copy_slices([state("weight", torch.device("cpu"))], targets)
    assert events == [("copy", True)] * 2
