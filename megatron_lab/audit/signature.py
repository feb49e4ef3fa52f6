"""Signatures: a few numbers of a global tensor that do not depend on how it is split. A trace keeps them of gradients and weights.

A signature has the sum of squares and, for k = 0 .. 3, the signed sum s_k: the sum over all elements of the element times a sign.
The sign is a product of one sign for each dimension, which depends on the name, on k and on the index along the dimension. All are
sums over elements, in float64, so those of disjoint boxes add up; the signed sums are linear in the tensor too. For two tensors x
and y the mean of (s_k(x) - s_k(y))^2 is an unbiased estimate of ||x - y||^2 (Alon, Matias and Szegedy 1996, section 2.2).
`TraceRecorder` takes the signatures of gradients and weights of the whole model, from the shards of every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron.parallel.boxes import Box, PlacedBox
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, Shard
from megatron.parallel.random import stable_seed
from megatron_lab.audit.trace_file import NUM_SIGNS, SIGNATURE_SIZE, Signature

_BLOCK = 1 << 20
"""Elements that are processed at once; the memory taken beside the tensor is a few times this."""
_PERIOD = 1 << 12
"""Number of indices whose signs are drawn at once."""


def box_signature(name: str, box: Box, part: torch.Tensor) -> torch.Tensor:
    """Signature of one box of a tensor: float64 [5], on the device of `part`.

    Args:
        name: global name of the tensor.
        part: the box's elements, contiguous, of any floating-point dtype.
    """
    total = torch.zeros(SIGNATURE_SIZE, dtype=torch.float64, device=part.device)
    if not box.numel:
        return total
    columns = box.sizes[-1] if box.sizes else 1
    rows = part.detach().reshape(-1, columns)
    row_signs, column_signs = _signs_of_rows(name, box, part.device), _signs(name, box, len(box.sizes) - 1, part.device)
    step = max(1, _BLOCK // columns)
    for start in range(0, len(rows), step):
        block = rows[start : start + step].to(torch.float64)
        signed = block @ column_signs.t()
        total[:NUM_SIGNS] += (signed * row_signs[:, start : start + step].t()).sum(0)
        total[NUM_SIGNS] += torch.linalg.vector_norm(block).square()
    return total


def signature_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Signature of a whole tensor: float64 [5]."""
    return box_signature(name, Box.whole(tuple(tensor.shape)), tensor.contiguous())


def placed_signature(name: str, boxes: Sequence[PlacedBox], flat: torch.Tensor) -> torch.Tensor:
    """Signature of several boxes whose elements lie in one flat tensor. What no box covers (padding) is left out."""
    total = torch.zeros(SIGNATURE_SIZE, dtype=torch.float64, device=flat.device)
    for placed in boxes:
        total += box_signature(name, placed.box, flat[placed.start : placed.start + placed.box.numel])
    return total


def shard_signatures(
    shards: Sequence[Shard],
    records: Mapping[str, ParamRecord],
    context: ParallelContext,
    tensor_of: Callable[[Shard], torch.Tensor],
) -> torch.Tensor:
    """This rank's share of the signatures of all parameters, by the elements that it counts: float64 [len(records), 5] on the
    context's device. The sum over the world has each element once.

    Args:
        records: those of the whole model; the rows are in their order.
        tensor_of: a flat tensor of the shard's counted elements: `lambda shard: shard.counted_grad`.
    """
    row_of = {name: row for row, name in enumerate(records)}
    found = torch.zeros(len(records), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
    for shard in shards:
        name = shard.record.name
        found[row_of[name]] += placed_signature(name, shard.counted_boxes(context), tensor_of(shard)).to(context.device)
    return found


def named(signature: torch.Tensor) -> tuple[float, ...]:
    """The signature as a trace stores it: the norm, then the signed sums."""
    *signed, squares = signature.tolist()
    return (squares**0.5, *signed)


def _signs_of_rows(name: str, box: Box, device: torch.device) -> torch.Tensor:
    """Signs of all dimensions but the last, multiplied: float64 [4, product of their sizes]."""
    rows = torch.ones(NUM_SIGNS, 1, dtype=torch.float64, device=device)
    for dim in range(len(box.sizes) - 1):
        rows = (rows.unsqueeze(2) * _signs(name, box, dim, device).unsqueeze(1)).flatten(1)
    return rows


def _signs(name: str, box: Box, dim: int, device: torch.device) -> torch.Tensor:
    """Signs along one dimension of a box: float64 [4, size] of 1 and -1. A scalar has the sign 1."""
    if not box.sizes:
        return torch.ones(NUM_SIGNS, 1, dtype=torch.float64, device=device)
    start, stop = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    drawn = np.concatenate([_drawn(name, dim, part) for part in range(start // _PERIOD, (stop - 1) // _PERIOD + 1)], axis=1)
    first = start // _PERIOD * _PERIOD
    return torch.from_numpy(drawn[:, start - first : stop - first].astype(np.float64)).to(device)


@functools.lru_cache(maxsize=4096)
def _drawn(name: str, dim: int, part: int) -> np.ndarray:
    """Signs of the indices [part * 4096, (part + 1) * 4096): int8 [4, 4096]."""
    generator = np.random.Generator(np.random.Philox(stable_seed("signature", name, dim, part)))
    bits = np.frombuffer(generator.bytes(NUM_SIGNS * _PERIOD // 8), dtype=np.uint8)
    return (1 - 2 * np.unpackbits(bits).astype(np.int8)).reshape(NUM_SIGNS, _PERIOD)


class TraceRecorder:
    """Takes signatures of the elements that this rank counts; `collect` puts the ranks' parts together.

    Args:
        shards: this rank's shards.
        records: those of the whole model, the same on every rank.
    """

    def __init__(self, shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext) -> None:
        self._shards, self._records, self._context = [shard for shard in shards if shard.counted], records, context
        self._gradients: torch.Tensor | None = None

    def gradients(self, loss_scale: float) -> None:
        """Take the signatures of the gradients: complete, not clipped, still multiplied by the loss scale."""
        found = shard_signatures(self._shards, self._records, self._context, lambda shard: shard.counted_grad)
        found /= loss_scale
        found[:, -1] /= loss_scale
        self._gradients = found

    def collect(self) -> tuple[dict[str, Signature], dict[str, Signature]]:
        """Signatures by name, the same on every rank: of the gradients since the last call (none if `gradients` was not called),
        and of the weights as they are now. One reduction over the world; all ranks call it together."""
        parts = [shard_signatures(self._shards, self._records, self._context, lambda shard: shard.counted_main)]
        if self._gradients is not None:
            parts.append(self._gradients)
        self._gradients = None
        sums = all_reduce(torch.stack(parts), self._context.world).cpu()
        weights, *gradients = ({name: named(row) for name, row in zip(self._records, part, strict=True)} for part in sums)
        return gradients[0] if gradients else {}, weights
