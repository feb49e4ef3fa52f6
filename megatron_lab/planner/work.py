"""What operations on tensors would have a device do: products with their shapes, attention, bytes that go through memory, kernels.

It is read off the operations themselves as a plan runs them on tensors without memory, so there is no second list of what a layer
computes. How long it takes on a device is `durations.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from megatron.spec.counts import attended
from megatron_lab.planner.kernel_memory import resolved


class MatrixProduct(NamedTuple):
    """`batch` products of [m, k] and [k, n]."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    """Dtype of the factors, as torch names it: bfloat16."""

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k


class AttentionWork(NamedTuple):
    """Scores of queries and keys, their softmax, and its product with values; or the gradients of these."""

    pairs: int
    """Pairs of a query and a key that count, of all heads and sequences; half of the square where attention is causal."""
    channels: int
    """Those of a query head and a value head together."""
    length: int
    """Tokens of a sequence."""
    backward: bool
    dtype: str

    @property
    def flops(self) -> int:
        """Two products forward. Backward has four for gradients; the fifth, of scores that it makes again, is in the device's
        rate."""
        return (4 if self.backward else 2) * self.pairs * self.channels


@dataclass(frozen=True)
class DeviceWork:
    """What some operations do, on one rank."""

    products: Counter[MatrixProduct] = field(default_factory=Counter)
    attention: Counter[AttentionWork] = field(default_factory=Counter)
    moved: int = 0
    """Bytes that all other kernels read and write."""
    kernels: int = 0
    """How many kernels are launched, those of products and attention too."""

    @property
    def flops(self) -> int:
        """FLOPs of products and attention."""
        return sum(times * one.flops for some in (self.products, self.attention) for one, times in some.items())

    def repeated(self, times: int) -> DeviceWork:
        """So often the same."""
        products = Counter({one: times * n for one, n in self.products.items()})
        attention = Counter({one: times * n for one, n in self.attention.items()})
        return DeviceWork(products, attention, times * self.moved, times * self.kernels)


def summed(works: Iterable[DeviceWork]) -> DeviceWork:
    """Works one after the other."""
    products, attention = Counter[MatrixProduct](), Counter[AttentionWork]()
    moved = kernels = 0
    for work in works:
        products.update(work.products)
        attention.update(work.attention)
        moved, kernels = moved + work.moved, kernels + work.kernels
    return DeviceWork(products, attention, moved, kernels)


class WorkCounter:
    """Adds up the work of operations."""

    def __init__(self) -> None:
        self.begin_with(DeviceWork())

    def begin_with(self, work: DeviceWork) -> None:
        """Count on from what was done before."""
        self._products, self._attention, self._moved, self._kernels = work.products, work.attention, work.moved, work.kernels

    def take(self) -> DeviceWork:
        """What was noted since the last time."""
        taken = DeviceWork(self._products, self._attention, self._moved, self._kernels)
        self.begin_with(DeviceWork())
        return taken

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation of torch that has run."""
        if func.namespace in _NOT_KERNELS or func.is_view:
            return
        name = func.name().split("::")[1].split(".")[0]
        if name in _WITH_SENDING:
            self._products.update(_WITH_SENDING[name](*args))
            return
        if name in _WITHOUT_KERNEL:
            return
        self._kernels += 1
        if name in _FACTORS:
            first = _FACTORS[name]
            self._products[_product(args[first], args[first + 1], out)] += 1
        elif "attention" in name or "_attn" in name:
            bound = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
            self._attention[_attention(name, bound)] += 1
        else:
            self._moved += _moved(name, args, kwargs, out)


_NOT_KERNELS = ("prim", "c10d")
_WITHOUT_KERNEL = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "promote_types", "lift_fresh", "alias", "detach")
    + ("_unsafe_view", "_local_scalar_dense", "set_", "resize_")
)
_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1, "_scaled_mm": 0, "_grouped_mm": 0}
_FACTORS |= {"_scaled_grouped_mm": 0}
"""Operations that multiply matrices, with the place of the first factor among their arguments."""
_BY_ROWS = frozenset(
    ("embedding", "index_select", "index", "gather", "index_put_", "_index_put_impl_", "index_copy_", "scatter_add_")
)
"""Operations that touch no more of a large tensor than they have indices for."""


def _gathered_products(x: torch.Tensor, matrices: list[torch.Tensor], dim: int, group: str, *_: Any) -> Iterator[MatrixProduct]:
    """Those of what all ranks of a group have."""
    size = resolved(group).size()
    for product in (_product(x.flatten(0, -2), matrix) for matrix in matrices):
        yield product._replace(m=product.m * size)


def _scattered_product(x: torch.Tensor, matrix: torch.Tensor, *_: Any) -> Iterator[MatrixProduct]:
    yield _product(x.flatten(0, -2), matrix)


_WITH_SENDING: dict[str, Callable[..., Iterator[MatrixProduct]]] = {
    "fused_all_gather_matmul": _gathered_products,
    "fused_matmul_reduce_scatter": _scattered_product,
}
"""Products that go along with what ranks send."""


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> MatrixProduct:
    """The product of [m, k] and [k, n], with a batch in front, or grouped: rows of one are divided among several of the other, or
    what is summed over is divided among several results."""
    groups, m, n, k = 1, a.shape[-2], b.shape[-1], a.shape[-1]
    if a.dim() == b.dim() == 3:
        groups = a.shape[0]
    elif b.dim() == 3:
        groups, m = b.shape[0], -(-m // b.shape[0])
    elif out is not None and out.dim() == 3:
        groups, k = out.shape[0], -(-k // out.shape[0])
    return MatrixProduct(groups, m, n, k, _dtype(a))


def _attention(name: str, bound: dict[str, Any]) -> AttentionWork:
    """A kernel of torch: of sequences [b, heads, s, d] or [b, s, heads, d], or of documents end to end [t, heads, d]."""
    q, k, v = (bound[word] for word in ("query", "key", "value"))
    heads, length, keys = (-3, -2, -2) if name.startswith("_scaled") else (-2, -3, -3)
    heads, length, keys = q.shape[heads], q.shape[length], k.shape[keys]
    batch = q.shape[0] if q.dim() == 4 else 1
    bounds = bound.get("cu_seq_q")
    if bounds is not None:
        batch = max(1, bounds.shape[0] - 1)
        length, keys = length // batch, keys // batch
    pairs = length * keys
    if bound.get("is_causal"):
        window = (bound.get("window_size") or [bound.get("window_size_left")])[0]
        pairs = attended(length, None if window is None or window < 0 else window) // 2 if length == keys else pairs // 2
    return AttentionWork(
        batch * heads * pairs, q.shape[-1] + v.shape[-1], length, "grad_out" in bound or "grad_out_" in bound, _dtype(q)
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _moved(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that a kernel reads and writes: its tensors once each."""
    inputs, outputs = list(_tensors((*args, *kwargs.values()))), list(_tensors((out,)))
    if name in _BY_ROWS:
        rows = min((_bytes(one) for one in (*inputs, *outputs) if one.is_floating_point()), default=0)
        return 2 * rows
    known = {id(one) for one in inputs}
    return (
        sum(_bytes(one) for one in inputs)
        + sum(_bytes(one) for one in outputs if id(one) not in known)
        + (_bytes(outputs[0]) if name.endswith("_") and outputs else 0)
    )


def _tensors(some: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return the tensors among some values, and those in lists, tuples and dictionaries among them."""
    for one in some:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple | dict):
            yield from (leaf for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    """Those that it stands on: where one number is read many times, it is read once."""
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(numel) * tensor.itemsize
