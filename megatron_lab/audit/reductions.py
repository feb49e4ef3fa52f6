"""Audit of a step: check that the optimizer uses the sum of the gradients that all ranks computed, with each element counted once
in the gradient norm.

`LocalGradients` receives each gradient that the rank's backward computes, before any sum over ranks. It counts the gradients and
adds up their signatures: four signed sums and the sum of squares of a tensor (`signature.py`). The signed sums are linear. So the
signatures of all microbatches and uses of a parameter add up to the signature of its complete gradient.

There are two checks for every parameter:

- The signatures of the local gradients, summed over the ranks over which the gradient must be summed, must equal the signature of
  the gradients in the shards.
- The slices that the ranks count in the global norm must cover each element of the parameter exactly once, and the norm must be
  that of the counted elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.checkpoint.manifest import is_partition
from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard
from megatron.parallel.tensor_slice import TensorSlice
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES, Topology
from megatron_lab.audit.digests import get_rounding_tolerance
from megatron_lab.audit.partial_sums import OMITTED_AXES, PartialSumSignatures, get_summed_axes
from megatron_lab.audit.replicas import MAX_LINES, format_rank_list
from megatron_lab.audit.signature import compute_buffer_signature, compute_shard_signatures, compute_slice_signature
from megatron_lab.audit.trace_file import NUM_SIGNS, SIGNATURE_SIZE


def get_replicated_axes(record: ParamRecord) -> tuple[str, ...]:
    """Return the axes along which a parameter's gradient is not summed, because every rank along these axes should compute an equal
    gradient."""
    split = {split.axis for split in record.splits}
    grid = EXPERT_AXES if record.is_expert else ("tp", *GRADIENT_AXES)
    return tuple(axis for axis in grid if axis not in split and axis not in record.partial_axes)


class LocalGradients:
    """Signatures (four signed sums and the sum of squares) of all gradients that this rank computes in one step, before any sum
    over ranks. `add_grad` must be called for every gradient.

    Args:
        params: parameters of this rank that have a gradient.
        shards: shards of this rank.
        records: properties of all parameters of the unsharded model that have a gradient, by name. Row i of every tensor of
            signatures belongs to the i-th parameter.
    """

    def __init__(
        self, params: Sequence[ParamEntry], shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext
    ) -> None:
        self._params, self._context = params, context
        self._shards = {shard.record.name: shard for shard in shards}
        self._row_of = {name: row for row, name in enumerate(records)}
        self._num_writes = dict.fromkeys((entry.record.name for entry in params), 0)
        self.signatures = torch.zeros(len(records), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
        """Signatures of the local gradients. Their sum of squares adds up all uses and microbatches, to bound the rounding."""
        self._shard_signatures = torch.zeros_like(self.signatures)
        """Signatures of the local gradients, restricted to the elements that this rank updates."""
        self.partial_sums = PartialSumSignatures(shards, self._row_of, context)

    def add_grad(self, entry: ParamEntry, grad: torch.Tensor) -> None:
        """Add a local gradient of a parameter to the signatures (four signed sums and the sum of squares) of the parameter, and
        count it. Backward computes one such gradient for each use of the parameter in each microbatch."""
        name = entry.record.name
        row, shard = self._row_of[name], self._shards.get(name)
        local_slice = entry.record.get_local_slice(self._context.axis_sizes, self._context.coordinates)
        self._num_writes[name] += 1
        self.signatures[row] += compute_slice_signature(name, local_slice, grad[tuple(slice(size) for size in local_slice.sizes)])
        if shard is not None:
            shard_grad = grad.view(-1)[shard.flat_range.start : shard.flat_range.stop]
            self._shard_signatures[row] += compute_buffer_signature(name, shard.get_slices(self._context), shard_grad)
        self.partial_sums.add_grad(entry.record, grad)

    def find_missing_grads(self, num_microbatches: int) -> list[str]:
        """Return an error message for each parameter that received too few or too many gradients on any rank. All ranks must call
        this method together.

        Args:
            num_microbatches: number of microbatches of this rank in the step.
        """
        problems = {}
        for entry in self._params:
            name, expected = entry.record.name, entry.uses_per_microbatch * num_microbatches
            if self._num_writes[name] != expected:
                problems[name] = f"{self._num_writes[name] or 'none'} of {expected} gradients received"
        ranks_by_problem: dict[tuple[str, str], list[int]] = {}
        for rank, rank_problems in enumerate(gather_objects(problems, self._context.world)):
            for name, message in rank_problems.items():
                ranks_by_problem.setdefault((name, message), []).append(rank)
        return [f"{name}: {message} on {format_rank_list(ranks)}" for (name, message), ranks in ranks_by_problem.items()]

    def get_summands(self) -> torch.Tensor:
        """Return this rank's summands of the expected signatures: float64 [number of parameters, 5]. Summed over all ranks, they
        are the signatures of the complete gradients.

        If several ranks compute an equal gradient, only the first of these ranks has a nonzero summand.
        """
        coordinates = self._context.coordinates
        summands = torch.zeros_like(self.signatures)
        for entry in self._params:
            if all(coordinates[axis] == 0 for axis in get_replicated_axes(entry.record)):
                row = self._row_of[entry.record.name]
                summands[row] = self.signatures[row]
        return summands

    def compute_tensor_rank_spread(self) -> torch.Tensor:
        """Return how far the gradients of tensor ranks differ where each tensor rank should compute the complete gradient. The
        result is the largest difference of a signed sum between tensor ranks: float64 [number of parameters]. It is 0 for all other
        parameters."""
        extremes = torch.zeros(2, len(self._row_of), NUM_SIGNS, dtype=torch.float64, device=self._context.device)
        for entry in self._params:
            if "tp" in get_replicated_axes(entry.record):
                row = self._row_of[entry.record.name]
                extremes[0, row], extremes[1, row] = self.signatures[row, :NUM_SIGNS], -self.signatures[row, :NUM_SIGNS]
        maxima = all_reduce(extremes, self._context.group("tp"), dist.ReduceOp.MAX)
        return all_reduce((maxima[0] + maxima[1]).amax(1), self._context.world, dist.ReduceOp.MAX)

    def inspect_shard(self, name: str, tolerance: float) -> tuple[ParamRecord, bool] | None:
        """Check whether the gradient in this rank's shard of a parameter is only the local gradient of this rank, so that the sum
        over ranks is missing.

        Args:
            name: name of the parameter.
            tolerance: largest difference of the signed sums that counts as rounding, relative to the norm of the local gradient.

        Returns:
            properties of the parameter, and whether the sum is missing. None if this rank has no shard of the parameter.
        """
        shard, local_signature = self._shards.get(name), self._shard_signatures[self._row_of[name]]
        if shard is None or not shard.grad.numel():
            return None
        shard_signature = compute_buffer_signature(name, shard.get_slices(self._context), shard.grad)
        is_near = (shard_signature - local_signature)[:NUM_SIGNS].abs().max() <= tolerance * local_signature[NUM_SIGNS].sqrt()
        return shard.record, bool(is_near and local_signature[NUM_SIGNS] > 0)


def audit(
    local_gradients: LocalGradients,
    shards: Sequence[Shard],
    records: Mapping[str, ParamRecord],
    context: ParallelContext,
    *,
    norm: float,
    squared_norms: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[list[str], list[str]]:
    """Compare the gradients that the ranks computed with the gradients that the optimizer is about to use. All ranks must call this
    function together, before the update.

    Args:
        local_gradients: local gradients of the step, computed in a separate pass without sums over ranks.
        shards: shards whose elements this rank counts in the global norm, with the gradients that the optimizer uses.
        records: properties of all parameters of the unsharded model that have a gradient, by name.
        norm: global gradient norm that the step computed. The gradients are still multiplied by the loss scale.
        squared_norms: this rank's summands of the squared norm.
        dtype: dtype of the model. Its rounding bounds the difference between gradients that are computed twice.

    Returns:
        messages about the problems, and names of the parameters whose gradient is zero in every element. Both lists are identical
        on every rank.
    """
    miscounted = _find_miscounted_params(shards, records, context)
    shard_signatures = compute_shard_signatures(shards, records, context, lambda shard: shard.norm_grad)
    totals = all_reduce(
        torch.stack([local_gradients.get_summands(), shard_signatures, *local_gradients.partial_sums.signatures]), context.world
    ).cpu()
    tensor_rank_spread = local_gradients.compute_tensor_rank_spread().tolist()
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    tolerance = get_rounding_tolerance(dtype)
    # A gradient that is zero except for rounding, such as that of the bias of a key norm, is not reproducible.
    min_size = 1e-3 * math.sqrt(float(totals[0, :, NUM_SIGNS].sum()))
    problems = dict(miscounted)
    for row, name in enumerate(records):
        expected, actual, partial_signatures = totals[0, row], totals[1, row], totals[2:, row]
        size = max(math.sqrt(max(expected[NUM_SIGNS], actual[NUM_SIGNS])), min_size)
        if tensor_rank_spread[row] > tolerance * size:
            problems[name] = "its gradient differs between tensor ranks, although each of them should have the complete gradient"
        elif name not in problems and (expected - actual)[:NUM_SIGNS].abs().max() > tolerance * size:
            problems[name] = "the optimizer does not get the sum of its gradients"
            if len(problems) <= MAX_LINES:  # later problems are not shown, so the collective is not needed
                inspections = gather_objects(local_gradients.inspect_shard(name, tolerance), context.world)
                inspected = {rank: state for rank, state in enumerate(inspections) if state is not None}
                omitted_axes = [
                    axes
                    for axes, partial_signature in zip(OMITTED_AXES, partial_signatures, strict=True)
                    if partial_signature.any() and (partial_signature - actual)[:NUM_SIGNS].abs().max() <= tolerance * size
                ]
                problems[name] = _describe_wrong_sum(expected, actual, inspected, omitted_axes, context.topology)
    total = float(totals[1, :, NUM_SIGNS].sum())
    if not miscounted and not math.isclose(norm * norm, total, rel_tol=1e3 * eps):
        message = f"the step computed {norm:.6g}, but the norm of the gradients is {math.sqrt(total):.6g}"
        counted_sq_norms = dict(zip(records, shard_signatures[:, NUM_SIGNS].tolist(), strict=True))
        rank_problems = gather_objects(_find_norm_error(float(squared_norms.sum()), counted_sq_norms, 1e3 * eps), context.world)
        problems["the norm"] = "; ".join(
            [message, *(f"{problem} on rank {rank}" for rank, problem in enumerate(rank_problems) if problem)]
        )
    zero = [name for row, name in enumerate(records) if not totals[1, row, NUM_SIGNS] and name not in problems]
    return [f"{name}: {message}" for name, message in problems.items()], zero


def _find_miscounted_params(
    shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext
) -> dict[str, str]:
    """Find parameters with elements that no rank, or more than one rank, counts in the global gradient norm. Return a message for
    each of these parameters, by name."""
    local_slices = [(shard.record.name, buffer_slice.slice) for shard in shards for buffer_slice in shard.get_norm_slices(context)]
    slices_by_name: dict[str, list[tuple[int, TensorSlice]]] = {name: [] for name in records}
    for rank, rank_slices in enumerate(gather_objects(local_slices, context.world)):
        for name, tensor_slice in rank_slices:
            slices_by_name[name].append((rank, tensor_slice))
    return {
        name: _describe_miscount(records[name], ranked_slices)
        for name, ranked_slices in slices_by_name.items()
        if not is_partition(records[name].shape, [tensor_slice for _, tensor_slice in ranked_slices])
    }


def _describe_miscount(record: ParamRecord, ranked_slices: Sequence[tuple[int, TensorSlice]]) -> str:
    """Describe which ranks count elements of a parameter twice in the global norm, or how many elements no rank counts.

    Args:
        ranked_slices: slices of the parameter that are counted, each with the rank that counts it.
    """
    for i, (rank, tensor_slice) in enumerate(ranked_slices):
        for second_rank, second_slice in ranked_slices[i + 1 :]:
            common = tensor_slice.intersect(second_slice)
            if common is not None:
                ranks = [rank] if rank == second_rank else [rank, second_rank]
                location = (
                    f"an element at {common.offsets}"
                    if common.numel == 1
                    else f"{common.numel:,} elements from {common.offsets} on"
                )
                return f"counted twice in the norm by {format_rank_list(ranks)}: {location}"
    missing = math.prod(record.shape) - sum(tensor_slice.numel for _, tensor_slice in ranked_slices)
    return f"{missing:,} of {math.prod(record.shape):,} elements are counted in the norm by no rank"


def _describe_wrong_sum(
    expected: torch.Tensor,
    actual: torch.Tensor,
    inspected: Mapping[int, tuple[ParamRecord, bool]],
    omitted_axes: Sequence[tuple[str, ...]],
    topology: Topology,
) -> str:
    """Describe how the gradients in the shards of one parameter differ from the sum of the local gradients.

    Args:
        expected: signature (four signed sums, sum of squares) of the sum of the local gradients.
        actual: signature of the gradients in the shards.
        inspected: result of `LocalGradients.inspect_shard` of each rank that has a shard of the parameter.
        omitted_axes: sets of axes that explain the difference if they are left out of the sum.
    """
    record, _ = next(iter(inspected.values()))
    axes = get_summed_axes(record, topology)
    axis_names = [*(_RANK_NAMES[axis] for axis in axes), *(["the stages that share it"] if record.tied and topology.pp > 1 else [])]
    summed_over, holders = " and ".join(axis_names), f"; its shards are on {format_rank_list(list(inspected))}"
    actual_sums, expected_sums = actual[:NUM_SIGNS], expected[:NUM_SIGNS]
    factor = float(actual_sums @ expected_sums / (expected_sums @ expected_sums)) if expected_sums.any() else math.nan
    if (
        not math.isclose(factor, 1.0, rel_tol=1e-3)
        and (actual_sums - factor * expected_sums).abs().max() < 1e-3 * expected_sums.abs().max()
    ):
        return f"the optimizer gets {factor:.4g} x the sum of its gradients{_explain_factor(factor, topology)}{holders}"
    unsummed_ranks = [rank for rank, (_, is_unsummed) in inspected.items() if is_unsummed]
    if summed_over and unsummed_ranks:
        groups_text = _format_groups(unsummed_ranks, axes, topology) if axes else ""
        return (
            f"not summed over {summed_over}: {format_rank_list(unsummed_ranks)} would use only their local gradients{groups_text}"
        )
    if omitted_axes:
        missing, remaining = (
            " and ".join(_RANK_NAMES[axis] for axis in axes if (axis in omitted_axes[0]) == is_omitted)
            for is_omitted in (True, False)
        )
        return f"not summed over {missing}, but only over {remaining}{_format_groups(list(inspected), omitted_axes[0], topology)}"
    relative_error = float((actual_sums - expected_sums).square().mean().sqrt()) / math.sqrt(
        max(float(expected[NUM_SIGNS]), 1e-300)
    )
    return (
        f"the optimizer does not get the sum over {summed_over or 'microbatches'} "
        f"(off by about {relative_error:.0%} of it){holders}"
    )


def _format_groups(ranks: Iterable[int], axes: Sequence[str], topology: Topology) -> str:
    """Format the process groups that contain these ranks along the given axes as text, at most four groups."""
    groups = sorted({topology.group(rank, *axes) for rank in ranks})
    return f" (group {', '.join(str(list(ranks)) for ranks in groups[:4])})"


_RANK_NAMES = {"tp": "tensor ranks", "cp": "context ranks", "dp": "data ranks"}


def _explain_factor(factor: float, topology: Topology) -> str:
    """Return text that explains why a gradient sum is wrong by `factor`: the parallel sizes that equal `factor` or 1 / `factor`.

    For example, " (the tensor size)" for the tensor-parallel size. The text is empty if no parallel size fits.
    """
    sizes = {"tensor": topology.tp, "context": topology.cp, "data": topology.dp, "pipeline": topology.pp}
    for prefix, value in (("", factor), ("one over ", 1 / factor if factor else 0.0)):
        matches = [f"the {axis} size" for axis, size in sizes.items() if size > 1 and math.isclose(value, size, rel_tol=1e-3)]
        if matches:
            return f" ({prefix}{' or '.join(matches)})"
    return ""


def _find_norm_error(sq_sum: float, counted_sq_norms: Mapping[str, float], tolerance: float) -> str | None:
    """Check this rank's summand of the squared gradient norm. Return a message about the error, or None if the summand is correct.

    Args:
        sq_sum: summand that the step computed on this rank.
        counted_sq_norms: squared norm of the elements that this rank should count, by parameter.
        tolerance: largest relative difference that counts as rounding.
    """
    total = sum(counted_sq_norms.values())
    excess = sq_sum - total
    if math.isclose(sq_sum, total, rel_tol=tolerance):
        return None
    for name, square in counted_sq_norms.items():
        if math.isclose(abs(excess), square, rel_tol=1e-3):
            return f"{name} is counted {'twice' if excess > 0 else 'not at all'}"
    return f"the sum of squares is too {'large' if excess > 0 else 'small'}"
