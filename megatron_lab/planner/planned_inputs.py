"""Inputs of a step for the planner: the tensors of a microbatch (with shapes, but without data), and the bytes of all inputs of a
step on a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from megatron.attention.documents import Documents, DocumentsByLength, T, TokenRange
from megatron.config.data import DataConfig
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import Group
from megatron.parallel.random import DropoutKey
from megatron.parallel.sequence_split import SequenceSplit, compute_token_costs, split_balanced
from megatron.spec.counts import compute_window_shares

DocumentTensor = Literal["order", "starts", "holders"]
"""Tensor about document boundaries that attention may keep:

- "order": order of the tokens by the lengths of their documents, and its inverse
- "starts": start of each token's document
- "holders": order of the tokens by the context ranks that hold them, and its inverse; equal for all samples of a microbatch
"""

_TOKEN_BYTES, _MASK_BYTES = torch.int64.itemsize, torch.float32.itemsize
_DOCUMENT_TENSOR_BYTES: dict[DocumentTensor, int] = {"order": 2 * _TOKEN_BYTES, "starts": torch.int32.itemsize}


def build_inputs(model: Model, data: DataConfig, micro_batch_size: int, context_group: Group, device: torch.device) -> ModelInputs:
    """Build the inputs of a microbatch as a training step passes them to the model, with tensors that have shapes but no data.

    Args:
        context_group: process group of the context ranks.
        device: device of the tensors: the meta device, or the CPU while fake tensors are active.
    """
    seq_length = model.config.seq_length
    shape = (seq_length // context_group.size, micro_batch_size)
    tokens, mask = torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device)
    documents = None
    if data.reset_attention_mask or context_group.size > 1:
        starts = sorted({0, seq_length // 3}) if data.reset_attention_mask else [0]
        documents = _build_documents(model, starts, micro_batch_size, context_group.size, device)
    mtp_targets = [(tokens, mask)] * (model.config.mtp_num_layers if context_group.size > 1 else 0)
    return ModelInputs(tokens, tokens, tokens, mask, DropoutKey(0, 0, 0), documents, mtp_targets=mtp_targets)


def count_input_bytes(
    model: Model,
    data: DataConfig,
    num_microbatches: int,
    micro_batch_size: int,
    cp_size: int,
    document_tensors: Collection[DocumentTensor] = frozenset(),
) -> int:
    """Count the bytes of a step's inputs on this rank (tokens, labels, masks, positions, document boundaries). The inputs of all
    microbatches exist from the start of the step.

    Args:
        num_microbatches: microbatches of a data rank in a step.
        document_tensors: names of the tensors about document boundaries that attention saves for the backward.
    """
    seq_length = model.config.seq_length
    local_length = seq_length // cp_size
    # If documents decide which rank holds which tokens, the positions differ between microbatches.
    has_positions = data.reset_position_ids or (data.reset_attention_mask and cp_size > 1)
    shared_bytes = 0 if has_positions else local_length * _TOKEN_BYTES
    microbatch_bytes = 0
    if 0 in model.chunks or model.computes_loss or data.reset_position_ids or data.reset_attention_mask:
        num_mtp_targets = model.config.mtp_num_layers if cp_size > 1 else 0
        microbatch_bytes = (
            micro_batch_size
            * local_length
            * ((2 + has_positions) * _TOKEN_BYTES + _MASK_BYTES + num_mtp_targets * (_TOKEN_BYTES + _MASK_BYTES))
        )
        microbatch_bytes += (
            micro_batch_size
            * seq_length
            * sum(_DOCUMENT_TENSOR_BYTES[name] for name in document_tensors & _DOCUMENT_TENSOR_BYTES.keys())
        )
    holder_bytes = 2 * seq_length * _TOKEN_BYTES * ("holders" in document_tensors)
    if data.reset_attention_mask:
        return num_microbatches * (microbatch_bytes + holder_bytes) + shared_bytes
    return num_microbatches * microbatch_bytes + shared_bytes + holder_bytes


class PlannedDocuments(Documents):
    """Document boundaries whose tensors have no data. `used_tensors` records which of these tensors attention uses, because a plan
    counts only the memory of these."""

    def __init__(
        self, cu_seqlens: NDArray[np.int32], cu_seqlens_device: torch.Tensor, batch_size: int, split: SequenceSplit | None
    ) -> None:
        super().__init__(cu_seqlens, cu_seqlens_device, batch_size, split)
        self.used_tensors: set[DocumentTensor] = set()
        shape, device = (int(cu_seqlens[-1]) // batch_size, batch_size), cu_seqlens_device.device
        order, inverse = (torch.empty(int(cu_seqlens[-1]), dtype=torch.int64, device=device) for _ in range(2))
        self._sorted = DocumentsByLength(order, inverse, DocumentsByLength.of(cu_seqlens, batch_size, torch.device("cpu")).groups)
        self._document_starts = torch.empty(shape, dtype=torch.int32, device=device)
        rank_order, inverse_rank_order = (torch.empty(shape[0], dtype=torch.int64, device=device) for _ in range(2))
        self._rank_order = (rank_order, inverse_rank_order)

    @property
    def sorted_by_length(self) -> DocumentsByLength:  # type: ignore[override]
        """Tokens ordered by the lengths of their documents. Reading this property adds "order" to `used_tensors`."""
        self.used_tensors.add("order")
        return self._sorted

    @property
    def document_starts(self) -> torch.Tensor:  # type: ignore[override]
        """Position of the first token of each token's document. Reading this property adds "starts" to `used_tensors`."""
        self.used_tensors.add("starts")
        return self._document_starts

    @property
    def context_rank_order(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Order of the tokens by the context rank that holds them, and the inverse order. Reading this property adds "holders" to
        `used_tensors`."""
        self.used_tensors.add("holders")
        return self._rank_order

    def get_cached_for_pair(
        self, queries: TokenRange, keys: TokenRange, build: Callable[[TokenRange, TokenRange, Documents], T]
    ) -> T:
        """Call `build` for a range of query tokens and a range of key tokens, and return its value with all tensors moved to the
        device of these documents. Unlike in a run, the value is not cached."""
        result: T = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.cu_seqlens_device.device), build(queries, keys, self))
        return result


def _build_documents(model: Model, starts: Sequence[int], batch_size: int, cp_size: int, device: torch.device) -> PlannedDocuments:
    """Build document boundaries for a microbatch whose samples all have documents at these offsets. A fixed choice is enough: the
    number and lengths of documents hardly change the memory of attention.

    Args:
        starts: offset in tokens of each document within a sample.
    """
    seq_length = model.config.seq_length
    cu_seqlens = np.append(
        (np.arange(batch_size)[:, None] * seq_length + np.array(starts)).ravel(), batch_size * seq_length
    ).astype(np.int32)
    split = (
        split_balanced(compute_token_costs(seq_length, compute_window_shares(model.config), cu_seqlens), cp_size)
        if cp_size > 1
        else None
    )
    return PlannedDocuments(cu_seqlens, torch.empty(len(cu_seqlens), dtype=torch.int32, device=device), batch_size, split)
