"""Causal attention within the documents of packed samples. No [s, s] tensor is allocated.

Shapes: `s` sequence, `b` microbatch, `T = b * s` tokens, `D` documents, `n` query heads, `g` key-value heads, `d` head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megatron.attention.backends import has_flash_attention, is_flash_enabled
from megatron.parallel.sequence_split import SequenceSplit
from megatron.spec.attention_backends import MAX_FLASH_HEAD_SIZE
from megatron.spec.counts import count_attended_pairs

MAX_SEQUENCES_PER_CALL = 65535
"""Largest number of sequences in one attention call: the limit of the second dimension of a CUDA grid."""
_UNLIMITED = -1
"""Window size that stands for all tokens in `varlen_attn`."""


TokenRange = tuple[int, int]
"""Consecutive tokens of a sample: the position of the first token, and the position after the last token."""
T = TypeVar("T")


class DataTokens(NamedTuple):
    """Tokens of a microbatch that are data, not padding at the end of a sample."""

    is_data: torch.Tensor
    """Whether each local token is data, bool [s, b]."""
    counts: torch.Tensor
    """Number of tokens of each complete sample that are data, int64 [b]."""


class Documents:
    """Boundaries of the documents in the packed samples of one microbatch. All layers share one object.

    Args:
        cu_seqlens: offset of each document in the concatenated samples, and at the end the total number of tokens: int32
            [documents + 1], on the host.
        cu_seqlens_device: `cu_seqlens` on the device of the model.
        batch_size: samples of the microbatch.
        sequence_split: which context ranks hold which tokens; None without context parallelism.
        data_lengths: number of tokens of each sample before its padding, including the last label; None without padding.
    """

    def __init__(
        self,
        cu_seqlens: NDArray[np.int32],
        cu_seqlens_device: torch.Tensor,
        batch_size: int,
        sequence_split: SequenceSplit | None = None,
        data_lengths: Sequence[int] | None = None,
    ) -> None:
        self.data_lengths = data_lengths
        self.cu_seqlens, self.cu_seqlens_device, self.batch_size, self.sequence_split = (
            cu_seqlens,
            cu_seqlens_device,
            batch_size,
            sequence_split,
        )
        self.max_seqlen = int(np.diff(cu_seqlens).max())
        self._pair_cache: dict[tuple[TokenRange, TokenRange], Any] = {}
        self._data_tokens: dict[tuple[int, int, int], DataTokens] = {}
        self._documents_without_padding: dict[int, Documents] = {}

    @property
    def sample_length(self) -> int:
        """Number of tokens of a sample, over all context ranks."""
        return int(self.cu_seqlens[-1]) // self.batch_size

    @property
    def is_packed(self) -> bool:
        """Whether any sample contains several documents."""
        return len(self.cu_seqlens) > self.batch_size + 1

    @functools.cached_property
    def context_rank_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Permutation between two orders of the tokens: concatenated over the context ranks, and by position in the sequence.

        Returns:
            for each token of the concatenation over the ranks, its position in the sequence; and the inverse permutation. Both
            int64 [tokens of the sequence].
        """
        assert self.sequence_split is not None, "without context parallelism, tokens have no order of context ranks"
        order, device = self.sequence_split.order, self.cu_seqlens_device.device
        return copy_to_device(order, device), copy_to_device(np.argsort(order), device)

    def find_data_tokens(self, num_ahead: int, rank: int, num_ranks: int) -> DataTokens | None:
        """Find the tokens that are data. Return None if the microbatch has no padding. The result is cached for all layers.

        Args:
            num_ahead: number of positions between a token and the last token that the layer reads at its position; 0 except in
                multi-token prediction. A position at which the layer reads padding does not count as data.
            rank: index of this rank among the `num_ranks` ranks that share a sequence, each with equally many of its tokens.
        """
        if self.data_lengths is None:
            return None
        key = num_ahead, rank, num_ranks
        if key not in self._data_tokens:
            counts, device = self._count_data_tokens(num_ahead), self.cu_seqlens_device.device
            positions = np.arange(self.sample_length) if self.sequence_split is None else self.sequence_split.order
            is_data = positions.reshape(num_ranks, -1, 1)[rank] < counts
            self._data_tokens[key] = DataTokens(copy_to_device(is_data, device), copy_to_device(counts, device))
        return self._data_tokens[key]

    def mask_padding(self, num_ahead: int) -> Documents:
        """Return documents of the same tokens in which padding attends to no token, not even to itself.

        Args:
            num_ahead: as for `find_data_tokens`.
        """
        if self.data_lengths is None:
            return self
        if num_ahead not in self._documents_without_padding:
            masked = Documents(self.cu_seqlens, self.cu_seqlens_device, self.batch_size, self.sequence_split)
            is_data = np.arange(self.sample_length)[:, None] < self._count_data_tokens(num_ahead)
            starts = np.where(is_data, self._host_document_starts, np.int32(self.sample_length))
            masked._host_document_starts = starts
            self._documents_without_padding[num_ahead] = masked
        return self._documents_without_padding[num_ahead]

    def _count_data_tokens(self, num_ahead: int) -> NDArray[np.int64]:
        """Return the number of positions of each sample that are data, [b]. A sample without padding has no position at which a
        layer reads padding, because the tokens beyond its last label are not padding."""
        lengths = np.array(self.data_lengths, dtype=np.int64)
        return np.where(lengths > self.sample_length, self.sample_length, np.maximum(lengths - num_ahead, 0))

    def find_document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        """Return at which offsets documents begin, strictly between the offsets `start` and `end` of the concatenated samples. The
        returned offsets are relative to `start`."""
        low, high = np.searchsorted(self.cu_seqlens, [start + 1, end])
        return self.cu_seqlens[low:high].astype(np.int64) - start

    def find_document(self, token: int) -> tuple[int, int]:
        """Return the start and end of the document that contains a token. `token`, start and end are offsets in the concatenated
        samples of the microbatch."""
        index = int(np.searchsorted(self.cu_seqlens, token, side="right"))
        return int(self.cu_seqlens[index - 1]), int(self.cu_seqlens[index])

    def get_cached_for_pair(
        self, queries: TokenRange, keys: TokenRange, build: Callable[[TokenRange, TokenRange, Documents], T]
    ) -> T:
        """Return `build(queries, keys, self)` for a token range of queries and one of keys. The result is cached, so that it is
        built only once for all layers."""
        if (queries, keys) not in self._pair_cache:
            self._pair_cache[queries, keys] = build(queries, keys, self)
        return self._pair_cache[queries, keys]  # type: ignore[no-any-return]

    def count_equivalent_samples(self, window_shares: Mapping[int | None, float]) -> float:
        """Return the number of single-document samples that have the same attention FLOPs as this microbatch.

        Args:
            window_shares: share of each attention window of the model's layers (None: no window) in the attention FLOPs of a
                single-document sample (`compute_window_shares`).
        """
        lengths, counts = np.unique(np.diff(self.cu_seqlens), return_counts=True)
        length_counts, sample_length = list(zip(lengths.tolist(), counts.tolist(), strict=True)), self.sample_length
        return sum(
            share
            * sum(count * count_attended_pairs(length, window) for length, count in length_counts)
            / count_attended_pairs(sample_length, window)
            for window, share in window_shares.items()
        )

    @functools.cached_property
    def sorted_by_length(self) -> DocumentsByLength:
        """Permutation of the tokens that sorts the documents by length."""
        return DocumentsByLength.of(self.cu_seqlens, self.batch_size, self.cu_seqlens_device.device)

    @functools.cached_property
    def document_starts(self) -> torch.Tensor:
        """Position in the sample at which the document of each token begins: int32 [sequence, microbatch]."""
        return copy_to_device(self._host_document_starts, self.cu_seqlens_device.device)

    def get_min_document_start(self, position: int) -> int:
        """Return where the document that contains `position` begins, as a position in the sample: the smallest value over all
        samples of the microbatch. No sample's query at `position` attends to an earlier key."""
        return self._min_document_starts[position]

    @functools.cached_property
    def _min_document_starts(self) -> list[int]:
        """Result of `get_min_document_start` for every position. Cached, because every layer reads it for each block of queries."""
        return self._host_document_starts.min(axis=1).tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def _host_document_starts(self) -> NDArray[np.int32]:
        """`document_starts` as an array in host memory."""
        starts = np.repeat(self.cu_seqlens[:-1] % self.sample_length, np.diff(self.cu_seqlens))
        return np.ascontiguousarray(starts.reshape(self.batch_size, self.sample_length).T)


def build_unpacked_documents(sample_length: int, batch_size: int, sequence_split: SequenceSplit, device: torch.device) -> Documents:
    """Build the `Documents` of samples that consist of a single document and are split over context ranks."""
    cu_seqlens = np.arange(0, (batch_size + 1) * sample_length, sample_length, dtype=np.int32)
    return Documents(cu_seqlens, torch.from_numpy(cu_seqlens).to(device), batch_size, sequence_split)


class DocumentsByLength(NamedTuple):
    """Permutation of the tokens of a microbatch that makes documents of equal length adjacent, so that one attention call computes
    all of them.

    Documents of k different lengths have at least k (k + 1) / 2 tokens. So for T tokens there are at most sqrt(2 T) different
    lengths and as many calls, whatever the number of documents. Every further 65,535 documents of one length need one more call.
    """

    token_order: torch.Tensor
    """Index in the flattened [sequence, microbatch] of the token at each position of the sorted order: [number of tokens]."""
    inverse_order: torch.Tensor
    """Position in the sorted order of each token of the flattened [sequence, microbatch]: [number of tokens]."""
    groups: list[tuple[int, int]]
    """(number of documents, length of each) for each attention call, in the sorted order."""

    @classmethod
    def of(cls, cu_seqlens: NDArray[np.int32], batch_size: int, device: torch.device) -> DocumentsByLength:
        """Sort the documents of a microbatch by length.

        Args:
            cu_seqlens: offset of each document in the concatenated samples, and at the end the total number of tokens.
            batch_size: samples of the microbatch.
            device: device of the permutations.
        """
        lengths = np.diff(cu_seqlens).astype(np.int64)
        length_order = np.argsort(lengths, kind="stable")
        starts, sorted_lengths = cu_seqlens[:-1][length_order].astype(np.int64), lengths[length_order]
        ends = np.cumsum(sorted_lengths)
        tokens = np.arange(ends[-1]) + np.repeat(starts - (ends - sorted_lengths), sorted_lengths)  # samples end to end
        sample_indices, positions = np.divmod(tokens, ends[-1] // batch_size)
        token_order = positions * batch_size + sample_indices
        inverse_order = np.empty_like(token_order)
        inverse_order[token_order] = np.arange(len(token_order))
        unique_lengths, counts = np.unique(sorted_lengths, return_counts=True)
        groups = [
            (min(MAX_SEQUENCES_PER_CALL, count - done), length)
            for count, length in zip(counts.tolist(), unique_lengths.tolist(), strict=True)
            for done in range(0, count, MAX_SEQUENCES_PER_CALL)
        ]
        return cls(copy_to_device(token_order, device), copy_to_device(inverse_order, device), groups)


def document_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """Compute softmax(scale q k^T) v, where a token attends to itself and the earlier tokens of its document.

    Args:
        q: queries [s, b, n, d]: sequence, microbatch, heads, channels.
        k, v: keys and values [s, b, g, d]; each head serves n / g neighboring query heads. The values may have another number of
            channels.
        scale: factor of the products q k^T; None for 1 / sqrt(d).

    Returns:
        [s, b, n * channels of v].
    """
    if flash_supports(q, v, dropout) and len(documents.cu_seqlens) - 1 <= MAX_SEQUENCES_PER_CALL:
        return flash_attention(q, k, v, documents.cu_seqlens_device, documents.max_seqlen, scale=scale)
    return grouped_attention(q, k, v, documents, dropout, scale)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention within documents by flash attention (torch's `varlen_attn`). Arguments and shapes are those of
    `varlen_attention`."""
    return varlen_attention(q, k, v, cu_seqlens, max_seqlen, *_load_varlen_attn(), window=window, scale=scale)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    varlen_attn: Callable[..., Any],
    has_enable_gqa: bool,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within sequences of different lengths by one call of flash attention.

    Args:
        q, k, v: [s, b, heads, channels], for s tokens of b samples. A sequence is a document or a complete sample.
        cu_seqlens: offset of each sequence in the concatenated samples, and at the end the total: int32 [sequences + 1].
        max_seqlen: length of the longest sequence.
        varlen_attn: torch's `varlen_attn`.
        has_enable_gqa: whether `varlen_attn` supports key-value heads that serve several query heads (`enable_gqa`).
        window: number of earlier tokens that a token attends to; None for all.
        scale: factor of the products q k^T; None for 1 / sqrt(channels).

    Returns:
        [s, b, heads * channels].
    """
    length, batch_size, num_heads, _ = q.shape
    is_grouped = num_heads != k.shape[2]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [T, heads, d], sample after sample
    if is_grouped and not has_enable_gqa:
        k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if is_grouped and has_enable_gqa else {}
    if scale is not None:
        options["scale"] = scale
    window_size = (_UNLIMITED if window is None else window, 0)
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=window_size, **options)
    return out.reshape(batch_size, length, -1).transpose(0, 1).contiguous()


def count_bytes_copied_for_groups(num_tokens: int, num_heads: int, head_size: int, itemsize: int) -> int:
    """Return the size in bytes of the copies of keys and values that `flash_attention` makes for grouped-query attention, one for
    each query head. 0 if torch's kernel needs no copies.

    Args:
        num_heads: query heads.
        itemsize: bytes per element.
    """
    return 0 if _load_varlen_attn()[1] else 2 * num_tokens * num_heads * head_size * itemsize


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """Compute attention within documents by `scaled_dot_product_attention`, with one call for all documents of one length."""
    sorted_documents, is_grouped = documents.sorted_by_length, q.shape[2] != k.shape[2]
    sorted_qkv = [reorder(x.flatten(0, 1), sorted_documents.token_order, sorted_documents.inverse_order) for x in (q, k, v)]
    outs, start = [], 0
    for count, length in sorted_documents.groups:
        group_rows = slice(start, start + count * length)
        group_q, group_k, group_v = (x[group_rows].unflatten(0, (count, length)).transpose(1, 2) for x in sorted_qkv)
        out = F.scaled_dot_product_attention(
            group_q, group_k, group_v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [count * length, n * channels]
        start = group_rows.stop
    sorted_out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return reorder(sorted_out, sorted_documents.inverse_order, sorted_documents.token_order).unflatten(0, q.shape[:2])


def reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Permute the rows of x: row i of the result is row `order[i]` of x. Differentiable.

    Args:
        inverse: inverse permutation of `order`, which backward applies.
    """
    reordered: torch.Tensor = _Reorder.apply(x, order, inverse)
    return reordered


class _Reorder(torch.autograd.Function):
    """Permutation of rows. Backward applies the inverse permutation, without a scatter-add: it is deterministic and fast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def flash_supports(q: torch.Tensor, v: torch.Tensor, dropout: float) -> bool:
    """Return whether flash attention is enabled and supports a call.

    The call must have fp16 or bf16 tensors on a GPU with flash attention, and no dropout. Queries and values must have the same
    head size, a multiple of 8 and at most `MAX_FLASH_HEAD_SIZE`.
    """
    return (
        q.is_cuda
        and q.shape[-1] == v.shape[-1]
        and dropout == 0.0
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= MAX_FLASH_HEAD_SIZE
        and is_flash_enabled()
        and has_flash_attention(q.device)
    )


@functools.cache
def _load_varlen_attn() -> tuple[Callable[..., Any], bool]:
    """Return torch's function `varlen_attn`, and whether it supports fewer key-value heads than query heads (argument
    `enable_gqa`). The function of torch 2.13 does, the function of torch 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def copy_to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a host array to the device. For a CUDA device the copy is asynchronous, through pinned memory, and the host does not
    wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
