"""The progress of a run, and what follows from it: how many sequences each step takes, its learning rate and weight decay.

Pure arithmetic. Where the batch size grows, the run goes through stages of one batch size each, at most as many as there are batch
sizes. So every question is answered from the list of stages, however long the run is.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from megatron.checkpoint.errors import MismatchError
from megatron.checkpoint.storage import COUNTS, RECENT, Place
from megatron.config.config import Config
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.data.history import Phase
from megatron.spec.groups import RateEnds


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


# ---- Learning rate and weight decay as pure functions of the samples read in the updates so far.
#
# A skipped step makes no update, so it moves neither schedule. The first update takes the values at 0 samples.
# The formulas are those of Megatron-Core's OptimizerParamScheduler, so that a launch script keeps its curve.


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of the schedules, in samples."""

    warmup_samples: float
    """Length of the linear warm-up. A fraction of the decay length need not be a whole number."""
    decay_samples: int
    """Samples from the start of the run, warm-up included, to the floor of the rate."""
    wsd_decay_samples: int
    """Length of the final decay of WSD, which ends at `decay_samples`; 0 for other styles."""
    total_samples: int
    """Length of the whole run, over which weight decay grows."""
    rewarm_start: int | None = None
    """Where a second course of the learning rate begins, if there is one. It ends with the run."""
    rewarm_samples: int = 0
    """Length of the linear rise at its begin."""


def schedule_lengths(
    optimizer: OptimizerConfig, training: TrainingConfig, samples_after: Callable[[int], int], total_samples: int
) -> ScheduleLengths:
    """Turn the flags, in iterations or in samples, into samples.

    Args:
        optimizer: The settings of the schedules.
        training: Says whether the run is counted in iterations (--train-iters) or in samples (--train-samples).
        samples_after: Gives the samples in the first n iterations of the run (during a ramp-up, batches are small).
        total_samples: Samples of the whole run; the rate decays over them unless a decay length is given.

    Raises:
        ValueError: WSD has no length for its final decay, or warm-up leaves no samples to decay over.
    """
    if training.train_samples is None:
        run = training.train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
        assert run is not None, "the length is required and checked with the configuration"
        last = optimizer.lr_wsd_decay_iters
        unit, tenth, decay = "iters", run / 10, samples_after(run)
        warmup: float = samples_after(optimizer.lr_warmup_iters)
        wsd_decay = None if last is None else decay - samples_after(max(0, run - last))
    else:
        unit, tenth, warmup, wsd_decay = "samples", total_samples / 10, optimizer.lr_warmup_samples, optimizer.lr_wsd_decay_samples
        decay = total_samples if optimizer.lr_decay_samples is None else optimizer.lr_decay_samples
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    start, rise = optimizer.lr_rewarm_start_samples, optimizer.lr_rewarm_samples
    if optimizer.lr_rewarm_start_iters is not None:
        start = samples_after(optimizer.lr_rewarm_start_iters)
        rise = samples_after(optimizer.lr_rewarm_start_iters + optimizer.lr_rewarm_iters) - start

    if optimizer.lr_decay_style == "WSD" and wsd_decay is None:
        raise ValueError(
            f"--lr-decay-style WSD needs the length of its final decay: give --lr-wsd-decay-{unit} "
            f"(often a tenth of the run, here {max(1, round(tenth))})."
        )
    if optimizer.lr_decay_style != "constant" and warmup >= decay:
        raise ValueError(
            f"Warm-up of {warmup:g} samples leaves nothing of the {decay} samples over which the learning rate decays. "
            f"Lower --lr-warmup-{unit} (or --lr-warmup-fraction) so that it is shorter than the decay, "
            f"raise --lr-decay-{unit}, or take --lr-decay-style constant."
        )
    return ScheduleLengths(warmup, decay, wsd_decay or 0, total_samples, start, rise)


def learning_rate(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Learning rate of the next update.

    Args:
        samples: Samples of the updates made so far.
        config: Rates and styles; `lr` must be set.
        lengths: Where warm-up and decay end, from `schedule_lengths`.

    Source: Megatron-Core OptimizerParamScheduler. A second course is one more of the same kind, counted from where it begins: it
    warms up from the rate there, and decays to the end of the run (Ibrahim et al. 2024).
    """
    start = lengths.rewarm_start
    if start is None or samples <= start:
        return _course(samples, config, lengths)
    assert config.lr is not None, "the learning rate is required and checked with the configuration"
    again = replace(config, lr=config.lr_rewarm_factor * config.lr, lr_warmup_init=_course(start, config, lengths))
    rest = lengths.total_samples - start
    final = min(lengths.wsd_decay_samples, rest - lengths.rewarm_samples)
    return _course(samples - start, again, ScheduleLengths(lengths.rewarm_samples, rest, final, rest))


def _course(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Learning rate after so many samples of a course without a second one."""
    assert config.lr is not None, "the learning rate is required and checked with the configuration"
    peak, floor = config.lr, config.min_lr
    if lengths.warmup_samples > 0 and samples <= lengths.warmup_samples:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * samples / lengths.warmup_samples
    if config.lr_decay_style == "constant":
        return peak
    if samples > lengths.decay_samples:
        return floor
    if config.lr_decay_style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(lengths.warmup_samples, 1)) / math.sqrt(max(samples, 1)))
    return floor + _share_above_floor(samples, config, lengths) * (peak - floor)


def own_rates(samples: int, config: OptimizerConfig, lengths: ScheduleLengths, ends: Iterable[RateEnds]) -> dict[RateEnds, float]:
    """Learning rates of the next update where the course has other ends than --lr and --min-lr; arguments as `learning_rate`."""
    own = {one: {field: value for field, value in vars(one).items() if value is not None} for one in ends}
    return {one: learning_rate(samples, replace(config, **values), lengths) for one, values in own.items()}


def weight_decay(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Weight decay of the next update; arguments as `learning_rate`.

    It is constant, or goes from start to end over the whole run, linearly or along half a cosine.
    """
    if config.weight_decay_incr_style == "constant":
        return config.weight_decay
    start, end = config.start_weight_decay, config.end_weight_decay
    assert start is not None and end is not None, "both ends are required and checked with the configuration"
    if samples >= lengths.total_samples:
        return end
    ratio = samples / lengths.total_samples
    share = ratio if config.weight_decay_incr_style == "linear" else _half_cosine(1.0 - ratio)
    return start + share * (end - start)


def _share_above_floor(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """The share of (peak - floor) that is left between warm-up and the end of the decay: 1 at its start, 0 at its end."""
    if config.lr_decay_style == "WSD":
        decay_start = lengths.decay_samples - lengths.wsd_decay_samples
        if samples <= decay_start:
            return 1.0
        ratio = (samples - decay_start) / lengths.wsd_decay_samples
        style: str = config.lr_wsd_decay_style
    else:
        ratio = (samples - lengths.warmup_samples) / (lengths.decay_samples - lengths.warmup_samples)
        style = config.lr_decay_style
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _half_cosine(ratio)
        case "exponential":  # halves would never arrive: scaled so that it ends at 0
            return 2.0 * 0.5**ratio - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
        case _:
            raise AssertionError(f"unknown decay style {style!r}")


def _half_cosine(ratio: float) -> float:
    """Half a cosine, which falls from 1 at ratio 0 to 0 at ratio 1."""
    return 0.5 * (1.0 + math.cos(math.pi * ratio))


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
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """The `config.json` of the checkpoint, unchecked; empty if there is none."""


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
