"""Progress of a run, and the quantities that depend on it: batch size, learning rate and weight decay of each step.

This module contains only arithmetic. If the batch size grows, the run is divided into spans: consecutive steps with the same batch
size. All quantities are computed from the list of spans, so the computing time does not depend on the length of the run.
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
from megatron.checkpoint.storage import PROGRESS_COUNTS, RECENT_STEPS, PathOrUrl
from megatron.config.config import Config
from megatron.config.flags import get_flag
from megatron.config.save import check_json_type
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.data.history import Phase
from megatron.spec.groups import LearningRateBounds


@dataclass
class Progress:
    """Counters of a run since its first start, across restarts. Together with weights and optimizer state they are the complete
    state of a run."""

    iteration: int = 0
    """Number of steps so far, including skipped ones."""
    consumed_samples: int = 0
    """Number of samples read so far. It determines the position in the data and the batch size of the next step."""
    updated_samples: int = 0
    """Number of samples in steps that updated the parameters. It determines learning rate and weight decay of the next step."""
    skipped_iterations: int = 0
    """Number of steps without a parameter update."""

    recent: list[tuple[float, float]] = field(default_factory=list)
    """Loss and gradient norm of each of the latest steps. --spike-policy compares the next step with them. Empty without
    --spike-policy."""

    phases: list[Phase] = field(default_factory=list)
    """Data settings of the run so far: one phase for each part of the run in which they did not change, in order. Only ranks
    that read samples keep the list up to date."""

    def is_multiple_of(self, interval: int | None) -> bool:
        """Return whether `iteration` is a multiple of `interval`. Always False if the interval is None or 0."""
        return bool(interval) and self.iteration % interval == 0  # type: ignore[operator]

    def to_json(self) -> dict[str, Any]:
        """Return the counters as JSON values, in the form in which the `state.json` of a checkpoint stores them."""
        window = {RECENT_STEPS: [list(step) for step in self.recent]} if self.recent else {}
        counts = {name: getattr(self, name) for name in PROGRESS_COUNTS}
        return counts | {"phases": [phase.to_json() for phase in self.phases]} | window

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Progress:
        """Build the counters from the JSON values in the `state.json` of a checkpoint.

        Raises:
            ValueError: an entry is missing, unknown, or has an invalid value.
        """
        check_json_type(state, cls, "progress")
        if missing := [name for name in PROGRESS_COUNTS if name not in state]:
            raise ValueError(f"the entry progress.{missing[0]} is missing")
        return cls(
            **{name: state[name] for name in PROGRESS_COUNTS},
            recent=[(float(loss), float(norm)) for loss, norm in state.get(RECENT_STEPS, ())],
            phases=[Phase.from_json(saved) for saved in state.get("phases", ())],
        )


@dataclass(frozen=True)
class _BatchSizeSpan:
    """Consecutive steps of a run that have the same batch size."""

    start_iteration: int  # steps before the span
    start_sample: int  # samples consumed before the span
    batch_size: int


class BatchSizePlan:
    """Plan of the batch sizes of a run: global batch size, number of microbatches and length of the run, as pure functions of the
    number of consumed samples.

    `TrainingConfig.compute_batch_sizes` determines how the batch size grows.

    Args:
        training: settings of the batch sizes and of the length of the run, already validated.
        data_size: number of data-parallel ranks.
        seq_length: tokens per sample.
        iteration: number of earlier steps, if the run is resumed.
        consumed_samples: number of samples of the earlier steps. Their batch sizes may have been different.
    """

    def __init__(
        self, training: TrainingConfig, data_size: int, seq_length: int, *, iteration: int = 0, consumed_samples: int = 0
    ) -> None:
        self._training, self._data_size, self._seq_length = training, data_size, seq_length
        self._samples_per_microstep = training.micro_batch_size * data_size
        self._sizes = training.compute_batch_sizes(data_size, seq_length)
        self.final_global_batch_size = training.get_final_batch_size(data_size)
        """Sequences per step after the batch size has stopped growing."""
        self._spans = self._list_spans(_BatchSizeSpan(iteration, consumed_samples, self.get_global_batch_size(consumed_samples)))

    def resume_at(self, iteration: int, consumed_samples: int) -> BatchSizePlan:
        """Return the plan for the rest of a run that resumes after `iteration` steps and `consumed_samples` samples."""
        return BatchSizePlan(
            self._training, self._data_size, self._seq_length, iteration=iteration, consumed_samples=consumed_samples
        )

    def get_global_batch_size(self, consumed_samples: int) -> int:
        """Return the number of sequences in the step that starts after `consumed_samples` samples."""
        return self._sizes[bisect_right(self._sizes, consumed_samples, key=itemgetter(0)) - 1][1]

    def get_num_microbatches(self, consumed_samples: int) -> int:
        """Return the number of microbatches of each data-parallel rank in the step that starts after `consumed_samples` samples."""
        return self.get_global_batch_size(consumed_samples) // self._samples_per_microstep

    def count_consumed_samples(self, iterations: int) -> int:
        """Return the number of samples that the first `iterations` steps of the run consume.

        If the run was resumed, `iterations` must not be less than the iteration of the resume: earlier steps may have had other
        batch sizes.
        """
        span_index = bisect_right(self._spans, iterations, key=lambda span: span.start_iteration)
        span = self._spans[max(0, span_index - 1)]
        return span.start_sample + (iterations - span.start_iteration) * span.batch_size

    @property
    def total_iterations(self) -> int:
        """Number of steps of the run. With --train-samples, an incomplete last batch is dropped."""
        if self._training.train_samples is None:
            assert self._training.train_iters is not None, "the length is required and checked with the configuration"
            return self._training.train_iters
        samples = self._training.train_samples
        span_index = bisect_right(self._spans, samples, key=lambda span: span.start_sample)
        span = self._spans[max(0, span_index - 1)]
        return span.start_iteration + (samples - span.start_sample) // span.batch_size

    @property
    def total_samples(self) -> int:
        """Number of samples of the run, from which the learning-rate and weight-decay schedules are computed: --train-samples, or
        the samples that --train-iters steps consume."""
        if self._training.train_samples is not None:
            return self._training.train_samples
        return self.count_consumed_samples(self.total_iterations)

    def _list_spans(self, first: _BatchSizeSpan) -> list[_BatchSizeSpan]:
        spans = [first]
        for start_sample, batch_size in self._sizes:
            span = spans[-1]
            # A single step may pass several start samples.
            if start_sample <= span.start_sample or batch_size == span.batch_size:
                continue
            num_iterations = -(-(start_sample - span.start_sample) // span.batch_size)
            consumed_samples = span.start_sample + num_iterations * span.batch_size
            spans.append(
                _BatchSizeSpan(
                    span.start_iteration + num_iterations, consumed_samples, self.get_global_batch_size(consumed_samples)
                )
            )
        return spans


# ---- Learning rate and weight decay as pure functions of the number of samples in updates so far.
#
# A skipped step has no update, so it advances neither schedule. The first update uses the values at 0 samples.
# The formulas are those of Megatron-Core's OptimizerParamScheduler, so a launch script gives the same curve as in Megatron-LM.


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of the parts of the learning-rate and weight-decay schedules (warm-up, decay, full run), in samples."""

    warmup_samples: float
    """Length of the linear warm-up. It may be fractional, if it is set as a fraction of the decay length."""
    decay_samples: int
    """Number of samples from the start of the run, including warm-up, until the learning rate reaches its minimum."""
    wsd_decay_samples: int
    """Length of the final decay of the WSD (warmup-stable-decay) schedule, which ends at `decay_samples`; 0 for other
    styles."""
    total_samples: int
    """Length of the complete run. Weight decay grows over this length, and a second learning-rate decay ends with it."""
    rewarm_start: int | None = None
    """Number of samples after which the learning rate starts a second warm-up and decay; None if there is no second warm-up.
    The second decay ends with the run."""
    rewarm_samples: int = 0
    """Length of the second warm-up; 0 if there is no second warm-up."""


def compute_schedule_lengths(
    optimizer: OptimizerConfig, training: TrainingConfig, consumed_samples_at: Callable[[int], int], total_samples: int
) -> ScheduleLengths:
    """Compute the lengths of the learning-rate and weight-decay schedules in samples, from settings in iterations or samples.

    Args:
        optimizer: settings of the schedules.
        training: settings that determine whether the length of the run is in iterations (--train-iters) or samples
            (--train-samples).
        consumed_samples_at: function that returns the number of samples in the first n iterations. During a batch-size ramp-up the
            batches are smaller.
        total_samples: samples of the complete run. The learning rate decays over them unless a decay length is set.

    Raises:
        ValueError: WSD has no length for its final decay, or the warm-up is not shorter than the decay.
    """
    if training.train_samples is None:
        num_decay_iters = training.train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
        assert num_decay_iters is not None, "the length is required and checked with the configuration"
        num_wsd_decay_iters = optimizer.lr_wsd_decay_iters
        unit, tenth, decay_samples = "iters", num_decay_iters / 10, consumed_samples_at(num_decay_iters)
        warmup_samples: float = consumed_samples_at(optimizer.lr_warmup_iters)
        wsd_decay_samples = (
            None
            if num_wsd_decay_iters is None
            else decay_samples - consumed_samples_at(max(0, num_decay_iters - num_wsd_decay_iters))
        )
    else:
        unit, tenth, warmup_samples, wsd_decay_samples = (
            "samples",
            total_samples / 10,
            optimizer.lr_warmup_samples,
            optimizer.lr_wsd_decay_samples,
        )
        decay_samples = total_samples if optimizer.lr_decay_samples is None else optimizer.lr_decay_samples
    if optimizer.lr_warmup_fraction is not None:
        warmup_samples = optimizer.lr_warmup_fraction * decay_samples
    rewarm_start, rewarm_samples = optimizer.lr_rewarm_start_samples, optimizer.lr_rewarm_samples
    if optimizer.lr_rewarm_start_iters is not None:
        rewarm_start = consumed_samples_at(optimizer.lr_rewarm_start_iters)
        rewarm_samples = consumed_samples_at(optimizer.lr_rewarm_start_iters + optimizer.lr_rewarm_iters) - rewarm_start

    if optimizer.lr_decay_style == "WSD" and wsd_decay_samples is None:
        raise ValueError(
            f"--lr-decay-style WSD needs the length of its final decay: set --lr-wsd-decay-{unit} "
            f"(often a tenth of the run, here {max(1, round(tenth))})."
        )
    if optimizer.lr_decay_style != "constant" and warmup_samples >= decay_samples:
        raise ValueError(
            f"The learning rate cannot decay: its warm-up takes {warmup_samples:g} samples, but warm-up and decay together must "
            f"end after {decay_samples} samples. "
            f"Lower --lr-warmup-{unit} (or --lr-warmup-fraction), raise --lr-decay-{unit}, or use --lr-decay-style constant."
        )
    return ScheduleLengths(warmup_samples, decay_samples, wsd_decay_samples or 0, total_samples, rewarm_start, rewarm_samples)


def compute_learning_rate(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Return the learning rate of the next update.

    After `lengths.rewarm_start` samples, the learning rate follows a second warm-up and decay (Ibrahim et al. 2024). The second
    warm-up begins at the learning rate reached by then, and the second decay ends with the run.

    Args:
        samples: number of samples in the updates so far; samples of skipped steps do not count.
        config: learning rates and decay styles; `lr` must be set.
        lengths: lengths of warm-up and decay, from `compute_schedule_lengths`.

    Source: Megatron-Core OptimizerParamScheduler.
    """
    rewarm_start = lengths.rewarm_start
    if rewarm_start is None or samples <= rewarm_start:
        return _compute_single_cycle_rate(samples, config, lengths)
    assert config.lr is not None, "the learning rate is required and checked with the configuration"
    rewarm_config = replace(
        config, lr=config.lr_rewarm_factor * config.lr, lr_warmup_init=_compute_single_cycle_rate(rewarm_start, config, lengths)
    )
    rewarm_length = lengths.total_samples - rewarm_start
    wsd_decay_samples = min(lengths.wsd_decay_samples, rewarm_length - lengths.rewarm_samples)
    return _compute_single_cycle_rate(
        samples - rewarm_start,
        rewarm_config,
        ScheduleLengths(lengths.rewarm_samples, rewarm_length, wsd_decay_samples, rewarm_length),
    )


def _compute_single_cycle_rate(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Return the learning rate after `samples` samples of a schedule that has only one warm-up and one decay."""
    assert config.lr is not None, "the learning rate is required and checked with the configuration"
    max_lr, min_lr = config.lr, config.min_lr
    if lengths.warmup_samples > 0 and samples <= lengths.warmup_samples:
        return config.lr_warmup_init + (max_lr - config.lr_warmup_init) * samples / lengths.warmup_samples
    if config.lr_decay_style == "constant":
        return max_lr
    if samples > lengths.decay_samples:
        return min_lr
    if config.lr_decay_style == "inverse-square-root":
        return max(min_lr, max_lr * math.sqrt(max(lengths.warmup_samples, 1)) / math.sqrt(max(samples, 1)))
    return min_lr + _compute_decay_fraction(samples, config, lengths) * (max_lr - min_lr)


def compute_group_learning_rates(
    samples: int, config: OptimizerConfig, lengths: ScheduleLengths, bounds_of_groups: Iterable[LearningRateBounds]
) -> dict[LearningRateBounds, float]:
    """Return the learning rates of the next update for the parameter groups that have separate values of --lr or --min-lr.

    Args:
        samples: number of samples in the updates so far; samples of skipped steps do not count.
        config: learning rates and decay styles of the run.
        lengths: lengths of warm-up and decay, from `compute_schedule_lengths`.
        bounds_of_groups: maximum and minimum learning rate of each group. For a bound that is None, the value in `config` applies.

    Returns:
        learning rate of each group, by the bounds of the group.
    """
    overrides = {
        bounds: {field: value for field, value in vars(bounds).items() if value is not None} for bounds in bounds_of_groups
    }
    return {bounds: compute_learning_rate(samples, replace(config, **values), lengths) for bounds, values in overrides.items()}


def compute_weight_decay(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Return the weight decay of the next update.

    Weight decay is constant, or changes from its start to its end value over the complete run, linearly or along half a cosine.

    Args:
        samples: number of samples in the updates so far; samples of skipped steps do not count.
        config: weight decay, or its start and end value and the style of the change.
        lengths: lengths of the schedules, of which `total_samples` is used.
    """
    if config.weight_decay_incr_style == "constant":
        return config.weight_decay
    start, end = config.start_weight_decay, config.end_weight_decay
    assert start is not None and end is not None, "both ends are required and checked with the configuration"
    if samples >= lengths.total_samples:
        return end
    ratio = samples / lengths.total_samples
    share = ratio if config.weight_decay_incr_style == "linear" else _compute_half_cosine(1.0 - ratio)
    return start + share * (end - start)


def _compute_decay_fraction(samples: int, config: OptimizerConfig, lengths: ScheduleLengths) -> float:
    """Return the fraction of (maximum - minimum learning rate) that remains during the decay: 1 at its start, 0 at its end."""
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
            return _compute_half_cosine(ratio)
        case "exponential":  # 0.5**ratio ends at 0.5, so rescale from [1, 0.5] to [1, 0]
            return 2.0 * 0.5**ratio - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
        case _:
            raise AssertionError(f"internal error: learning-rate decay style {style!r} is not implemented. Please report this")


def _compute_half_cosine(ratio: float) -> float:
    """Return half a cosine, which falls from 1 at ratio 0 to 0 at ratio 1: the shape of cosine decays."""
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
    """Schedules of learning rate and weight decay: their settings, and their lengths in samples."""

    optimizer: OptimizerConfig
    lengths: ScheduleLengths

    def to_json(self) -> dict[str, Any]:
        """Return the settings and lengths of the schedules as JSON values, in the form in which a checkpoint stores them."""
        fields = {name: getattr(self.optimizer, name) for name in _SCHEDULE_FIELDS}
        return {**fields, "lengths": dataclasses.asdict(self.lengths)}

    def with_saved(self, saved: dict[str, Any]) -> LearningSchedule:
        """Return a copy with the settings and lengths of the schedules in a checkpoint.

        Args:
            saved: result of `to_json`, read from the checkpoint.
        """
        saved = fill_missing_fields(saved)
        fields = {name: saved[name] for name in _SCHEDULE_FIELDS}
        return LearningSchedule(dataclasses.replace(self.optimizer, **fields), ScheduleLengths(**saved["lengths"]))


def fill_missing_fields(saved: dict[str, Any]) -> dict[str, Any]:
    """Add the schedule settings that an older checkpoint lacks. Each gets its default, with which a schedule is the same as without
    the setting.

    Args:
        saved: schedules of a checkpoint, as `LearningSchedule.to_json` returns them.

    Raises:
        ValueError: an entry is missing, unknown, or has an invalid value.
    """
    for name, value in saved.items():
        if name == "lengths":
            check_json_type(value, ScheduleLengths, "schedule.lengths")
        elif name not in _SCHEDULE_FIELDS:
            raise ValueError(f"the entry schedule.{name[:40]} is unknown")
        else:
            get_flag(name).from_json(value)
    if "lengths" not in saved:
        raise ValueError("the entry schedule.lengths is missing")
    defaults = {name: getattr(OptimizerConfig(), name) for name in _SCHEDULE_FIELDS}
    default_lengths = {"rewarm_start": None, "rewarm_samples": 0}
    return {**defaults, **saved, "lengths": {**default_lengths, **saved["lengths"]}}


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """State from which a run starts: its progress, its learning-rate and weight-decay schedules, and the checkpoint that was
    loaded."""

    progress: Progress
    schedule: LearningSchedule
    path: PathOrUrl | None
    """Checkpoint from which the run continues. None for a run that starts at iteration 0, also if it starts with the weights of
    another run."""
    notes: Sequence[str] = ()
    """Lines for the start-up log."""
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """Content of the checkpoint's `config.json`, not validated; empty without a checkpoint."""


# ---- Schedules with which a resumed run continues: those of its command line, or those of its checkpoint.

_SCHEDULE_FLAGS = (
    *("train_epochs", "train_iters", "train_samples", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init"),
    *("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    *("lr_rewarm_start_iters", "lr_rewarm_start_samples", "lr_rewarm_iters", "lr_rewarm_samples", "lr_rewarm_factor"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "decoupled_lr", "decoupled_min_lr"),
)
"""Settings that determine the schedules."""


def compare_schedule_flags(saved: Config, current: Config) -> list[str]:
    """Return a line for each learning-rate or weight-decay setting that differs between a checkpoint and this run. The line has the
    flag with both values."""
    differences = []
    for name in _SCHEDULE_FLAGS:
        saved_value, current_value = ({**vars(config.training), **vars(config.optimizer)}.get(name) for config in (saved, current))
        if saved_value != current_value:
            saved_text, current_text = ("not given" if value is None else value for value in (saved_value, current_value))
            differences.append(f"--{name.replace('_', '-')} {saved_text} in the checkpoint, {current_text} here")
    return differences


def resolve_schedule(
    current: LearningSchedule,
    saved: dict[str, Any],
    path: PathOrUrl,
    flag_differences: Sequence[str] = (),
    updated_samples: int = 0,
) -> LearningSchedule:
    """Return the learning-rate and weight-decay schedules with which a resumed run continues: those of the command line or those of
    the checkpoint.

    Args:
        current: schedules of this command line.
        saved: schedules of the checkpoint, as `LearningSchedule.to_json` returns them.
        path: path of the checkpoint, for the error message.
        flag_differences: result of `compare_schedule_flags`, for the error message.
        updated_samples: number of samples in updates so far, from which the schedules continue.

    Raises:
        MismatchError: the schedules differ, and --resume-schedule does not say which schedules to use.
    """
    if current.optimizer.schedule_source == "saved":
        return current.with_saved(saved)
    current_json, saved = current.to_json(), fill_missing_fields(saved)
    if current.optimizer.schedule_source == "new" or current_json == saved:
        return current
    flat_current, flat_saved = ({**d, **d["lengths"]} for d in (current_json, saved))
    ignored = {"lengths"}  # lengths that no schedule depends on may differ
    if current.optimizer.weight_decay_incr_style == "constant":
        ignored.add("total_samples")
    if current.optimizer.lr_decay_style == "constant":
        ignored.add("decay_samples")
    elif current.lengths.rewarm_start is not None:
        ignored.discard("total_samples")  # the second decay ends there
    differing = [
        f"{name}: {flat_saved[name]} there, {flat_current[name]} here"
        for name in flat_current
        if name not in ignored and flat_current[name] != flat_saved[name]
    ]
    if not differing:
        return current
    saved_schedule = current.with_saved(saved)
    saved_rate, current_rate = (
        compute_learning_rate(updated_samples, schedule.optimizer, schedule.lengths) for schedule in (saved_schedule, current)
    )
    raise MismatchError(
        f"the schedules of learning rate or weight decay differ from those of {path}:\n  "
        + "\n  ".join([*flag_differences, *differing])
        + "\n  Choose the schedules with one of these flags:\n"
        f"    --resume-schedule new    those of this command line: the learning rate continues with {current_rate:.3g}\n"
        f"    --resume-schedule saved  those of the checkpoint: the learning rate continues with {saved_rate:.3g}\n"
        "  (Flags of Megatron-LM: --override-opt-param-scheduler, --use-checkpoint-opt-param-scheduler.)"
    )
