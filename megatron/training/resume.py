"""Start of a run: from its latest checkpoint, from the weights of another run, or from initial weights. Also checks that the
settings fit the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, MismatchError
from megatron.checkpoint.folder_types import check_not_foreign
from megatron.checkpoint.global_tensor import EMA, WEIGHT
from megatron.checkpoint.load import LoadResult, load_tensors
from megatron.checkpoint.save_folder import find_checkpoint, read_config, read_state, record_damage
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, PathOrUrl
from megatron.checkpoint.storage_url import NODE_MEMORY_URL, open_storage
from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.model import (
    CHANGEABLE_FIELDS,
    DECREASABLE_FIELDS,
    INCREASABLE_FIELDS,
    ModelConfig,
    get_changeable_from_weights,
)
from megatron.config.outputs import CheckpointConfig
from megatron.config.save import from_dict
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.spec.groups import build_group_lookup
from megatron.spec.layer_pattern import format_pattern
from megatron.spec.mlps import build_experts_spec, has_experts
from megatron.spec.weights import iter_weights, parse_mtp_depth
from megatron.training.failure import run_on_all_ranks
from megatron.training.progress import (
    LearningSchedule,
    Progress,
    ResumePoint,
    compare_schedule_flags,
    fill_missing_fields,
    resolve_schedule,
)
from megatron.training.saver import build_global_tensors

# ---- Normalised settings of a model: settings that describe the same model become equal.


def normalize_model(model: ModelConfig) -> ModelConfig:
    """Return the model's settings in a normal form, which is equal for two configurations that describe the same model.

    Defaults are filled in, so that a missing setting equals its default. Settings without effect get the same value in all models.
    """
    has_learned_positions = model.position_embedding_type == "learned_absolute"
    return dataclasses.replace(
        _normalize_mlps(model),
        kv_channels=model.head_size,
        num_query_groups=model.num_key_value_heads,
        group_query_attention=False,  # only num_query_groups matters
        max_position_embeddings=model.num_positions if has_learned_positions else None,
        lora_alpha=None if model.lora_rank is None else model.lora_scale * model.lora_rank,
        lora_targets=tuple(sorted(model.lora_targets)),
    )


def _normalize_mlps(model: ModelConfig) -> ModelConfig:
    """Bring the settings of MLPs and experts into a normal form, in which two models that compute the same have equal settings,
    even if one sets a default explicitly. The comparison of run and checkpoint then reports only real differences."""
    normalized = dataclasses.replace(model, ffn_hidden_size=model.ffn_size)
    if model.num_experts is None:
        return normalized
    has_experts_by_layer, experts_spec = (
        tuple(has_experts(model, layer) for layer in range(model.num_layers)),
        build_experts_spec(model),
    )
    router = experts_spec.router
    return dataclasses.replace(
        normalized,
        ffn_hidden_size=None if all(has_experts_by_layer) else model.ffn_size,
        moe_layer_freq=format_pattern(has_experts_by_layer),
        moe_ffn_hidden_size=experts_spec.expert.ffn_size,
        moe_router_pre_softmax=router.pre_softmax,
        moe_router_topk_scaling_factor=router.scaling_factor,
        moe_router_num_groups=router.num_groups,
        moe_router_group_topk=router.top_k_groups,
    )


class SelectedCheckpoint(NamedTuple):
    """Checkpoint to load: its path, its metadata, and its differences from the run. The settings of the run have been checked to
    fit it."""

    path: PathOrUrl
    state: dict[str, Any]
    notes: list[str]
    """Lines for the start-up log."""
    new_params: frozenset[str] = frozenset()
    """Names of the parameters that the checkpoint lacks. They keep their initial values."""
    config_json: Mapping[str, Any] = MappingProxyType({})
    """Content of the checkpoint's `config.json`, not validated."""
    schedule_differences: Sequence[str] = ()
    """Learning-rate and weight-decay settings that differ between checkpoint and run, each as a flag with both values."""


def resume(
    config: Config,
    context: ParallelContext,
    optimizer: ShardedOptimizer,
    scaler: GradScaler,
    schedule: LearningSchedule,
    vocab_size: int,
    *,
    uses_node_memory: bool = False,
) -> ResumePoint:
    """Load weights and state from the checkpoint of --load, or only weights from --pretrained-checkpoint. Without a checkpoint,
    return the state at iteration 0. All ranks call this function together.

    If a checkpoint is damaged, the one before it is loaded, and the log reports the damage.

    Args:
        schedule: learning-rate and weight-decay schedules of the command line.
        uses_node_memory: whether the nodes keep copies of the state in host memory (`megatron_lab/node_memory`). A run that
            continues in the same save folder loads the copy if it is newer than the newest checkpoint.

    Raises:
        ValueError: there is no checkpoint although one is required, it contains another model, all checkpoints are damaged, or the
            schedules differ.
    """
    checkpoint = config.checkpoint
    notes: list[str] = []
    if checkpoint.load is not None:
        wants_state = checkpoint.load_optim and not checkpoint.finetune
        folder, iteration = checkpoint.load, checkpoint.ckpt_step
        takes_node_memory = uses_node_memory and folder == checkpoint.save and iteration is None and wants_state

        def select(damaged: dict[int, str]) -> SelectedCheckpoint | None:
            is_newer_in_memory = (
                import_object("megatron_lab.node_memory.node_memory:is_memory_newer") if takes_node_memory else lambda *_: False
            )
            source = NODE_MEMORY_URL if is_newer_in_memory(open_storage(folder), damaged) else folder
            return select_checkpoint(config, source, iteration, vocab_size, damaged, continues_run=not checkpoint.finetune)

        selected = load_selected(config.model, select, context, optimizer, wants_state=wants_state, may_fall_back=iteration is None)
        if selected is not None:
            if checkpoint.finetune:
                return _start_from_weights(selected, schedule, "--finetune")
            skips_training = config.training.skip_train
            return restore_run(selected, optimizer, scaler, schedule, wants_state=wants_state, skips_training=skips_training)
        check_missing_checkpoint(checkpoint, skips_training=config.training.skip_train)
        is_first_start = checkpoint.load == checkpoint.save  # a run that is always started with the same command
        notes = [f"{'' if is_first_start else 'WARNING: '}--load {folder} holds no checkpoint: the run begins at iteration 0"]
        if not is_first_start:
            notes[0] += _suggest_download(folder)
    if checkpoint.pretrained_checkpoint is not None:
        base_path = checkpoint.pretrained_checkpoint
        selected = load_selected(
            config.model,
            lambda damaged: select_base_checkpoint(config, base_path, vocab_size, damaged),
            context,
            optimizer,
            wants_state=False,
            may_fall_back=True,
        )
        assert selected is not None, "select_base_checkpoint raises an error for a missing checkpoint"
        return _start_from_weights(selected, schedule, "--pretrained-checkpoint", notes)
    return ResumePoint(Progress(), schedule, None, notes)


def check_missing_checkpoint(checkpoint: CheckpointConfig, *, skips_training: bool = False) -> None:
    """Check that the run may start without a checkpoint although --load is set.

    Raises:
        MismatchError: the folder of --load has no checkpoint, and another flag requires one.
    """
    requirements = {
        "--skip-train": skips_training,
        "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
        "--finetune": checkpoint.finetune,
        "--no-load-optim": not checkpoint.load_optim,
    }
    if set_flags := [flag for flag, is_set in requirements.items() if is_set]:
        raise MismatchError(
            f"--load {checkpoint.load} holds no checkpoint, but {set_flags[0]} requires a checkpoint. Check the path, or leave out "
            f"{set_flags[0]}{_suggest_download(checkpoint.load)}"
        )


def _suggest_download(folder: object) -> str:
    """Return the commands that provide a --save folder, if the name of the folder may be that of a model on the Hub."""
    return str(import_object("megatron_lab.data_tools.hub_names:suggest_model_download")(folder, needs_import=True))


def restore_run(
    selected: SelectedCheckpoint,
    optimizer: ShardedOptimizer,
    scaler: GradScaler,
    schedule: LearningSchedule,
    *,
    wants_state: bool,
    skips_training: bool = False,
) -> ResumePoint:
    """Restore the progress, the optimizer and the loss scaler from a checkpoint whose tensors are loaded. Select the learning-rate
    and weight-decay schedules of the checkpoint or of this run.

    Args:
        schedule: schedules of the command line.
        wants_state: restore the optimizer and the loss scaler too, not only the progress.
        skips_training: whether the run only evaluates (--skip-train).

    Raises:
        CheckpointError: the state of the checkpoint is incomplete.
        MismatchError: the schedules differ, and --resume-schedule does not say which schedules to use.
    """
    path, state, notes, _, config_json, schedule_differences = selected
    try:
        if wants_state:
            optimizer.num_steps = int(state["optimizer_updates"])
            scaler.load_state_dict(state["scaler"])
        else:
            notes = [*notes, *([] if skips_training else ["moments start from zero (--no-load-optim)"])]
        progress = Progress.from_json(state["progress"])
        resolved_schedule = resolve_schedule(schedule, state["schedule"], path, schedule_differences, progress.updated_samples)
        return ResumePoint(progress, resolved_schedule, path, notes, config_json)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"state.json of {path} lacks an entry or has an invalid one ({error!r}), so the run cannot continue from it: "
            "use another checkpoint, or add --finetune to load only the weights"
        ) from error


def _start_from_weights(
    selected: SelectedCheckpoint, schedule: LearningSchedule, flag: str, notes: Sequence[str] = ()
) -> ResumePoint:
    """Return the state from which a run starts at iteration 0 with the weights of another run.

    Args:
        selected: checkpoint of the other run.
        flag: flag that requests this start, for the start-up log.
        notes: further lines for the start-up log.
    """
    message = f"weights of {selected.path}; counting starts from iteration 0 ({flag})"
    return ResumePoint(Progress(), schedule, None, [*notes, *selected.notes, message])


def load_selected(
    model: ModelConfig,
    select: Callable[[dict[int, str]], SelectedCheckpoint | None],
    context: ParallelContext,
    optimizer: ShardedOptimizer,
    *,
    wants_state: bool,
    may_fall_back: bool,
) -> SelectedCheckpoint | None:
    """Load the checkpoint that `select` returns. If its content is damaged, call `select` again for another checkpoint.

    `notes` of the returned checkpoint, which are lines for the start-up log, also say how many loaded tensors equal the
    checkpoint's digests.

    Args:
        select: function that selects a checkpoint. Its argument maps the damaged iterations, which it must skip, to the reasons. It
            returns None if the folder has no checkpoint at all.
        wants_state: load optimizer state, not only weights.
        may_fall_back: try the next older checkpoint if a checkpoint is damaged.

    Returns:
        the loaded checkpoint, or None if the folder has none.

    Raises:
        DamagedCheckpointError: all checkpoints are damaged, or one is damaged and `may_fall_back` is False.
        MismatchError: `wants_state` is True, but the checkpoint has no optimizer state.
    """
    damaged: dict[int, str] = {}
    while True:
        # Only rank 0 selects: this saves file-system accesses of all other ranks, and all ranks load the same checkpoint.
        selected = broadcast_object(
            run_on_all_ranks(context, lambda: _select(select, damaged) if context.rank == 0 else None), context.world
        )
        if selected is None:
            return None
        if wants_state and not selected.state.get("has_optimizer"):
            raise MismatchError(
                f"{selected.path} was saved without optimizer state: add --no-load-optim, or --finetune to start from iteration 0"
            )
        has_average = selected.state.get("ema_decay") is not None
        loads_average = wants_state and has_average
        tensors = build_global_tensors(optimizer, context, state=wants_state, averages=loads_average)
        tensors = [tensor for tensor in tensors if tensor.name.partition(".")[2] not in selected.new_params]
        try:
            loaded = load_tensors(
                selected.path,
                tensors,
                context.world,
                allow_unused=lambda name: (
                    name.startswith(f"{EMA}.")
                    or (not wants_state and not name.startswith(f"{WEIGHT}."))
                    or _is_dropped(name.partition(".")[2], model)
                ),
            )
        except DamagedCheckpointError as error:  # raised on every rank
            record_damage(selected.path, error, damaged, may_fall_back)
            continue
        optimizer.copy_main_to_model_params()
        if not loads_average:
            optimizer.reset_averages()
        return selected._replace(
            notes=[
                *selected.notes,
                *_describe_average(optimizer, in_checkpoint=has_average, is_loaded=loads_average),
                _describe_load(loaded),
            ]
        )


def _select(select: Callable[[dict[int, str]], SelectedCheckpoint | None], damaged: dict[int, str]) -> SelectedCheckpoint | None:
    try:
        return select(damaged)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        raise MismatchError(str(error)) from error


def _describe_average(optimizer: ShardedOptimizer, *, in_checkpoint: bool, is_loaded: bool) -> list[str]:
    """Return a note for the start-up log about the average of the weights (--ema-decay). The list is empty if there is no average,
    or if the average of the checkpoint is loaded.

    Args:
        in_checkpoint: whether the checkpoint has an average.
        is_loaded: whether the average of the checkpoint is loaded.
    """
    if in_checkpoint and not optimizer.has_averages:
        return ["the average of the weights in the checkpoint is left out (no --ema-decay)"]
    return (
        ["the average of the weights begins at the weights of the checkpoint"] if optimizer.has_averages and not is_loaded else []
    )


def select_checkpoint(
    config: Config,
    folder: str,
    iteration: int | Literal["best"] | None,
    vocab_size: int,
    damaged: dict[int, str],
    *,
    continues_run: bool,
) -> SelectedCheckpoint | None:
    """Select a checkpoint of a save folder, read its metadata, and check that it fits the run.

    Args:
        folder: path or URL of the save folder.
        iteration: iteration to select; "best" for the one with the lowest validation loss; None for the newest undamaged one.
        damaged: reason why a checkpoint is damaged, by its iteration. These checkpoints are skipped, and newly found damaged ones
            are added.
        continues_run: whether the run continues from the checkpoint, or only loads its weights.

    Returns:
        the checkpoint, or None if the folder has none.
    """
    while True:
        warnings: list[str] = []
        try:
            path = find_checkpoint(folder, iteration, warn=warnings.append, damaged=damaged)
        except DamagedCheckpointError:
            check_not_foreign(folder)
            raise
        if path is None:
            check_not_foreign(folder)
            return None
        try:
            return check_checkpoint(
                config, path, vocab_size, [f"WARNING: {text}" for text in warnings], continues_run=continues_run
            )
        except DamagedCheckpointError as error:
            record_damage(path, error, damaged, may_fall_back=iteration is None)


def select_base_checkpoint(config: Config, base: str, vocab_size: int, damaged: dict[int, str]) -> SelectedCheckpoint:
    """Select the checkpoint whose weights initialise the run: `base` itself, or the newest checkpoint in the folder `base`.

    Args:
        base: value of --pretrained-checkpoint.
        damaged: reason why a checkpoint is damaged, by its iteration. These checkpoints are skipped.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it does not fit the run.
    """
    storage = open_storage(base)
    if storage.get_file_size(MANIFEST) is not None:
        if damaged:  # the only candidate is damaged
            raise DamagedCheckpointError("; ".join(damaged.values()))
        return check_checkpoint(config, storage.path_or_url, vocab_size, [], continues_run=False)
    selected = select_checkpoint(config, base, None, vocab_size, damaged, continues_run=False)
    if selected is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {base} holds no checkpoint: give a --save folder or an iter_ folder "
            f"(tools/checkpoint.py import converts weights of other programs){_suggest_download(base)}"
        )
    return selected


def check_checkpoint(
    config: Config, path: PathOrUrl, vocab_size: int, notes: list[str], *, continues_run: bool
) -> SelectedCheckpoint:
    """Read the metadata of a checkpoint and check that it fits the run.

    Args:
        path: path or URL of the checkpoint.
        vocab_size: vocabulary size of this run's tokenizer.
        notes: earlier lines for the start-up log, to which lines about this checkpoint are added.
        continues_run: whether the run continues from the checkpoint, or only loads its weights.

    Raises:
        CheckpointError: the checkpoint does not fit the run.
    """
    state, config_json = read_state(path), read_config(path)
    check_state(path, state)
    config_path = open_storage(path).get_location(CONFIG)
    if missing := {"config", "vocab_size"} - config_json.keys():
        raise DamagedCheckpointError(f"{config_path} has no entry {min(missing)}; copy the file again")
    saved = from_dict(config_json["config"], config_path)
    notes = notes + check_model(config, config_json, vocab_size, path, continues_run=continues_run)
    notes += import_object("megatron_lab.data_tools.tokenizer_checks:check_weights")(config, config_json, path)
    saved_names = {weight.name for weight in iter_weights(saved.model, vocab_size)}
    missing_weights = [weight for weight in iter_weights(config.model, vocab_size) if weight.name not in saved_names]
    new_weights = [weight for weight in missing_weights if weight.count_update is not None]
    if new_weights:
        notes.append(
            f"{len(new_weights)} router tensors that the checkpoint lacks start with initial values ({new_weights[0].name}, ...)"
        )
    if config.model.lora_rank is not None:
        adapters = [weight for weight in missing_weights if not weight.frozen]
        new_weights += adapters
        if adapters:
            notes.append(f"{len(adapters)} adapter matrices that the checkpoint lacks start with initial values")
    if continues_run and "progress" not in state:
        raise CheckpointError(
            f"{path} holds only weights, not the state of a run: add --finetune, or give it as --pretrained-checkpoint"
        )
    schedule_differences = compare_schedule_flags(saved, config) if continues_run else []
    return SelectedCheckpoint(
        path, state, notes, frozenset(weight.name for weight in new_weights), config_json, schedule_differences
    )


def check_state(path: PathOrUrl, state: Mapping[str, Any]) -> None:
    """Check that the progress and the schedules in the training state of a checkpoint have the entries that a run writes, with
    values of their types.

    Args:
        path: path or URL of the checkpoint.
        state: content of `state.json`.

    Raises:
        DamagedCheckpointError: an entry is missing or has another type.
    """
    try:
        if "progress" in state:
            Progress.from_json(state["progress"])
        if "schedule" in state:
            fill_missing_fields(state["schedule"])
    except ValueError as error:
        raise DamagedCheckpointError(
            f"{open_storage(path).get_location(STATE)} does not have the content that a run writes ({error}); copy the file again"
        ) from error


def _describe_load(loaded: LoadResult) -> str:
    """Return a line for the start-up log that says how many loaded tensors equal the digests in the checkpoint."""
    text = f"{loaded.num_equal} tensors in memory equal what was saved"
    if loaded.content_digest is not None:
        text += f" (content digest of the checkpoint: {loaded.content_digest[:16]})"
    if loaded.num_narrowed:
        text += f"; {loaded.num_narrowed} were rounded to a narrower dtype and are not compared"
    if loaded.num_unverified:
        text += f"; for {loaded.num_unverified} the checkpoint has no digests to compare with"
    return text


# ---- Comparison of the settings with those of the checkpoint.

# Topics whose settings change the results of a continued run. They may differ from the checkpoint, and the log reports them.
_COMPARED_TOPICS = ("data", "training", "optimizer", "precision", "parallel")
# Settings that do not change the results, such as paths and limits, or that another check compares.
_UNREPORTED_SETTINGS = {
    "num_workers",
    "data_cache_path",
    "allow_tokenizer_mismatch",
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


def check_model(config: Config, config_json: dict[str, Any], vocab_size: int, path: PathOrUrl, *, continues_run: bool) -> list[str]:
    """Check that the settings of this run fit those of a checkpoint.

    Args:
        config: settings of this run.
        config_json: `config.json` of the checkpoint.
        vocab_size: vocabulary size of this run's tokenizer.
        path: path of the checkpoint, for messages.
        continues_run: whether the run continues from the checkpoint. Otherwise it only loads the weights, and only the model must
            agree.

    Returns:
        a note for each setting that differs and is allowed to differ.

    Raises:
        CheckpointError: settings that change the model differ, or the optimizer differs and its state is to be loaded.
    """
    saved = from_dict(config_json["config"], open_storage(path).get_location(CONFIG))
    model_differences = _compare_fields(normalize_model(saved.model), normalize_model(config.model))
    reduced = {name for name in DECREASABLE_FIELDS if getattr(config.model, name) < getattr(saved.model, name)}
    increased = {name for name in INCREASABLE_FIELDS if getattr(config.model, name) > getattr(saved.model, name)}
    may_differ = reduced | increased | (CHANGEABLE_FIELDS if continues_run else get_changeable_from_weights(saved.model))
    conflicts = [text for name, text in model_differences.items() if name not in may_differ]
    if config_json["vocab_size"] != vocab_size:
        conflicts.append(
            f"vocabulary {config_json['vocab_size']} there, {vocab_size} here (see --vocab-size, --tokenizer-type and its files)"
        )
    if conflicts:
        raise CheckpointError(
            f"{path} holds another model:\n  "
            + "\n  ".join(conflicts)
            + "\n  Use the checkpoint's settings (--use-checkpoint-args takes them), or another checkpoint."
            + _advise_on_adapters(saved.model, config.model, continues_run=continues_run)
        )
    saved_optimizer, current_optimizer = saved.optimizer.optimizer, config.optimizer.optimizer
    if continues_run and saved_optimizer != current_optimizer and config.checkpoint.load_optim:
        raise CheckpointError(
            f"{path} holds the state of --optimizer {saved_optimizer}, but this run uses {current_optimizer}.\n"
            f"  Use --optimizer {saved_optimizer}, or start with a new optimizer state (--no-load-optim)."
        )
    if continues_run and config.checkpoint.load_optim:
        saved_group, current_group = build_group_lookup(saved.optimizer), build_group_lookup(config.optimizer)
        saved_block_size, block_size = saved.optimizer.adam_8bit_block_size, config.optimizer.adam_8bit_block_size
        for weight in iter_weights(config.model, vocab_size):
            optimizer = current_group(weight).optimizer
            if saved_group(weight).optimizer != optimizer:
                raise CheckpointError(
                    f"{path}: {weight.name} was trained with {saved_group(weight).optimizer}, but this run uses {optimizer}.\n"
                    f"  Use {saved_group(weight).optimizer} for this parameter (--optimizer, --param-groups), or start with a new "
                    "optimizer state (--no-load-optim)."
                )
            if optimizer == "adam8bit" and saved_block_size != block_size:
                raise CheckpointError(
                    f"{path} holds 8-bit moments in blocks of {saved_block_size} elements, but this run uses {block_size}.\n"
                    f"  Use --adam-8bit-block-size {saved_block_size}, or start with a new optimizer state (--no-load-optim)."
                )
    allowed_differences = list(model_differences.values())
    topics = ("precision",) if config.training.skip_train else _COMPARED_TOPICS
    for topic in topics if continues_run else ():
        differences = _compare_fields(getattr(saved, topic), getattr(config, topic))
        allowed_differences += [text for name, text in differences.items() if name not in _UNREPORTED_SETTINGS]
    notes = [f"differs from the checkpoint: {text}" for text in allowed_differences]
    if saved.model.mtp_num_layers > config.model.mtp_num_layers:
        notes.append(_describe_dropped_depths(saved.model, config.model, vocab_size))
    return notes


def _advise_on_adapters(saved: ModelConfig, current: ModelConfig, *, continues_run: bool) -> str:
    """Return advice for the user if run and checkpoint have different LoRA adapters, or an empty string."""
    if saved.lora_rank is None and current.lora_rank is not None and continues_run:
        return "\n  To train adapters beside these weights, begin with them: --pretrained-checkpoint, or --load with --finetune."
    if saved.lora_rank is not None and saved.lora_rank != current.lora_rank:
        return "\n  tools/checkpoint.py import makes a checkpoint in which its adapters are added to the weights."
    return ""


def _describe_dropped_depths(saved: ModelConfig, current: ModelConfig, vocab_size: int) -> str:
    """Return a warning about the tensors that are not loaded because the run has fewer multi-token-prediction layers than its
    checkpoint."""
    weights = (weight for weight in iter_weights(saved, vocab_size) if parse_mtp_depth(weight.name) is not None)
    dropped = [weight for weight in weights if _is_dropped(weight.name, current)]
    depths = f"{saved.mtp_num_layers - current.mtp_num_layers} of {saved.mtp_num_layers} depths of multi-token prediction"
    return (
        f"WARNING: {depths} in the checkpoint are left out, with their moments: {len(dropped)} tensors of "
        f"{sum(weight.numel for weight in dropped):,} parameters (--mtp-num-layers {current.mtp_num_layers})"
    )


def _is_dropped(name: str, current: ModelConfig) -> bool:
    """Return whether a parameter of the checkpoint is not loaded, because the model does not have it.

    This concerns multi-token-prediction layers that the model lacks. It also concerns the experts' shares of the tokens, which only
    the load-balancing loss `global_aux_loss` needs.
    """
    depth = parse_mtp_depth(name)
    is_unused_router_share = name.endswith("router.shares") and current.moe_router_load_balancing_type != "global_aux_loss"
    return is_unused_router_share or (depth is not None and depth >= current.mtp_num_layers)


def _compare_fields(saved: Any, current: Any) -> dict[str, str]:
    """Return the fields whose values differ between two settings objects: for each name of a field a text with both values."""
    values = {name: (saved_value, vars(current)[name]) for name, saved_value in vars(saved).items()}
    return {
        name: f"--{name.replace('_', '-')} {saved_value} there, {current_value} here"
        for name, (saved_value, current_value) in values.items()
        if saved_value != current_value
    }
