"""Signatures of global tensors: five numbers by which tensors are compared, and which do not depend on how a tensor is split over
ranks. A trace (--save-trace) stores the signatures of gradients and weights.

A signature contains the sum of squares and, for k = 0 .. 3, the signed sum s_k: the sum of all elements, each multiplied by a sign.
The sign of an element is a product of one sign per dimension, which depends on the tensor's name, on k and on the index along the
dimension. All five are sums over elements in float64, so the signatures of disjoint slices add up. The signed sums are also linear
in the tensor. For two tensors x and y the mean of (s_k(x) - s_k(y))^2 is an unbiased estimate of ||x - y||^2 (Alon, Matias and
Szegedy 1996, section 2.2).

`TraceRecorder` computes the signatures of the gradients and weights of the complete model from the shards of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, Shard
from megatron.parallel.random import compute_stable_seed
from megatron.parallel.tensor_slice import BufferSlice, TensorSlice
from megatron_lab.audit.trace_file import NUM_SIGNS, SIGNATURE_SIZE, Signature

_BLOCK_SIZE = 1 << 20
"""Elements that are processed at once. The additional memory is a few times this size."""
_PERIOD = 1 << 12
"""Number of indices whose signs are drawn at once."""


def compute_slice_signature(name: str, tensor_slice: TensorSlice, elements: torch.Tensor) -> torch.Tensor:
    """Compute the signature of a slice of a global tensor: its four signed sums, then its sum of squares. The signatures of
    disjoint slices add up to that of the tensor.

    Args:
        name: global name of the tensor. The signs depend on it.
        tensor_slice: offsets and sizes of the slice in the global tensor.
        elements: elements of the slice, contiguous, of any floating-point dtype.

    Returns:
        float64 [5], on the device of `elements`.
    """
    total = torch.zeros(SIGNATURE_SIZE, dtype=torch.float64, device=elements.device)
    if not tensor_slice.numel:
        return total
    columns = tensor_slice.sizes[-1] if tensor_slice.sizes else 1
    rows = elements.detach().reshape(-1, columns)
    row_signs, column_signs = (
        _get_row_signs(name, tensor_slice, elements.device),
        _get_signs(name, tensor_slice, len(tensor_slice.sizes) - 1, elements.device),
    )
    step = max(1, _BLOCK_SIZE // columns)
    for start in range(0, len(rows), step):
        block = rows[start : start + step].to(torch.float64)
        signed = block @ column_signs.t()
        total[:NUM_SIGNS] += (signed * row_signs[:, start : start + step].t()).sum(0)
        total[NUM_SIGNS] += torch.linalg.vector_norm(block).square()
    return total


def compute_signature(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Compute the signature of a complete tensor: its four signed sums, then its sum of squares, float64 [5]. The signs depend on
    the tensor's name."""
    return compute_slice_signature(name, TensorSlice.full(tuple(tensor.shape)), tensor.contiguous())


def compute_buffer_signature(name: str, buffer_slices: Sequence[BufferSlice], flat: torch.Tensor) -> torch.Tensor:
    """Compute the sum of the signatures (four signed sums, sum of squares) of several slices of a tensor: float64 [5].

    Args:
        name: global name of the tensor.
        buffer_slices: slices, each with its offset in `flat`.
        flat: flat buffer with the elements of the slices. Elements outside of the slices (padding) are ignored.
    """
    total = torch.zeros(SIGNATURE_SIZE, dtype=torch.float64, device=flat.device)
    for buffer_slice in buffer_slices:
        total += compute_slice_signature(
            name, buffer_slice.slice, flat[buffer_slice.offset : buffer_slice.offset + buffer_slice.slice.numel]
        )
    return total


def compute_shard_signatures(
    shards: Sequence[Shard],
    records: Mapping[str, ParamRecord],
    context: ParallelContext,
    get_tensor: Callable[[Shard], torch.Tensor],
) -> torch.Tensor:
    """Compute this rank's summand of the signatures (four signed sums, sum of squares) of all parameters: float64 [len(records), 5]
    on the context's device.

    A rank includes the elements that it counts in the global norm, so the sum over all ranks includes each element once.

    Args:
        shards: shards of this rank.
        records: properties of all parameters of the unsharded model, by name. Row i of the result belongs to the i-th parameter.
        get_tensor: function that returns a flat tensor of the shard's counted elements, such as `lambda shard: shard.norm_grad`.
    """
    row_of = {name: row for row, name in enumerate(records)}
    signatures = torch.zeros(len(records), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
    for shard in shards:
        name = shard.record.name
        signatures[row_of[name]] += compute_buffer_signature(name, shard.get_norm_slices(context), get_tensor(shard)).to(
            context.device
        )
    return signatures


def to_trace_signature(signature: torch.Tensor) -> tuple[float, ...]:
    """Convert a signature [5] to the numbers that a trace file stores: the norm, then the four signed sums."""
    *signed, sq_sum = signature.tolist()
    return (sq_sum**0.5, *signed)


def _get_row_signs(name: str, tensor_slice: TensorSlice, device: torch.device) -> torch.Tensor:
    """Return the random signs (1 or -1) by which the rows of a slice are multiplied in the four signed sums of its signature:
    float64 [4, number of rows]. A row is one vector along the last dimension.

    Each of the four sums has its own signs. A row has one sign per dimension except the last, and is multiplied by the product of
    these signs.
    """
    rows = torch.ones(NUM_SIGNS, 1, dtype=torch.float64, device=device)
    for dim in range(len(tensor_slice.sizes) - 1):
        rows = (rows.unsqueeze(2) * _get_signs(name, tensor_slice, dim, device).unsqueeze(1)).flatten(1)
    return rows


def _get_signs(name: str, tensor_slice: TensorSlice, dim: int, device: torch.device) -> torch.Tensor:
    """Return the random signs (1 or -1) that the indices of a slice along dimension `dim` have in the four signed sums of a
    signature: float64 [4, size], one row for each sum. An element is multiplied by the product of its signs along all dimensions. A
    scalar has the sign 1."""
    if not tensor_slice.sizes:
        return torch.ones(NUM_SIGNS, 1, dtype=torch.float64, device=device)
    start, stop = tensor_slice.offsets[dim], tensor_slice.offsets[dim] + tensor_slice.sizes[dim]
    signs = np.concatenate(
        [_draw_signs(name, dim, period) for period in range(start // _PERIOD, (stop - 1) // _PERIOD + 1)], axis=1
    )
    first = start // _PERIOD * _PERIOD
    return torch.from_numpy(signs[:, start - first : stop - first].astype(np.float64)).to(device)


@functools.lru_cache(maxsize=4096)
def _draw_signs(name: str, dim: int, period: int) -> np.ndarray:
    """Draw the random signs (1 or -1) that 4096 indices of dimension `dim` have in the four signed sums of a signature: int8 [4,
    4096], one row for each sum. The first index is period * 4096.

    The signs depend only on the arguments, so all ranks use the same signs without communication. They are drawn in periods so that
    a rank draws few signs beyond those of its slice.
    """
    generator = np.random.Generator(np.random.Philox(compute_stable_seed("signature", name, dim, period)))
    bits = np.frombuffer(generator.bytes(NUM_SIGNS * _PERIOD // 8), dtype=np.uint8)
    return (1 - 2 * np.unpackbits(bits).astype(np.int8)).reshape(NUM_SIGNS, _PERIOD)


class TraceRecorder:
    """Computes the signatures of all gradients and weights for a trace. A signature consists of five sums over the elements of a
    tensor. Each rank computes the sums over the elements that it counts in the gradient norm. `collect` adds up the sums of all
    ranks.

    Args:
        shards: shards of this rank.
        records: properties of all parameters of the unsharded model, by name; identical on every rank.
    """

    def __init__(self, shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext) -> None:
        self._shards, self._records, self._context = [shard for shard in shards if shard.norm_range], records, context
        self._grad_signatures: torch.Tensor | None = None

    def record_gradients(self, loss_scale: float) -> None:
        """Compute this rank's part of the signatures of the gradients: the sums over the elements that it counts in the gradient
        norm, without the loss scale. At the time of the call the gradients are summed over ranks, not clipped, and still multiplied
        by the loss scale."""
        signatures = compute_shard_signatures(self._shards, self._records, self._context, lambda shard: shard.norm_grad)
        signatures /= loss_scale
        signatures[:, -1] /= loss_scale
        self._grad_signatures = signatures

    def collect(self) -> tuple[dict[str, Signature], dict[str, Signature]]:
        """Return the signatures of gradients and of weights, each by parameter name. They are identical on every rank.

        The gradients are those of the latest `record_gradients`. Their dict is empty if that method has not been called since the
        previous `collect`. The weights are the current weights. All ranks must call this method together; it makes one reduction
        over all ranks.
        """
        local_signatures = [
            compute_shard_signatures(self._shards, self._records, self._context, lambda shard: shard.norm_main_param)
        ]
        if self._grad_signatures is not None:
            local_signatures.append(self._grad_signatures)
        self._grad_signatures = None
        totals = all_reduce(torch.stack(local_signatures), self._context.world).cpu()
        weights, *gradients = (
            {name: to_trace_signature(row) for name, row in zip(self._records, rows, strict=True)} for rows in totals
        )
        return gradients[0] if gradients else {}, weights
