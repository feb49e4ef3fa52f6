"""The progress of a run, and how many sequences each step takes. Pure arithmetic.

Where the batch size grows, the run goes through stages of one batch size each, at most as many as there are batch sizes. So every
question is answered from the list of stages, however long the run is.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from megatron.checkpoint.errors import MismatchError
from megatron.checkpoint.storage import COUNTS, RECENT, Place
from megatron.config.config import Config
from megatron.config.training import OptimizerConfig, SpikeConfig, TrainingConfig
from megatron.data.history import Phase
from megatron.optimizer.lr_schedule import ScheduleLengths, learning_rate


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


# ---- Loss spikes (--spike-policy): steps whose loss or gradient norm stands far above those before.
#
# A step is judged by two numbers that every rank has on the host before the update, the same on all. docs/spikes.md has the
# definition, and says where it comes from.

_LEAST_SPREAD = 1e-3
"""Least robust standard deviation, as a share of the median: where steps are nearly alike, rounding is no spike."""


class SpikeError(RuntimeError):
    """Spikes come again wherever the run goes on."""


@dataclass(frozen=True)
class Spike:
    """A step that stands out, and what it stands out from."""

    loss: float
    grad_norm: float
    median_loss: float
    median_norm: float
    skips: bool
    """Whether its update is not made."""

    def words(self, iteration: int, samples: range) -> str:
        """A line for the log.

        Args:
            samples: the numbers of those of the step.
        """
        return (
            f"loss spike at iteration {iteration}: loss {self.loss:.6g} (median {self.median_loss:.6g}), "
            f"gradient norm {self.grad_norm:.6g} (median {self.median_norm:.6g}), "
            f"samples {samples.start:,} to {samples.stop - 1:,}{'; no update is made' if self.skips else ''}"
        )


@dataclass(frozen=True)
class SpikeJudge:
    """Compares a step with the steps before.

    Args:
        recent: loss and gradient norm of the steps before, the last ones behind; may be longer than the window.
    """

    config: SpikeConfig
    recent: Sequence[tuple[float, float]]

    def __call__(self, loss: float, grad_norm: float) -> Spike | None:
        """What the step stands out from; None if it is no spike, or too few steps are known to say so."""
        window = self.recent[-self.config.spike_window :]
        if self.config.spike_policy == "none" or len(window) < self.config.spike_window // 2:
            return None
        losses, norms = zip(*window, strict=True)
        if not (self._stands_out(loss, losses) or self._stands_out(grad_norm, norms)):
            return None
        skips = self.config.spike_policy != "warn"
        return Spike(loss, grad_norm, statistics.median(losses), statistics.median(norms), skips)

    def _stands_out(self, value: float, before: Sequence[float]) -> bool:
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(one - middle) for one in before)
        return value > middle + self.config.spike_threshold * max(spread, _LEAST_SPREAD * abs(middle))


def remembered(
    recent: Sequence[tuple[float, float]], loss: float, grad_norm: float, config: SpikeConfig
) -> list[tuple[float, float]]:
    """The window after a step. A spike enters it too: so a run that stays at another level is judged by that, once half of the
    window has it. A step that overflowed does not: its norm is no number."""
    if config.spike_policy == "none" or not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return list(recent)
    return [*recent, (loss, grad_norm)][-config.spike_window :]


# ---- With which schedules of learning rate and weight decay a run goes on: its command line's, or those of its checkpoint.

_FLAGS = (
    *("train_iters", "train_samples", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init"),
    *("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    *("lr_rewarm_start_iters", "lr_rewarm_start_samples", "lr_rewarm_iters", "lr_rewarm_samples", "lr_rewarm_factor"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "decoupled_lr", "decoupled_min_lr"),
)
"""Settings that the schedules follow from."""


def flags_that_differ(saved: Config, here: Config) -> list[str]:
    """The settings of the schedules that differ from those of a checkpoint, in words of the command line."""
    found = []
    for name in _FLAGS:
        there, this = ({**vars(config.training), **vars(config.optimizer)}.get(name) for config in (saved, here))
        if there != this:
            was, now = ("not given" if value is None else value for value in (there, this))
            found.append(f"--{name.replace('_', '-')} {was} in the checkpoint, {now} here")
    return found


def agreed_schedule(
    here: LearningSchedule, saved: dict[str, Any], path: Place, flags: Sequence[str] = (), updated_samples: int = 0
) -> LearningSchedule:
    """The schedule to continue with.

    Args:
        here: that of the command line.
        saved: that of the checkpoint.
        flags: what `flags_that_differ` found.
        updated_samples: the place in the schedules from which the run goes on.

    Raises:
        MismatchError: the two differ and no flag says which one counts.
    """
    if here.optimizer.takes_schedules == "saved":
        return here.with_saved(saved)
    mine, saved = here.to_json(), with_defaults(saved)
    if here.optimizer.takes_schedules == "new" or mine == saved:
        return here
    flat_mine, flat_saved = ({**d, **d["lengths"]} for d in (mine, saved))
    idle = {"lengths"}  # the run may be longer or shorter where no schedule depends on its length
    if here.optimizer.weight_decay_incr_style == "constant":
        idle.add("total_samples")
    if here.optimizer.lr_decay_style == "constant":
        idle.add("decay_samples")
    elif here.lengths.rewarm_start is not None:
        idle.discard("total_samples")  # at which the second course ends
    differing = [
        f"{name}: {flat_saved[name]} there, {flat_mine[name]} here"
        for name in flat_mine
        if name not in idle and flat_mine[name] != flat_saved[name]
    ]
    if not differing:
        return here
    old = here.with_saved(saved)
    then, now = (learning_rate(updated_samples, one.optimizer, one.lengths) for one in (old, here))
    raise MismatchError(
        f"the schedules of learning rate or weight decay differ from those of {path}:\n  "
        + "\n  ".join([*flags, *differing])
        + "\n  Say which count, by one word:\n"
        f"    --resume-schedule new    those of this command line: the learning rate goes on with {now:.3g}\n"
        f"    --resume-schedule saved  those of the checkpoint: it goes on with {then:.3g}\n"
        "  (In Megatron-LM's words: --override-opt-param-scheduler, --use-checkpoint-opt-param-scheduler.)"
    )
