"""Table of the model's parameters by global name. The record of each parameter has its name, its shape, how ranks split it, and the
axes along which its gradient is summed.

All code that handles parameters, except for the layers that use them, reads these records: initialization, gradient reduction, the
global norm, weight decay, sharding, checkpoints, export and memory reports. So each property of a parameter is defined only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType
from megatron.config.precision import Fp8
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.state_shape import PER_ELEMENT, StateShape
from megatron.parallel.tensor_slice import BufferSlice, FlatRange, TensorSlice, map_flat_range
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES
from megatron.spec.weights import ParamInfo, WeightSpec, iter_weights

if TYPE_CHECKING:
    from megatron.parallel.overlap import Overlap


@dataclass(frozen=True)
class Split:
    """Split of one dimension of a parameter over the ranks of one axis."""

    dim: int
    axis: str
    padded_size: int | None = None
    """Full size of the dimension including padding; None if it is not padded. Only dimension 0 may be padded."""


@dataclass(frozen=True)
class ParamRecord(ParamInfo):
    """Properties of one parameter in a given parallel layout: name, shape, how ranks split its dimensions, and along which axes its
    gradient is a partial sum.

    The record is the same on every rank.
    """

    splits: tuple[Split, ...] = ()
    partial_axes: tuple[str, ...] = GRADIENT_AXES
    """Axes along which the gradient of each rank is a partial sum, and over whose ranks gradients must be summed."""
    chunks: tuple[int, ...] = ()
    """Model chunks that hold the parameter; several for a word embedding that is tied to the output layer."""

    @classmethod
    def of(cls, weight: WeightSpec, *, tensor_size: int, sequence_parallel: bool, chunks: tuple[int, ...]) -> ParamRecord:
        """Build the record of a parameter from its specification (`WeightSpec`), for a parallel layout.

        Args:
            tensor_size: number of tensor-parallel ranks, over which dimension 0 may need padding.
            sequence_parallel: whether the tensor-parallel ranks also split the sequence.
            chunks: model chunks that hold the parameter.
        """
        return cls(
            weight.name,
            weight.shape,
            splits=tuple(
                Split(dim, axis, weight.get_padded_size(tensor_size) if dim == 0 else None) for dim, axis in weight.splits
            ),
            partial_axes=_get_gradient_axes(weight, sequence_parallel),
            chunks=chunks,
            param_type=weight.param_type,
            init=weight.init,
            tied=weight.tied,
            mup_width=weight.mup_width,
            fused_heads=weight.fused_heads,
            score_rows=weight.score_rows,
            count_update=weight.count_update,
            frozen=weight.frozen,
        )

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to experts, and is split over axes of the expert grid."""
        return any(split.axis in EXPERT_AXES for split in self.splits)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Axes along which all ranks hold the same values of the parameter.

        For most parameters these are the model-parallel axes along which the parameter is not sharded. A parameter that is updated
        by token counts (such as a router's bias) is never sharded. All ranks over which its token counts are summed hold the same
        values, so the axes of the gradient group are included too.
        """
        if self.count_update is not None:
            return ("tp", *GRADIENT_AXES)
        split = {split.axis for split in self.splits}
        return tuple(axis for axis in (EXPERT_AXES[:2] if self.is_expert else ("tp",)) if axis not in split)

    @property
    def measures_noise(self) -> bool:
        """Whether the gradient noise of --log-gradient-noise includes the parameter: only matrices of layers that tensor-parallel
        ranks split.

        Every tensor-parallel rank has complete gradients for its elements of these matrices. The gradient of another parameter may
        be a partial sum over the tensor-parallel ranks, and the square of a partial sum says nothing about the noise.
        """
        return self.role == "hidden" and bool(self.splits) and "tp" not in self.partial_axes

    def is_counted_at(self, context: ParallelContext) -> bool:
        """Return whether this rank includes its slice of the parameter in global norms. Of all ranks that hold the same slice, only
        one does."""
        return all(context.coordinates[axis] == 0 for axis in self.replicated_axes if axis not in self.partial_axes)

    def get_local_shape(self, axis_sizes: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of the slice of the parameter that a rank holds (the local parameter), including padding.

        Args:
            axis_sizes: number of ranks along each axis, by axis name. A missing axis has size 1.
        """
        shape = list(self.shape)
        for split in self.splits:
            full_size, num_ranks = split.padded_size or shape[split.dim], axis_sizes.get(split.axis, 1)
            assert full_size % num_ranks == 0, (
                f"{self.name}: dimension {split.dim} ({full_size}) does not divide by {split.axis} {num_ranks}"
            )
            shape[split.dim] = full_size // num_ranks
        return tuple(shape)

    def get_local_slice(self, axis_sizes: dict[str, int], coordinates: dict[str, int]) -> TensorSlice:
        """Return the slice of the global parameter on the rank at `coordinates`, without padding.

        The slice is empty if the rank holds only padding.
        """
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        local_shape = self.get_local_shape(axis_sizes)
        for split in self.splits:
            start = min(coordinates.get(split.axis, 0) * local_shape[split.dim], self.shape[split.dim])
            offsets[split.dim] = start
            sizes[split.dim] = min(start + local_shape[split.dim], self.shape[split.dim]) - start
        return TensorSlice(tuple(offsets), tuple(sizes))

    def get_slices(self, flat_range: FlatRange, context: ParallelContext) -> list[BufferSlice]:
        """Return the slices of the global parameter that form a range of the flattened local parameter, without padding."""
        sizes = context.axis_sizes
        return map_flat_range(self.get_local_shape(sizes), self.get_local_slice(sizes, context.coordinates), flat_range)

    def get_state_slices(self, state_shape: StateShape, flat_range: FlatRange, context: ParallelContext) -> list[BufferSlice]:
        """Return the slices of a global optimizer state that belong to a range of the flattened local parameter, without padding.

        Args:
            state_shape: which elements of the parameter share a value of the state.
        """
        sizes = context.axis_sizes
        return state_shape.get_slices(self.get_local_shape(sizes), self.get_local_slice(sizes, context.coordinates), flat_range)


def _get_gradient_axes(weight: WeightSpec, sequence_parallel: bool) -> tuple[str, ...]:
    """Return the axes along which each rank's gradient of a weight is a partial sum; empty if the weight has no gradient to sum."""
    if weight.count_update is not None or weight.frozen:
        return ()  # token counts are already summed over the ranks (`moe/balance.py`); frozen parameters have no gradient
    if weight.is_expert:
        return EXPERT_AXES[-1:]
    return ("tp", *GRADIENT_AXES) if weight.has_partial_tp_grad(sequence_parallel) else GRADIENT_AXES


def build_global_records(model: ModelConfig, vocab_size: int) -> dict[str, ParamRecord]:
    """Return the record of every parameter of the unsharded model by global name, in the order of the forward. A record has the
    parameter's name, shape and initial values.

    To load weights from a file, the file must have all of these parameters.

    Args:
        vocab_size: rows of the word embedding, without padding.
    """
    weights = iter_weights(model, vocab_size)
    return {weight.name: ParamRecord.of(weight, tensor_size=1, sequence_parallel=False, chunks=(0,)) for weight in weights}


@dataclass
class ParamEntry:
    """Parameter on this rank: its record, and the module attributes that refer to it."""

    record: ParamRecord
    owners: list[tuple[nn.Module, str]]
    """Pairs (module, name of the attribute that holds the parameter); several if modules of this rank share the parameter."""
    chunk: int = 0
    """Index of the model chunk of this rank that declared the parameter."""
    chunks: set[int] = field(default_factory=set)
    """Indices of all model chunks of this rank that use the parameter."""
    extra_uses: int = 0
    """Number of uses per microbatch in addition to one use by each module in `owners`."""

    @property
    def uses_per_microbatch(self) -> int:
        """Number of gradients that backward adds to the parameter per microbatch on this rank.

        There is one for each use, and none if the parameter needs no gradient.
        """
        return 0 if self.record.count_update is not None or self.record.frozen else len(self.owners) + self.extra_uses

    @property
    def is_shared_across_stages(self) -> bool:
        """Whether a chunk of another pipeline stage holds the parameter too."""
        return not self.chunks.issuperset(self.record.chunks)

    @property
    def param(self) -> nn.Parameter:
        """Current `nn.Parameter` object. It may change, because wrappers such as FSDP replace it."""
        module, attribute = self.owners[0]
        param = getattr(module, attribute)
        assert isinstance(param, nn.Parameter)
        return param

    def replace(self, param: nn.Parameter) -> None:
        """Set another parameter object in the attributes of all modules that refer to the parameter (`owners`)."""
        for module, attribute in self.owners:
            setattr(module, attribute, param)


class ParamTable:
    """Parameters of one rank by global name, in the order of their declaration."""

    def __init__(self) -> None:
        self._entries: dict[str, ParamEntry] = {}

    def add(self, record: ParamRecord, module: nn.Module, attribute: str, chunk: int = 0) -> None:
        """Add a new parameter of a model chunk, which `module` holds under the name `attribute`. For a further module with the same
        parameter, use `share`."""
        assert record.name not in self._entries, f"parameter {record.name} declared twice"
        self._entries[record.name] = ParamEntry(record, [(module, attribute)], chunk, {chunk})

    def share(self, name: str, module: nn.Module, attribute: str, chunk: int = 0) -> nn.Parameter:
        """Add a further module of this rank that uses an existing parameter, and return the parameter. The caller sets the
        attribute of the module."""
        entry = self._entries[name]
        entry.owners.append((module, attribute))
        entry.chunks.add(chunk)
        return entry.param

    def add_uses(self, name: str, num_uses: int) -> None:
        """Count further uses of a parameter per microbatch. Backward must add one gradient for each use. Names of parameters that
        this rank does not hold are ignored."""
        if name in self._entries:
            self._entries[name].extra_uses += num_uses

    def __getitem__(self, name: str) -> ParamEntry:
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[ParamEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


def materialize(module: nn.Module, table: ParamTable, device: torch.device) -> None:
    """Allocate on `device` every parameter of the table that is on the meta device. Values are undefined until initialization."""
    for entry in table:
        if entry.param.is_meta:
            entry.replace(
                nn.Parameter(
                    torch.empty(entry.param.shape, dtype=entry.param.dtype, device=device), requires_grad=entry.param.requires_grad
                )
            )
    assert not any(p.is_meta for p in module.parameters()), "a parameter was created without an entry in the table"


# ---- Shards: the elements of a parameter that this rank updates. Optimizer, gradient clipping and checkpoints handle only shards.
#
# A provider (see `data_parallel`) shards the model's state over the data-parallel ranks. It creates the shards in groups whose
# parameters are gathered together. The optimizer creates the main parameters, and decides in which memory they are.


@dataclass
class Shard:
    """Part of one parameter that this rank updates: values, gradient, main parameter and optimizer states of a range of its
    elements.

    All tensors are flat. Except for optimizer states with fewer values (`state_shapes`), they have the length of `flat_range`.
    """

    record: ParamRecord
    flat_range: FlatRange
    """Elements of the flattened local parameter that form this shard."""
    weights: torch.Tensor
    """Elements of the model's parameter that belong to the shard. A view, so writing to it changes the model."""
    grad: torch.Tensor
    """Gradient of the shard's elements, in the dtype of `main_param`. Complete after `ShardProvider.finish_gradients`."""
    norm_range: range
    """Indices within the shard of the elements that this rank includes in global norms. Exactly one rank includes each element
    of the model, and the same rank for every sharding strategy. So norms do not depend on the strategy, bit for bit."""
    duplicate_range: range = range(0)
    """Indices within the shard of the elements whose copies on another rank are included in global norms. The gradients of both
    copies should be equal. Duplicates are on all tensor ranks but the first if the parameter is not split over them, on the
    last stage if it is tied, and in all FSDP replicas but the first. Checks for NaN need this range, because a NaN may be in a
    duplicate only."""
    is_fully_sharded: bool = False
    """Whether this rank stores only its shard of the parameter (FSDP), and gathers the full parameter for each use."""
    on_host: bool = False
    """Whether weights, gradient and optimizer state are in host memory."""
    main_param: torch.Tensor = field(init=False)
    """Main parameter in float32 or a wider dtype. If `weights` has this dtype, it is the same tensor; otherwise a copy, possibly in
    host memory. The optimizer sets it."""
    moments: dict[str, torch.Tensor] = field(init=False)
    """Flat tensors of the optimizer state, by name of the state. The optimizer sets them."""
    state_shapes: dict[str, StateShape] = field(default_factory=dict)
    """State shape of each optimizer state, by name: which elements of the parameter have one common state value, such as the
    elements of a row. By default each element has its own. The optimizer sets this attribute."""

    average: torch.Tensor | None = None
    """Exponential moving average of `main_param`, if the run uses one. The optimizer sets it."""

    def get_slices(self, context: ParallelContext) -> list[BufferSlice]:
        """Return the slices of the global parameter that form this shard, without padding."""
        return self.record.get_slices(self.flat_range, context)

    def get_state_slices(self, name: str, context: ParallelContext) -> list[BufferSlice]:
        """Return the slices of the global optimizer state `name` that belong to this shard, without padding."""
        return self.record.get_state_slices(self.get_state_shape(name), self.flat_range, context)

    def get_state_shape(self, name: str) -> StateShape:
        """Return which elements of the parameter share a value of the optimizer state `name`; by default each element has its own
        value."""
        return self.state_shapes.get(name, PER_ELEMENT)

    def get_norm_slices(self, context: ParallelContext) -> list[BufferSlice]:
        """Return the slices of the global parameter that this rank includes in global norms."""
        start = self.flat_range.start
        return self.record.get_slices(FlatRange(start + self.norm_range.start, start + self.norm_range.stop), context)

    @property
    def norm_grad(self) -> torch.Tensor:
        """View of the gradient of the elements that this rank includes in global norms."""
        return self.grad[self.norm_range.start : self.norm_range.stop]

    @property
    def duplicate_grad(self) -> torch.Tensor:
        """View of the gradient of the elements whose copies on another rank are included in global norms. Checks for NaN and
        infinity include these elements too."""
        return self.grad[self.duplicate_range.start : self.duplicate_range.stop]

    @property
    def norm_main_param(self) -> torch.Tensor:
        """View of the main parameter of the elements that this rank includes in global norms."""
        return self.main_param[self.norm_range.start : self.norm_range.stop]


@dataclass(frozen=True)
class ParamPartition:
    """Partition of one parameter over the ranks of a pipeline stage: which rank updates which elements. All these ranks know the
    same partition."""

    record: ParamRecord
    main_dtype: torch.dtype
    boundaries: tuple[int, ...] = ()
    """Indices of the flattened local parameter at which the second and each further shard starts."""
    axes: tuple[str, ...] = ()
    """Axes of the ranks that divide the update of the local parameter; empty if every rank updates all of it."""
    num_ranks: int = 1
    """Number of ranks that divide the update: all ranks along `axes`, or in hybrid FSDP the ranks of a shard group."""
    first_rank: int = 0
    """Position, among the `num_ranks` ranks, of the rank with the first shard. The ranks after it have the following shards."""
    is_tied_across_stages: bool = False
    """Whether another pipeline stage holds the parameter too."""

    def get_flat_ranges(self, numel: int) -> list[FlatRange]:
        """Return the shards of a flattened local parameter with `numel` elements, in order."""
        return [FlatRange(start, stop) for start, stop in itertools.pairwise((0, *self.boundaries, numel))]


def _do_nothing() -> None: ...


@dataclass
class ShardGroup:
    """Shards whose gradients are reduced together and whose parameters are gathered together.

    A group consists of the parameters of a bucket, or of a transformer block.
    """

    shards: list[Shard]
    gather_params: Callable[[], None] = _do_nothing
    """Function that starts to send the updated weights of this rank to the other ranks that hold them. Called after all weights
    of the group are written."""
    params: Sequence[ParamPartition] = ()
    """All parameters of the group, including those without a shard on this rank. The order is the same on all ranks."""
    on_reduced: list[Callable[[Pending], None]] = field(default_factory=list)
    """Functions that `notify_reduced` calls with the pending reduction of the group's gradients."""

    def notify_reduced(self, pending: Pending) -> None:
        """Call the functions in `on_reduced`. Called once per step, when the final reduction of the group's gradients has started.

        Args:
            pending: the reduction, for which the functions must wait (on CUDA, on any stream).
        """
        for callback in self.on_reduced:
            callback(pending)


# ---- Scope: the context in which a module declares its parameters: prefix of their names, specifications, dtype and table.


@dataclass(frozen=True)
class Scope:
    """Everything that a module needs to declare its parameters: prefix of the parameter names, parameter specifications, dtype and
    parameter table.

    Every module with parameters receives a scope. `child` returns the scope of a submodule.
    """

    context: ParallelContext
    table: ParamTable
    weights: Mapping[str, WeightSpec]
    """Specifications of all weights of the model, by global name."""
    dtype: torch.dtype
    sequence_parallel: bool = False
    overlap: Overlap | None = None
    """Overlap of matrix products with the collectives along the sequence; None if collectives and products run one after
    another."""
    fp8: Fp8 | None = None
    """Settings for 8-bit matrix products in linear layers; None to compute in `dtype`."""
    cp_comm_types: tuple[CpCommType, ...] = ()
    """Communication of context parallelism in each layer; empty without context parallelism."""
    uses_allgather_dispatch: bool = False
    """Whether experts use the allgather token dispatcher instead of alltoall."""
    lora_scale: float = 1.0
    """Number by which the output of LoRA adapters is multiplied."""
    prefix: str = ""
    chunk: int = 0
    num_chunks: int = 1

    def get_child(self, name: str) -> Scope:
        """Return the scope of the submodule `name`, which extends the prefix of parameter names by "name."."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def tp(self) -> Group:
        """Tensor-parallel group."""
        return self.context.group("tp")

    def get_weight(self, attribute: str) -> WeightSpec:
        """Return the specification of the parameter that this module holds under the name `attribute`."""
        return self.weights[f"{self.prefix}{attribute}"]

    def has_weight(self, attribute: str) -> bool:
        """Return whether the model's specification contains the parameter `attribute` of this module. For example, a bias may be
        absent."""
        return f"{self.prefix}{attribute}" in self.weights

    def register_param(self, module: nn.Module, attribute: str, weight: WeightSpec | None = None) -> None:
        """Declare a parameter: add its record to the table, and register the local parameter with the module on the meta device.

        Args:
            attribute: name of the parameter in the module.
            weight: specification of the parameter; None for the one that the model's specification has under this name.
        """
        weight = weight or self.get_weight(attribute)
        end_chunks = (0, self.num_chunks - 1) if self.num_chunks > 1 else (0,)
        record = ParamRecord.of(
            weight,
            tensor_size=self.tp.size,
            sequence_parallel=self.sequence_parallel,
            chunks=end_chunks if weight.tied else (self.chunk,),
        )
        # Updates by token counts are much smaller than the bias of a router, so 16 bits would lose them.
        dtype = self.dtype if record.count_update is None else torch.promote_types(self.dtype, torch.float32)
        local_param = torch.empty(record.get_local_shape(self.context.axis_sizes), dtype=dtype, device="meta")
        module.register_parameter(attribute, nn.Parameter(local_param, requires_grad=not record.frozen))
        self.table.add(record, module, attribute, self.chunk)

    def register_optional_param(self, module: nn.Module, attribute: str) -> None:
        """Declare a parameter if the model's specification has it. Otherwise, set the attribute of the module to None."""
        if self.has_weight(attribute):
            self.register_param(module, attribute)
        else:
            module.register_parameter(attribute, None)
