"""The data of a run on this rank: the datasets, and the microbatches of a step as the model takes them.

Only the stages that need samples read them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config.config import Config
from megatron.config.data import DataConfig, has_own_splits, parse_split, split_words
from megatron.config.imports import named
from megatron.config.model import ModelConfig
from megatron.data.history import Phase, describe_phases, go_on, pass_over
from megatron.data.loader import StepLoader
from megatron.data.samples import DocumentRules, Microbatch, SampleSource
from megatron.data.splits import Datasets, open_datasets
from megatron.data.tokenizer import build_tokenizer, embedding_rows
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.cut import Cut, balanced, token_costs
from megatron.parallel.random import DropoutKey
from megatron.spec.counts import attention_shares
from megatron.spec.schedules import placement
from megatron.training.failure import together
from megatron.training.progress import BatchSizePlan, Progress

if TYPE_CHECKING:
    from megatron.attention.documents import Documents


@dataclass(frozen=True)
class Cutting:
    """How samples are divided among context ranks. It is the last thing that is done to them on the host."""

    group: Group
    """The context ranks."""
    length: int
    """Tokens of a sample."""
    shares: Mapping[int | None, float]
    """Part of each window in the attention of a sample (`attention_shares`): what pieces are weighed by."""
    depths: int
    """Depths of multi-token prediction, which need what lies as many places further on."""

    @functools.cached_property
    def of_samples(self) -> Cut:
        """The cut where each sample is one document."""
        return balanced(token_costs(self.length, self.shares), self.group.size)

    def own(self, microbatch: Microbatch) -> tuple[Cut | None, dict[str, NDArray[Any]]]:
        """The cut of a microbatch, and what this rank holds of its arrays, by the names of its fields."""
        arrays = {name: array for name, array in vars(microbatch).items() if isinstance(array, np.ndarray)}
        if self.group.size == 1:
            return None, arrays
        cut = self.of_samples
        if microbatch.bounds is not None:
            cut = balanced(token_costs(self.length, self.shares, microbatch.bounds), self.group.size)
        places = cut.places(self.group.index)
        for k in range(1, self.depths + 1):
            arrays[f"labels ahead {k}"] = np.pad(microbatch.labels[:, k:], ((0, 0), (0, k)))
            arrays[f"mask ahead {k}"] = np.pad(microbatch.loss_mask[:, k:], ((0, 0), (0, k)))
        if microbatch.positions is None and cut.pieces != self.of_samples.pieces:
            arrays["positions"] = np.broadcast_to(places, (len(microbatch.tokens), len(places)))
        return cut, {name: each[:, places] if each.shape == microbatch.tokens.shape else each for name, each in arrays.items()}


class HostInputs(NamedTuple):
    """A microbatch, and what this rank holds of its arrays as tensors in host memory ([s / context ranks, b]), ready to go to the
    device. The reading thread makes them."""

    microbatch: Microbatch
    tensors: dict[str, torch.Tensor]
    """By the names of its fields, those that it has."""

    cut: Cut | None = None
    """Which context ranks hold which tokens; None where there is one context rank."""

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device, cutting: Cutting) -> HostInputs:
        """Copy this rank's part of the arrays; for CUDA into pinned memory, from which the device fetches them while the host goes
        on."""
        cut, arrays = cutting.own(microbatch)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array.T)) for name, array in arrays.items()}
        return cls(microbatch, {name: t.pin_memory() for name, t in tensors.items()} if device.type == "cuda" else tensors, cut)


@dataclass(frozen=True)
class BatchMaker:
    """Makes the inputs of whole steps for one rank.

    Args:
        seed: seed of dropout.
        seq_length: tokens in a sample.
        micro_batch_size: samples in a microbatch.
        rules: the meaning of the end of a document.
        attention_shares: part of each window in the attention of a sample, by which context ranks share it evenly.
        depths: those of multi-token prediction.
    """

    context: ParallelContext
    seed: int
    seq_length: int
    micro_batch_size: int
    rules: DocumentRules
    attention_shares: Mapping[int | None, float] = field(default_factory=lambda: {None: 1.0})
    depths: int = 0

    @classmethod
    def for_model(
        cls, model: ModelConfig, context: ParallelContext, seed: int, micro_batch_size: int, rules: DocumentRules
    ) -> BatchMaker:
        """Make the inputs that a model takes."""
        return cls(context, seed, model.seq_length, micro_batch_size, rules, attention_shares(model), model.mtp_num_layers)

    def steps(
        self,
        source: SampleSource | None,
        *,
        global_batch_size_at: Callable[[int], int],
        consumed_samples: int,
        total_samples: int,
        num_workers: int,
        dropout: bool = True,
    ) -> Iterator[list[ModelInputs]]:
        """The steps from `consumed_samples` on.

        Args:
            source: the samples; None on a rank that reads none.
            num_workers: threads that read ahead.
            dropout: whether they get the keys of dropout, as in training.
        """
        consumed = consumed_samples
        rank, size = self.context.data_group.index, self.context.data_group.size

        def key(first_sample: int) -> DropoutKey | None:
            if not dropout:
                return None
            return DropoutKey(self.seed, consumed, first_sample, context_rank=self.cutting.group.index)

        if source is None:
            assert not self.rules.every_stage_reads, "layers need to know where documents end"
            while consumed < total_samples:
                batch = global_batch_size_at(consumed)
                firsts = range(consumed + rank * self.micro_batch_size, consumed + batch, size * self.micro_batch_size)
                yield [ModelInputs(self._positions, dropout_key=key(first), documents=self._samples) for first in firsts]
                consumed += batch
            return
        loader = StepLoader(
            source,
            self.rules,
            functools.partial(HostInputs.of, device=self.context.device, cutting=self.cutting),
            micro_batch_size=self.micro_batch_size,
            data_rank=rank,
            data_size=size,
            global_batch_size_at=global_batch_size_at,
            consumed_samples=consumed,
            total_samples=total_samples,
            num_workers=num_workers,
        )
        try:
            for step in loader:
                inputs = [self._inputs(host, key(host.microbatch.first_sample)) for host in step]
                loader.read_ahead()
                yield inputs
                consumed = loader.consumed_samples
        finally:
            loader.close()

    def evaluation(
        self, source: SampleSource | None, *, global_batch_size: int, num_batches: int, num_workers: int = 0
    ) -> Iterator[list[ModelInputs]]:
        """Steps over the first samples of a split, always the same, without dropout."""
        return self.steps(
            source,
            global_batch_size_at=lambda _: global_batch_size,
            consumed_samples=0,
            total_samples=global_batch_size * num_batches,
            num_workers=num_workers,
            dropout=False,
        )

    def inputs_of(self, microbatch: Microbatch) -> ModelInputs:
        """What this rank takes of one microbatch, without dropout."""
        return self._inputs(HostInputs.of(microbatch, self.context.device, self.cutting), None)

    def _inputs(self, host: HostInputs, key: DropoutKey | None) -> ModelInputs:
        tensors = {name: self._on_device(tensor) for name, tensor in host.tensors.items()}
        bounds = host.microbatch.bounds
        return ModelInputs(
            tensors.get("positions", self._positions),
            tensors["tokens"],
            tensors["labels"],
            tensors["loss_mask"],
            key,
            self._samples
            if bounds is None
            else named("megatron.attention.documents:Documents")(bounds, tensors["bounds"], self.micro_batch_size, host.cut),
            ahead=[(tensors[f"labels ahead {k + 1}"], tensors[f"mask ahead {k + 1}"]) for k in range(self.depths) if host.cut],
        )

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Even a call that does nothing lets a reading thread take Python's lock.
        return tensor if self.context.device.type == "cpu" else tensor.to(self.context.device, non_blocking=True)

    @functools.cached_property
    def cutting(self) -> Cutting:
        """How samples are divided among the context ranks."""
        return Cutting(self.context.context_group, self.seq_length, self.attention_shares, self.depths)

    @functools.cached_property
    def _positions(self) -> torch.Tensor:
        """Positions of this rank's tokens in samples that count from 0 to s - 1, [s / context ranks, b]; one tensor for all
        microbatches."""
        if self.cutting.group.size == 1:
            positions = torch.arange(self.seq_length, device=self.context.device)
        else:
            positions = torch.from_numpy(self.cutting.of_samples.places(self.cutting.group.index)).to(self.context.device)
        return positions.unsqueeze(1).expand(-1, self.micro_batch_size)

    @functools.cached_property
    def _samples(self) -> Documents | None:
        """Whole samples, where attention needs to know which ranks hold which tokens of them."""
        if self.cutting.group.size == 1:
            return None
        found: Documents = named("megatron.attention.documents:samples")(
            self.seq_length, self.micro_batch_size, self.cutting.of_samples, self.context.device
        )
        return found


def reads_samples(context: ParallelContext, stage_of_chunk: Sequence[int], rules: DocumentRules) -> bool:
    """Whether this rank takes tokens (for the first chunk), labels (for the last) or the places of documents (for any)."""
    return rules.every_stage_reads or context.group("pp").index in (stage_of_chunk[0], stage_of_chunk[-1])


Batches = Iterator[list[ModelInputs]]


class Sources(NamedTuple):
    """The samples of each split, where the run and this rank's stage read any."""

    train: SampleSource | None = None
    valid: SampleSource | None = None
    test: SampleSource | None = None


@dataclass(frozen=True)
class Corpus:
    """Describes the training data, for warnings."""

    tokens: int | None
    """Number of tokens in one epoch; None for made-up data, and if the number is unknown."""
    split_in_order: bool
    """Whether training and validation are the first and later documents of the same files (--split)."""


@dataclass(frozen=True)
class RunData:
    """The data of a run on this rank, whatever its place in the run."""

    config: Config
    vocab_size: int
    maker: BatchMaker
    datasets: Datasets | None
    """The datasets; None on a rank whose stage reads no samples."""
    has_test: bool

    @property
    def corpus(self) -> Corpus:
        """The description of the training data, as far as this rank knows it."""
        parts = self.datasets.train.components if self.datasets is not None else ()
        tokens = sum(each.dataset.num_tokens(each.documents) for each in parts)
        return Corpus(tokens or None, bool(parts) and not has_own_splits(self.config.data))

    def at(self, progress: Progress, plan: BatchSizePlan, context: ParallelContext, *, passed_over: int = 0) -> RunBatches:
        """The batches of the rest of the run. What was consumed before stays consumed; `progress.phases` is updated. All ranks call
        it together.

        Args:
            passed_over: how many of the samples that `progress` has consumed last belong to no step, after a loss spike.

        Raises:
            SetupError: an index cannot be made.
        """

        def make() -> Sources:
            if self.datasets is None:
                return Sources()
            now = self._phase(self.datasets, progress, plan)
            before = progress.consumed_samples - passed_over
            progress.phases = go_on(progress.phases, replace(now, first_sample=before))
            if passed_over:
                progress.phases = pass_over(progress.phases, progress.iteration, before, passed_over)
            valid, test = self.datasets.valid, self.datasets.test
            evaluation = self.config.training.eval_iters * plan.final_global_batch_size
            # As many evaluations as Megatron-LM counts; its order of the validation samples depends on it.
            interval = self.config.training.eval_interval
            evaluations = plan.total_iterations // interval + 1 if interval else 1
            return Sources(
                self.datasets.train.source(plan.total_samples, progress.phases),
                valid.source(evaluation * evaluations, num_read=evaluation) if valid else None,
                test.source(evaluation) if test else None,
            )

        return RunBatches(self, plan, together(context, make))

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
            step_batch_size_schedule=training.step_batch_size_schedule,
            parts=datasets.train.parts(),
            blending=datasets.train.blending,
            num_samples=plan.total_samples if data.data_order == "megatron" else None,
        )


@dataclass(frozen=True)
class RunBatches:
    """The batches of a run on this rank, from its place in the run on."""

    data: RunData
    plan: BatchSizePlan
    sources: Sources

    def training(self, consumed_samples: int) -> Batches:
        """Training steps from a number of consumed samples on."""
        return self.data.maker.steps(
            self.sources.train,
            global_batch_size_at=self.plan.global_batch_size,
            consumed_samples=consumed_samples,
            total_samples=self.plan.total_samples,
            num_workers=self.data.config.data.num_workers,
        )

    @property
    def validation(self) -> Callable[[], Batches] | None:
        """Evaluation batches, always the same; None if the run has no evaluation."""
        return functools.partial(self._held_out, self.sources.valid) if self.data.config.training.eval_iters else None

    @property
    def test(self) -> Callable[[], Batches] | None:
        """Batches of the test split; None if it has no share of the data."""
        return functools.partial(self._held_out, self.sources.test) if self.data.has_test else None

    def describe(self, phases: Sequence[Phase]) -> list[str]:
        """Lines of the start-up log (on a rank that reads data)."""
        train, datasets, total = self.sources.train, self.data.datasets, self.plan.total_samples
        if train is None or datasets is None:
            return []
        lines = [f"the run takes {total:,} training samples", *describe_phases(phases), *train.describe(total)]
        for source in (self.sources.valid, self.sources.test):
            lines += source.describe(self.data.config.training.eval_iters * self.plan.final_global_batch_size) if source else []
        warnings = [text for split in datasets if split is not None for text in split.warnings(self.data.maker.rules)]
        return lines + list(dict.fromkeys(f"WARNING: {text}" for text in warnings))

    def _held_out(self, source: SampleSource | None) -> Batches:
        config, batch = self.data.config, self.plan.final_global_batch_size
        count, num_workers = config.training.eval_iters, config.data.num_workers
        return self.data.maker.evaluation(source, global_batch_size=batch, num_batches=count, num_workers=num_workers)


def open_data(config: Config, context: ParallelContext) -> RunData:
    """Open and check tokenizer and datasets on every rank that needs them; all ranks call it together.

    Raises:
        SetupError: something is missing or damaged on some rank.
    """
    training, data, parallel, seq_length = config.training, config.data, config.parallel, config.model.seq_length
    chunks = parallel.chunks_per_stage(config.model.num_layers)
    stage_of_chunk = placement(parallel.schedule, parallel.pipeline_model_parallel_size, chunks)

    def build() -> RunData:
        tokenizer = build_tokenizer(data)
        rules = DocumentRules(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        evaluates = training.eval_iters > 0
        tests = evaluates and not data.mock_data and _has_test_data(data)
        datasets = None
        if reads_samples(context, stage_of_chunk, rules):
            datasets = open_datasets(
                data,
                seed=training.seed,
                seq_length=seq_length,
                tokenizer=tokenizer,
                need_validation=evaluates,
                need_test=tests,
            )
        maker = BatchMaker.for_model(config.model, context, training.seed, training.micro_batch_size, rules)
        return RunData(config, embedding_rows(tokenizer, data), maker, datasets, tests)

    return together(context, build)


def _has_test_data(data: DataConfig) -> bool:
    if has_own_splits(data):
        return bool(split_words(data)[1][2])
    return parse_split(data.split)[2] > 0
