"""Batch of a training step whose tokens come from the user (`Trainer.step`)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.samples import DocumentSpan, SampleSource
from megatron.model.inputs import ModelInputs
from megatron.training.inputs import RunData


def build_batch(data: RunData, tokens: NDArray[np.int64] | torch.Tensor, size: int) -> list[ModelInputs]:
    """Return this rank's microbatches of a batch.

    Args:
        data: data of the run.
        tokens: token ids [size, sequence length + 1], the same on all ranks.
        size: global batch size of the step.

    Raises:
        ValueError: the tokens have another shape, or an id is not in the vocabulary.
    """
    rows = torch.as_tensor(tokens).cpu().numpy().astype(np.int64)
    length = data.config.model.seq_length
    if rows.shape != (size, length + 1):
        raise ValueError(
            f"tokens have the shape {list(rows.shape)}, but a step takes [global batch size, --seq-length + 1]: "
            f"pass tokens of the shape [{size}, {length + 1}]"
        )
    if rows.min() < 0 or rows.max() >= data.vocab_size:
        raise ValueError(
            f"token ids range from {rows.min()} to {rows.max()}, but the vocabulary has only the ids 0 to "
            f"{data.vocab_size - 1}. Use the tokenizer of this run"
        )
    source = _TokenRowSource(rows) if data.datasets is not None else None
    return next(
        data.batch_builder.iter_batches(
            source, global_batch_size_at=lambda _: size, consumed_samples=0, total_samples=size, num_workers=0
        )
    )


class _TokenRowSource(SampleSource):
    """Source of samples whose rows are tokens from the user: an array [samples, sequence length + 1]."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.seq_length = rows.shape[1] - 1
        self._rows = rows

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        return self._rows[first : first + count]

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        return []

    def describe(self, num_samples: int) -> list[str]:
        return []
