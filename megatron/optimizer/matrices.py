"""Helpers for update rules such as Adafactor that sum over the rows, the columns or all elements of a matrix. A rank updates a flat
range of a parameter, so these functions find the rows and columns to which the elements of the range belong.

The functions take a target: a flat main parameter or a part of one. Its range in the flattened matrix consists of at most three
slices: the end of a row, complete rows, and the start of a row. (A parameter with several matrices may need more.) Each slice is a
rectangular region of the global tensor, so its elements can be viewed in the shape of the region. In an array with the sum of every
row of the parameter, the sums for a slice are at the indices of the region's rows; columns are analogous. Padding is in no slice.

A unit is one matrix [R, C] of a parameter, or one vector of a parameter that holds vectors. Statistics are sums over units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.optimizer.rule import Target
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.state_shape import PER_COLUMN
from megatron.parallel.tensor_slice import BufferSlice, FlatRange
from megatron.spec.weights import get_score_row

Index = tuple[slice, ...]


def count_unit_dims(record: ParamRecord) -> int:
    """Return the number of trailing dimensions that form a unit (one matrix or vector of the parameter): 1 for vectors, 2 for
    matrices."""
    return 1 if record.param_type == "vector" else 2


def get_units_shape(record: ParamRecord) -> tuple[int, ...]:
    """Return the leading dimensions of a parameter: the shape of an array with one entry per unit (matrix or vector of the
    parameter)."""
    return record.shape[: -count_unit_dims(record)]


def compute_unit_numel(record: ParamRecord) -> int:
    """Return the number of elements of a unit: one matrix of the parameter, or one vector."""
    return math.prod(record.shape[-count_unit_dims(record) :])


@dataclass(frozen=True)
class TargetSlice:
    """Rectangular region of the global tensor whose elements are contiguous in a target (a flat main parameter or a part of it)."""

    buffer_slice: BufferSlice

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the slice's elements in the shape of the region.

        Args:
            flat: flat tensor with one value per element of the target (the main parameter or the part of it that has this slice).
        """
        start = self.buffer_slice.offset
        return flat[start : start + self.buffer_slice.slice.numel].view(self.buffer_slice.slice.sizes)

    @property
    def row_index(self) -> Index:
        """Index that selects the rows of this slice in an array with one entry per row of the parameter."""
        return self.buffer_slice.slice.index[:-1]

    @property
    def column_index(self) -> Index:
        """Index that selects the columns of this slice in an array with one entry per column of the parameter."""
        return (*self.buffer_slice.slice.index[:-2], self.buffer_slice.slice.index[-1])

    @property
    def has_row_starts(self) -> bool:
        """Whether the slice starts at the first column, so that it contains the start of each of its rows. Sums over rows use it to
        count each row once, although several slices or ranks may hold parts of a row."""
        return self.buffer_slice.slice.offsets[-1] == 0

    def get_unit_index(self, dims: int) -> Index:
        """Return the index that selects the units of this slice in an array with one entry per unit (matrix or vector) of the
        parameter.

        Args:
            dims: number of dimensions of a unit (`count_unit_dims`).
        """
        return self.buffer_slice.slice.index[:-dims]


def slice_target(target: Target, context: ParallelContext) -> list[TargetSlice]:
    """Divide all elements of a target (a main parameter or a part of it), without padding, into rectangular slices."""
    return [TargetSlice(buffer_slice) for buffer_slice in target.record.get_slices(target.flat_range, context)]


def slice_norm_range(target: Target, context: ParallelContext) -> list[TargetSlice]:
    """Divide into rectangular slices the elements of a target (a main parameter or a part of it) that this rank contributes to sums
    over the full parameter.

    Each element of the parameter is in one of these slices on exactly one rank.
    """
    start, norm_range = target.flat_range.start, target.norm_range
    buffer_slices = target.record.get_slices(FlatRange(start + norm_range.start, start + norm_range.stop), context)
    return [TargetSlice(BufferSlice(buffer_slice.slice, norm_range.start + buffer_slice.offset)) for buffer_slice in buffer_slices]


def view_row_state(target: Target, state_name: str, target_slice: TargetSlice, context: ParallelContext) -> torch.Tensor:
    """Return a view of an optimizer state with one value per row, for the R rows of a slice: [..., R]. A row is in at most one
    slice of a target."""
    row_length = target.record.get_local_shape(context.axis_sizes)[-1]
    first_row = (target.flat_range.start + target_slice.buffer_slice.offset) // row_length - target.flat_range.start // row_length
    sizes = target_slice.buffer_slice.slice.sizes[:-1]
    return target.moments[state_name][first_row : first_row + math.prod(sizes)].view(sizes)


def view_column_states(target: Target, state_name: str, context: ParallelContext) -> list[tuple[torch.Tensor, Index]]:
    """Return an optimizer state with one value per column, for all columns of a target (a main parameter or a part of it).

    Returns:
        views of the state, each with its index in an array with one entry per column of the parameter.
    """
    state_slices = target.record.get_state_slices(PER_COLUMN, target.flat_range, context)
    flat = target.moments[state_name]
    return [
        (
            flat[state_slice.offset : state_slice.offset + state_slice.slice.numel].view(state_slice.slice.sizes),
            state_slice.slice.index,
        )
        for state_slice in state_slices
    ]


def compute_unit_squared_norms(view: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the squared norm of each unit in a view. A unit is a matrix or a vector: the last `dims` dimensions of the view.

    Each row is summed in the tensor's dtype, and the sums of the rows are added in float64, as in
    `statistics.compute_squared_norms`.
    """
    row_sums = torch.linalg.vector_norm(view, dim=-1).double().square_()
    return (row_sums.sum(-1) if dims == 2 else row_sums).to(view.dtype)


def add_squared_norms(unit_sums: torch.Tensor, tensor: torch.Tensor, slices: Sequence[TargetSlice], dims: int) -> None:
    """Add the squared norms of slices of a tensor to `unit_sums`, an array with one entry per unit (matrix or vector of the
    parameter).

    Args:
        tensor: flat tensor with one value per element of the target.
        dims: number of dimensions of a unit (`count_unit_dims`).
    """
    for target_slice in slices:
        unit_sums[target_slice.get_unit_index(dims)].add_(
            compute_unit_squared_norms(target_slice.of(tensor), dims).to(unit_sums.device)
        )


# ---- QK-clip: after an update, scale down the query and key weights of heads with too large attention logits (MuonClip; Kimi K2,
# arXiv 2507.20534, section 2.1).
#
# Let S be the largest logit of a head in the step (`megatron.attention.max_logits`) and gamma = min(1, threshold / S). The weights
# of the head's queries are multiplied by gamma^alpha and those of its keys by gamma^(1 - alpha). With the new weights, the largest
# logit for the same inputs would be the threshold. Query heads that share a key head use the smallest gamma among them, as in
# Megatron-LM. In latent attention, the rotated channels of queries are multiplied by gamma, because all heads share the rotated
# key.


class QKClip:
    """QK-clip: scales down the query and key weights of heads whose attention logits are too large.

    The weights are scaled in the main parameters, after the update. Then the moving averages are updated, and the main parameters
    are copied to the model's weights.

    Args:
        max_logits: largest attention logit of each head in the step over the global batch, [layers, query heads]. The tensor is
            refilled in each step.
        threshold: largest logit that is not scaled down.
        alpha: division of the scaling between queries and keys. For a head that must be scaled by c, queries are multiplied by
            c^alpha and keys by c^(1 - alpha).
    """

    def __init__(self, max_logits: torch.Tensor, threshold: float, alpha: float, context: ParallelContext) -> None:
        self._max_logits, self._threshold, self._context = max_logits, threshold, context
        self._exponents = {"query": alpha, "key": 1.0 - alpha, "both": 1.0}
        self._gammas: dict[torch.device, torch.Tensor] = {}

    def update_factors(self) -> None:
        """Compute the number by which the logits of each head must be scaled, from the largest logits of the current step."""
        gammas = torch.where(self._max_logits > self._threshold, self._threshold / self._max_logits, 1.0)
        self._gammas = {gammas.device: gammas}

    def build_clip(self, targets: Sequence[Target]) -> Callable[[], None]:
        """Return a function that scales the query and key rows of the main parameters in `targets`. Call the function after each
        update of these parameters."""
        query_key_slices = [
            (target_slice.of(target.main), target.record, target_slice.buffer_slice.slice.index[0])
            for target in targets
            if target.record.score_rows is not None
            for target_slice in slice_target(target, self._context)
        ]

        def clip() -> None:
            for view, record, rows in query_key_slices:
                factors = self._compute_factors(record, view.device)[rows].to(view.dtype)
                view.mul_(factors.view(-1, *[1] * (view.dim() - 1)))

        return clip

    def _compute_factors(self, record: ParamRecord, device: torch.device) -> torch.Tensor:
        """Return the number by which QK-clip multiplies each row of a parameter, as a tensor on `device`."""
        if device not in self._gammas:
            self._gammas[device] = next(iter(self._gammas.values())).to(device)
        scores = record.score_rows
        assert scores is not None
        gammas = (
            self._gammas[device][get_score_row(record.name)].view(-1, scores.queries_per_unit).amin(-1, keepdim=True)
        )  # [units, 1]
        row_factors = [
            gammas.pow(self._exponents[side]).expand(-1, rows)
            if side in self._exponents
            else torch.ones_like(gammas).expand(-1, rows)
            for rows, side in scores.sections
        ]
        return torch.cat(row_factors, 1).flatten()
