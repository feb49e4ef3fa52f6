"""Length of a run in passes over its training data (--train-epochs).

An epoch has as many samples as the training data contains: the sum of the samples of its datasets. In a blend without weights,
an epoch reads each sample once. With weights, an epoch has the same length, and some datasets are read more often than others.
Datasets of weight 0 do not count. Sample counts follow from the number of tokens and --seq-length or, with --whole-documents,
from the packed documents.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.config.checks.finding import get_data_parallel_size
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.rules import find_violations
from megatron.config.training import OptimizerConfig
from megatron.data.splits import open_datasets
from megatron.data.tokenizer import build_tokenizer
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.failure import run_on_all_ranks
from megatron.training.features import Feature, RunComponents
from megatron.training.inputs import RunData
from megatron.training.progress import BatchSizePlan

_PHASES = ("decay", "warmup", "wsd_decay", "rewarm_start", "rewarm")
"""Phases of the learning-rate schedule whose length is a setting, in iterations or in samples."""
_MIN_ASSUMED_LENGTH = 100


def resolve_epochs(config: Config, data: RunData, context: ParallelContext) -> Config:
    """Return the settings with the number of samples or iterations that --train-epochs means. All ranks call this function
    together.

    Args:
        data: data of the run. Ranks without datasets get the number of the other ranks.

    Raises:
        ValueError: the number of samples is unknown, less than one step, or does not fit other settings.
    """

    def count() -> int | None:
        return None if data.datasets is None else _require_count(data.datasets.train.count_epoch_samples())

    counts = gather_objects(run_on_all_ranks(context, count), context.world)
    samples_per_epoch = _require_count(next((value for value in counts if value is not None), None))
    return set_run_length(config, samples_per_epoch, context.data_group.size, context.world.size)


def resolve_epochs_from_files(config: Config, world_size: int, data_size: int) -> Config:
    """Return the settings with the number of samples or iterations that --train-epochs means, without ranks: for a plan, or
    before a start. Settings without --train-epochs are returned unchanged.

    Raises:
        ValueError: the data cannot be read, or the number does not fit other settings.
    """
    if config.training.train_epochs is None:
        return config
    datasets = open_datasets(
        config.data,
        seed=config.training.seed,
        seq_length=config.model.seq_length,
        tokenizer=build_tokenizer(config.data),
        need_validation=False,
        need_test=False,
    )
    return set_run_length(config, _require_count(datasets.train.count_epoch_samples()), data_size, world_size)


def _require_count(samples_per_epoch: int | None) -> int:
    if samples_per_epoch is None:
        raise ValueError(
            "--train-epochs: the number of samples of this training data is unknown.\n"
            "  Set the length of the run by --train-iters or --train-samples."
        )
    return samples_per_epoch


def set_run_length(config: Config, samples_per_epoch: int, data_size: int, world_size: int) -> Config:
    """Return the settings with --train-samples, or with --train-iters if the learning-rate schedule is in iterations. The value of
    --train-epochs remains, for the records of the run.

    Args:
        data_size: number of data-parallel ranks.

    Raises:
        ValueError: the run would have no step, or other settings do not fit its length.
    """
    epochs = config.training.train_epochs
    assert epochs is not None, "called only with --train-epochs"
    training = replace(config.training, train_samples=round(epochs * samples_per_epoch))
    plan = BatchSizePlan(training, data_size, config.model.seq_length)
    meaning = f"--train-epochs {epochs:g} is {training.train_samples:,} samples of {samples_per_epoch:,} in an epoch"
    if plan.total_iterations < 1:
        raise ValueError(
            f"{meaning}, less than a step of {plan.get_global_batch_size(0):,} sequences.\n  Raise --train-epochs, or lower "
            "--global-batch-size or --seq-length."
        )
    if has_lengths_in_iterations(config.optimizer):
        training = replace(training, train_samples=None, train_iters=plan.total_iterations)
    if violations := find_violations(replace(config, training=replace(training, train_epochs=None)), world_size):
        raise ValueError(f"{meaning}, which does not fit other settings.\n{ConfigError(violations)}")
    return replace(config, training=training)


def has_lengths_in_iterations(optimizer: OptimizerConfig) -> bool:
    """Return whether a length of the learning-rate schedule is set in iterations, such as --lr-warmup-iters."""
    return any(getattr(optimizer, f"lr_{phase}_iters") for phase in _PHASES)


def assume_run_length(config: Config) -> Config:
    """Return the settings with an assumed --train-iters or --train-samples instead of --train-epochs, for proofs, which do not
    read the data. It is the length of the learning-rate decay if that is set. Settings without --train-epochs are returned
    unchanged."""
    if config.training.train_epochs is None:
        return config
    is_in_iterations = has_lengths_in_iterations(config.optimizer)
    unit = "iters" if is_in_iterations else "samples"
    lengths = {phase: getattr(config.optimizer, f"lr_{phase}_{unit}") or 0 for phase in _PHASES}
    length = max(lengths["decay"] or 2 * lengths["warmup"], lengths["rewarm_start"] + lengths["rewarm"] + 1, _MIN_ASSUMED_LENGTH)
    train_iters, train_samples = (length, None) if is_in_iterations else (None, length)
    training = replace(config.training, train_epochs=None, train_iters=train_iters, train_samples=train_samples)
    return replace(config, training=training)


def describe_epochs(config: Config, data_size: int) -> str:
    """Describe the length of a run whose epochs are resolved, for the log: "2 epochs = 2,000 samples = 250 iterations".

    Args:
        data_size: number of data-parallel ranks.
    """
    training = config.training
    plan = BatchSizePlan(training, data_size, config.model.seq_length)
    num_read = plan.count_consumed_samples(plan.total_iterations)
    samples = training.train_samples or num_read
    epochs = "1 epoch" if training.train_epochs == 1 else f"{training.train_epochs:g} epochs"
    text = f"{epochs} = {samples:,} samples = {plan.total_iterations:,} iterations"
    return text + (f" (the last {samples - num_read:,} samples do not fill a batch)" if samples > num_read else "")


def describe_planned_epochs(config: Config, world_size: int) -> list[str]:
    """Return the line about the length of a planned run (--dry-run), or the reason why it is unknown. Empty without
    --train-epochs."""
    data_size = get_data_parallel_size(config, world_size)
    if config.training.train_epochs is None or data_size is None:
        return []
    try:
        return [describe_epochs(resolve_epochs_from_files(config, world_size, data_size), data_size)]
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return [f"the length of --train-epochs {config.training.train_epochs:g} is unknown here: {reason}"]


class EpochFeature(Feature):
    """Feature of --train-epochs: logs the length of the run in samples and iterations."""

    def get_summary_lines(self, run: RunComponents) -> list[str]:
        """Return the line with the length of the run."""
        return [describe_epochs(run.config, run.context.data_group.size)]
