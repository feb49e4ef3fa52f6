"""Forks that have lost CUDA: only where there is a device to lose."""

from __future__ import annotations

import pytest
import torch

from megatron_lab.monitoring import forks


@pytest.mark.parametrize(("in_bad_fork", "devices", "lost"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_fork_loses_the_devices_that_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, *, in_bad_fork: bool, devices: int, lost: bool
) -> None:
    """A build of torch for CUDA on a machine without a GPU says of each fork that CUDA is lost there; a run on its CPU goes on."""
    monkeypatch.setattr(forks, "is_in_bad_fork", lambda: in_bad_fork)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert forks.has_lost_devices() is lost
