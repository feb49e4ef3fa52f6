"""The microbatches of a step as the model takes them, on this rank. Only the stages that need samples read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.loader import StepLoader
from megatron.data.samples import DocumentRules, Microbatch, SampleSource
from megatron.model.document_attention import Documents
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import DropoutKey


@dataclass(frozen=True)
class HostInputs:
    """The arrays of a microbatch as tensors [s, b] in host memory, ready to go to the device; made by the thread that reads."""

    first_sample: int
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor | None
    bounds: NDArray[np.int32] | None
    bounds_tensor: torch.Tensor | None

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> HostInputs:
        """Copy the arrays, for CUDA into pinned memory, from which the device fetches them while the host goes on."""

        def tensor(array: np.ndarray) -> torch.Tensor:
            made = torch.from_numpy(np.ascontiguousarray(array.T))
            return made.pin_memory() if device.type == "cuda" else made

        positions, bounds = microbatch.positions, microbatch.bounds
        return cls(
            microbatch.first_sample,
            tensor(microbatch.tokens),
            tensor(microbatch.labels),
            tensor(microbatch.loss_mask),
            None if positions is None else tensor(positions),
            bounds,
            None if bounds is None else tensor(bounds),
        )


@dataclass(frozen=True)
class BatchMaker:
    """Makes the inputs of whole steps for one rank.

    Args:
        seed: of dropout.
        seq_length: tokens in a sample.
        micro_batch_size: samples in a microbatch.
        rules: what the end of a document means.
    """

    context: ParallelContext
    seed: int
    seq_length: int
    micro_batch_size: int
    rules: DocumentRules

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
            num_workers: threads that read ahead.
        """
        return self._steps(source, global_batch_size_at, consumed_samples, total_samples, num_workers, dropout=True)

    def evaluation(
        self, source: SampleSource | None, *, global_batch_size: int, num_batches: int, num_workers: int = 0
    ) -> Iterator[list[ModelInputs]]:
        """The first samples of a split, always the same, without dropout."""
        total = global_batch_size * num_batches
        return self._steps(source, lambda _: global_batch_size, 0, total, num_workers, dropout=False)

    def _steps(
        self,
        source: SampleSource | None,
        global_batch_size_at: Callable[[int], int],
        consumed: int,
        total: int,
        num_workers: int,
        dropout: bool,
    ) -> Iterator[list[ModelInputs]]:
        rank, size = self.context.data_group.index, self.context.data_group.size

        def key(first_sample: int) -> DropoutKey | None:
            return DropoutKey(self.seed, step=consumed, first_sample=first_sample) if dropout else None

        if source is None:
            assert not self.rules.every_stage_reads, "layers need to know where documents end"
            while consumed < total:
                batch = global_batch_size_at(consumed)
                firsts = range(consumed + rank * self.micro_batch_size, consumed + batch, size * self.micro_batch_size)
                yield [ModelInputs(self._whole_positions, dropout_key=key(first)) for first in firsts]
                consumed += batch
            return
        loader = StepLoader(
            source,
            self.rules,
            functools.partial(HostInputs.of, device=self.context.device),
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
                inputs = [self._inputs(host, key(host.first_sample)) for host in step]
                loader.read_ahead()
                yield inputs
                consumed = loader.consumed_samples
        finally:
            loader.close()

    def _inputs(self, host: HostInputs, key: DropoutKey | None) -> ModelInputs:
        documents = None
        if host.bounds is not None and host.bounds_tensor is not None:
            documents = Documents(host.bounds, self._on_device(host.bounds_tensor), self.micro_batch_size)
        return ModelInputs(
            self._whole_positions if host.positions is None else self._on_device(host.positions),
            self._on_device(host.tokens),
            self._on_device(host.labels),
            self._on_device(host.loss_mask),
            key,
            documents,
        )

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Even a call that does nothing lets a reading thread take Python's lock.
        return tensor if self.context.device.type == "cpu" else tensor.to(self.context.device, non_blocking=True)

    @functools.cached_property
    def _whole_positions(self) -> torch.Tensor:
        """0 to s - 1 in every sample, [s, b]; one tensor for all microbatches."""
        positions = torch.arange(self.seq_length, device=self.context.device)
        return positions.unsqueeze(1).expand(-1, self.micro_batch_size)


def reads_samples(context: ParallelContext, stage_of_chunk: Sequence[int], rules: DocumentRules) -> bool:
    """Whether this rank takes tokens (for the first chunk), labels (for the last) or the places of documents (for any)."""
    return rules.every_stage_reads or context.group("pp").index in (stage_of_chunk[0], stage_of_chunk[-1])
