"""The audit of a step: the optimizer must be about to use the sum of what all ranks computed, with each element counted once.

`OwnGradients` records what each rank's backward gave by itself, before any sum over ranks: how often each gradient was written, and
its signature. The signed sums of a signature are linear, so those of all microbatches and uses add up to those of the whole
gradient. For every parameter there are two checks. The signatures of the ranks' own gradients, summed over the ranks that its
record names, must be the signature of the gradients in the shards. And the boxes that the ranks count in the global norm must make
up the whole parameter, and the norm be that of what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.checkpoint.manifest import tiles
from megatron.parallel.boxes import Box
from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES, Topology
from megatron_lab.audit.digests import rounding_band
from megatron_lab.audit.partial_sums import LEFT_OUT, PartialSums, summed_axes
from megatron_lab.audit.replicas import MOST_LINES, ranks_in_words
from megatron_lab.audit.signature import box_signature, placed_signature, shard_signatures
from megatron_lab.audit.trace_file import NUM_SIGNS, SIGNATURE_SIZE


def whole_over(record: ParamRecord) -> tuple[str, ...]:
    """Axes along which every rank should have the same gradient, so that it is not summed over them."""
    split = {split.axis for split in record.splits}
    grid = EXPERT_AXES if record.of_experts else ("tp", *GRADIENT_AXES)
    return tuple(axis for axis in grid if axis not in split and axis not in record.partial_over)


class OwnGradients:
    """Receives every gradient of one step on this rank (`look`).

    Args:
        params: this rank's parameters that have a gradient.
        shards: this rank's shards.
        records: those of the whole model with a gradient; the rows of all signatures are in their order.
    """

    def __init__(
        self, params: Sequence[ParamEntry], shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext
    ) -> None:
        self._params, self._context = params, context
        self._shards = {shard.record.name: shard for shard in shards}
        self._row_of = {name: row for row, name in enumerate(records)}
        self._writes = dict.fromkeys((entry.record.name for entry in params), 0)
        self.signatures = torch.zeros(len(records), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
        """Signatures of the parameters' gradients. The sum of squares is that of the single writes: it bounds the rounding."""
        self._of_shards = torch.zeros_like(self.signatures)
        """Signatures of the parts that this rank updates."""
        self.partial_sums = PartialSums(shards, self._row_of, context)

    def look(self, entry: ParamEntry, grad: torch.Tensor) -> None:
        """Take in one gradient of a parameter: that of one use in one microbatch."""
        name = entry.record.name
        row, shard = self._row_of[name], self._shards.get(name)
        held = entry.record.held_box(self._context.axis_sizes, self._context.coordinates)
        self._writes[name] += 1
        self.signatures[row] += box_signature(name, held, grad[tuple(slice(size) for size in held.sizes)])
        if shard is not None:
            part = grad.view(-1)[shard.piece.start : shard.piece.stop]
            self._of_shards[row] += placed_signature(name, shard.boxes(self._context), part)
        self.partial_sums.look(entry.record, grad)

    def missing(self, num_microbatches: int) -> list[str]:
        """Messages on wrong numbers of gradients that reached the parameters, on any rank. All ranks call it together."""
        wrong = {}
        for entry in self._params:
            name, wanted = entry.record.name, entry.uses_per_microbatch * num_microbatches
            if self._writes[name] != wanted:
                wrong[name] = f"{self._writes[name] or 'none'} of {wanted} gradients reached it"
        found: dict[tuple[str, str], list[int]] = {}
        for rank, theirs in enumerate(gather_objects(wrong, self._context.world)):
            for name, words in theirs.items():
                found.setdefault((name, words), []).append(rank)
        return [f"{name}: {words} on {ranks_in_words(ranks)}" for (name, words), ranks in found.items()]

    def addends(self) -> torch.Tensor:
        """This rank's summand of what the sums over ranks should give: its signatures, but 0 where another rank has the same."""
        at = self._context.coordinates
        part = torch.zeros_like(self.signatures)
        for entry in self._params:
            if all(at[axis] == 0 for axis in whole_over(entry.record)):
                row = self._row_of[entry.record.name]
                part[row] = self.signatures[row]
        return part

    def spread_over_tensor_ranks(self) -> torch.Tensor:
        """The largest difference of the signed sums on tensor ranks that should each have a whole gradient: [parameters]."""
        ends = torch.zeros(2, len(self._row_of), NUM_SIGNS, dtype=torch.float64, device=self._context.device)
        for entry in self._params:
            if "tp" in whole_over(entry.record):
                row = self._row_of[entry.record.name]
                ends[0, row], ends[1, row] = self.signatures[row, :NUM_SIGNS], -self.signatures[row, :NUM_SIGNS]
        most = all_reduce(ends, self._context.group("tp"), dist.ReduceOp.MAX)
        return all_reduce((most[0] + most[1]).amax(1), self._context.world, dist.ReduceOp.MAX)

    def seen(self, name: str, band: float) -> tuple[ParamRecord, bool] | None:
        """This rank's record of a parameter (which names the axes of the sum), and whether its shard has what this rank alone
        computed. None if it has no shard of it."""
        shard, own = self._shards.get(name), self._of_shards[self._row_of[name]]
        if shard is None or not shard.grad.numel():
            return None
        here = placed_signature(name, shard.boxes(self._context), shard.grad)
        near = (here - own)[:NUM_SIGNS].abs().max() <= band * own[NUM_SIGNS].sqrt()
        return shard.record, bool(near and own[NUM_SIGNS] > 0)


def audit(
    own: OwnGradients,
    shards: Sequence[Shard],
    records: Mapping[str, ParamRecord],
    context: ParallelContext,
    *,
    norm: float,
    squares: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[list[str], list[str]]:
    """Compare what the ranks computed with what they are about to use. All ranks call it together, before the update.

    Args:
        own: gradients of the same step, run without sums.
        shards: those that the step counts in the norm, their gradients complete.
        norm: the step's global norm of the gradients as they are (with the loss scale).
        squares: this rank's terms of its square.
        dtype: the model's. Gradients of the same step computed twice may differ by as much as its rounding.

    Returns:
        the problems, and the parameters whose gradient is zero in every element; the same on every rank.
    """
    uncounted = _not_counted_once(shards, records, context)
    found = shard_signatures(shards, records, context, lambda shard: shard.counted_grad)
    sums = all_reduce(torch.stack([own.addends(), found, *own.partial_sums.signatures]), context.world).cpu()
    spread = own.spread_over_tensor_ranks().tolist()
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    band = rounding_band(dtype)
    # A gradient that is zero but for rounding (of the bias of a norm of the keys) is not the same twice.
    least = 1e-3 * math.sqrt(float(sums[0, :, NUM_SIGNS].sum()))
    problems = dict(uncounted)
    for row, name in enumerate(records):
        expected, here, partial_sums = sums[0, row], sums[1, row], sums[2:, row]
        size = max(math.sqrt(max(expected[NUM_SIGNS], here[NUM_SIGNS])), least)
        if spread[row] > band * size:
            problems[name] = "its gradient differs between tensor ranks, though its record says that each has the whole of it"
        elif name not in problems and (expected - here)[:NUM_SIGNS].abs().max() > band * size:
            problems[name] = "the optimizer gets something else than the sum of its gradients"
            if len(problems) <= MOST_LINES:  # what is shown
                seen = gather_objects(own.seen(name, band), context.world)
                held = {rank: state for rank, state in enumerate(seen) if state is not None}
                left_out = [
                    axes
                    for axes, partial in zip(LEFT_OUT, partial_sums, strict=True)
                    if partial.any() and (partial - here)[:NUM_SIGNS].abs().max() <= band * size
                ]
                problems[name] = _wrong_sum(expected, here, held, left_out, context.topology)
    total = float(sums[1, :, NUM_SIGNS].sum())
    if not uncounted and not math.isclose(norm * norm, total, rel_tol=1e3 * wide):
        words = f"it is {norm:.6g}, and that of the gradients {math.sqrt(total):.6g}"
        counted = dict(zip(records, found[:, NUM_SIGNS].tolist(), strict=True))
        odd = gather_objects(_wrongly_counted(float(squares.sum()), counted, 1e3 * wide), context.world)
        problems["the norm"] = "; ".join([words, *(f"{what} on rank {rank}" for rank, what in enumerate(odd) if what)])
    zero = [name for row, name in enumerate(records) if not sums[1, row, NUM_SIGNS] and name not in problems]
    return [f"{name}: {words}" for name, words in problems.items()], zero


def _not_counted_once(shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext) -> dict[str, str]:
    """Parameters with elements that no rank counts in the norm, or several do; with the reason in words."""
    mine = [(shard.record.name, placed.box) for shard in shards for placed in shard.counted_boxes(context)]
    boxes: dict[str, list[tuple[int, Box]]] = {name: [] for name in records}
    for rank, theirs in enumerate(gather_objects(mine, context.world)):
        for name, box in theirs:
            boxes[name].append((rank, box))
    return {
        name: _counted_in_words(records[name], held)
        for name, held in boxes.items()
        if not tiles(records[name].shape, [box for _, box in held])
    }


def _counted_in_words(record: ParamRecord, held: Sequence[tuple[int, Box]]) -> str:
    """Which ranks count the same elements, or how many elements no rank counts."""
    for at, (rank, box) in enumerate(held):
        for other, second in held[at + 1 :]:
            common = box.intersect(second)
            if common is not None:
                both = [rank] if rank == other else [rank, other]
                where = (
                    f"an element at {common.offsets}"
                    if common.numel == 1
                    else f"{common.numel:,} elements from {common.offsets} on"
                )
                return f"counted twice in the norm by {ranks_in_words(both)}: {where}"
    missing = math.prod(record.shape) - sum(box.numel for _, box in held)
    return f"{missing:,} of {math.prod(record.shape):,} elements are counted in the norm by no rank"


def _wrong_sum(
    expected: torch.Tensor,
    here: torch.Tensor,
    held: Mapping[int, tuple[ParamRecord, bool]],
    left_out: Sequence[tuple[str, ...]],
    topology: Topology,
) -> str:
    """How the gradients in the shards differ from the sum of the ranks' own, in words.

    Args:
        expected: signature of the sum.
        here: signature of what is in the shards.
        held: what each rank that has a shard of it has seen.
        left_out: axes without which the sum is what is in the shards.
    """
    record, _ = next(iter(held.values()))
    axes = summed_axes(record, topology)
    parts = [*(_RANKS[axis] for axis in axes), *(["the stages that share it"] if record.tied and topology.pp > 1 else [])]
    over, where = " and ".join(parts), f"; it is held by {ranks_in_words(list(held))}"
    signed, wanted = here[:NUM_SIGNS], expected[:NUM_SIGNS]
    factor = float(signed @ wanted / (wanted @ wanted)) if wanted.any() else math.nan
    if not math.isclose(factor, 1.0, rel_tol=1e-3) and (signed - factor * wanted).abs().max() < 1e-3 * wanted.abs().max():
        return f"the optimizer gets {factor:.4g} x the sum of its gradients{_fact(factor, topology)}{where}"
    alone = [rank for rank, (_, only_own) in held.items() if only_own]
    if over and alone:
        named = _groups_in_words(alone, axes, topology) if axes else ""
        return f"not summed over {over}: {ranks_in_words(alone)} would use the own gradient alone{named}"
    if left_out:
        missing, rest = (" and ".join(_RANKS[axis] for axis in axes if (axis in left_out[0]) == out) for out in (True, False))
        return f"not summed over {missing}, but over {rest} alone{_groups_in_words(list(held), left_out[0], topology)}"
    off = float((signed - wanted).square().mean().sqrt()) / math.sqrt(max(float(expected[NUM_SIGNS]), 1e-300))
    return f"the optimizer gets something else than the sum over {over or 'microbatches'} (off by about {off:.0%} of it){where}"


def _groups_in_words(ranks: Iterable[int], axes: Sequence[str], topology: Topology) -> str:
    """The groups of these ranks along some axes, the first of them."""
    groups = sorted({topology.group(rank, *axes) for rank in ranks})
    return f" (group {', '.join(str(list(ranks)) for ranks in groups[:4])})"


_RANKS = {"tp": "tensor ranks", "cp": "context ranks", "dp": "data ranks"}


def _fact(factor: float, topology: Topology) -> str:
    """Sizes of the layout that equal the factor, or its inverse."""
    sizes = {"tensor": topology.tp, "context": topology.cp, "data": topology.dp, "pipeline": topology.pp}
    for words, number in (("", factor), ("one over ", 1 / factor if factor else 0.0)):
        same = [f"the {axis} size" for axis, size in sizes.items() if size > 1 and math.isclose(number, size, rel_tol=1e-3)]
        if same:
            return f" ({words}{' or '.join(same)})"
    return ""


def _wrongly_counted(terms: float, counted: Mapping[str, float], band: float) -> str | None:
    """What is wrong with this rank's part of the square of the norm, if anything.

    Args:
        terms: the sum of its terms.
        counted: square of the norm of what it should count, by parameter.
    """
    total = sum(counted.values())
    excess = terms - total
    if math.isclose(terms, total, rel_tol=band):
        return None
    for name, square in counted.items():
        if math.isclose(abs(excess), square, rel_tol=1e-3):
            return f"{name} is counted {'twice' if excess > 0 else 'not at all'}"
    return f"{'too much' if excess > 0 else 'too little'} is counted"
