"""Where the mains and moments of some shards live, and how gradients come there and new weights get back.

Here: on the device. `offload` has host memory. Another home (disk) would bring mains and moments in when its update begins and take
them out after it; nothing else moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.parallel.shards import Shard

# Each view of a flat buffer starts at a multiple of this many elements, so that vector kernels are aligned.
ALIGN = 64


@dataclass(frozen=True)
class Block:
    """Elements [start, stop) of one of a home's shards."""

    index: int
    start: int
    stop: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The block of one of the flat tensors that stand for the shards."""
        return tensors[self.index][self.start : self.stop]


class Home(ABC):
    """Some shards of one group.

    Args:
        offloaded: whether the shards were chosen for host memory.
    """

    def __init__(self, shards: Sequence[Shard], *, offloaded: bool) -> None:
        self.shards, self.offloaded = list(shards), offloaded
        dtypes = {(shard.weights.dtype, shard.grad.dtype) for shard in self.shards}
        assert len(dtypes) == 1, f"the shards of a group have several dtypes: {dtypes}"
        self.mains: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []
        """Beside the mains; complete after `fetch`."""
        self.main_buffers: list[torch.Tensor] = []
        """Memory of the mains; none where they are the weights."""
        self.moment_buffers: list[torch.Tensor] = []
        self.grad_buffers: list[torch.Tensor] = []
        """Memory of the gradients; none where they are the shards' own."""

    def moments(self) -> list[torch.Tensor]:
        """A moment of each shard: zeros beside the mains, in one buffer."""
        made = flat_views(self.mains, self.mains[0].dtype, self.mains[0].device)
        self.moment_buffers.append(made[0].zero_())
        return made[1]

    @abstractmethod
    def fetch(self) -> None:
        """See to it that `grads` can be read."""

    @abstractmethod
    def writer(self, blocks: Sequence[Block]) -> Callable[[], None]:
        """What begins to carry these blocks of the mains to the weights."""

    @abstractmethod
    def finish(self) -> None:
        """Have whatever is issued from now on see the weights that were written."""


class OnDevice(Home):
    """Mains on the device of the weights: the weights themselves where dtypes agree, else copies.

    Offloaded shards are here too where the device's memory is the host's.
    """

    def __init__(self, shards: Sequence[Shard], *, offloaded: bool = False) -> None:
        super().__init__(shards, offloaded=offloaded)
        self._apart = self.shards[0].weights.dtype != self.shards[0].grad.dtype
        if self._apart:
            buffer, self.mains = copies_of_weights(self.shards, self.shards[0].weights.device)
            self.main_buffers.append(buffer)
        else:
            self.mains = [shard.weights for shard in self.shards]
        self.grads = [shard.grad for shard in self.shards]

    def fetch(self) -> None:
        """They lie there."""

    def writer(self, blocks: Sequence[Block]) -> Callable[[], None]:
        """Rounds to the model's dtype, where they are apart."""
        if not self._apart:
            return _nothing
        whole = [shard.weights for shard in self.shards]
        weights, mains = [block.of(whole) for block in blocks], [block.of(self.mains) for block in blocks]
        return lambda: torch._foreach_copy_(weights, mains)

    def finish(self) -> None:
        """All is in the order of the stream."""


def _nothing() -> None: ...


def flat_views(
    like: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device | None = None, *, pinned: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer, and for each flat tensor a view of it of the same length.

    Args:
        device: None for host memory.
    """
    starts, end = _starts(like)
    buffer = torch.empty(end, dtype=dtype, device=device, pin_memory=pinned)
    return buffer, [buffer[start : start + tensor.numel()] for start, tensor in zip(starts, like, strict=True)]


def room_for(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a buffer that holds these, each of them aligned."""
    return _starts(tensors)[1] * tensors[0].itemsize


def views_like(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views into a buffer of bytes, as `room_for` lays them out."""
    typed = buffer[: room_for(tensors)].view(tensors[0].dtype)
    return [typed[start : start + tensor.numel()] for start, tensor in zip(_starts(tensors)[0], tensors, strict=True)]


def copies_of_weights(shards: Sequence[Shard], device: torch.device | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies of the weights in the gradients' dtype: one buffer, and its views.

    Args:
        device: None for host memory.
    """
    buffer, views = flat_views([shard.weights for shard in shards], shards[0].grad.dtype, device)
    for view, shard in zip(views, shards, strict=True):
        view.copy_(shard.weights)
    return buffer, views


def _starts(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // ALIGN) * ALIGN
    return starts, end
