"""Settings of a run that only evaluates (--skip-train)."""

from __future__ import annotations

from dataclasses import replace

from megatron.config.config import Config
from megatron.config.training import OptimizerConfig

_EVALUATION_OPTIMIZER = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=1e-3, lr_decay_style="constant")
"""Optimizer that is never called and needs no state."""


def adapt_settings(config: Config, notes: list[str]) -> Config:
    """Return the settings of a run with --skip-train: with values for the settings that only training needs, and without an
    optimizer state, neither in memory nor from the checkpoint.

    Args:
        notes: lines for the start-up log, to which one is added.
    """
    notes.append("--skip-train evaluates only: settings of the optimizer have no effect, and no optimizer state is loaded.")
    training, checkpoint = config.training, config.checkpoint
    training = replace(training, train_epochs=None)  # without training data, their length is not known
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    return replace(
        config,
        training=replace(training, iterations_to_skip=()),
        optimizer=replace(_EVALUATION_OPTIMIZER, resume_schedule=None if checkpoint.load is None else "new"),
        checkpoint=replace(checkpoint, load_optim=checkpoint.load is None),
        logging=replace(config.logging, loss_picture=False, report=False),
    )
