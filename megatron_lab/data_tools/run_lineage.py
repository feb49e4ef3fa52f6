"""Lineage of a run's training data: which documents each training step reads, according to the run's checkpoint or run.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from megatron.checkpoint.save_folder import find_checkpoint, list_checkpoints, read_config, read_state
from megatron.checkpoint.storage import CONFIG
from megatron.checkpoint.storage_url import open_storage
from megatron.config.config import Config
from megatron.config.regular_file import parse_json, read_text
from megatron.config.save import check_json_type, from_dict
from megatron.config.training import TrainingConfig
from megatron.data.datasets import WHOLE_DOCUMENTS_SUFFIX, Component, SplitData
from megatron.data.history import Phase
from megatron.data.indexed_dataset import DatasetError, IndexedDataset, fingerprint
from megatron.data.samples import DocumentSpan, SampleSource
from megatron.data.splits import open_datasets
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.inputs import set_stream_folder
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.resume import check_state


@dataclass
class RunLineage:
    """Order in which a run reads its training data, and the documents that each of its samples contains.

    Args:
        config: settings of the run at its last start.
        phases: data settings since the beginning of the run. A phase is a range of training steps in which the data settings
            (datasets, sequence length, batch size and so on) do not change. The last phase also applies to all samples that the run
            has not read yet.
        tokenizer: tokenizer of the run.
        origin: file or checkpoint from which the settings were read, for messages.
    """

    config: Config
    phases: list[Phase]
    tokenizer: Tokenizer
    origin: Path | str

    @classmethod
    def from_save_folder(cls, folder: Path, ckpt_step: int | Literal["best"] | None = None) -> RunLineage:
        """Read the data settings of a run from its --save folder.

        They come from the newest checkpoint, or from the checkpoint of iteration `ckpt_step`. Before the first checkpoint, they
        come from run.json.

        Raises:
            ValueError: the folder has neither a checkpoint nor run.json, or the data is missing.
        """
        if not list_checkpoints(folder) and ckpt_step is None:
            file = folder / "run.json"
            config = from_dict(_read_run_record(file)["config"], str(file))
            try:
                tokenizer = build_tokenizer(config.data)
            except ValueError as error:
                raise ValueError(f"the settings in {file} cannot be used: {error}") from error
            return cls(config, [_build_first_phase(config, tokenizer)], tokenizer, file)
        path = find_checkpoint(folder, ckpt_step)
        assert path is not None, "the folder has a checkpoint"
        config = from_dict(read_config(path).get("config", {}), open_storage(path).get_location(CONFIG))
        state = read_state(path)
        check_state(path, state)
        phases = Progress.from_json(state["progress"]).phases if "progress" in state else []
        tokenizer = build_tokenizer(config.data)
        return cls(config, phases or [_build_first_phase(config, tokenizer)], tokenizer, path)

    def get_step_samples(self, step: int) -> range:
        """Return the indices of the samples that a training step reads. Index 0 is the first sample of the run.

        Args:
            step: number of the step, counted from 1 as in the log.

        Raises:
            ValueError: the run has no such step.
        """
        if step < 1:
            raise ValueError(f"--step {step}: the steps of a run are counted from 1. Choose a step of at least 1.")
        phase = next(phase for phase in reversed(self.phases) if phase.first_iteration < step)
        plan = _build_batch_size_plan(self.config.training, phase)
        if (last := plan.total_iterations) < step and phase is self.phases[-1]:
            raise ValueError(f"--step {step}: the run has {last:,} steps ({self.origin}). Choose a step from 1 to {last:,}.")
        return range(plan.count_consumed_samples(step - 1), plan.count_consumed_samples(step))

    def count_samples(self) -> int:
        """Return the number of samples that the run will have read at its end, if its settings do not change any more."""
        plan = _build_batch_size_plan(self.config.training, self.phases[-1])
        return plan.count_consumed_samples(plan.total_iterations)

    def find_phase(self, sample_index: int) -> int:
        """Return the index in `phases` of the data settings with which the run reads a sample.

        Args:
            sample_index: index of the sample, counted from the beginning of the run.

        Raises:
            ValueError: the run does not read the sample.
        """
        if not 0 <= sample_index < self.count_samples():
            raise ValueError(
                f"--sample {sample_index}: the run reads samples 0 to {self.count_samples() - 1:,} ({self.origin}). Choose a "
                "sample in this range."
            )
        return max(i for i, phase in enumerate(self.phases) if phase.first_sample <= sample_index)

    def is_skipped(self, sample_index: int) -> bool:
        """Return whether the run skipped a sample after a loss spike. After the spike, the run has gone back to a checkpoint and
        continued after the skipped data."""
        return any(phase.first_sample - phase.passed_over <= sample_index < phase.first_sample for phase in self.phases)

    def build_source(self, phase_index: int) -> SampleSource:
        """Build the object that reads the samples of one phase (a range of steps with the same data settings).

        Args:
            phase_index: index in `phases`.

        Returns:
            Source of samples. Its sample indices count from the beginning of the run, not of the phase.

        Raises:
            DatasetError: a dataset is missing or is not the dataset that the run read.
        """
        phase = self.phases[phase_index]
        if any(not entry.num_documents for entry in phase.parts):
            return self._build_streamed_source(phase_index)
        components = tuple(
            _open_component(entry.prefix, entry.fingerprint, entry.first_document, entry.num_documents, entry.weight)
            for entry in phase.parts
        )
        split_data = SplitData(
            split=0,
            config=dataclasses.replace(
                self.config.data,
                data_order=phase.order,
                whole_documents=any(entry.fingerprint.endswith(WHOLE_DOCUMENTS_SUFFIX) for entry in phase.parts),
            ),
            seed=phase.seed,
            seq_length=phase.seq_length,
            vocab_size=self.tokenizer.vocab_size,
            eod=self.tokenizer.eod,
            components=components,
            blending=phase.blending,
        )
        return split_data.build_source(phase.num_samples or 1, self.phases[: phase_index + 1])

    def _build_streamed_source(self, phase_index: int) -> SampleSource:
        """Build the object that reads the samples of a phase in which the run read a Hugging Face dataset (--hf-dataset).

        Raises:
            DatasetError: the settings name no such dataset, or it has changed.
        """
        phase = self.phases[phase_index]
        (entry,) = phase.parts
        data = open_datasets(
            set_stream_folder(self.config),
            seed=phase.seed,
            seq_length=phase.seq_length,
            tokenizer=self.tokenizer,
            need_validation=False,
            need_test=False,
        ).train
        if data.blend_entries()[0].fingerprint != entry.fingerprint:
            raise DatasetError(
                f"{entry.prefix} is not the dataset that the run read, or one of --hf-text-column, --hf-shuffle-buffer, "
                "--hf-valid-documents or the tokenizer has changed since.\n"
                "  Restore the run's dataset. Of a run that changed its data, only the last data can be shown."
            )
        return data.build_source(1, self.phases[: phase_index + 1])

    def iter_samples(self, sample_indices: range) -> Iterator[tuple[int, list[DocumentSpan], list[int]]]:
        """Read samples of the run with the documents that they come from.

        Args:
            sample_indices: indices of the samples, counted from the beginning of the run.

        Yields:
            The sample's index, the ranges of tokens of documents that it contains, and its token ids.
        """
        sources: dict[int, SampleSource] = {}
        for sample_index in sample_indices:
            phase_index = self.find_phase(sample_index)
            source = sources.get(phase_index) or sources.setdefault(phase_index, self.build_source(phase_index))
            yield sample_index, source.get_lineage(sample_index), source.get_samples(sample_index, 1)[0].tolist()


def _open_component(prefix: str, expected: str, first_document: int, num_documents: int, weight: float) -> Component:
    dataset = IndexedDataset(prefix)
    expected = expected.removesuffix(WHOLE_DOCUMENTS_SUFFIX)
    if (actual := fingerprint(dataset)) != expected:
        raise DatasetError(
            f"{prefix} is not the dataset that the run read: its fingerprint is {actual}, not {expected}.\n"
            "  Restore the run's dataset at this path."
        )
    return Component(dataset, range(first_document, first_document + num_documents), weight)


def _build_batch_size_plan(training: TrainingConfig, phase: Phase) -> BatchSizePlan:
    # Only batch sizes matter here, not their split into microbatches: micro_batch_size and data-parallel size are 1.
    plan_config = dataclasses.replace(
        training,
        micro_batch_size=1,
        global_batch_size=phase.global_batch_size,
        rampup_batch_size=phase.rampup_batch_size,
        step_batch_size_schedule=phase.step_batch_size_schedule,
    )
    return BatchSizePlan(plan_config, 1, phase.seq_length, iteration=phase.first_iteration, consumed_samples=phase.first_sample)


def _build_first_phase(config: Config, tokenizer: Tokenizer) -> Phase:
    """Return the data settings of a run that has stored no phase (range of steps with the same data settings) yet, as one phase
    that covers all samples of the run."""
    training = config.training
    seq_length, order = config.model.seq_length, config.data.data_order
    datasets = open_datasets(
        config.data, seed=training.seed, seq_length=seq_length, tokenizer=tokenizer, need_validation=False, need_test=False
    )
    global_batch_size = training.global_batch_size
    if global_batch_size is None:
        raise ValueError("the settings in run.json have no global batch size. Copy the file again, or inspect a checkpoint.")
    phase = Phase(
        0,
        0,
        order,
        training.seed,
        seq_length,
        global_batch_size,
        training.rampup_batch_size,
        datasets.train.blend_entries(),
        datasets.train.blending,
        step_batch_size_schedule=training.step_batch_size_schedule,
    )
    return dataclasses.replace(
        phase, num_samples=_build_batch_size_plan(training, phase).total_samples if order == "megatron" else None
    )


class _RunRecord(TypedDict):
    """Entry of `run.json` that is read here."""

    config: dict[str, dict]


def _read_run_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(read_text(path))
        check_json_type(record, _RunRecord, "", is_open=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--run {path.parent} contains neither a checkpoint nor a readable run.json ({error}).\n"
            "  Set --run to the --save folder of a run."
        ) from error
    return record
