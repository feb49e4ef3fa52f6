"""The inputs of a microbatch without memory, and what those of a step take."""

from __future__ import annotations

import numpy as np
import torch

from megatron.config.data import DataConfig
from megatron.model.build import Model
from megatron.model.document_attention import ByLength, Documents
from megatron.model.gpt import ModelInputs
from megatron.parallel.random import DropoutKey

_TOKEN, _MASK = torch.int64.itemsize, torch.float32.itemsize


def make_inputs(model: Model, data: DataConfig, micro_batch_size: int, device: torch.device) -> ModelInputs:
    """A microbatch as a training step hands it to the model, on a device without memory."""
    shape = (model.config.seq_length, micro_batch_size)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    documents = _documents(shape, device) if data.reset_attention_mask else None
    return ModelInputs(tokens, tokens, tokens, torch.zeros(shape, device=device), DropoutKey(0, 0, 0), documents)


def input_bytes(model: Model, data: DataConfig, num_sequences: int, *, sorts_documents: bool) -> int:
    """What the inputs of a step take on this rank, all of whose microbatches are there from its beginning.

    Args:
        num_sequences: of all microbatches of a data rank.
        sorts_documents: attention keeps the order of the tokens by the lengths of their documents.
    """
    whole_positions = 0 if data.reset_position_ids else model.config.seq_length * _TOKEN
    each = 0
    if 0 in model.chunks or model.computes_loss or data.reset_position_ids or data.reset_attention_mask:
        each = 2 * _TOKEN + _MASK + _TOKEN * data.reset_position_ids + 2 * _TOKEN * sorts_documents
    return num_sequences * model.config.seq_length * each + whole_positions


def _documents(shape: tuple[int, int], device: torch.device) -> Documents:
    """Two documents of different lengths in each sample. How many there are and how long hardly changes what attention keeps."""
    length, batch = shape
    starts = np.arange(batch)[:, None] * length + np.array(sorted({0, length // 3}))
    bounds = np.append(starts.ravel(), batch * length).astype(np.int32)
    documents = Documents(bounds, torch.empty(len(bounds), dtype=torch.int32, device=device), batch)
    groups = ByLength.of(bounds, batch, torch.device("cpu")).groups
    order, places = (torch.empty(length * batch, dtype=torch.int64, device=device) for _ in range(2))
    documents.__dict__["by_length"] = ByLength(order, places, groups)  # the numbers themselves would be real tensors
    return documents
