"""The data of a run on this rank: the datasets, and the microbatches of a step as the model takes them.

Only the stages that need samples read them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config.config import Config
from megatron.config.data import has_own_splits, split_words
from megatron.data.datasets import Datasets, open_datasets
from megatron.data.history import Phase, describe_phases, go_on
from megatron.data.loader import StepLoader
from megatron.data.samples import DocumentRules, Microbatch, SampleSource, missing_ends
from megatron.data.split import parse_split
from megatron.data.tokenizers.tokenizer import build_tokenizer, embedding_rows
from megatron.model.document_attention import Documents
from megatron.model.gpt import ModelInputs
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import DropoutKey
from megatron.spec.schedules import placement
from megatron.training.failure import together
from megatron.training.progress import BatchSizePlan, Progress


@dataclass(frozen=True)
class HostInputs:
    """The arrays of a microbatch as tensors [s, b] in host memory, ready to go to the device. The reading thread makes them."""

    first_sample: int
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor | None
    bounds: NDArray[np.int32] | None
    bounds_tensor: torch.Tensor | None

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> HostInputs:
        """Copy the arrays; for CUDA into pinned memory, from which the device fetches them while the host goes on."""

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
        seed: seed of dropout.
        seq_length: tokens in a sample.
        micro_batch_size: samples in a microbatch.
        rules: the meaning of the end of a document.
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
        """Training steps from `consumed_samples` on, with dropout keys.

        Args:
            source: the samples; None on a rank that reads none.
            num_workers: threads that read ahead.
        """
        return self._steps(source, global_batch_size_at, consumed_samples, total_samples, num_workers, dropout=True)

    def evaluation(
        self, source: SampleSource | None, *, global_batch_size: int, num_batches: int, num_workers: int = 0
    ) -> Iterator[list[ModelInputs]]:
        """Steps over the first samples of a split, always the same, without dropout."""
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
        """Positions 0 to s - 1 of every sample, [s, b]; one tensor for all microbatches."""
        positions = torch.arange(self.seq_length, device=self.context.device)
        return positions.unsqueeze(1).expand(-1, self.micro_batch_size)


def reads_samples(context: ParallelContext, stage_of_chunk: Sequence[int], rules: DocumentRules) -> bool:
    """Whether this rank takes tokens (for the first chunk), labels (for the last) or the places of documents (for any)."""
    return rules.every_stage_reads or context.group("pp").index in (stage_of_chunk[0], stage_of_chunk[-1])


Batches = Iterator[list[ModelInputs]]


@dataclass(frozen=True)
class Sources:
    """The samples of each split that the run reads."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None


@dataclass(frozen=True)
class RunData:
    """The datasets that this rank reads, and how they become the inputs of a step."""

    vocab_size: int
    datasets: Datasets | None
    """The datasets; None on a rank whose stage reads no samples."""
    config: Config
    maker: BatchMaker
    has_validation: bool
    has_test: bool
    sources: Sources | None = None
    """Set by `at`, which knows the place in the run; None where nothing is read."""

    def at(self, progress: Progress, plan: BatchSizePlan, context: ParallelContext) -> RunData:
        """The data of the rest of the run. What was consumed before stays consumed; `progress.phases` is updated. All ranks call it
        together.

        Raises:
            SetupError: an index cannot be made.
        """

        def make() -> Sources | None:
            if self.datasets is None:
                return None
            progress.phases = go_on(progress.phases, self._phase(self.datasets, progress, plan))
            valid, test, evaluation = self.datasets.valid, self.datasets.test, self._evaluation_samples(plan)
            return Sources(
                self.datasets.train.source(plan.total_samples, progress.phases),
                valid.source(evaluation * self._num_evaluations(plan), num_read=evaluation) if valid else None,
                test.source(evaluation) if test else None,
            )

        return dataclasses.replace(self, sources=together(context, make))

    def training(self, plan: BatchSizePlan, consumed_samples: int) -> Batches:
        """Training steps from a number of consumed samples on."""
        return self.maker.training(
            self.sources.train if self.sources else None,
            global_batch_size_at=plan.global_batch_size,
            consumed_samples=consumed_samples,
            total_samples=plan.total_samples,
            num_workers=self.config.data.num_workers,
        )

    def validation(self, plan: BatchSizePlan) -> Callable[[], Batches] | None:
        """Evaluation batches, always the same; None if the run has no evaluation."""
        return self._held_out(self.sources.valid if self.sources else None, plan) if self.has_validation else None

    def test(self, plan: BatchSizePlan) -> Callable[[], Batches] | None:
        """Batches of the test split; None if it has no share of the data."""
        return self._held_out(self.sources.test if self.sources else None, plan) if self.has_test else None

    def describe(self, plan: BatchSizePlan, progress: Progress) -> list[str]:
        """Lines of the start-up log (on a rank that reads data)."""
        if self.sources is None:
            return []
        lines = [f"the run takes {plan.total_samples:,} training samples", *describe_phases(progress.phases)]
        lines += self.sources.train.describe(plan.total_samples)
        for source in (self.sources.valid, self.sources.test):
            lines += source.describe(self._evaluation_samples(plan)) if source else []
        return lines + self._warnings()

    def _warnings(self) -> list[str]:
        assert self.datasets is not None
        components = [each for data in self.datasets if data is not None for each in data.components]
        told = (missing_ends(each.dataset, each.documents, self.maker.rules) for each in components)
        return list(dict.fromkeys(f"WARNING: {text}" for text in told if text is not None))

    def _phase(self, datasets: Datasets, progress: Progress, plan: BatchSizePlan) -> Phase:
        training, data = self.config.training, self.config.data
        return Phase(
            first_iteration=progress.iteration,
            first_sample=progress.consumed_samples,
            order=data.data_order,
            seed=training.seed,
            seq_length=self.config.model.seq_length,
            global_batch_size=plan.final_global_batch_size,
            rampup_batch_size=training.rampup_batch_size,
            parts=datasets.train.parts(),
            blending=datasets.train.blending,
            num_samples=plan.total_samples if data.data_order == "megatron" else None,
        )

    def _held_out(self, source: SampleSource | None, plan: BatchSizePlan) -> Callable[[], Batches]:
        batch, count = plan.final_global_batch_size, self.config.training.eval_iters
        return lambda: self.maker.evaluation(
            source, global_batch_size=batch, num_batches=count, num_workers=self.config.data.num_workers
        )

    def _evaluation_samples(self, plan: BatchSizePlan) -> int:
        return self.config.training.eval_iters * plan.final_global_batch_size

    def _num_evaluations(self, plan: BatchSizePlan) -> int:
        """The number of evaluations as Megatron-LM counts them; its order of the validation samples depends on it."""
        interval = self.config.training.eval_interval
        return plan.total_iterations // interval + 1 if interval else 1


def open_data(config: Config, context: ParallelContext) -> RunData:
    """Open and check tokenizer and datasets on every rank that needs them; all ranks call it together.

    Raises:
        SetupError: something is missing or damaged on some rank.
    """
    training, data, evaluates = config.training, config.data, config.training.eval_iters > 0
    parallel = config.parallel
    chunks = parallel.chunks_per_stage(config.model.num_layers)
    stage_of_chunk = placement(parallel.schedule, parallel.pipeline_model_parallel_size, chunks)

    def build() -> tuple[int, DocumentRules, bool, Datasets | None]:
        tokenizer = build_tokenizer(data)
        rules = DocumentRules(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        tests = evaluates and not data.mock_data and _has_test_data(config)
        if not reads_samples(context, stage_of_chunk, rules):
            return embedding_rows(tokenizer, data), rules, tests, None
        datasets = open_datasets(
            data,
            seed=training.seed,
            seq_length=config.model.seq_length,
            tokenizer=tokenizer,
            need_validation=evaluates,
            need_test=tests,
        )
        return embedding_rows(tokenizer, data), rules, tests, datasets

    vocab_size, rules, tests, datasets = together(context, build)
    maker = BatchMaker(context, training.seed, config.model.seq_length, training.micro_batch_size, rules)
    return RunData(vocab_size, datasets, config, maker, evaluates, tests)


def _has_test_data(config: Config) -> bool:
    if has_own_splits(config.data):
        return bool(split_words(config.data)[1][2])
    return parse_split(config.data.split)[2] > 0
