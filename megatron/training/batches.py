"""The microbatches of a step as the model takes them, on this rank. Only the stages of the first and the last chunk read tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.batches import Microbatch, SampleSource
from megatron.data.loader import StepLoader
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import DropoutKey


@dataclass(frozen=True)
class BatchMaker:
    """Makes the inputs of whole steps for one rank.

    Args:
        seed: of dropout.
        seq_length: tokens in a sample.
        micro_batch_size: samples in a microbatch.
    """

    context: ParallelContext
    seed: int
    seq_length: int
    micro_batch_size: int

    def training(
        self,
        source: SampleSource | None,
        *,
        global_batch_size_at: Callable[[int], int],
        consumed_samples: int,
        total_samples: int,
        num_workers: int,
    ) -> Iterator[list[ModelInputs]]:
        """Steps from `consumed_samples` on, with dropout keys.

        Args:
            source: the samples; None on a rank that reads none.
        """
        step_at, consumed = (
            self._loader(source, global_batch_size_at, consumed_samples, total_samples, num_workers),
            consumed_samples,
        )
        for step in step_at:
            yield [
                self._inputs(microbatch, DropoutKey(self.seed, step=consumed, first_sample=microbatch[1])) for microbatch in step
            ]
            consumed += global_batch_size_at(consumed)

    def evaluation(self, source: SampleSource | None, *, global_batch_size: int, num_batches: int) -> Iterator[list[ModelInputs]]:
        """The first samples of a split, always the same, without dropout."""
        total = global_batch_size * num_batches
        for step in self._loader(source, lambda _: global_batch_size, 0, total, num_workers=0):
            yield [self._inputs(microbatch, None) for microbatch in step]

    def _loader(
        self,
        source: SampleSource | None,
        global_batch_size_at: Callable[[int], int],
        consumed: int,
        total: int,
        num_workers: int,
    ) -> Iterator[list[tuple[Microbatch | None, int]]]:
        """Steps of (arrays or None, first sample)."""
        rank, size = self.context.group("cp", "dp").index, self.context.group("cp", "dp").size
        if source is not None:
            loader = StepLoader(
                source,
                micro_batch_size=self.micro_batch_size,
                data_rank=rank,
                data_size=size,
                global_batch_size_at=global_batch_size_at,
                consumed_samples=consumed,
                total_samples=total,
                num_workers=num_workers,
            )
            try:
                for step in loader:
                    yield [(microbatch, microbatch.first_sample) for microbatch in step]
            finally:
                loader.close()
            return
        while consumed < total:
            batch = global_batch_size_at(consumed)
            start = consumed + rank * self.micro_batch_size
            yield [(None, first) for first in range(start, consumed + batch, size * self.micro_batch_size)]
            consumed += batch

    def _inputs(self, microbatch: tuple[Microbatch | None, int], key: DropoutKey | None) -> ModelInputs:
        arrays, device = microbatch[0], self.context.device
        positions = torch.arange(self.seq_length, device=device).unsqueeze(1).expand(-1, self.micro_batch_size)
        if arrays is None:
            return ModelInputs(positions, dropout_key=key)
        tokens, labels, mask = (_to_device(a, device) for a in (arrays.tokens, arrays.labels, arrays.loss_mask))
        return ModelInputs(positions, tokens, labels, mask, key)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """[b, s] on the host to [s, b] on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array.T))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def reads_tokens(context: ParallelContext, stage_of_chunk: Sequence[int]) -> bool:
    """Whether this rank takes tokens (for the first chunk) or labels (for the last)."""
    return context.group("pp").index in (stage_of_chunk[0], stage_of_chunk[-1])
