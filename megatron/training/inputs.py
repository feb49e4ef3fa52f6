"""Training and evaluation data of this rank: the datasets, and the microbatches of each step as inputs of the model.

Only the pipeline stages that need samples read them.

Shapes: `b` microbatch size, `s` sequence length.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config.config import Config
from megatron.config.data import DataConfig, has_split_datasets, parse_split, read_split_blends
from megatron.config.imports import import_object
from megatron.config.model import ModelConfig
from megatron.data.history import Phase, continue_phases, describe_phases, skip_samples
from megatron.data.loader import StepLoader
from megatron.data.samples import DocumentRules, Microbatch, SampleSource
from megatron.data.splits import Datasets, DataSplit, open_datasets
from megatron.data.tokenizer import build_tokenizer, compute_embedding_rows
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.random import DropoutKey
from megatron.parallel.sequence_split import SequenceSplit, compute_token_costs, split_balanced
from megatron.spec.counts import compute_window_shares
from megatron.spec.schedules import assign_chunks
from megatron.training.failure import run_on_all_ranks
from megatron.training.progress import BatchSizePlan, Progress

if TYPE_CHECKING:
    from megatron.attention.documents import Documents


@dataclass(frozen=True)
class SequenceSplitter:
    """Splitter of microbatches over the context-parallel ranks: it selects the tokens that this rank processes. Splitting is the
    last step of data processing on the host."""

    group: Group
    """Process group of the context-parallel ranks."""
    seq_length: int
    """Tokens per sample."""
    window_shares: Mapping[int | None, float]
    """Fraction of a sample's attention computation for each window size of the layers, from `compute_window_shares`. The key
    None stands for layers without a window. From the fractions follows the cost of each token, by which the split is balanced."""
    mtp_depths: int
    """Number of multi-token-prediction layers. Layer k (from 1) needs the labels and the loss mask k positions further on,
    which can be on another rank."""

    @functools.cached_property
    def sample_split(self) -> SequenceSplit:
        """Assignment of token positions to context-parallel ranks, for a sample that is a single document."""
        return split_balanced(compute_token_costs(self.seq_length, self.window_shares), self.group.size)

    def split(self, microbatch: Microbatch) -> tuple[SequenceSplit | None, dict[str, NDArray[Any]]]:
        """Select this rank's part of a microbatch.

        Returns:
            the assignment of token positions to context-parallel ranks (None for one rank), and this rank's arrays by the names of
            the fields of `Microbatch`. With several ranks there are also `labels ahead k` and `mask ahead k` for each
            multi-token-prediction layer k.
        """
        arrays = {name: array for name, array in vars(microbatch).items() if isinstance(array, np.ndarray)}
        if self.group.size == 1:
            return None, arrays
        sequence_split = self.sample_split
        if microbatch.cu_seqlens is not None:
            sequence_split = split_balanced(
                compute_token_costs(self.seq_length, self.window_shares, microbatch.cu_seqlens), self.group.size
            )
        positions = sequence_split.get_positions(self.group.rank)
        for k in range(1, self.mtp_depths + 1):
            arrays[f"labels ahead {k}"] = np.pad(microbatch.labels[:, k:], ((0, 0), (0, k)))
            arrays[f"mask ahead {k}"] = np.pad(microbatch.loss_mask[:, k:], ((0, 0), (0, k)))
        if microbatch.positions is None and sequence_split.segments != self.sample_split.segments:
            arrays["positions"] = np.broadcast_to(positions, (len(microbatch.tokens), len(positions)))
        return sequence_split, {
            name: values[:, positions] if values.shape == microbatch.tokens.shape else values for name, values in arrays.items()
        }


class HostInputs(NamedTuple):
    """Inputs of the model for one microbatch: the microbatch, and this rank's part of it as tensors in host memory. The tensors
    have the shape [sequence length / context-parallel size, microbatch size]. The data loader's threads build them."""

    microbatch: Microbatch
    host_tensors: dict[str, torch.Tensor]
    """Tensors by the names of the fields of `Microbatch`. A field that is None has no tensor."""

    sequence_split: SequenceSplit | None = None
    """Assignment of token positions to context-parallel ranks; None for one context-parallel rank."""

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device, splitter: SequenceSplitter) -> HostInputs:
        """Build the inputs from a microbatch, by copying this rank's arrays into tensors. For CUDA the tensors are in pinned
        memory, so that the copy to the device is asynchronous."""
        sequence_split, arrays = splitter.split(microbatch)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array.T)) for name, array in arrays.items()}
        return cls(
            microbatch, {name: t.pin_memory() for name, t in tensors.items()} if device.type == "cuda" else tensors, sequence_split
        )


@dataclass(frozen=True)
class BatchBuilder:
    """Builder of the model inputs of each step on one rank.

    Args:
        seed: seed of dropout.
        seq_length: tokens per sample.
        micro_batch_size: samples per microbatch.
        document_rules: whether positions restart, attention stops and the loss is masked at the end of a document.
        window_shares: fraction of a sample's attention computation for each window size of the layers, to balance the split of
            samples over the context-parallel ranks. The key None stands for layers without a window.
        mtp_depths: number of multi-token-prediction layers.
    """

    context: ParallelContext
    seed: int
    seq_length: int
    micro_batch_size: int
    document_rules: DocumentRules
    window_shares: Mapping[int | None, float] = field(default_factory=lambda: {None: 1.0})
    mtp_depths: int = 0

    @classmethod
    def for_model(
        cls, model: ModelConfig, context: ParallelContext, seed: int, micro_batch_size: int, document_rules: DocumentRules
    ) -> BatchBuilder:
        """Build a batch builder with the sequence length, attention windows and multi-token-prediction layers of a model."""
        return cls(
            context, seed, model.seq_length, micro_batch_size, document_rules, compute_window_shares(model), model.mtp_num_layers
        )

    def iter_batches(
        self,
        source: SampleSource | None,
        *,
        global_batch_size_at: Callable[[int], int],
        consumed_samples: int,
        total_samples: int,
        num_workers: int,
        has_dropout: bool = True,
    ) -> Iterator[list[ModelInputs]]:
        """Yield the batches of the training steps, each as the list of this rank's microbatches. The first step starts after
        `consumed_samples` samples.

        Args:
            source: source of the samples; None on a rank that does not read data.
            global_batch_size_at: function that returns the global batch size of the step that starts after the given number of
                samples.
            consumed_samples: samples of all earlier steps, over all data-parallel ranks.
            total_samples: number of consumed samples after which no further batch is yielded.
            num_workers: number of threads that read ahead.
            has_dropout: add to the inputs the random keys that determine dropout masks, as training needs them.
        """
        consumed = consumed_samples
        rank, size = self.context.data_group.rank, self.context.data_group.size

        def dropout_key(sample: int) -> DropoutKey | None:
            if not has_dropout:
                return None
            return DropoutKey(self.seed, consumed, sample, context_rank=self.splitter.group.rank)

        if source is None:
            assert not self.document_rules.needed_by_all_stages, "layers need to know where documents end"
            while consumed < total_samples:
                batch_size = global_batch_size_at(consumed)
                start_samples = range(consumed + rank * self.micro_batch_size, consumed + batch_size, size * self.micro_batch_size)
                yield [
                    ModelInputs(self._positions, dropout_key=dropout_key(start_sample), documents=self._unpacked_documents)
                    for start_sample in start_samples
                ]
                consumed += batch_size
            return
        loader = StepLoader(
            source,
            self.document_rules,
            functools.partial(HostInputs.of, device=self.context.device, splitter=self.splitter),
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
                inputs = [self._build_model_inputs(host, dropout_key(host.microbatch.first_sample)) for host in step]
                loader.prefetch()
                yield inputs
                consumed = loader.consumed_samples
        finally:
            loader.close()

    def iter_evaluation_batches(
        self, source: SampleSource | None, *, global_batch_size: int, num_batches: int, num_workers: int = 0
    ) -> Iterator[list[ModelInputs]]:
        """Yield the batches of an evaluation, each as the list of this rank's microbatches, without dropout. Every evaluation reads
        the same samples, the first ones of the split.

        Args:
            source: source of the samples; None on a rank that does not read data.
            global_batch_size: number of sequences of a batch, over all data-parallel ranks.
            num_batches: number of global batches.
            num_workers: number of threads that read ahead; 0 to read in the calling thread.
        """
        return self.iter_batches(
            source,
            global_batch_size_at=lambda _: global_batch_size,
            consumed_samples=0,
            total_samples=global_batch_size * num_batches,
            num_workers=num_workers,
            has_dropout=False,
        )

    def build_inputs(self, microbatch: Microbatch) -> ModelInputs:
        """Build this rank's model inputs of one microbatch, without dropout."""
        return self._build_model_inputs(HostInputs.of(microbatch, self.context.device, self.splitter), None)

    def _build_model_inputs(self, host: HostInputs, key: DropoutKey | None) -> ModelInputs:
        tensors = {name: self._on_device(tensor) for name, tensor in host.host_tensors.items()}
        cu_seqlens = host.microbatch.cu_seqlens
        return ModelInputs(
            tensors.get("positions", self._positions),
            tensors["tokens"],
            tensors["labels"],
            tensors["loss_mask"],
            key,
            self._unpacked_documents
            if cu_seqlens is None
            else import_object("megatron.attention.documents:Documents")(
                cu_seqlens, tensors["cu_seqlens"], self.micro_batch_size, host.sequence_split, host.microbatch.data_lengths
            ),
            mtp_targets=[
                (tensors[f"labels ahead {k + 1}"], tensors[f"mask ahead {k + 1}"])
                for k in range(self.mtp_depths)
                if host.sequence_split
            ],
        )

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # On the CPU skip the call: even a no-op `to` lets a loader thread take Python's global lock.
        return tensor if self.context.device.type == "cpu" else tensor.to(self.context.device, non_blocking=True)

    @functools.cached_property
    def splitter(self) -> SequenceSplitter:
        """Object that selects this context-parallel rank's tokens of each microbatch."""
        return SequenceSplitter(self.context.context_group, self.seq_length, self.window_shares, self.mtp_depths)

    @functools.cached_property
    def _positions(self) -> torch.Tensor:
        """Positions of this rank's tokens in the sample, used if positions do not restart at each document: [sequence length /
        context-parallel size, microbatch size]. All microbatches share this tensor."""
        if self.splitter.group.size == 1:
            positions = torch.arange(self.seq_length, device=self.context.device)
        else:
            positions = torch.from_numpy(self.splitter.sample_split.get_positions(self.splitter.group.rank)).to(self.context.device)
        return positions.unsqueeze(1).expand(-1, self.micro_batch_size)

    @functools.cached_property
    def _unpacked_documents(self) -> Documents | None:
        """Document boundaries of a microbatch in which each sample is one document. With several context-parallel ranks, they tell
        attention how the samples are split. None for one context-parallel rank, because attention then needs no boundaries."""
        if self.splitter.group.size == 1:
            return None
        documents: Documents = import_object("megatron.attention.documents:build_unpacked_documents")(
            self.seq_length, self.micro_batch_size, self.splitter.sample_split, self.context.device
        )
        return documents


def needs_samples(context: ParallelContext, stage_of_chunk: Sequence[int], document_rules: DocumentRules) -> bool:
    """Return whether this rank must read samples. The first model chunk needs tokens, and the last needs labels. If positions or
    attention restart at each document, every chunk needs the document boundaries.

    Args:
        stage_of_chunk: pipeline stage of each model chunk, for the chunks of the full model.
        document_rules: whether positions restart, attention stops and the loss is masked at the end of a document.
    """
    return document_rules.needed_by_all_stages or context.group("pp").rank in (stage_of_chunk[0], stage_of_chunk[-1])


Batches = Iterator[list[ModelInputs]]
BatchesBySet = Mapping[str, Callable[[], Batches]]
"""Functions that create an iterator over the batches of a validation or test set, by the name of the set ("" without a name)."""


class Sources(NamedTuple):
    """Sources of the samples of the training split, and of the sets of validation and test by name. There are none on a rank whose
    stage does not read samples."""

    train: SampleSource | None = None
    valid: Mapping[str, SampleSource] = MappingProxyType({})
    test: Mapping[str, SampleSource] = MappingProxyType({})


@dataclass(frozen=True)
class Corpus:
    """Properties of the training data that the warnings about suspicious losses use."""

    num_tokens: int | None
    """Number of tokens in one epoch; None for mock data, or if the number is unknown."""
    has_sequential_split: bool
    """Whether training and validation documents come from the same files (--split). The first documents of each file are then
    the training documents."""


@dataclass(frozen=True)
class RunData:
    """Tokenizer and datasets of a run on this rank. They are the same at every point of the run; `create_batches` creates the
    batches that follow a given point."""

    config: Config
    vocab_size: int
    batch_builder: BatchBuilder
    datasets: Datasets | None
    """Datasets; None on a rank whose stage reads no samples."""
    validation_sets: tuple[str, ...] = ()
    """Names of the validation sets, the same on every rank. A single set without a name is ""."""
    has_test: bool = False
    tokenizer_notes: Sequence[str] = ()
    """Lines for the start-up log about ids of the tokenizer."""
    tokenizer_warnings: Sequence[str] = ()
    """Warnings, on the first rank, about datasets that were not written with the tokenizer of the run."""

    @property
    def corpus(self) -> Corpus:
        """Properties of the training data, as far as this rank knows them. A rank without datasets does not know the number of
        tokens."""
        components = self.datasets.train.components if self.datasets is not None else ()
        tokens = sum(component.dataset.count_tokens(component.documents) for component in components)
        return Corpus(tokens or None, bool(components) and not has_split_datasets(self.config.data))

    def create_batches(
        self, progress: Progress, plan: BatchSizePlan, context: ParallelContext, *, num_discarded: int = 0
    ) -> RunBatches:
        """Create the batches of the run from `progress` to its end. All ranks call this function together.

        Samples that are already consumed are not read again. `progress.phases`, the data settings of the run so far, is updated in
        place.

        Args:
            plan: batch sizes and length of the run.
            num_discarded: number of samples that the run skips after a loss spike. `progress.consumed_samples` already counts them,
                after the samples of the completed steps, but no step trains on them.

        Raises:
            SetupError: an index of the samples cannot be built.
        """

        training = self.config.training
        # Count evaluations as Megatron-LM does: its order of the validation samples depends on the number.
        num_evaluations = plan.total_iterations // training.eval_interval + 1 if training.eval_interval else 1
        samples_per_evaluation = training.eval_iters * plan.final_global_batch_size

        def open_sets(splits: Mapping[str, DataSplit], num_samples: int) -> dict[str, SampleSource]:
            if training.full_validation:
                complete_set = import_object("megatron_lab.data_tools.complete_sets:CompleteSet")
                return {name: complete_set(split) for name, split in splits.items()}
            return {name: split.build_source(num_samples, num_consumed=samples_per_evaluation) for name, split in splits.items()}

        def open_sources() -> Sources:
            if self.datasets is None:
                return Sources()
            valid = open_sets(self.datasets.valid, samples_per_evaluation * num_evaluations)
            test = open_sets(self.datasets.test, samples_per_evaluation)
            if training.skip_train:
                return Sources(None, valid, test)
            phase = self._build_phase(self.datasets, progress, plan)
            first_sample = progress.consumed_samples - num_discarded
            progress.phases = continue_phases(progress.phases, replace(phase, first_sample=first_sample))
            if num_discarded:
                progress.phases = skip_samples(progress.phases, progress.iteration, first_sample, num_discarded)
            return Sources(self.datasets.train.build_source(plan.total_samples, progress.phases), valid, test)

        sources = run_on_all_ranks(context, open_sources)
        num_batches: dict[tuple[str, str], int] = {}
        if training.full_validation:
            count_batches = import_object("megatron_lab.data_tools.complete_sets:count_batches")
            num_batches = count_batches(context, sources.valid, sources.test, plan.final_global_batch_size)
        return RunBatches(self, plan, sources, num_batches)

    def _build_phase(self, datasets: Datasets, progress: Progress, plan: BatchSizePlan) -> Phase:
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
            parts=datasets.train.blend_entries(),
            blending=datasets.train.blending,
            num_samples=plan.total_samples if data.data_order == "megatron" else None,
        )


@dataclass(frozen=True)
class RunBatches:
    """Batches for training, validation and test on this rank, from the run's current progress to its end."""

    data: RunData
    plan: BatchSizePlan
    sources: Sources
    num_batches: Mapping[tuple[str, str], int]
    """Number of global batches in an evaluation of each set, by the name of its split and of the set, with --full-validation."""

    def iter_training_batches(self, consumed_samples: int) -> Batches:
        """Yield the batches of the training steps that follow after `consumed_samples` samples."""
        return self.data.batch_builder.iter_batches(
            self.sources.train,
            global_batch_size_at=self.plan.get_global_batch_size,
            consumed_samples=consumed_samples,
            total_samples=self.plan.total_samples,
            num_workers=self.data.config.data.num_workers,
        )

    @property
    def validation_batches(self) -> BatchesBySet:
        """Function that creates an iterator over the batches of a validation set, by the name of the set. Every call starts at the
        same first batch. Empty if the run has no evaluation."""
        return self._build_evaluations("validation", self.data.validation_sets, self.sources.valid)

    @property
    def test_batches(self) -> BatchesBySet:
        """Function that creates an iterator over the batches of the test split; empty if the data has no test split."""
        return self._build_evaluations("test", ("",) if self.data.has_test else (), self.sources.test)

    def describe(self, phases: Sequence[Phase]) -> list[str]:
        """Return lines for the start-up log about the training samples and the datasets, with warnings. Empty on a rank that does
        not read data.

        Args:
            phases: data settings of the run so far, one phase for each part of the run in which they did not change.
        """
        (train_source, valid, test), datasets, total = self.sources, self.data.datasets, self.plan.total_samples
        if datasets is None:
            return []
        lines = list(self.data.tokenizer_notes)
        if train_source is not None:
            lines += [f"the run takes {total:,} training samples", *describe_phases(phases), *train_source.describe(total)]
        num_samples, config = self.data.config.training.eval_iters * self.plan.final_global_batch_size, self.data.config.data
        for name, source in (*valid.items(), *test.items()):
            lines += [f"{name and f'set {name}: '}{line}" for line in source.describe(num_samples)]
        if config.multiple_validation_sets:
            lines += import_object("megatron_lab.data_tools.validation_sets:list_set_notes")(config)
        splits = (datasets.train, *datasets.valid.values(), *datasets.test.values())
        warnings = [text for split in splits for text in split.find_warnings(self.data.batch_builder.document_rules)]
        return lines + list(dict.fromkeys(f"WARNING: {text}" for text in (*warnings, *self.data.tokenizer_warnings)))

    def _build_evaluations(self, split: str, names: Sequence[str], sources: Mapping[str, SampleSource]) -> BatchesBySet:
        config = self.data.config
        return {
            name: functools.partial(
                self.data.batch_builder.iter_evaluation_batches,
                sources.get(name),
                global_batch_size=self.plan.final_global_batch_size,
                num_batches=self.num_batches.get((split, name), config.training.eval_iters),
                num_workers=config.data.num_workers,
            )
            for name in names
        }


def open_data(config: Config, context: ParallelContext) -> RunData:
    """Open and check the tokenizer and the datasets on every rank that needs them. All ranks call this function together.

    Raises:
        SetupError: a file is missing or damaged on some rank.
    """
    training, data, parallel, seq_length = config.training, set_stream_folder(config), config.parallel, config.model.seq_length
    chunks = parallel.get_chunks_per_stage(config.model.num_layers)
    stage_of_chunk = assign_chunks(parallel.schedule, parallel.pipeline_model_parallel_size, chunks)

    def build() -> RunData:
        tokenizer = build_tokenizer(data)
        document_rules = DocumentRules(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        needs_validation = training.eval_iters > 0
        _, blends = read_split_blends(data)
        has_own_test = has_split_datasets(data) or data.hf_dataset is not None
        has_test_data = any(blends[2].values()) if has_own_test else parse_split(data.split)[2] > 0
        needs_test = needs_validation and not data.mock_data and has_test_data
        datasets = None
        if needs_samples(context, stage_of_chunk, document_rules):
            datasets = open_datasets(
                data,
                seed=training.seed,
                seq_length=seq_length,
                tokenizer=tokenizer,
                need_validation=needs_validation,
                need_test=needs_test,
                need_training=not training.skip_train,
            )
        maker = BatchBuilder.for_model(config.model, context, training.seed, training.micro_batch_size, document_rules)
        validation_sets = tuple(blends[1] or {"": ()}) if needs_validation else ()
        notes = (*tokenizer.notes, *(tokenizer.text_notes if data.hf_dataset is not None else ()))
        warnings = []
        if context.rank == 0 and not data.mock_data:
            warnings = import_object("megatron_lab.data_tools.tokenizer_checks:check_run_datasets")(data, datasets, tokenizer)
        num_rows = compute_embedding_rows(tokenizer, data)
        return RunData(config, num_rows, maker, datasets, validation_sets, needs_test, notes, warnings)

    return run_on_all_ranks(context, build)


def set_stream_folder(config: Config) -> DataConfig:
    """Return the data settings. With --hf-dataset, the folder for positions is the folder `stream` in --save, unless it is set."""
    data, save = config.data, config.checkpoint.save
    if data.hf_dataset is None or data.data_cache_path is not None or save is None:
        return data
    return replace(data, data_cache_path=os.path.join(save, "stream"))
