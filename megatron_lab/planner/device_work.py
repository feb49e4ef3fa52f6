"""Device work of tensor operations: shapes of matrix products, attention calls, memory traffic, and number of kernels.

The work is recorded from the operations that a plan runs on meta or fake tensors, so layers need no second description of their
computation. `durations.py` predicts how long the work takes on a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from megatron.spec.counts import count_attended_pairs
from megatron_lab.planner.kernel_memory import resolve_group


class Gemm(NamedTuple):
    """Sizes of `batch` equal matrix products, each of an [m, k] matrix and a [k, n] matrix."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    """Dtype of the input matrices as torch names it, such as "bfloat16"."""

    @property
    def flops(self) -> int:
        """FLOPs of the matrix product: two for each multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k


class AttentionWork(NamedTuple):
    """Sizes of one call of the attention core (scores of queries and keys, softmax, product with the values), or of its
    backward."""

    num_pairs: int
    """Number of query-key pairs, over all heads and sequences. Causal attention over s tokens counts s * s / 2 pairs per
    head."""
    num_channels: int
    """Sum of the sizes of a query head and a value head. In the forward, each query-key pair takes one multiply-add per channel."""
    seq_length: int
    """Number of query tokens of a sequence."""
    backward: bool
    dtype: str

    @property
    def flops(self) -> int:
        """FLOPs of the two matrix products of the forward, or of the four gradient products of the backward.

        The fifth product of the backward recomputes the scores. It is not counted, because the measured rate of the device accounts
        for it.
        """
        return (4 if self.backward else 2) * self.num_pairs * self.num_channels


@dataclass(frozen=True)
class DeviceWork:
    """Work of several operations on the device of one rank: matrix products, attention, memory traffic and kernel launches."""

    gemms: Counter[Gemm] = field(default_factory=Counter)
    attention: Counter[AttentionWork] = field(default_factory=Counter)
    memory_bytes: int = 0
    """Bytes that all kernels except matrix products and attention read and write."""
    num_kernels: int = 0
    """Number of kernel launches, including matrix products and attention."""

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and attention."""
        return sum(count * operation.flops for counter in (self.gemms, self.attention) for operation, count in counter.items())

    def repeat(self, times: int) -> DeviceWork:
        """Return the work of running the operations of this object `times` times."""
        gemms = Counter({gemm: times * n for gemm, n in self.gemms.items()})
        attention = Counter({call: times * n for call, n in self.attention.items()})
        return DeviceWork(gemms, attention, times * self.memory_bytes, times * self.num_kernels)


def sum_work(works: Iterable[DeviceWork]) -> DeviceWork:
    """Return the sum of several works, field by field."""
    gemms, attention = Counter[Gemm](), Counter[AttentionWork]()
    memory_bytes = num_kernels = 0
    for work in works:
        gemms.update(work.gemms)
        attention.update(work.attention)
        memory_bytes, num_kernels = memory_bytes + work.memory_bytes, num_kernels + work.num_kernels
    return DeviceWork(gemms, attention, memory_bytes, num_kernels)


class WorkCounter:
    """Counts the work that a device would do for operations, while these run on meta or fake tensors: matrix products, attention,
    memory traffic and kernels."""

    def __init__(self) -> None:
        self.reset(DeviceWork())

    def reset(self, work: DeviceWork) -> None:
        """Replace the work counted so far by `work`. Operations recorded later are added to it."""
        self._gemms, self._attention, self._memory_bytes, self._num_kernels = (
            work.gemms,
            work.attention,
            work.memory_bytes,
            work.num_kernels,
        )

    def take(self) -> DeviceWork:
        """Return the work counted so far and reset the count to zero."""
        work = DeviceWork(self._gemms, self._attention, self._memory_bytes, self._num_kernels)
        self.reset(DeviceWork())
        return work

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the work of a torch operation that has run.

        Args:
            func: operation as `__torch_dispatch__` gets it, which was called with `args` and `kwargs`.
            out: output of the operation.
        """
        if func.namespace in _NAMESPACES_WITHOUT_KERNELS or func.is_view:
            return
        name = func.name().split("::")[1].split(".")[0]
        if name in _FUSED_COMM_GEMMS:
            self._gemms.update(_FUSED_COMM_GEMMS[name](*args))
            return
        if name in _OPS_WITHOUT_KERNEL:
            return
        self._num_kernels += 1
        if name in _GEMM_OPERANDS:
            first = _GEMM_OPERANDS[name]
            self._gemms[_build_gemm(args[first], args[first + 1], out)] += 1
        elif "attention" in name or "_attn" in name:
            named_args = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            self._attention[_build_attention_work(name, named_args)] += 1
        else:
            self._memory_bytes += _count_memory_bytes(name, args, kwargs, out)


_NAMESPACES_WITHOUT_KERNELS = ("prim", "c10d")
_OPS_WITHOUT_KERNEL = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "promote_types", "lift_fresh", "alias", "detach")
    + ("_unsafe_view", "_local_scalar_dense", "set_", "resize_")
)
_GEMM_OPERANDS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1, "_scaled_mm": 0, "_grouped_mm": 0}
_GEMM_OPERANDS |= {"_scaled_grouped_mm": 0}
"""Operations that multiply matrices, with the position of the first factor among their arguments."""
_INDEXED_OPS = frozenset(
    ("embedding", "index_select", "index", "gather", "index_put_", "_index_put_impl_", "index_copy_", "scatter_add_")
)
"""Operations that access only the indexed rows of a large tensor."""


def _iter_all_gather_gemms(x: torch.Tensor, matrices: list[torch.Tensor], dim: int, group: str, *_: Any) -> Iterator[Gemm]:
    """Yield the matrix products of a fused kernel that gathers `x` from all ranks of the process group and multiplies it by each
    matrix."""
    size = resolve_group(group).size()
    for gemm in (_build_gemm(x.flatten(0, -2), matrix) for matrix in matrices):
        yield gemm._replace(m=gemm.m * size)


def _iter_reduce_scatter_gemms(x: torch.Tensor, matrix: torch.Tensor, *_: Any) -> Iterator[Gemm]:
    yield _build_gemm(x.flatten(0, -2), matrix)


_FUSED_COMM_GEMMS: dict[str, Callable[..., Iterator[Gemm]]] = {
    "fused_all_gather_matmul": _iter_all_gather_gemms,
    "fused_matmul_reduce_scatter": _iter_reduce_scatter_gemms,
}
"""Matrix products that are fused with communication."""


def _build_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> Gemm:
    """Return the sizes of a matrix product of [m, k] and [k, n], which may be batched or grouped.

    A grouped product either divides the rows of `a` among several matrices `b`, or divides the summed dimension k among several
    outputs.
    """
    groups, m, n, k = 1, a.shape[-2], b.shape[-1], a.shape[-1]
    if a.dim() == b.dim() == 3:
        groups = a.shape[0]
    elif b.dim() == 3:
        groups, m = b.shape[0], -(-m // b.shape[0])
    elif out is not None and out.dim() == 3:
        groups, k = out.shape[0], -(-k // out.shape[0])
    return Gemm(groups, m, n, k, _get_dtype_name(a))


def _build_attention_work(name: str, named_args: dict[str, Any]) -> AttentionWork:
    """Return the work of a call of an attention kernel.

    The tensors have the shape [b, heads, s, d] or [b, s, heads, d] (b sequences of s tokens, head size d). With packed documents it
    is [t, heads, d], for t tokens in total.
    """
    q, k, v = (named_args[arg_name] for arg_name in ("query", "key", "value"))
    num_heads, seq_length, kv_length = (-3, -2, -2) if name.startswith("_scaled") else (-2, -3, -3)
    num_heads, seq_length, kv_length = q.shape[num_heads], q.shape[seq_length], k.shape[kv_length]
    batch_size = q.shape[0] if q.dim() == 4 else 1
    cu_seqlens = named_args.get("cu_seq_q")
    if cu_seqlens is not None:
        batch_size = max(1, cu_seqlens.shape[0] - 1)
        seq_length, kv_length = seq_length // batch_size, kv_length // batch_size
    num_pairs = seq_length * kv_length
    if named_args.get("is_causal"):
        window = (named_args.get("window_size") or [named_args.get("window_size_left")])[0]
        num_pairs = (
            count_attended_pairs(seq_length, None if window is None or window < 0 else window) // 2
            if seq_length == kv_length
            else num_pairs // 2
        )
    return AttentionWork(
        batch_size * num_heads * num_pairs,
        q.shape[-1] + v.shape[-1],
        seq_length,
        "grad_out" in named_args or "grad_out_" in named_args,
        _get_dtype_name(q),
    )


def _get_dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _count_memory_bytes(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Estimate the bytes that a kernel reads and writes. Each tensor among its arguments and outputs counts once, but an in-place
    argument twice.

    Operations that read or write rows by index count twice the smallest floating-point tensor, which holds only the accessed rows.
    """
    inputs, outputs = list(_iter_tensors((*args, *kwargs.values()))), list(_iter_tensors((out,)))
    if name in _INDEXED_OPS:
        row_bytes = min((_count_storage_bytes(t) for t in (*inputs, *outputs) if t.is_floating_point()), default=0)
        return 2 * row_bytes
    input_ids = {id(t) for t in inputs}
    return (
        sum(_count_storage_bytes(t) for t in inputs)
        + sum(_count_storage_bytes(t) for t in outputs if id(t) not in input_ids)
        + (_count_storage_bytes(outputs[0]) if name.endswith("_") and outputs else 0)
    )


def _iter_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or outputs, including those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _count_storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: a broadcast element is read once."""
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(numel) * tensor.itemsize
