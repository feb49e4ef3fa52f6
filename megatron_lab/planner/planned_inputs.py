"""The inputs of a step, on a device without memory: what a microbatch is made of, and what those of a step take on a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from megatron.attention.documents import ByLength, Documents, Made, Run
from megatron.config.data import DataConfig
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import Group
from megatron.parallel.cut import Cut, balanced, token_costs
from megatron.parallel.random import DropoutKey
from megatron.spec.counts import attention_shares

PlaceOfDocuments = Literal["order", "starts", "holders"]
"""The order of the tokens by the lengths of their documents, both ways; where the document of each token starts; or the order of
the tokens by the context ranks that hold them, both ways, which all samples of a microbatch have alike."""

_TOKEN, _MASK = torch.int64.itemsize, torch.float32.itemsize
_OF_DOCUMENTS: dict[PlaceOfDocuments, int] = {"order": 2 * _TOKEN, "starts": torch.int32.itemsize}


def make_inputs(model: Model, data: DataConfig, micro_batch_size: int, sharers: Group, device: torch.device) -> ModelInputs:
    """A microbatch as a training step hands it to the model, on a device without memory.

    Args:
        sharers: the context ranks.
    """
    length = model.config.seq_length
    shape = (length // sharers.size, micro_batch_size)
    tokens, mask = torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device)
    documents = None
    if data.reset_attention_mask or sharers.size > 1:
        starts = sorted({0, length // 3}) if data.reset_attention_mask else [0]
        documents = _documents(model, starts, micro_batch_size, sharers.size, device)
    ahead = [(tokens, mask)] * (model.config.mtp_num_layers if sharers.size > 1 else 0)
    return ModelInputs(tokens, tokens, tokens, mask, DropoutKey(0, 0, 0), documents, ahead=ahead)


def input_bytes(
    model: Model,
    data: DataConfig,
    num_microbatches: int,
    micro_batch_size: int,
    context_ranks: int,
    kept_of_documents: Collection[PlaceOfDocuments] = frozenset(),
) -> int:
    """What the inputs of a step take on this rank, all of whose microbatches are there from its beginning.

    Args:
        num_microbatches: of a data rank.
        kept_of_documents: what attention keeps of where they lie.
    """
    whole = model.config.seq_length
    length = whole // context_ranks
    # Where documents decide who holds which tokens, each microbatch may have positions of its own.
    own_positions = data.reset_position_ids or (data.reset_attention_mask and context_ranks > 1)
    once = 0 if own_positions else length * _TOKEN
    each = 0
    if 0 in model.chunks or model.computes_loss or data.reset_position_ids or data.reset_attention_mask:
        ahead = model.config.mtp_num_layers if context_ranks > 1 else 0
        each = micro_batch_size * length * ((2 + own_positions) * _TOKEN + _MASK + ahead * (_TOKEN + _MASK))
        each += micro_batch_size * whole * sum(_OF_DOCUMENTS[kept] for kept in kept_of_documents & _OF_DOCUMENTS.keys())
    of_holders = 2 * whole * _TOKEN * ("holders" in kept_of_documents)
    if data.reset_attention_mask:
        return num_microbatches * (each + of_holders) + once
    return num_microbatches * each + once + of_holders


class PlannedDocuments(Documents):
    """Notes which of its tensors attention asks for, and gives some without memory."""

    def __init__(self, bounds: NDArray[np.int32], on_device: torch.Tensor, batch: int, cut: Cut | None) -> None:
        super().__init__(bounds, on_device, batch, cut)
        self.asked: set[PlaceOfDocuments] = set()
        shape, device = (int(bounds[-1]) // batch, batch), on_device.device
        order, places = (torch.empty(int(bounds[-1]), dtype=torch.int64, device=device) for _ in range(2))
        self._sorted = ByLength(order, places, ByLength.of(bounds, batch, torch.device("cpu")).groups)
        self._begun = torch.empty(shape, dtype=torch.int32, device=device)
        held, held_at = (torch.empty(shape[0], dtype=torch.int64, device=device) for _ in range(2))
        self._held = (held, held_at)

    @property
    def by_length(self) -> ByLength:  # type: ignore[override]
        """See `Documents`."""
        self.asked.add("order")
        return self._sorted

    @property
    def starts(self) -> torch.Tensor:  # type: ignore[override]
        """See `Documents`."""
        self.asked.add("starts")
        return self._begun

    @property
    def order_of_holders(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """See `Documents`."""
        self.asked.add("holders")
        return self._held

    def pairs(self, queries: Run, keys: Run, make: Callable[[Run, Run, Documents], Made]) -> Made:
        """See `Documents`."""
        found: Made = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.on_device.device), make(queries, keys, self))
        return found


def _documents(model: Model, starts: Sequence[int], batch: int, context_ranks: int, device: torch.device) -> PlannedDocuments:
    """Documents that start at these places of each sample. How many there are and how long hardly changes what attention keeps."""
    length = model.config.seq_length
    bounds = np.append((np.arange(batch)[:, None] * length + np.array(starts)).ravel(), batch * length).astype(np.int32)
    cut = balanced(token_costs(length, attention_shares(model.config), bounds), context_ranks) if context_ranks > 1 else None
    return PlannedDocuments(bounds, torch.empty(len(bounds), dtype=torch.int32, device=device), batch, cut)
