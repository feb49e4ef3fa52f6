"""Causal attention that stays within documents, for samples packed with several. No [s, s] tensor is made.

Shapes: `s` sequence, `b` microbatch, `T = b * s`, `D` documents, `n` query heads, `g` key-value heads, `d` head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megatron.attention.backends import flash_is_on, flash_runs_on
from megatron.parallel.cut import Cut
from megatron.spec.attention_backends import LARGEST_FLASH_HEAD
from megatron.spec.counts import attended

MOST_AT_ONCE = 65535
"""The most sequences in one call: a CUDA grid has room for so many in its second dimension."""
_ALL = -1
"""In a window of `varlen_attn`: every token."""


Run = tuple[int, int]
"""The first place of neighbouring tokens in their sequence, and the one behind the last."""
Made = TypeVar("Made")


class Documents:
    """Where the documents of one microbatch lie. It is made once and shared by all layers.

    Args:
        bounds: token at which each document starts, with the samples laid end to end, and b x s: [D + 1]. On the host.
        on_device: the same on the model's device, int32.
        batch: b.
        cut: which context ranks hold which tokens; None where there is one context rank.
    """

    def __init__(self, bounds: NDArray[np.int32], on_device: torch.Tensor, batch: int, cut: Cut | None = None) -> None:
        self.bounds, self.on_device, self.batch, self.cut = bounds, on_device, batch, cut
        self.longest = int(np.diff(bounds).max())
        self._pairs: dict[tuple[Run, Run], Any] = {}

    @property
    def length(self) -> int:
        """s, the tokens of a whole sample."""
        return int(self.bounds[-1]) // self.batch

    @property
    def bounded(self) -> bool:
        """Whether a sample holds several documents."""
        return len(self.bounds) > self.batch + 1

    @functools.cached_property
    def order_of_holders(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Place in the sequence of the tokens of all context ranks, one rank after the other, and where each place is then: [s]."""
        assert self.cut is not None, "one rank holds all tokens"
        order, device = self.cut.order, self.on_device.device
        return to_device(order, device), to_device(np.argsort(order), device)

    def within(self, first: int, end: int) -> NDArray[np.int64]:
        """How far behind `first` documents begin between two tokens, of the samples laid end to end."""
        low, high = np.searchsorted(self.bounds, [first + 1, end])
        return self.bounds[low:high].astype(np.int64) - first

    def around(self, token: int) -> tuple[int, int]:
        """The document of a token of the samples laid end to end: its first token, and the one behind its last."""
        number = int(np.searchsorted(self.bounds, token, side="right"))
        return int(self.bounds[number - 1]), int(self.bounds[number])

    def pairs(self, queries: Run, keys: Run, make: Callable[[Run, Run, Documents], Made]) -> Made:
        """What is made of two runs of tokens, once for all layers."""
        if (queries, keys) not in self._pairs:
            self._pairs[queries, keys] = make(queries, keys, self)
        return self._pairs[queries, keys]  # type: ignore[no-any-return]

    def attended_sequences(self, shares: Mapping[int | None, float]) -> float:
        """How many samples of one document each need as much attention.

        Args:
            shares: part of each window in the attention of a sample (`attention_shares`).
        """
        lengths, counts = np.unique(np.diff(self.bounds), return_counts=True)
        each, whole = list(zip(lengths.tolist(), counts.tolist(), strict=True)), self.length
        return sum(
            share * sum(count * attended(length, window) for length, count in each) / attended(whole, window)
            for window, share in shares.items()
        )

    @functools.cached_property
    def by_length(self) -> ByLength:
        """The documents sorted by length."""
        return ByLength.of(self.bounds, self.batch, self.on_device.device)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Place in its sample at which the document of each token starts, int32 [s, b]."""
        return to_device(self._starts, self.on_device.device)

    def lowest_start(self, place: int) -> int:
        """The first place at which, in any sample, the document of a place begins."""
        return self._lowest_starts[place]

    @functools.cached_property
    def _lowest_starts(self) -> list[int]:
        """That of every place: each layer asks for each of its blocks."""
        return self._starts.min(axis=1).tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def _starts(self) -> NDArray[np.int32]:
        """The same on the host."""
        starts = np.repeat(self.bounds[:-1] % self.length, np.diff(self.bounds))
        return np.ascontiguousarray(starts.reshape(self.batch, self.length).T)


def samples(length: int, batch: int, cut: Cut, device: torch.device) -> Documents:
    """Samples of one document each, of which context ranks hold parts."""
    bounds = np.arange(0, (batch + 1) * length, length, dtype=np.int32)
    return Documents(bounds, torch.from_numpy(bounds).to(device), batch, cut)


class ByLength(NamedTuple):
    """Tokens reordered so that documents of one length lie side by side: then one call serves all of them.

    Documents of k different lengths have at least k (k + 1) / 2 tokens, so there are at most sqrt(2 T) calls however many documents
    there are (but for one more for every 65,535 documents of a length).
    """

    order: torch.Tensor
    """Row of [s, b] at each place, [T]."""
    places: torch.Tensor
    """Place of each row of [s, b], [T]."""
    groups: list[tuple[int, int]]
    """Number of documents and their length, for each group in this order."""

    @classmethod
    def of(cls, bounds: NDArray[np.int32], batch: int, device: torch.device) -> ByLength:
        """Sort the documents of a microbatch."""
        lengths = np.diff(bounds).astype(np.int64)
        sorting = np.argsort(lengths, kind="stable")
        starts, sizes = bounds[:-1][sorting].astype(np.int64), lengths[sorting]
        ends = np.cumsum(sizes)
        tokens = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)  # samples end to end
        samples, positions = np.divmod(tokens, ends[-1] // batch)
        order = positions * batch + samples
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        distinct, counts = np.unique(sizes, return_counts=True)
        groups = [
            (min(MOST_AT_ONCE, count - done), length)
            for count, length in zip(counts.tolist(), distinct.tolist(), strict=True)
            for done in range(0, count, MOST_AT_ONCE)
        ]
        return cls(to_device(order, device), to_device(places, device), groups)


def attention_within_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale q k^T) v, where a token sees itself and what comes before it in its document.

    Args:
        q: [s, b, n, d].
        k, v: [s, b, g, d]; each serves n/g neighbouring query heads. The channels of v may be others.
        scale: None for 1 / sqrt(d).

    Returns:
        [s, b, n * channels of v].
    """
    if flash_takes(q, v, dropout) and len(documents.bounds) - 1 <= MOST_AT_ONCE:
        return flash_attention(q, k, v, documents.on_device, documents.longest, scale=scale)
    return grouped_attention(q, k, v, documents, dropout, scale)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The same by torch's `varlen_attn`; see `varlen_attention`."""
    return varlen_attention(q, k, v, bounds, longest, *_varlen(), window=window, scale=scale)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    attend: Callable[..., Any],
    takes_groups: bool,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention by one call of flash attention for sequences of different lengths.

    Args:
        bounds: of the sequences, with the samples laid end to end: int32 [D + 1].
        longest: length of the longest.
        attend: torch's `varlen_attn`.
        takes_groups: whether it lets one key-value head serve several query heads (`enable_gqa`).
        window: tokens before its own to which a token attends; None for all.
    """
    length, batch, heads, _ = q.shape
    grouped = heads != k.shape[2]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [T, heads, d], sample after sample
    if grouped and not takes_groups:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if grouped and takes_groups else {}
    if scale is not None:
        options["scale"] = scale
    reach = (_ALL if window is None else window, 0)
    out = attend(q, k, v, bounds, bounds, longest, longest, window_size=reach, **options)
    return out.reshape(batch, length, -1).transpose(0, 1).contiguous()


def bytes_copied_for_groups(tokens: int, heads: int, head_size: int, itemsize: int) -> int:
    """Return the bytes that `flash_attention` copies of keys and values which query heads share; 0 if torch needs no copy."""
    return 0 if _varlen()[1] else 2 * tokens * heads * head_size * itemsize


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """Compute attention by one call of `scaled_dot_product_attention` for all documents of one length."""
    by_length, grouped = documents.by_length, q.shape[2] != k.shape[2]
    ordered = [reorder(x.flatten(0, 1), by_length.order, by_length.places) for x in (q, k, v)]
    outs, start = [], 0
    for count, length in by_length.groups:
        rows = slice(start, start + count * length)
        some_q, some_k, some_v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in ordered)
        out = F.scaled_dot_product_attention(
            some_q, some_k, some_v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [count * length, n * channels]
        start = rows.stop
    joined = outs[0] if len(outs) == 1 else torch.cat(outs)
    return reorder(joined, by_length.places, by_length.order).unflatten(0, q.shape[:2])


def reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows of x in another order: row `order[i]` at place i. `inverse` is the order that puts them back."""
    found: torch.Tensor = _Reorder.apply(x, order, inverse)
    return found


class _Reorder(torch.autograd.Function):
    """Puts rows in another order. The backward is the inverse, with no sum over indices: the same bits each time, and fast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def flash_takes(q: torch.Tensor, v: torch.Tensor, dropout: float) -> bool:
    """Whether flash attention can compute it: 16 bits on CUDA without dropout, head size a multiple of 8, also of the values."""
    return (
        q.is_cuda
        and q.shape[-1] == v.shape[-1]
        and dropout == 0.0
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= LARGEST_FLASH_HEAD
        and flash_is_on()
        and flash_runs_on(q.device)
    )


@functools.cache
def _varlen() -> tuple[Callable[..., Any], bool]:
    """torch's `varlen_attn`, and whether it takes grouped queries (not in torch 2.11, but in 2.13)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def to_device(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
