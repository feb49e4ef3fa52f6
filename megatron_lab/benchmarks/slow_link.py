"""A slow network, emulated: a documented delay in the communication of the data ranks, or of other groups.

The model is one serial link for each rank. A collective occupies the link for (bytes that the rank sends) / bandwidth, counted as
a ring sends them: of a buffer of B bytes over n ranks (n - 1)/n B in a reduce-scatter or an all-gather, twice that in an
all-reduce (Patarasuk and Yuan 2009). It begins when it is started and the link is free, so collectives follow each other in the
order of their start. The real collective runs meanwhile; `wait()` waits for it and then sleeps until the link is through. Sleeping
takes no core, as a network card takes none, so what is computed meanwhile is computed at full speed.

The delay is put around the functions of `megatron.parallel.collectives` that start a collective, for as long as `installed()`
lasts; the framework itself knows nothing of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron.parallel import collectives
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Group

DATA_GROUPS = ("dp", "cp-dp", "tp-cp-dp")
"""Names of the groups over which gradients and parameters of the data ranks travel."""


def _reduced(tensor: torch.Tensor, size: int) -> float:
    return 2 * (size - 1) / size * tensor.nbytes


def _scattered(tensor: torch.Tensor, size: int) -> float:
    return (size - 1) / size * tensor.nbytes


def _gathered(tensor: torch.Tensor, size: int) -> float:
    return (size - 1) * tensor.nbytes


def _passed_on(tensor: torch.Tensor, size: int) -> float:
    return tensor.nbytes


SENT: dict[str, Callable[[torch.Tensor, int], float]] = {
    "start_all_reduce": _reduced,
    "start_reduce_scatter": _scattered,
    "start_all_gather": _gathered,
    "start_pass_on": _passed_on,
}
"""Bytes that a rank sends, from what it puts in and the number of ranks."""


class SlowPending(Pending):
    """A collective on the link."""

    def __init__(self, real: Pending, done: float) -> None:
        self._real, self._done = real, done

    def wait(self) -> torch.Tensor:
        """Wait for the collective and for the link."""
        result = self._real.wait()
        time.sleep(max(0.0, self._done - time.perf_counter()))
        return result


class SlowLink:
    """One rank's link.

    Args:
        groups: names of those whose collectives are slowed.
    """

    def __init__(self, groups: Sequence[str] = DATA_GROUPS) -> None:
        self._groups = groups
        self.bandwidth = float("inf")
        """Bytes a second."""
        self.connected = True
        """Without a link no collective of these groups runs at all: what is left is computation. (Results are wrong then.)"""
        self.sent = 0.0
        """Bytes given to the link since this was last set to zero."""
        self._free = 0.0

    def start(
        self, name: str, real: Callable[..., Pending], tensor: torch.Tensor, group: Group, *args: Any, **kwargs: Any
    ) -> Pending:
        """Start a collective: `real` by its name, with its arguments."""
        if group.name not in self._groups or group.size == 1:
            return real(tensor, group, *args, **kwargs)
        size = SENT[name](tensor, group.size)
        self.sent += size
        if not self.connected:
            return _untouched(name, tensor, group, *args, **kwargs)
        self._free = max(self._free, time.perf_counter()) + size / self.bandwidth
        return SlowPending(real(tensor, group, *args, **kwargs), self._free)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every collective of this process goes over the link, whichever module starts it."""
        real = {name: getattr(collectives, name) for name in SENT}
        ours = {name: partial(self.start, name, function) for name, function in real.items()}
        users = [module for name, module in list(sys.modules.items()) if name.startswith(("megatron.", "megatron_lab."))]
        _replace(users, real, ours)
        try:
            yield
        finally:
            _replace(users, ours, real)


def _replace(modules: list[Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    for module in modules:
        for name in SENT:
            if getattr(module, name, None) is old[name]:
                setattr(module, name, new[name])


def _untouched(name: str, tensor: torch.Tensor, group: Group, *args: Any, out: torch.Tensor | None = None) -> Pending:
    """What a collective returns if nothing travels: memory of the right shape, whatever it holds."""
    if out is not None or name in ("start_all_reduce", "start_pass_on"):
        return Pending(tensor if out is None else out)
    rows = tensor.shape[0]
    rows = rows * group.size if name == "start_all_gather" else rows // group.size
    return Pending(tensor.new_zeros((rows, *tensor.shape[1:])))
