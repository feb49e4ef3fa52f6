"""What one microbatch of a chunk keeps in ways of its own: regions that run again, and layers whose tensors are in host memory.

Set around its forward, so that the model's parts find it; the executor holds it until its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from megatron.memory.host import HostMemory

BeforeRemake = Callable[[Sequence[nn.Module]], None]
"""Is called with the modules of a region before it runs again: their parameters must have memory then."""


class MovedLayer(Protocol):
    """A layer whose saved tensors are in host memory between its forward and its backward (`megatron.memory.offload`)."""

    remade_ahead: bool
    """Whether it runs again in an operation of its own, before backward."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is in host memory and not asked back yet."""

    def settle(self) -> None:
        """Give the device copies free. Whatever is computed from now on waits until they have been copied."""

    def fetch(self) -> None:
        """Begin to bring back what was moved."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Begin to move a tensor, if that is worth it. The result takes its place."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor of which `pack` gave this."""


class Kept:
    """What one microbatch of a chunk keeps.

    Args:
        before_remake: called before each remake of a region.
        host: where saved tensors go that are moved; without it, none is.
        back_soon: the first of its backward operations comes so soon that the last chosen layer stays on the device.
        living: tensors that live until its backward whatever is saved, such as a received input.
    """

    def __init__(
        self,
        before_remake: BeforeRemake | None = None,
        host: HostMemory | None = None,
        *,
        back_soon: bool = False,
        living: Iterable[torch.Tensor] = (),
    ) -> None:
        self.before_remake, self.host, self.back_soon = before_remake, host, back_soon
        self.living = {storage_key(tensor) for tensor in living}
        self.remakes: list[Callable[[], None]] = []
        """Runs a region again: one for each that the schedule may remake, in the order of the forward."""
        self.layers: list[MovedLayer] = []
        """Those chosen to have their tensors in host memory, in the order of the forward."""
        self.on_host: MovedLayer | None = None
        """The one of them that runs its forward now."""

    def remake_last(self) -> None:
        """Run the region again that backward enters first."""
        self.remakes.pop()()
        self.remakes.clear()  # the others live as long as the graph needs them

    def settle(self) -> None:
        """Give the device memory free of what the forward has moved last; whatever is computed from now on waits for the copy."""
        if self.layers:
            self.layers[-1].settle()

    def fetch(self, *, for_remake: bool) -> None:
        """Begin to bring back what the next operation needs first.

        Args:
            for_remake: it runs the last region again; otherwise it is a backward.
        """
        if self.layers and (self.layers[-1].remade_ahead or not for_remake):
            self.layers[-1].fetch()


# Set around one forward. A plain global, as in `megatron.parallel.accumulate`.
_kept: Kept | None = None


def current() -> Kept | None:
    """That of the forward that runs now, if the executor (or a plan) runs it."""
    return _kept


@contextmanager
def keeping(kept: Kept | None = None) -> Iterator[Kept]:
    """Around the forward of one microbatch of a chunk: note what it keeps."""
    global _kept
    assert _kept is None, "keeping() does not nest"
    _kept = kept = kept or Kept()
    try:
        yield kept
    finally:
        _kept = None


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors of one storage, as long as it lives. (Addresses would do, but a plan's tensors have none.)"""
    return tensor.untyped_storage()._cdata
