"""Where a run begins: at a checkpoint of its own, with the weights of another, or afresh; and whether its settings fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, MismatchError
from megatron.checkpoint.folder_kinds import refuse_foreign
from megatron.checkpoint.global_tensor import AVERAGE, WEIGHT
from megatron.checkpoint.load import Loaded, load_tensors
from megatron.checkpoint.save_folder import find_checkpoint, note_damaged, read_config, read_state
from megatron.checkpoint.storage import MANIFEST, Place
from megatron.checkpoint.storage_kinds import LOCATION, open_storage
from megatron.config.config import Config
from megatron.config.imports import named
from megatron.config.model import FREE_DOWNWARD, FREE_FIELDS, FREE_UPWARD, ModelConfig, free_at_beginning
from megatron.config.outputs import CheckpointConfig
from megatron.config.save import from_dict
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.spec.groups import groups_of
from megatron.spec.layer_pattern import pattern_text
from megatron.spec.mlps import experts_of, has_experts
from megatron.spec.weights import depth_of, model_weights
from megatron.training.failure import together
from megatron.training.progress import LearningSchedule, Progress, Resumed, agreed_schedule, flags_that_differ
from megatron.training.saver import global_tensors

# ---- The settings of a model with defaults filled in, so that two spellings of one model are equal.


def effective(model: ModelConfig) -> ModelConfig:
    """The settings with defaults filled in, so that a missing one equals the default. What has no effect is the same in all."""
    learned = model.position_embedding_type == "learned_absolute"
    return dataclasses.replace(
        _with_experts_spelt_out(model),
        kv_channels=model.head_size,
        num_query_groups=model.num_key_value_heads,
        group_query_attention=False,  # only the number of key-value heads counts
        max_position_embeddings=model.num_positions if learned else None,
        lora_alpha=None if model.lora_rank is None else model.lora_scale * model.lora_rank,
        lora_targets=tuple(sorted(model.lora_targets)),
    )


def _with_experts_spelt_out(model: ModelConfig) -> ModelConfig:
    """The same of MLPs and experts."""
    found = dataclasses.replace(model, ffn_hidden_size=model.ffn_size)
    if model.num_experts is None:
        return found
    marks, of_layer = tuple(has_experts(model, layer) for layer in range(model.num_layers)), experts_of(model)
    router = of_layer.router
    return dataclasses.replace(
        found,
        ffn_hidden_size=None if all(marks) else model.ffn_size,
        moe_layer_freq=pattern_text(marks),
        moe_ffn_hidden_size=of_layer.expert.width,
        moe_router_pre_softmax=router.pre_softmax,
        moe_router_topk_scaling_factor=router.scaling,
        moe_router_num_groups=router.groups,
        moe_router_group_topk=router.open_groups,
    )


class ChosenCheckpoint(NamedTuple):
    """A checkpoint that fits the run."""

    path: Place
    state: dict[str, Any]
    notes: list[str]
    begin: frozenset[str] = frozenset()
    """Parameters that it lacks and that begin with their initial values."""
    record: Mapping[str, Any] = MappingProxyType({})
    """Its `config.json`; see `Resumed`."""
    schedule_flags: Sequence[str] = ()
    """Settings of the schedules that differ from the run's, in words."""


def resume(
    config: Config,
    context: ParallelContext,
    optimizer: ShardedOptimizer,
    scaler: GradScaler,
    schedule: LearningSchedule,
    vocab_size: int,
    *,
    in_memory: bool = False,
) -> Resumed:
    """Fill weights and state from the checkpoint that --load names, or else weights from --pretrained-checkpoint.

    All ranks call it together. If a checkpoint turns out to be damaged, the one before it is taken, and the log says so.

    Args:
        in_memory: whether nodes keep state (`kept_state.py`): where it is newer, a run that goes on in its own folder takes it.

    Raises:
        ValueError: there is none and there must be, it belongs to another model, all are damaged, or its schedules differ.
    """
    checkpoint = config.checkpoint
    notes: list[str] = []
    if checkpoint.load is not None:
        wants_state = checkpoint.load_optim and not checkpoint.finetune
        folder, step = checkpoint.load, checkpoint.ckpt_step
        own = in_memory and folder == checkpoint.save and step is None and wants_state

        def look(damaged: dict[int, str]) -> ChosenCheckpoint | None:
            newer = named("megatron_lab.node_memory.kept_state:newer_in_memory") if own else lambda *_: False
            place = LOCATION if newer(open_storage(folder), damaged) else folder
            return look_in(config, place, step, vocab_size, damaged, goes_on=not checkpoint.finetune)

        chosen = fill(config.model, look, context, optimizer, wants_state=wants_state, may_fall_back=step is None)
        if chosen is not None:
            if checkpoint.finetune:
                return _begun(chosen, schedule, "--finetune")
            return continued(chosen, optimizer, scaler, schedule, wants_state=wants_state)
        check_may_lack(checkpoint)
        usual = checkpoint.load == checkpoint.save  # the first start of a run that is restarted by the same command
        notes = [f"{'' if usual else 'WARNING: '}--load {folder} holds no checkpoint: the run begins at iteration 0"]
    if checkpoint.pretrained_checkpoint is not None:
        base = checkpoint.pretrained_checkpoint
        chosen = fill(
            config.model,
            lambda damaged: look_at_base(config, base, vocab_size, damaged),
            context,
            optimizer,
            wants_state=False,
            may_fall_back=True,
        )
        assert chosen is not None, "a missing base is an error"
        return _begun(chosen, schedule, "--pretrained-checkpoint", notes)
    return Resumed(Progress(), schedule, None, notes)


def check_may_lack(checkpoint: CheckpointConfig) -> None:
    """Refuse a run whose --load holds no checkpoint, if it needs one: a user who wants a part of it does.

    Raises:
        MismatchError: it does.
    """
    needs = {
        "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
        "--finetune": checkpoint.finetune,
        "--no-load-optim": not checkpoint.load_optim,
    }
    if named := [flag for flag, given in needs.items() if given]:
        raise MismatchError(f"--load {checkpoint.load} holds no checkpoint, and {named[0]} is given")


def continued(
    chosen: ChosenCheckpoint, optimizer: ShardedOptimizer, scaler: GradScaler, schedule: LearningSchedule, *, wants_state: bool
) -> Resumed:
    """Take over the counts, and agree on the schedules."""
    path, state, notes, _, record, flags = chosen
    try:
        if wants_state:
            optimizer.num_updates = int(state["optimizer_updates"])
            scaler.load_state_dict(state["scaler"])
        else:
            notes = [*notes, "moments start from zero (--no-load-optim)"]
        progress = Progress.from_json(state["progress"])
        agreed = agreed_schedule(schedule, state["schedule"], path, flags, progress.updated_samples)
        return Resumed(progress, agreed, path, notes, record)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the state.json of {path} is not that of a run of this program ({error!r}): add --finetune to take its weights alone"
        ) from error


def _begun(chosen: ChosenCheckpoint, schedule: LearningSchedule, flag: str, notes: Sequence[str] = ()) -> Resumed:
    """A run that begins with the weights of another."""
    told = f"weights of {chosen.path}; counting starts from iteration 0 ({flag})"
    return Resumed(Progress(), schedule, None, [*notes, *chosen.notes, told])


def fill(
    model: ModelConfig,
    look: Callable[[dict[int, str]], ChosenCheckpoint | None],
    context: ParallelContext,
    optimizer: ShardedOptimizer,
    *,
    wants_state: bool,
    may_fall_back: bool,
) -> ChosenCheckpoint | None:
    """Load the first checkpoint that is sound to its last byte; the notes then say what was compared.

    Args:
        look: chooses a checkpoint. It is given the iterations that cannot be read, with the reasons, and passes these over. None
            means that there is no checkpoint at all.

    Raises:
        DamagedCheckpointError: none is sound, or there is no choice.
    """
    damaged: dict[int, str] = {}
    while True:
        # One rank looks and tells the others: so thousands need not ask the file system, and all take the same checkpoint.
        chosen = broadcast_object(together(context, lambda: _chosen(look, damaged) if context.rank == 0 else None), context.world)
        if chosen is None:
            return None
        if wants_state and not chosen.state.get("has_optimizer"):
            raise MismatchError(
                f"{chosen.path} was saved without optimizer state: add --no-load-optim, or --finetune to start counting from 0"
            )
        has_average = chosen.state.get("ema_decay") is not None
        averages = wants_state and has_average
        tensors = global_tensors(optimizer, context, state=wants_state, averages=averages)
        tensors = [tensor for tensor in tensors if tensor.name.partition(".")[2] not in chosen.begin]
        try:
            loaded = load_tensors(
                chosen.path,
                tensors,
                context.world,
                allow_unused=lambda name: (
                    name.startswith(f"{AVERAGE}.")
                    or (not wants_state and not name.startswith(f"{WEIGHT}."))
                    or _is_left_out(name.partition(".")[2], model)
                ),
            )
        except DamagedCheckpointError as error:  # on every rank the same
            note_damaged(chosen.path, error, damaged, may_fall_back)
            continue
        optimizer.publish()
        if not averages:
            optimizer.begin_averages()
        return chosen._replace(notes=[*chosen.notes, *_told_of_averages(optimizer, has=has_average, taken=averages), _told(loaded)])


def _chosen(look: Callable[[dict[int, str]], ChosenCheckpoint | None], damaged: dict[int, str]) -> ChosenCheckpoint | None:
    try:
        return look(damaged)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        raise MismatchError(str(error)) from error


def _told_of_averages(optimizer: ShardedOptimizer, *, has: bool, taken: bool) -> list[str]:
    """What becomes of the average of the weights (--ema-decay), where the run or the checkpoint has none."""
    if has and not optimizer.averages:
        return ["the average of the weights in the checkpoint is left out (no --ema-decay)"]
    return ["the average of the weights begins at the weights of the checkpoint"] if optimizer.averages and not taken else []


def look_in(
    config: Config, folder: str, step: int | None, vocab_size: int, damaged: dict[int, str], *, goes_on: bool
) -> ChosenCheckpoint | None:
    """The checkpoint of a run to take, with its content beside tensors; checks that it fits."""
    while True:
        told: list[str] = []
        try:
            path = find_checkpoint(folder, step, tell=told.append, damaged=damaged)
        except DamagedCheckpointError:
            refuse_foreign(folder)
            raise
        if path is None:
            refuse_foreign(folder)
            return None
        try:
            return fitting(config, path, vocab_size, [f"WARNING: {text}" for text in told], goes_on=goes_on)
        except DamagedCheckpointError as error:
            note_damaged(path, error, damaged, may_fall_back=step is None)


def look_at_base(config: Config, base: str, vocab_size: int, damaged: dict[int, str]) -> ChosenCheckpoint:
    """The checkpoint whose weights to begin with: `base` itself, or the newest in it."""
    storage = open_storage(base)
    if storage.size(MANIFEST) is not None:
        if damaged:  # there is no other
            raise DamagedCheckpointError("; ".join(damaged.values()))
        return fitting(config, storage.place, vocab_size, [], goes_on=False)
    found = look_in(config, base, None, vocab_size, damaged, goes_on=False)
    if found is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {base} holds no checkpoint: give a --save folder or an iter_ folder "
            f"(weights of another program are brought into one by tools/checkpoint.py import)"
        )
    return found


def fitting(config: Config, path: Place, vocab_size: int, notes: list[str], *, goes_on: bool) -> ChosenCheckpoint:
    state = read_state(path)
    record = read_config(path)
    notes = notes + check_model(config, record, vocab_size, path, goes_on=goes_on)
    saved = {weight.name for weight in model_weights(from_dict(record["config"]).model, vocab_size)}
    lacking = [one for one in model_weights(config.model, vocab_size) if one.name not in saved]
    begin = [one for one in lacking if one.by_counts is not None]
    if begin:
        notes.append(f"{len(begin)} tensors of routers that the checkpoint lacks begin anew ({begin[0].name}, ...)")
    if config.model.lora_rank is not None:
        adapters = [one for one in lacking if not one.frozen]
        begin += adapters
        if adapters:
            notes.append(f"{len(adapters)} matrices of adapters begin anew beside the weights of the checkpoint")
    if goes_on and "progress" not in state:
        raise CheckpointError(
            f"{path} holds weights alone, not the state of a run: add --finetune, or give it as --pretrained-checkpoint"
        )
    differ = flags_that_differ(from_dict(record["config"]), config) if goes_on else []
    return ChosenCheckpoint(path, state, notes, frozenset(one.name for one in begin), record, differ)


def _told(loaded: Loaded) -> str:
    """The result of the comparison with the checkpoint's content, in words."""
    text = f"{loaded.equal} tensors in memory equal what was saved"
    if loaded.digest is not None:
        text += f" (content digest of the checkpoint: {loaded.digest[:16]})"
    if loaded.narrowed:
        text += f"; {loaded.narrowed} were rounded to a narrower dtype and are not compared"
    if loaded.unknown:
        text += f"; of {loaded.unknown} it holds no content sums to compare with"
    return text


# ---- whether the settings go with those of the checkpoint

# Settings that change the numbers of a run that continues: they may differ, but the user should know. All of the other topics.
_TOLD = ("data", "training", "optimizer", "precision", "parallel")
# These decide where and how long, not what; or another check treats them.
_NOT_TOLD = {
    "num_workers",
    "data_cache_path",
    "exit_interval",
    "exit_duration_in_mins",
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
    "resume_schedule",
    "distributed_timeout_minutes",
    "hang_warn_s",
    "hang_kill_s",
    "straggler_interval",
    "device",
}


def check_model(config: Config, record: dict[str, Any], vocab_size: int, path: Place, *, goes_on: bool) -> list[str]:
    """Compare the settings of this run with those of a checkpoint.

    Args:
        config: settings of this run.
        record: `config.json` of the checkpoint.
        vocab_size: that of this run's tokenizer.
        path: the checkpoint.
        goes_on: whether the run continues from the checkpoint; else it takes the weights alone, and only the model counts.

    Returns:
        A note for each setting that differs and may.

    Raises:
        CheckpointError: settings that make another model differ, or the optimizer is another one and its state is wanted.
    """
    saved = from_dict(record["config"])
    model = _differences(effective(saved.model), effective(config.model))
    fewer = {name for name in FREE_DOWNWARD if getattr(config.model, name) < getattr(saved.model, name)}
    more = {name for name in FREE_UPWARD if getattr(config.model, name) > getattr(saved.model, name)}
    may_differ = fewer | more | (FREE_FIELDS if goes_on else free_at_beginning(saved.model))
    wrong = [text for name, text in model.items() if name not in may_differ]
    if record["vocab_size"] != vocab_size:
        wrong.append(f"vocabulary {record['vocab_size']} there, {vocab_size} here (see --tokenizer-type and its files)")
    if wrong:
        raise CheckpointError(
            f"{path} holds another model:\n  "
            + "\n  ".join(wrong)
            + "\n  Use the checkpoint's settings (--use-checkpoint-args takes them), or another checkpoint."
            + _about_adapters(saved.model, config.model, goes_on=goes_on)
        )
    before, now = saved.optimizer.optimizer, config.optimizer.optimizer
    if goes_on and before != now and config.checkpoint.load_optim:
        raise CheckpointError(
            f"{path} holds the state of --optimizer {before}, not of {now}: take {before}, or leave its state with --no-load-optim"
        )
    if goes_on and config.checkpoint.load_optim:
        there, here = groups_of(saved.optimizer), groups_of(config.optimizer)
        blocks, block = saved.optimizer.adam_8bit_block_size, config.optimizer.adam_8bit_block_size
        for weight in model_weights(config.model, vocab_size):
            rule = here(weight).optimizer
            if there(weight).optimizer != rule:
                raise CheckpointError(
                    f"{path} holds the state of {there(weight).optimizer} for {weight.name}, not of {rule}: "
                    "leave its rule as it was (--param-groups), or leave the state with --no-load-optim"
                )
            if rule == "adam8bit" and blocks != block:
                raise CheckpointError(
                    f"{path} holds moments in blocks of {blocks}, not of {block}: take --adam-8bit-block-size {blocks}"
                )
    free = list(model.values())
    for topic in _TOLD if goes_on else ():
        differing = _differences(getattr(saved, topic), getattr(config, topic))
        free += [text for name, text in differing.items() if name not in _NOT_TOLD]
    told = [f"differs from the checkpoint: {text}" for text in free]
    if saved.model.mtp_num_layers > config.model.mtp_num_layers:
        told.append(_told_of_depths(saved.model, config.model, vocab_size))
    return told


def _about_adapters(saved: ModelConfig, here: ModelConfig, *, goes_on: bool) -> str:
    """What to do where a checkpoint has other adapters than the run, or one of them has none."""
    if saved.lora_rank is None and here.lora_rank is not None and goes_on:
        return "\n  To train adapters beside these weights, begin with them: --pretrained-checkpoint, or --load with --finetune."
    if saved.lora_rank is not None and saved.lora_rank != here.lora_rank:
        return "\n  tools/checkpoint.py import makes a checkpoint in which its adapters are added to the weights."
    return ""


def _told_of_depths(saved: ModelConfig, here: ModelConfig, vocab_size: int) -> str:
    """What is left out where a run has fewer depths of multi-token prediction than its checkpoint."""
    weights = (weight for weight in model_weights(saved, vocab_size) if depth_of(weight.name) is not None)
    left = [weight for weight in weights if _is_left_out(weight.name, here)]
    depths = f"{saved.mtp_num_layers - here.mtp_num_layers} of {saved.mtp_num_layers} depths of multi-token prediction"
    return (
        f"WARNING: {depths} in the checkpoint are left out, with their moments: {len(left)} tensors of "
        f"{sum(weight.numel for weight in left):,} parameters (--mtp-num-layers {here.mtp_num_layers})"
    )


def _is_left_out(name: str, here: ModelConfig) -> bool:
    """Whether a parameter is of a depth that this run's model does not have, or shares of experts, which it does not need."""
    depth = depth_of(name)
    shares = name.endswith("router.shares") and here.moe_router_load_balancing_type != "global_aux_loss"
    return shares or (depth is not None and depth >= here.mtp_num_layers)


def _differences(saved: Any, here: Any) -> dict[str, str]:
    """Fields whose values differ, with the difference as text."""
    values = {name: (there, vars(here)[name]) for name, there in vars(saved).items()}
    return {
        name: f"--{name.replace('_', '-')} {there} there, {this} here" for name, (there, this) in values.items() if there != this
    }
