"""Which documents a step of a run reads, from what the run has saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.save_folder import checkpoints, find_checkpoint, read_config, read_state
from megatron.config.config import Config
from megatron.config.save import from_dict
from megatron.config.training import TrainingConfig
from megatron.data.datasets import WHOLE, Component, SplitData
from megatron.data.history import Phase
from megatron.data.indexed_dataset import DatasetError, IndexedDataset, fingerprint
from megatron.data.samples import SamplePiece, SampleSource
from megatron.data.splits import open_datasets
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.progress import BatchSizePlan, Progress


@dataclass
class RunLineage:
    """The order in which a run reads its training data.

    Args:
        config: its settings at the last start.
        phases: its data settings since the beginning; the last ones hold for what it has not read yet.
        origin: the file that says so.
    """

    config: Config
    phases: list[Phase]
    tokenizer: Tokenizer
    origin: Path | str

    @classmethod
    def of(cls, folder: Path, ckpt_step: int | None = None) -> RunLineage:
        """From a run's --save folder: its newest checkpoint, or that of a step, or before the first one run.json.

        Raises:
            ValueError: there is neither, or the data is not where it was.
        """
        if not checkpoints(folder) and ckpt_step is None:
            record = _read_record(folder / "run.json")
            config = from_dict(record["config"])
            tokenizer = build_tokenizer(config.data)
            return cls(config, [_first_phase(config, tokenizer)], tokenizer, folder / "run.json")
        path = find_checkpoint(folder, ckpt_step)
        assert path is not None, "there is a checkpoint"
        config = from_dict(read_config(path)["config"])
        phases = Progress.from_json(read_state(path)["progress"]).phases
        tokenizer = build_tokenizer(config.data)
        return cls(config, phases or [_first_phase(config, tokenizer)], tokenizer, path)

    def step_samples(self, step: int) -> range:
        """Numbers of the samples of a step, counted from 1 as in the log.

        Raises:
            ValueError: there is no such step.
        """
        if step < 1:
            raise ValueError(f"--step {step}: steps are counted from 1.")
        phase = next(phase for phase in reversed(self.phases) if phase.first_iteration < step)
        plan = _plan(self.config.training, phase)
        if (last := plan.total_iterations) < step and phase is self.phases[-1]:
            raise ValueError(f"--step {step}: the run has {last:,} steps ({self.origin}).")
        return range(plan.samples_after(step - 1), plan.samples_after(step))

    def total_samples(self) -> int:
        """Samples of the whole run, if it goes on with its last settings."""
        plan = _plan(self.config.training, self.phases[-1])
        return plan.samples_after(plan.total_iterations)

    def phase_of(self, sample: int) -> int:
        """Index of the phase that reads a sample.

        Raises:
            ValueError: the run reads no such sample.
        """
        if not 0 <= sample < self.total_samples():
            raise ValueError(f"--sample {sample}: the run reads samples 0 to {self.total_samples() - 1:,} ({self.origin}).")
        return max(at for at, phase in enumerate(self.phases) if phase.first_sample <= sample)

    def passed_over(self, sample: int) -> bool:
        """Whether a sample belongs to no step, since the run went back behind it after a loss spike."""
        return any(phase.first_sample - phase.passed_over <= sample < phase.first_sample for phase in self.phases)

    def source(self, phase: int) -> SampleSource:
        """The samples of a phase, by their numbers in the run.

        Raises:
            DatasetError: a dataset is missing or is not the one that the run read.
        """
        now = self.phases[phase]
        components = tuple(
            _component(part.prefix, part.fingerprint, part.first_document, part.num_documents, part.weight) for part in now.parts
        )
        data = SplitData(
            split=0,
            config=dataclasses.replace(
                self.config.data, data_order=now.order, whole_documents=any(part.fingerprint.endswith(WHOLE) for part in now.parts)
            ),
            seed=now.seed,
            seq_length=now.seq_length,
            vocab_size=self.tokenizer.vocab_size,
            eod=self.tokenizer.eod,
            components=components,
            blending=now.blending,
        )
        return data.source(now.num_samples or 1, self.phases[: phase + 1])

    def samples(self, numbers: range) -> Iterator[tuple[int, list[SamplePiece], list[int]]]:
        """Number, pieces and token ids of each sample."""
        sources: dict[int, SampleSource] = {}
        for number in numbers:
            phase = self.phase_of(number)
            source = sources.get(phase) or sources.setdefault(phase, self.source(phase))
            yield number, source.lineage(number), source.samples(number, 1)[0].tolist()


def _component(prefix: str, expected: str, first: int, count: int, weight: float) -> Component:
    dataset = IndexedDataset(prefix)
    expected = expected.removesuffix(WHOLE)
    if (found := fingerprint(dataset)) != expected:
        raise DatasetError(
            f"{prefix} is not the dataset that the run read: its fingerprint is {found}, not {expected}.\n"
            "  Bring the run's dataset back to this place."
        )
    return Component(dataset, range(first, first + count), weight)


def _plan(training: TrainingConfig, phase: Phase) -> BatchSizePlan:
    # Only the sizes of batches count here, not how they are divided.
    settings = dataclasses.replace(
        training,
        micro_batch_size=1,
        global_batch_size=phase.global_batch_size,
        rampup_batch_size=phase.rampup_batch_size,
        step_batch_size_schedule=phase.step_batch_size_schedule,
    )
    return BatchSizePlan(settings, 1, phase.seq_length, iteration=phase.first_iteration, consumed_samples=phase.first_sample)


def _first_phase(config: Config, tokenizer: Tokenizer) -> Phase:
    """The phase of a run that has not saved any: it reads from the start."""
    training = config.training
    seq_length, order = config.model.seq_length, config.data.data_order
    opened = open_datasets(
        config.data, seed=training.seed, seq_length=seq_length, tokenizer=tokenizer, need_validation=False, need_test=False
    )
    size = training.global_batch_size
    assert size is not None, "the record of a run holds it"
    phase = Phase(
        0,
        0,
        order,
        training.seed,
        seq_length,
        size,
        training.rampup_batch_size,
        opened.train.parts(),
        opened.train.blending,
        step_batch_size_schedule=training.step_batch_size_schedule,
    )
    return dataclasses.replace(phase, num_samples=_plan(training, phase).total_samples if order == "megatron" else None)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--run {path.parent} holds neither a checkpoint nor a run.json that can be read ({error}).\n"
            "  Give the --save folder of a run."
        ) from error
    return found
