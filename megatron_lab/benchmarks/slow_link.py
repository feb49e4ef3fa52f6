"""Emulation of a slow network: collectives of the data-parallel groups, or of other groups, are delayed by a defined time.

The model is one serial link per rank. A collective occupies the link for (bytes that the rank sends) / bandwidth. The bytes are
those of a ring algorithm over n ranks (Patarasuk and Yuan 2009). For a buffer of B bytes, a reduce-scatter or an all-gather sends
(n - 1) / n * B bytes, and an all-reduce sends twice as many. Collectives use the link in the order in which they start: a
collective waits until the link is free.

The real collective runs during that time. `wait()` waits for it and then sleeps until the emulated transfer has ended. Sleeping
uses no CPU core, just as a network card uses none, so concurrent computation runs at full speed.

`SlowLink.installed()` wraps the functions of `megatron.parallel.collectives` that start a collective. The framework itself has no
code for the emulation.
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
"""Names of the groups over which data ranks reduce gradients and gather parameters."""


def _all_reduce_bytes(tensor: torch.Tensor, group_size: int) -> float:
    return 2 * (group_size - 1) / group_size * tensor.nbytes


def _reduce_scatter_bytes(tensor: torch.Tensor, group_size: int) -> float:
    return (group_size - 1) / group_size * tensor.nbytes


def _all_gather_bytes(tensor: torch.Tensor, group_size: int) -> float:
    return (group_size - 1) * tensor.nbytes


def _count_ring_shift_bytes(tensor: torch.Tensor, group_size: int) -> float:
    return tensor.nbytes


SENT_BYTES: dict[str, Callable[[torch.Tensor, int], float]] = {
    "start_all_reduce": _all_reduce_bytes,
    "start_reduce_scatter": _reduce_scatter_bytes,
    "start_all_gather": _all_gather_bytes,
    "start_ring_shift": _count_ring_shift_bytes,
}
"""Functions that return the bytes a rank sends in a collective, from the input tensor and the number of ranks."""


class SlowPending(Pending):
    """Collective in flight on the emulated link. It is complete when the real collective and the emulated transfer are both
    complete.

    Args:
        pending: the real collective.
        end_time: time at which the emulated transfer ends.
    """

    def __init__(self, pending: Pending, end_time: float) -> None:
        self._pending, self._end_time = pending, end_time

    def wait(self) -> torch.Tensor:
        """Wait until the real collective and the emulated transfer have ended. Return the collective's result."""
        result = self._pending.wait()
        time.sleep(max(0.0, self._end_time - time.perf_counter()))
        return result


class SlowLink:
    """Emulated network link of one rank, which delays collectives according to its bandwidth.

    Args:
        groups: names of the process groups whose collectives are delayed.
    """

    def __init__(self, groups: Sequence[str] = DATA_GROUPS) -> None:
        self._groups = groups
        self.bandwidth = float("inf")
        """Bytes per second."""
        self.is_connected = True
        """False skips all collectives of these groups, so that only computation is left. Results are wrong then."""
        self.sent_bytes = 0.0
        """Bytes of all collectives, skipped ones included, since the caller last set this to zero."""
        self._free_at = 0.0

    def start(
        self, name: str, collective: Callable[..., Pending], tensor: torch.Tensor, group: Group, *args: Any, **kwargs: Any
    ) -> Pending:
        """Start a collective, and occupy the emulated link for the time that the collective's bytes take.

        Args:
            name: name of the function that starts the collective, a key of `SENT_BYTES`.
            collective: the function with that name. It is called with all other arguments.
        """
        if group.name not in self._groups or group.size == 1:
            return collective(tensor, group, *args, **kwargs)
        num_bytes = SENT_BYTES[name](tensor, group.size)
        self.sent_bytes += num_bytes
        if not self.is_connected:
            return _skip_collective(name, tensor, group, *args, **kwargs)
        self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bandwidth
        return SlowPending(collective(tensor, group, *args, **kwargs), self._free_at)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Send collectives of this process over the emulated link while the context is active, whichever module starts them.

        Only collectives of the groups that were given to the constructor are delayed.
        """
        originals = {name: getattr(collectives, name) for name in SENT_BYTES}
        slowed = {name: partial(self.start, name, function) for name, function in originals.items()}
        modules = [module for name, module in list(sys.modules.items()) if name.startswith(("megatron.", "megatron_lab."))]
        _replace(modules, originals, slowed)
        try:
            yield
        finally:
            _replace(modules, slowed, originals)


def _replace(modules: list[Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    for module in modules:
        for name in SENT_BYTES:
            if getattr(module, name, None) is old[name]:
                setattr(module, name, new[name])


def _skip_collective(name: str, tensor: torch.Tensor, group: Group, *args: Any, out: torch.Tensor | None = None) -> Pending:
    """Return a tensor of the shape that the collective would return, without communication, to measure computation alone. Its
    values are arbitrary."""
    if out is not None or name in ("start_all_reduce", "start_ring_shift"):
        return Pending(tensor if out is None else out)
    rows = tensor.shape[0]
    rows = rows * group.size if name == "start_all_gather" else rows // group.size
    return Pending(tensor.new_zeros((rows, *tensor.shape[1:])))
