"""Learning rate and weight decay as pure functions of the samples read in the updates so far.

A skipped step makes no update, so it moves neither schedule. The first update takes the values at 0 samples.
The formulas are those of Megatron-Core's OptimizerParamScheduler, so that a launch script keeps its curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.spec.groups import RateEnds


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of the schedules, in samples."""

    warmup_samples: float
    """Length of the linear warm-up. A fraction of the decay length need not be a whole number."""
    decay_samples: int
    """Where the rate reaches its floor, counted from the start of the run (warm-up included)."""
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
