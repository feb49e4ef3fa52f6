"""What the state of a model takes on one rank, by arithmetic: nothing is allocated, and parameters may be on the meta device.

For a model in 16 bits with Adam, on each of N data ranks, bytes for each parameter (Rajbhandari et al. 2019, section 5; here
gradients are float32):

================== ========== ========= =========== ======= ========
strategy           parameters gradients main params moments together
================== ========== ========= =========== ======= ========
no_shard           2          4         4           8       18
optim              2          4         4/N         8/N     6 + 12/N
optim_grads        2          4/N       4/N         8/N     2 + 16/N
optim_grads_params 4/N        4/N       themselves  8/N     16/N
================== ========== ========= =========== ======= ========

Beside it there is padding, and what only passes through: under optim_grads the gradients of a bucket until they are reduced, under
optim_grads_params the parameters and gradients of a unit while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from megatron.config.parallel import FsdpReshard
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.data_parallel.fsdp_plan import UnitPlan, own_piece
from megatron.data_parallel.plan import BucketPlan
from megatron.parallel.boxes import DimPiece
from megatron.parallel.context import Group
from megatron.parallel.params import ParamEntry


@dataclass(frozen=True)
class Bytes:
    """Of one kind of state."""

    device: int = 0
    host: int = 0
    padding: int = 0
    """Of both together, what belongs to no parameter."""

    @property
    def total(self) -> int:
        """On the device and in host memory."""
        return self.device + self.host

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.padding + other.padding)


@dataclass(frozen=True)
class Memory:
    """The state of a model on one rank."""

    parameters: Bytes = Bytes()
    gradients: Bytes = Bytes()
    mains: Bytes = Bytes()
    """Main parameters that are not the parameters themselves."""
    moments: Bytes = Bytes()
    buffers: Bytes = Bytes()
    """What only passes through, at most."""

    @property
    def total(self) -> Bytes:
        """All together."""
        return sum((getattr(self, kind.name) for kind in fields(self)), Bytes())

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.mains + other.mains,
            self.moments + other.moments,
            self.buffers + other.buffers,
        )


@dataclass(frozen=True)
class Shards:
    """Shards that the optimizer gets."""

    sizes: tuple[int, ...]
    """Elements of each."""
    dtype: torch.dtype
    """Of the weights."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps for each element that it updates, in the dtype of the mains."""

    num_moments: int
    """Adam 2; SGD 1 with momentum, else 0."""
    align: int = 1
    """Each shard's place in a buffer is a multiple of so many elements long."""
    offloaded: Callable[[Sequence[int]], Collection[int]] = lambda sizes: ()
    """Of shards of so many elements, the indices of those whose mains and moments lie in host memory."""
    apart: bool = True
    """What is offloaded of some shards does not depend on what others there are."""
    staged: bool = False
    """Host memory is apart from the device's: what is offloaded has copies of its parameters and gradients there."""

    def memory(self, shards: Sequence[Shards]) -> Memory:
        """Mains and moments, and the host's copies of gradients."""
        each = [(size, some.dtype) for some in shards for size in some.sizes]
        offloaded = self.offloaded([size for size, _ in each])
        total = Memory()
        for index, (size, dtype) in enumerate(each):
            main = main_grad_dtype(dtype)
            on_host = index in offloaded
            one = self._buffer(size, main.itemsize, on_host)
            total += Memory(
                mains=one if dtype != main or (on_host and self.staged) else Bytes(),
                moments=self._buffer(size, self.num_moments * main.itemsize, on_host),
                buffers=one if on_host and self.staged else Bytes(),
            )
        return total

    def _buffer(self, size: int, each: int, on_host: bool) -> Bytes:
        room = -(-size // self.align) * self.align
        return Bytes(0 if on_host else room * each, room * each if on_host else 0, (room - size) * each)


def bucket_memory(plan: BucketPlan, index: int, sharding: str, dtype: torch.dtype) -> tuple[Memory, Shards]:
    """Parameters and gradients in a bucket, and the shards that a rank updates.

    Args:
        index: of the slice that is the rank's.
        sharding: no_shard, optim or optim_grads.
        dtype: of the parameters.
    """
    main = main_grad_dtype(dtype)
    own = [piece.stop - piece.start for _, piece in plan.pieces(index)]
    whole = [placed.numel for placed in plan.params]
    parameters = _padded(plan.size, whole, dtype)
    gradients = _padded(plan.slice_size, own, main) if sharding == "optim_grads" else _padded(plan.size, whole, main)
    return Memory(parameters, gradients), Shards(tuple(whole if sharding == "no_shard" else own), dtype)


def fsdp_memory(
    chunks: Iterable[Sequence[UnitPlan]], group: Group, replicas: int, reshard: FsdpReshard, dtype: torch.dtype
) -> tuple[Memory, Shards]:
    """Sharded parameters, which are their own mains, their gradients, and units at work; and the shards that this rank updates.

    Most is at work when a backward leaves a unit: its gathered parameters and those of the unit that comes next (or of all units,
    if they are kept), its gradients, torch's copy of gradients that is reduced, and this rank's part of the sum. With replicas,
    such parts of all units wait for the end of the step, to be summed over the replicas.

    Args:
        chunks: the units of each, in the order of the forward.
        group: that shards, as the rank sees it.
        replicas: of what the group holds.
        dtype: in which parameters are gathered.
    """
    main = main_grad_dtype(dtype)
    sizes, parts, at_work, gathered = [], 0, 0, 0
    for units in chunks:
        before = 0
        for unit in units:
            own = [_elements(entry, own_piece(entry, group)) for entry in unit.entries]
            whole, part = sum(entry.param.numel() for entry in unit.entries), sum(padded_part(e, group.size) for e in unit.entries)
            beside = 0 if reshard == "never" else before + whole
            at_work = max(at_work, beside * dtype.itemsize + (2 * whole + part) * main.itemsize)
            before = whole
            gathered += whole
            parts += part
            sizes += own
    passing = at_work
    if reshard == "never":
        passing += gathered * dtype.itemsize
    if replicas > 1:
        passing += parts * main.itemsize
    memory = Memory(_padded(parts, sizes, main), Bytes(sum(sizes) * main.itemsize), buffers=Bytes(passing))
    return memory, Shards(tuple(sizes), main)


def padded_part(entry: ParamEntry, ranks: int) -> int:
    """Elements of a parameter that each of so many ranks has room for: those of the first rank."""
    length = entry.param.shape[entry.record.fsdp_dim]
    return entry.param.numel() // length * -(-length // ranks)


def _elements(entry: ParamEntry, piece: DimPiece) -> int:
    return entry.param.numel() // entry.param.shape[piece.dim] * (piece.stop - piece.start)


def _padded(size: int, held: Iterable[int], dtype: torch.dtype) -> Bytes:
    """A buffer of `size` elements with shards of so many in it."""
    return Bytes(size * dtype.itemsize, padding=(size - sum(held)) * dtype.itemsize)
