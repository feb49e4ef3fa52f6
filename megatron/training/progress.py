"""The progress of a run, and how many sequences each step takes. Pure arithmetic.

Where the batch size grows, the run goes through stages of one batch size each, at most as many as there are batch sizes. So every
question is answered from the list of stages, however long the run is.
"""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from megatron.checkpoint.storage import COUNTS, RECENT, Place
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.data.history import Phase
from megatron.optimizer.lr_schedule import ScheduleLengths


@dataclass
class Progress:
    """Counts since the start of the run, across restarts. With the weights and moments they are its whole state."""

    iteration: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    """Samples read: the place in the order of data and in the growth of the batch size."""
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

    `TrainingConfig.batch_sizes` says how the batch grows.

    Args:
        training: Batch sizes and length of the run, which have passed the rules.
        data_size: Number of data-parallel ranks.
        seq_length: Tokens of a sample.
        iteration: Steps made before, if the run is resumed.
        consumed_samples: Samples of these steps, whose batches may have been of other sizes.
    """

    def __init__(
        self, training: TrainingConfig, data_size: int, seq_length: int, *, iteration: int = 0, consumed_samples: int = 0
    ) -> None:
        self._training, self._data_size, self._seq_length = training, data_size, seq_length
        self._samples_per_microstep = training.micro_batch_size * data_size
        self._sizes = training.batch_sizes(data_size, seq_length)
        self.final_global_batch_size = training.final_batch_size(data_size)
        """Sequences in a step after any growth."""
        self._stages = self._list_stages(_Stage(iteration, consumed_samples, self.global_batch_size(consumed_samples)))

    def resumed_at(self, iteration: int, consumed_samples: int) -> BatchSizePlan:
        """The plan of the rest of a run that resumes here."""
        return BatchSizePlan(
            self._training, self._data_size, self._seq_length, iteration=iteration, consumed_samples=consumed_samples
        )

    def global_batch_size(self, consumed_samples: int) -> int:
        """Sequences in the step that starts after `consumed_samples`."""
        return self._sizes[bisect_right(self._sizes, consumed_samples, key=itemgetter(0)) - 1][1]

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of each data rank in the step that starts after `consumed_samples`."""
        return self.global_batch_size(consumed_samples) // self._samples_per_microstep

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps of a run. It cannot tell those before a resume."""
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

    def _list_stages(self, first: _Stage) -> list[_Stage]:
        stages = [first]
        for begin, batch_size in self._sizes:
            current = stages[-1]
            # The step that passes the mark may have passed several.
            if begin <= current.first_sample or batch_size == current.batch_size:
                continue
            iterations = -(-(begin - current.first_sample) // current.batch_size)
            consumed = current.first_sample + iterations * current.batch_size
            stages.append(_Stage(current.first_iteration + iterations, consumed, self.global_batch_size(consumed)))
        return stages


_SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
    "decoupled_lr",
    "decoupled_min_lr",
    "lr_rewarm_factor",
)


@dataclasses.dataclass(frozen=True)
class LearningSchedule:
    """The schedules of learning rate and weight decay: settings, and lengths in samples."""

    optimizer: OptimizerConfig
    lengths: ScheduleLengths

    def to_json(self) -> dict[str, Any]:
        """The schedules as a checkpoint holds them."""
        fields = {name: getattr(self.optimizer, name) for name in _SCHEDULE_FIELDS}
        return {**fields, "lengths": dataclasses.asdict(self.lengths)}

    def with_saved(self, saved: dict[str, Any]) -> LearningSchedule:
        """The schedules with which a checkpoint was trained."""
        saved = with_defaults(saved)
        fields = {name: saved[name] for name in _SCHEDULE_FIELDS}
        return LearningSchedule(dataclasses.replace(self.optimizer, **fields), ScheduleLengths(**saved["lengths"]))


def with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """The schedules of a checkpoint, in one of an older version too: what it does not name did not exist."""
    plain = {name: getattr(OptimizerConfig(), name) for name in _SCHEDULE_FIELDS}
    lengths = {"rewarm_start": None, "rewarm_samples": 0}
    return {**plain, **saved, "lengths": {**lengths, **saved["lengths"]}}


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The place where a run continues."""

    progress: Progress
    schedule: LearningSchedule
    path: Place | None
    """The checkpoint; None for a run that begins, also with the weights of another run."""
    notes: Sequence[str] = ()
    account: Any = None
    """What the checkpoint says of the run's time, unchecked (`Goodput`)."""


# ---- Goodput: the share of a run's time that went into steps that count, since its first start. docs/spikes.md has the definition.

Use = Literal["steps", "start-up", "saves", "evaluations", "steps that do not count", "between starts"]
USES: tuple[Use, ...] = ("steps", "start-up", "saves", "evaluations", "steps that do not count", "between starts")
_MOST_S = 1e10


class Goodput:
    """An account of the time of a run, in which each moment has one use.

    Args:
        saved: what `to_json` returned for the checkpoint that the run goes on from; None for a run that begins.
        began: when this start began, by the clock.
        clock: seconds since an epoch that all starts share.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, began: float | None = None, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._since = clock() if began is None else began
        self.seconds: dict[Use, float] = dict.fromkeys(USES, 0.0)
        """By use. Their sum is the time since the first start."""
        if saved is not None and _is_sound(saved):
            self.seconds |= {use: float(saved["seconds"][use]) for use in USES}
            self.seconds["between starts"] += max(0.0, self._since - saved["at"])

    def spent(self, use: Use) -> None:
        """All time since the last call had this use."""
        now = self._clock()
        self.seconds[use] += max(0.0, now - self._since)  # clocks are set back at times
        self._since = now

    def went_back(self, saved: Mapping[str, Any] | None) -> None:
        """The run went back to a checkpoint: steps made since do not count, nor does the time since the last call.

        Args:
            saved: what `to_json` returned for that checkpoint.
        """
        self.spent("steps that do not count")
        if saved is not None and _is_sound(saved):
            lost = max(0.0, self.seconds["steps"] - saved["seconds"]["steps"])
            self.seconds["steps"] -= lost
            self.seconds["steps that do not count"] += lost

    @property
    def share(self) -> float:
        """The goodput, from 0 to 1; 0 where no time is accounted for."""
        total = math.fsum(self.seconds.values())
        return self.seconds["steps"] / total if total else 0.0

    def words(self) -> str:
        """A line for the log."""
        total = math.fsum(self.seconds.values())
        parts = [f"{use} {seconds / total:.1%}" for use, seconds in self.seconds.items() if use != "steps" and seconds > 0]
        return f"goodput {self.share:.1%} of {total / 3600:.3g} hours since the first start; {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """The account as a checkpoint holds it."""
        return {"at": self._since, "seconds": dict(self.seconds)}


def _is_sound(saved: Any) -> bool:
    """Whether an account has the types and ranges that `to_json` gives it. One that has not is left out: no step depends on it."""
    if not isinstance(saved, dict) or not isinstance(saved.get("seconds"), dict):
        return False
    numbers = [saved.get("at"), *(saved["seconds"].get(use) for use in USES)]
    return all(type(each) in (int, float) and 0 <= each <= _MOST_S for each in numbers)
