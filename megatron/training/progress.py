"""The progress of a run, and how many sequences each step takes. Pure arithmetic.

With a ramp-up of the batch size the run goes through stages of one batch size each. There are at most as many stages as increments,
so every question is answered from the list of stages, however long the run is.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.save_folder import COUNTS, RECENT
from megatron.config.training import TrainingConfig
from megatron.data.history import Phase


@dataclass
class Progress:
    """Counts since the start of the run, across restarts. With the weights and moments they are its whole state."""

    iteration: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    """Samples read: the place in the order of data and in the batch-size ramp."""
    updated_samples: int = 0
    """Samples of the steps that made an update: the place in the schedules of learning rate and weight decay."""
    skipped_iterations: int = 0
    """Steps without an update."""

    recent: list[tuple[float, float]] = field(default_factory=list)
    """Loss and gradient norm of the last steps, the window by which --spike-policy judges the next; empty without it."""

    phases: list[Phase] = field(default_factory=list)
    """Data settings since the start of the run; filled on ranks that read samples."""

    def is_multiple_of(self, interval: int | None) -> bool:
        """Whether what is done every `interval` steps is due; never for None or 0."""
        return bool(interval) and self.iteration % interval == 0  # type: ignore[operator]

    def to_json(self) -> dict[str, Any]:
        """The counts as a checkpoint holds them."""
        window = {RECENT: [list(step) for step in self.recent]} if self.recent else {}
        counts = {name: getattr(self, name) for name in COUNTS}
        return counts | {"phases": [phase.to_json() for phase in self.phases]} | window

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Progress:
        """The counts that a checkpoint holds."""
        return cls(
            **{name: int(state[name]) for name in COUNTS},
            recent=[(float(loss), float(norm)) for loss, norm in state.get(RECENT, ())],
            phases=[Phase.from_json(saved) for saved in state.get("phases", ())],
        )


@dataclass(frozen=True)
class _Stage:
    """Consecutive steps of one batch size."""

    first_iteration: int  # steps made before the stage
    first_sample: int  # samples consumed before the stage
    batch_size: int


class BatchSizePlan:
    """Global batch size, number of microbatches and length of a run: a pure function of the samples consumed so far.

    With `--rampup-batch-size START INCREMENT SAMPLES` the batch is START + floor(consumed / (SAMPLES / increments)) *
    INCREMENT, at most the global batch size, where increments = (global batch size - START) / INCREMENT (the formula of
    Megatron-Core's RampupBatchsizeNumMicroBatchesCalculator, here in whole numbers, without its rounding).

    Args:
        training: Batch sizes, ramp-up and length of the run, which have passed the rules.
        data_size: Number of data-parallel ranks.
        iteration: Steps made before, if the run is resumed.
        consumed_samples: Samples of these steps, whose batches may have been of other sizes.
    """

    def __init__(self, training: TrainingConfig, data_size: int, *, iteration: int = 0, consumed_samples: int = 0) -> None:
        self._training, self._data_size = training, data_size
        self._samples_per_microstep = training.micro_batch_size * data_size
        self.final_global_batch_size = training.final_batch_size(data_size)
        """Sequences in a step after any ramp-up."""
        self._stages = self._list_stages(_Stage(iteration, consumed_samples, self.global_batch_size(consumed_samples)))

    def resumed_at(self, iteration: int, consumed_samples: int) -> BatchSizePlan:
        """The plan of the rest of a run that resumes here."""
        return BatchSizePlan(self._training, self._data_size, iteration=iteration, consumed_samples=consumed_samples)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Sequences in the step that starts after `consumed_samples`."""
        if self._training.rampup_batch_size is None:
            return self.final_global_batch_size
        start, increment, ramp_samples = self._training.rampup_batch_size
        if consumed_samples >= ramp_samples:
            return self.final_global_batch_size
        return start + consumed_samples * self._num_increments // ramp_samples * increment

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of each data rank in the step that starts after `consumed_samples`."""
        return self.global_batch_size(consumed_samples) // self._samples_per_microstep

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps of a run, ramp-up included. It cannot tell those before a resume."""
        found = bisect_right(self._stages, iterations, key=lambda stage: stage.first_iteration)
        stage = self._stages[max(0, found - 1)]
        return stage.first_sample + (iterations - stage.first_iteration) * stage.batch_size

    @property
    def total_iterations(self) -> int:
        """Number of steps of the run. With --train-samples, a last incomplete batch is dropped."""
        if self._training.train_samples is None:
            assert self._training.train_iters is not None, "the length is required and checked with the configuration"
            return self._training.train_iters
        samples = self._training.train_samples
        found = bisect_right(self._stages, samples, key=lambda stage: stage.first_sample)
        stage = self._stages[max(0, found - 1)]
        return stage.first_iteration + (samples - stage.first_sample) // stage.batch_size

    @property
    def total_samples(self) -> int:
        """Length of the run for the schedules: --train-samples, or the samples that --train-iters steps consume."""
        if self._training.train_samples is not None:
            return self._training.train_samples
        return self.samples_after(self.total_iterations)

    @property
    def _num_increments(self) -> int:
        assert self._training.rampup_batch_size is not None
        start, increment, _ = self._training.rampup_batch_size
        return (self.final_global_batch_size - start) // increment

    def _list_stages(self, first: _Stage) -> list[_Stage]:
        stages = [first]
        while (current := stages[-1]).batch_size < self.final_global_batch_size:
            assert self._training.rampup_batch_size is not None
            start, increment, ramp_samples = self._training.rampup_batch_size
            # The stage lasts until consumed * increments >= (its number + 1) * SAMPLES; the step that passes the
            # mark may pass several.
            number = (current.batch_size - start) // increment
            samples = -(-(number + 1) * ramp_samples // self._num_increments) - current.first_sample
            iterations = -(-samples // current.batch_size)
            consumed = current.first_sample + iterations * current.batch_size
            stages.append(_Stage(current.first_iteration + iterations, consumed, self.global_batch_size(consumed)))
        return stages
