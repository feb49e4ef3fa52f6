"""Check that a run can resume from its checkpoint, before its ranks are started."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.config.checks.finding import get_data_parallel_size
from megatron.config.config import Config
from megatron.data.indexed_dataset import DatasetError
from megatron.data.tokenizer import predict_embedding_rows
from megatron.training.progress import BatchSizePlan, Progress, resolve_schedule
from megatron.training.resume import SelectedCheckpoint, check_missing_checkpoint, select_base_checkpoint, select_checkpoint
from megatron.training.startup import make_learning_schedule, resolve_batch_size
from megatron_lab.data_tools.epochs import resolve_epochs_from_files


def check_resume(config: Config, world_size: int, *, ignores_missing: bool = False) -> None:
    """Check, without starting ranks, that a run with these settings can resume from its checkpoint. Weights are not read.

    Args:
        world_size: number of ranks of the run.
        ignores_missing: accept a missing checkpoint. For a plan of a run on another machine, where the checkpoint may be.

    Raises:
        ValueError: the checkpoint belongs to another model or learning rate schedule, a required checkpoint is missing, or the
            tokenizer that determines the vocabulary size cannot be built.
    """
    num_data_ranks = get_data_parallel_size(config, world_size)
    if num_data_ranks is None or (config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None):
        return
    if config.training.train_epochs is not None:
        try:
            config = resolve_epochs_from_files(config, world_size, num_data_ranks)
        except DatasetError:  # the data may be on other nodes; without it, the length of the schedules is unknown
            return
    plan = BatchSizePlan(config.training, num_data_ranks, config.model.seq_length)
    config = resolve_batch_size(config, plan)
    checkpoint = _select_resume_checkpoint(config, predict_embedding_rows(config.data), ignores_missing=ignores_missing)
    if checkpoint is None:
        return
    schedule = make_learning_schedule(config.optimizer, config.training, plan)
    sample_counts = Progress.from_json(checkpoint.state["progress"]).updated_samples
    resolve_schedule(schedule, checkpoint.state["schedule"], checkpoint.path, checkpoint.schedule_differences, sample_counts)


def find_resume_problem(config: Config, world_size: int) -> str | None:
    """Check that the settings fit the checkpoint from which the run would resume. Return the problem as text, or None if there is
    none.

    A damaged checkpoint does not count as a problem, because other nodes may be able to read it.

    Args:
        world_size: number of ranks of the run.
    """
    try:
        check_resume(config, world_size)
    except DamagedCheckpointError:
        return None  # the checkpoint may be readable on other nodes
    except CheckpointError as error:
        return str(error)
    return None


def _select_resume_checkpoint(config: Config, vocab_size: int, *, ignores_missing: bool) -> SelectedCheckpoint | None:
    """Select the checkpoint from which the run resumes, by the rules of `megatron.training.resume`, without reading weights. Return
    None if the run starts from scratch.

    Args:
        ignores_missing: accept a missing checkpoint even if the settings require one.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is not None:
        selected = select_checkpoint(
            config, checkpoint.load, checkpoint.ckpt_step, vocab_size, {}, continues_run=not checkpoint.finetune
        )
        if selected is not None:
            return None if checkpoint.finetune else selected
        if not ignores_missing:
            check_missing_checkpoint(checkpoint, skips_training=config.training.skip_train)
    if checkpoint.pretrained_checkpoint is not None and not ignores_missing:
        select_base_checkpoint(config, checkpoint.pretrained_checkpoint, vocab_size, {})
    return None
