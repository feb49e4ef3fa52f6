"""A short run of small batches, in which everything happens that happens in a long one: ramp-up, warm-up, decay, skipped steps."""

from __future__ import annotations

import dataclasses

from megatron.config.config import Config
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.verification.reference.schedules import batch_size

_LEAST_RATE = 1e-3
"""Highest learning rate below which a step would hardly change the weights."""
_MOST_CLIP = 0.05
"""Greatest norm of the gradient that is left: small models have larger ones, so that clipping is seen to act."""
_MOST_SAMPLES = 2
"""Of a microbatch."""


def reduced_training(training: TrainingConfig, pp: int, dp: int, small_pp: int, small_dp: int, steps: int) -> TrainingConfig:
    """Batches and length.

    Args:
        training: before.
        pp, dp: pipeline and data size before.
        small_pp, small_dp: after.
        steps: iterations.
    """
    micro = min(training.micro_batch_size, _MOST_SAMPLES)
    unit, ramp, full = micro * small_dp, training.rampup_batch_size, training.global_batch_size
    small_full, small_ramp = None, None
    if ramp is not None and full is not None:
        stages = min(2, (full - ramp[0]) // ramp[1])
        between = ramp[2] % (training.micro_batch_size * dp) > 0  # the batch grows in the middle of a step
        small_full, small_ramp = (1 + stages) * unit, (unit, unit, 2 * stages * unit + between)
    elif full is not None:
        small_full = unit * _microbatches(full // (training.micro_batch_size * dp), pp, small_pp)
    samples = None
    if training.train_samples is not None:
        last = small_full or unit
        consumed = 0
        for _ in range(steps):
            consumed += batch_size(consumed, last, small_ramp)
        samples = consumed + (training.train_samples % (full or training.micro_batch_size * dp) > 0)
    return dataclasses.replace(
        training,
        micro_batch_size=micro,
        global_batch_size=small_full,
        rampup_batch_size=small_ramp,
        train_iters=None if training.train_iters is None else steps,
        train_samples=samples,
        iterations_to_skip=(min(2, steps),) if training.iterations_to_skip and steps > 1 else (),
        eval_interval=None,
        exit_interval=None,
        exit_duration_in_mins=None,
    )


def _microbatches(count: int, pp: int, small_pp: int) -> int:
    """Fewer than stages where there were, as many where there were, else up to two rounds, uneven where they were."""
    if small_pp > 1 and count <= pp:
        return small_pp if count == pp else min(count, small_pp - 1)
    return min(count, 2 * small_pp + (count % pp > 0)) if small_pp > 1 else min(count, 3 + (count % 2 == 0))


def reduced_rates(config: Config, training: TrainingConfig, steps: int) -> OptimizerConfig:
    """Learning rates, the lengths of their schedules, and clipping.

    Args:
        config: before.
        training: after.
    """
    settings = config.optimizer
    kind, unit, run = "iters", 1, config.training.train_iters
    if training.train_samples is not None:
        kind, unit, run = "samples", training.train_samples // steps, config.training.train_samples
    assert run is not None and settings.lr is not None, "required"
    changed: dict[str, float | None] = {}
    warms_up = steps > 1  # a single step is all decay
    if getattr(settings, f"lr_warmup_{kind}"):
        changed[f"lr_warmup_{kind}"] = unit if warms_up else 0
    if settings.lr_warmup_fraction is not None:
        changed["lr_warmup_fraction"] = min(settings.lr_warmup_fraction, 0.5) if warms_up else None
    if (decay := getattr(settings, f"lr_decay_{kind}")) is not None:
        changed[f"lr_decay_{kind}"] = unit * max(2, steps + (decay > run) - (decay < run))
    if getattr(settings, f"lr_wsd_decay_{kind}") is not None:
        changed[f"lr_wsd_decay_{kind}"] = unit
    factor = max(1.0, _LEAST_RATE / settings.lr)
    for rate in ("lr", "min_lr", "lr_warmup_init"):
        changed[rate] = min(getattr(settings, rate) * factor, max(settings.lr, _LEAST_RATE))
    if not warms_up:
        changed["lr_warmup_init"] = 0.0
    changed["clip_grad"] = min(settings.clip_grad, _MOST_CLIP)
    return dataclasses.replace(settings, **changed)  # type: ignore[arg-type]
