"""One record per parameter, in a table keyed by the global name.

Everything that happens to a parameter beside its use (initial values, gradient reduction, the global norm, weight decay, sharding,
checkpoints, export, memory reports) reads its record. Nothing codes these facts a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.parallel import ContextWay
from megatron.config.precision import Fp8
from megatron.parallel.boxes import Box, FlatPiece, PlacedBox, place
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.state_shape import ELEMENTS, StateShape
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES
from megatron.spec.weights import ParamFacts, Weight, model_weights

if TYPE_CHECKING:
    from megatron.parallel.overlap import Overlap


@dataclass(frozen=True)
class Split:
    """One dimension cut over the ranks of one axis."""

    dim: int
    axis: str
    padded_size: int | None = None
    """Size of the dimension over all ranks with padding, where it is padded (only dimension 0 may be)."""


@dataclass(frozen=True)
class ParamRecord(ParamFacts):
    """The facts about one parameter at a layout, the same on every rank."""

    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = GRADIENT_AXES
    """Axes over which each rank's gradient is a partial sum."""
    chunks: tuple[int, ...] = ()
    """Pipeline chunks that hold the parameter; more than one when it is tied across chunks."""

    @classmethod
    def of(cls, weight: Weight, *, tensor_size: int, sequence_parallel: bool, chunks: tuple[int, ...]) -> ParamRecord:
        """The record of a weight at a layout.

        Args:
            tensor_size: number of ranks that divide what is split.
            sequence_parallel: whether tensor ranks divide the sequence too.
            chunks: pipeline chunks that hold it.
        """
        return cls(
            weight.name,
            weight.shape,
            splits=tuple(Split(dim, axis, weight.padded_size(tensor_size) if dim == 0 else None) for dim, axis in weight.splits),
            partial_over=_gradient_axes(weight, sequence_parallel),
            chunks=chunks,
            kind=weight.kind,
            init=weight.init,
            tied=weight.tied,
            width=weight.width,
            heads=weight.heads,
            scores=weight.scores,
            by_counts=weight.by_counts,
            frozen=weight.frozen,
        )

    @property
    def of_experts(self) -> bool:
        """Whether the ranks divide it as the experts' grid says."""
        return any(split.axis in EXPERT_AXES for split in self.splits)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Model-parallel axes along which every rank holds the same values; of what counts move, all axes, as nothing shards it."""
        if self.by_counts is not None:
            return ("tp", *GRADIENT_AXES)
        split = {split.axis for split in self.splits}
        return tuple(axis for axis in (EXPERT_AXES[:2] if self.of_experts else ("tp",)) if axis not in split)

    @property
    def tells_noise(self) -> bool:
        """Whether the noise of its gradient is measured: it is a matrix of the layers that tensor ranks divide. Of these each
        tensor rank has whole elements; of other parameters it may have one summand of several, whose square says nothing."""
        return self.role == "hidden" and bool(self.splits) and "tp" not in self.partial_over

    def counts_at(self, context: ParallelContext) -> bool:
        """Whether a rank counts its slice in global norms: of the ranks that hold the same slice, one does."""
        return all(context.coordinates[axis] == 0 for axis in self.replicated_axes if axis not in self.partial_over)

    def local_shape(self, axis_sizes: dict[str, int]) -> tuple[int, ...]:
        """Shape on one rank, padding included. `axis_sizes` maps axis names to sizes (missing means 1)."""
        shape = list(self.shape)
        for split in self.splits:
            whole, ranks = split.padded_size or shape[split.dim], axis_sizes.get(split.axis, 1)
            assert whole % ranks == 0, f"{self.name}: dimension {split.dim} ({whole}) does not divide by {split.axis} {ranks}"
            shape[split.dim] = whole // ranks
        return tuple(shape)

    def held_box(self, axis_sizes: dict[str, int], coordinates: dict[str, int]) -> Box:
        """The global, unpadded box that the rank at `coordinates` holds (empty if it holds only padding)."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        local = self.local_shape(axis_sizes)
        for split in self.splits:
            low = min(coordinates.get(split.axis, 0) * local[split.dim], self.shape[split.dim])
            offsets[split.dim] = low
            sizes[split.dim] = min(low + local[split.dim], self.shape[split.dim]) - low
        return Box(tuple(offsets), tuple(sizes))

    def boxes(self, piece: FlatPiece, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor that a piece of this rank's part holds, without padding."""
        sizes = context.axis_sizes
        return place(self.local_shape(sizes), self.held_box(sizes, context.coordinates), piece)

    def state_boxes(self, shape: StateShape, piece: FlatPiece, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor of a state that lies over a piece of this rank's part, without padding."""
        sizes = context.axis_sizes
        return shape.boxes(self.local_shape(sizes), self.held_box(sizes, context.coordinates), piece)


def _gradient_axes(weight: Weight, sequence_parallel: bool) -> tuple[str, ...]:
    """Axes over which the gradient of each rank is a partial sum."""
    if weight.by_counts is not None or weight.frozen:
        return ()  # counts are summed as they are taken, see `moe/balance.py`; what is frozen has no gradient
    if weight.of_experts:
        return EXPERT_AXES[-1:]
    return ("tp", *GRADIENT_AXES) if weight.partial_over_tp(sequence_parallel) else GRADIENT_AXES


def global_records(model: ModelConfig, vocab_size: int) -> dict[str, ParamRecord]:
    """The record of every parameter by its global name, in the order of the forward: what a complete source of weights holds.

    Args:
        vocab_size: rows of the word embedding, without padding.
    """
    weights = model_weights(model, vocab_size)
    return {one.name: ParamRecord.of(one, tensor_size=1, sequence_parallel=False, chunks=(0,)) for one in weights}


@dataclass
class ParamEntry:
    """A parameter that this rank holds: its record, and the module attributes under which it is found."""

    record: ParamRecord
    holders: list[tuple[nn.Module, str]]
    """(module, attribute); several when modules of this rank share the parameter."""
    chunk: int = 0
    """Pipeline chunk that declared it on this rank."""
    chunks: set[int] = field(default_factory=set)
    """All chunks of this rank that hold it."""
    more_uses: int = 0
    """How often a microbatch uses it beyond once for each holder."""

    @property
    def uses_per_microbatch(self) -> int:
        """How often backward writes its gradient in one microbatch on this rank: once for each use, if it has a gradient."""
        return 0 if self.record.by_counts is not None or self.record.frozen else len(self.holders) + self.more_uses

    @property
    def held_elsewhere(self) -> bool:
        """Whether a chunk of another pipeline stage holds it too."""
        return not self.chunks.issuperset(self.record.chunks)

    @property
    def param(self) -> nn.Parameter:
        """The parameter as it is now (wrappers such as FSDP may replace it)."""
        module, attribute = self.holders[0]
        found = getattr(module, attribute)
        assert isinstance(found, nn.Parameter)
        return found

    def replace(self, param: nn.Parameter) -> None:
        """Put another Parameter under every holder."""
        for module, attribute in self.holders:
            setattr(module, attribute, param)


class ParamTable:
    """The parameters of one rank by global name, in the order of their declaration."""

    def __init__(self) -> None:
        self._entries: dict[str, ParamEntry] = {}

    def add(self, record: ParamRecord, module: nn.Module, attribute: str, chunk: int = 0) -> None:
        """Enter a new parameter of a pipeline chunk. Declaring a name twice is a mistake; see `share`."""
        assert record.name not in self._entries, f"parameter {record.name} declared twice"
        self._entries[record.name] = ParamEntry(record, [(module, attribute)], chunk, {chunk})

    def share(self, name: str, module: nn.Module, attribute: str, chunk: int = 0) -> nn.Parameter:
        """Let another module of this rank hold the parameter; returns it."""
        entry = self._entries[name]
        entry.holders.append((module, attribute))
        entry.chunks.add(chunk)
        return entry.param

    def used_again(self, name: str, times: int) -> None:
        """Say that holders use the parameter so many times more in a microbatch. (A name that is not here has no gradient.)"""
        if name in self._entries:
            self._entries[name].more_uses += times

    def __getitem__(self, name: str) -> ParamEntry:
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[ParamEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


def materialize(module: nn.Module, table: ParamTable, device: torch.device) -> None:
    """Give every meta parameter of the table memory on `device` (values undefined until initialised)."""
    for entry in table:
        if entry.param.is_meta:
            entry.replace(
                nn.Parameter(
                    torch.empty(entry.param.shape, dtype=entry.param.dtype, device=device), requires_grad=entry.param.requires_grad
                )
            )
    assert not any(p.is_meta for p in module.parameters()), "a parameter was made outside the table"


# ---- A shard: the part of a parameter that this rank updates. The optimizer, clipping and checkpoints see only shards.
#
# Whoever divides the model's state over the data ranks (a provider, see `data_parallel`) makes the shards, in groups that are
# published together; the optimizer makes their main parameters, and decides where these lie.


@dataclass
class Shard:
    """One parameter's part on this rank. All tensors are flat and have the piece's number of elements."""

    record: ParamRecord
    piece: FlatPiece
    """The elements of the local parameter that the shard covers."""
    weights: torch.Tensor
    """These elements of the parameter: a view, so writing here changes the model."""
    grad: torch.Tensor
    """Their gradient, complete once the provider has finished a step; in the dtype of `main`."""
    counted: range
    """Indices of the elements that this rank counts in global norms. Each element of the model is counted once in the world, and by
    the same rank whether its state is sliced or not. So norms are the same, bit for bit."""
    copied: range = range(0)
    """Indices of the elements that another rank counts, which should have the same gradient there: on all tensor ranks but one
    where the parameter is not split over them, on the last stage where it is tied, in all replicas of FSDP but the first. A NaN may
    be in this copy alone."""
    alone: bool = False
    """Whether the rank holds nothing else of the parameter, and gathers it where it is used."""
    on_host: bool = False
    """Whether weights and gradient are in host memory, and with them the optimizer's state."""
    main: torch.Tensor = field(init=False)
    """The main parameter, in float32 or wider: the weights themselves where dtypes agree, else a copy, perhaps on the host. Set by
    the optimizer."""
    moments: dict[str, torch.Tensor] = field(init=False)
    """The optimizer's state by name; flat. Set by the optimizer."""
    state_shapes: dict[str, StateShape] = field(default_factory=dict)
    """How each state lies over the parameter; by default it has a number for each element. Set by the optimizer."""

    average: torch.Tensor | None = None
    """The exponential moving average of `main`, where the run keeps one. Set by the optimizer."""

    def boxes(self, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor that the shard holds, without padding."""
        return self.record.boxes(self.piece, context)

    def state_boxes(self, name: str, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor of a state that the shard holds, without padding."""
        return self.record.state_boxes(self.state_shape(name), self.piece, context)

    def state_shape(self, name: str) -> StateShape:
        """How a state lies over the parameter."""
        return self.state_shapes.get(name, ELEMENTS)

    def counted_boxes(self, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor that this rank counts in global norms."""
        start = self.piece.start
        return self.record.boxes(FlatPiece(start + self.counted.start, start + self.counted.stop), context)

    @property
    def counted_grad(self) -> torch.Tensor:
        """A view of the gradient of the counted elements."""
        return self.grad[self.counted.start : self.counted.stop]

    @property
    def copied_grad(self) -> torch.Tensor:
        """A view of the gradient of the copied elements."""
        return self.grad[self.copied.start : self.copied.stop]

    @property
    def counted_main(self) -> torch.Tensor:
        """A view of the main parameter's counted elements."""
        return self.main[self.counted.start : self.counted.stop]


@dataclass(frozen=True)
class DividedParam:
    """A parameter as the ranks of a stage divide it, the same for all of them."""

    record: ParamRecord
    main_dtype: torch.dtype
    cuts: tuple[int, ...] = ()
    """Elements of a rank's flattened tensor at which another rank's piece begins."""
    axes: tuple[str, ...] = ()
    """Axes of the ranks that divide a rank's tensor; none if each updates all of it."""
    num_ranks: int = 1
    """How many divide it: all along these axes, or of `fully_shard` with replicas so many neighbours."""
    first: int = 0
    """The place among these of the rank that has the first piece; the next have the next pieces."""
    tied_apart: bool = False
    """Whether another stage holds it too."""

    def pieces(self, numel: int) -> list[FlatPiece]:
        """The pieces of a rank's flattened tensor of so many elements, in order."""
        return [FlatPiece(start, stop) for start, stop in itertools.pairwise((0, *self.cuts, numel))]


def _nothing() -> None: ...


@dataclass
class ShardGroup:
    """Shards that are reduced together and published together: a bucket, or the parameters of a block."""

    shards: list[Shard]
    publish: Callable[[], None] = _nothing
    """Begin to send this rank's new weights to the other ranks that hold them. Called once all shards' weights are written."""
    params: Sequence[DividedParam] = ()
    """All parameters of the group, those of which this rank has no shard too, in an order that is the same on all ranks."""
    on_reduced: list[Callable[[Pending], None]] = field(default_factory=list)
    """Called before a step's end, when the group's gradients are on their way to being complete."""

    def announce(self, pending: Pending) -> None:
        """Call these, once a step, with what they must wait for (on CUDA, on any stream)."""
        for listen in self.on_reduced:
            listen(pending)


# ---- A scope: what a module needs to declare its parameters. It carries their names, the spec's weights, dtype and table.


@dataclass(frozen=True)
class Scope:
    """Passed to every module that holds parameters. `child` goes one name deeper."""

    context: ParallelContext
    table: ParamTable
    weights: Mapping[str, Weight]
    """The weights of the whole model in the spec, by global name."""
    dtype: torch.dtype
    sequence_parallel: bool = False
    overlap: Overlap | None = None
    """How products overlap with the collectives along the sequence; None: they take turns."""
    fp8: Fp8 | None = None
    """How linear layers compute in 8 bits; None: in the dtype."""
    context_ways: tuple[ContextWay, ...] = ()
    """How context ranks share keys and values in each layer, where there are several."""
    gathers_tokens: bool = False
    """Whether experts get their tokens by allgather, and not by alltoall."""
    lora_scale: float = 1.0
    """Factor of what adapters give."""
    prefix: str = ""
    chunk: int = 0
    num_chunks: int = 1

    def child(self, name: str) -> Scope:
        """The scope of a submodule."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def tp(self) -> Group:
        """The tensor group."""
        return self.context.group("tp")

    def weight(self, attribute: str) -> Weight:
        """The spec's entry for a parameter of this module."""
        return self.weights[f"{self.prefix}{attribute}"]

    def has(self, attribute: str) -> bool:
        """Whether the spec has a parameter of this module."""
        return f"{self.prefix}{attribute}" in self.weights

    def parameter(self, module: nn.Module, attribute: str, weight: Weight | None = None) -> None:
        """Declare a parameter: enter its record in the table and register the local part on the module, on the meta device.

        Args:
            weight: its entry in the spec; by default the one of this name.
        """
        weight = weight or self.weight(attribute)
        ends = (0, self.num_chunks - 1) if self.num_chunks > 1 else (0,)
        record = ParamRecord.of(
            weight,
            tensor_size=self.tp.size,
            sequence_parallel=self.sequence_parallel,
            chunks=ends if weight.tied else (self.chunk,),
        )
        # Steps of a bias are much smaller than the bias, so 16 bits would lose them.
        dtype = self.dtype if record.by_counts is None else torch.promote_types(self.dtype, torch.float32)
        local = torch.empty(record.local_shape(self.context.axis_sizes), dtype=dtype, device="meta")
        module.register_parameter(attribute, nn.Parameter(local, requires_grad=not record.frozen))
        self.table.add(record, module, attribute, self.chunk)

    def optional(self, module: nn.Module, attribute: str) -> None:
        """Declare a parameter if the spec has it; else the attribute is None."""
        if self.has(attribute):
            self.parameter(module, attribute)
        else:
            module.register_parameter(attribute, None)
