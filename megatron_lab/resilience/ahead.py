"""Whether a run can go on from its checkpoint, as far as that can be told before its ranks are started."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.config.checks.finding import data_size
from megatron.config.config import Config
from megatron.data.tokenizer import planned_rows
from megatron.training.progress import BatchSizePlan, Progress, agreed_schedule
from megatron.training.resume import ChosenCheckpoint, check_may_lack, look_at_base, look_in
from megatron.training.startup import make_learning_schedule, with_batch_size


def check_ahead(config: Config, world_size: int, *, only_what_is_there: bool = False) -> None:
    """Look, without ranks, whether a run with these settings can go on from the checkpoint that it would find. Reads no weights.

    Args:
        world_size: number of its ranks.
        only_what_is_there: a checkpoint that is not there is no fault: the run may be for another machine.

    Raises:
        ValueError: the checkpoint is of another model or another schedule, there is none and there must be, or the tokenizer that
            says how large the vocabulary is cannot be built.
    """
    data_ranks = data_size(config, world_size)
    if data_ranks is None or (config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None):
        return
    plan = BatchSizePlan(config.training, data_ranks, config.model.seq_length)
    config = with_batch_size(config, plan)
    chosen = _found(config, planned_rows(config.data), only_what_is_there=only_what_is_there)
    if chosen is None:
        return
    schedule = make_learning_schedule(config.optimizer, config.training, plan)
    counts = Progress.from_json(chosen.state["progress"]).updated_samples
    agreed_schedule(schedule, chosen.state["schedule"], chosen.path, chosen.schedule_flags, counts)


def misfit_ahead(config: Config, world_size: int) -> str | None:
    """What is wrong with the settings beside the checkpoint that the run would find, in words; None if nothing that can be told."""
    try:
        check_ahead(config, world_size)
    except DamagedCheckpointError:
        return None  # it may be readable elsewhere
    except CheckpointError as error:
        return str(error)
    return None


def _found(config: Config, vocab_size: int, *, only_what_is_there: bool) -> ChosenCheckpoint | None:
    """The checkpoint from which a run would go on, as `resume` chooses it, without weights; None for a run that begins.

    Args:
        only_what_is_there: no checkpoint where there must be one is no fault.

    Raises:
        CheckpointError: as `resume`.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is not None:
        chosen = look_in(config, checkpoint.load, checkpoint.ckpt_step, vocab_size, {}, goes_on=not checkpoint.finetune)
        if chosen is not None:
            return None if checkpoint.finetune else chosen
        if not only_what_is_there:
            check_may_lack(checkpoint)
    if checkpoint.pretrained_checkpoint is not None and not only_what_is_there:
        look_at_base(config, checkpoint.pretrained_checkpoint, vocab_size, {})
    return None
