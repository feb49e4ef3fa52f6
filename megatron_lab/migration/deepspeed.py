"""Conversion of a DeepSpeed configuration (JSON), with or without a launch script of Megatron-DeepSpeed, to flags of this
project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.regular_file import parse_json
from megatron_lab.migration.config_section import ConfigSection
from megatron_lab.migration.launch_command import LaunchCommand

_STRATEGIES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""Sharding strategy of each ZeRO stage."""


def convert_flags(command: LaunchCommand, values_by_flag: dict[str, tuple[str, ...]]) -> None:
    """Convert the flags with which a launch script configures DeepSpeed.

    Args:
        command: launch command of this project. It receives the corresponding flags, and messages about the flags without a
            counterpart.
        values_by_flag: values of the DeepSpeed flags, by name without the leading dashes.
    """
    stage_values = values_by_flag.get("zero-stage", ())
    if stage_values and stage_values[0].isdigit():
        _convert_zero_stage(command, f"--zero-stage {stage_values[0]}", int(stage_values[0]))
    if "deepspeed-activation-checkpointing" in values_by_flag and "recompute-granularity" not in command.flags:
        command.set_flag("recompute-granularity", "full", source="--deepspeed-activation-checkpointing")
        command.set_flag("recompute-method", "uniform")
        command.set_flag("recompute-num-layers", 1)
    for name in ("deepspeed", "no-pipeline-parallel"):
        if name in values_by_flag:
            command.omitted.append((f"--{name}", "other flags set the sharding and the number of pipeline stages"))


def convert_config(command: LaunchCommand, text: str) -> None:
    """Convert a DeepSpeed configuration to flags of this project.

    Args:
        command: launch command of this project. It receives the corresponding flags, and messages about the keys that have no
            effect in this project or cannot be converted.
        text: configuration in JSON.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"the DeepSpeed configuration to migrate is not valid JSON ({error}). Correct the file") from error
    if not isinstance(content, dict):
        raise ValueError("the DeepSpeed configuration to migrate is not a JSON object. Choose another file")
    config = ConfigSection(content, command)
    for section in ("fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "tensorboard", "wandb"):
        _SECTION_CONVERTERS[section](command, config)
    _convert_batch_size(command, config)
    config.convert_number("gradient_clipping", "clip-grad")
    config.convert_number("steps_per_print", "log-interval")
    if config.pop("wall_clock_breakdown"):
        command.set_flag("timing-log-level", 1, source="wall_clock_breakdown", reason="--timing-log-level 2 logs more timers")
    dtype = config.pop("communication_data_type")
    if dtype in ("bf16", "bfp16", "bfloat16"):
        command.set_flag("grad-reduce-in-bf16", source=f"communication_data_type {dtype}")
    elif dtype not in (None, "fp32", "fp16"):
        command.unconverted.append(
            (f"communication_data_type {dtype}", "Gradients are reduced in float32, or with --bf16 in bfloat16.")
        )
    if config.pop("activation_checkpointing") is not None and "recompute-granularity" not in command.flags:
        reason = (
            "It sets how saved activations are stored. --recompute-granularity sets what is recomputed; without it, nothing is."
        )
        command.unconverted.append(("activation_checkpointing", reason))
    config.omit(
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio "
        "memory_breakdown dump_state flops_profiler comms_logger checkpoint data_types amp",
        "it does not change the computation, or its effect is always on",
    )
    config.report_unconverted()


def _convert_batch_size(command: LaunchCommand, config: ConfigSection) -> None:
    """Convert the batch sizes to --micro-batch-size and --global-batch-size.

    A missing batch size is computed from the other batch size, gradient_accumulation_steps and the number of ranks. If the number
    of ranks is not known, the missing value is reported as a value that the user has to supply.
    """
    micro_batch_size, global_batch_size = config.pop_number("train_micro_batch_size_per_gpu"), config.pop_number("train_batch_size")
    num_microbatches = config.pop_number("gradient_accumulation_steps")
    dp_size = (command.world_size or 0) // command.model_parallel_size
    if micro_batch_size is None and global_batch_size and num_microbatches and dp_size:
        micro_batch_size = global_batch_size / num_microbatches / dp_size
    if global_batch_size is None and micro_batch_size and num_microbatches and dp_size:
        global_batch_size = micro_batch_size * num_microbatches * dp_size
    elif global_batch_size is None and num_microbatches not in (None, 1):
        command.missing.append(
            f"the number of ranks (--world-size N): gradient_accumulation_steps {num_microbatches:g} becomes --global-batch-size"
        )
    if micro_batch_size is None and global_batch_size is not None and "micro-batch-size" not in command.flags:
        command.missing.append("--micro-batch-size: it does not follow from train_batch_size alone (--world-size N may help)")
    for name, value, key in (
        ("micro-batch-size", micro_batch_size, "train_micro_batch_size_per_gpu"),
        ("global-batch-size", global_batch_size, "train_batch_size"),
    ):
        previous = command.get_number(name)
        if value is not None and previous is not None and previous != value:
            command.unconverted.append((f"{key} {value:g}", f"The launch script sets --{name} {previous:g}, which is used."))
        elif value is not None:
            command.set_flag(name, int(value), source=key if previous is None else "")


def _convert_zero_stage(command: LaunchCommand, source: str, stage: int) -> None:
    """Convert a ZeRO stage to --data-parallel-sharding-strategy, unless the command already has this flag.

    Args:
        source: setting in the configuration or script, for messages.
        stage: 0 to 3; other values are reported as unconverted.
    """
    strategy = _STRATEGIES.get(stage)
    previous = command.flags.get("data-parallel-sharding-strategy")
    if strategy is None:
        command.unconverted.append((source, "The ZeRO stages are 0 to 3."))
    elif previous is not None and previous != (strategy,):
        command.unconverted.append((source, f"{previous[0]} is used, which was set before."))
    elif previous is None and stage:
        command.set_flag("data-parallel-sharding-strategy", strategy, source=source)


def _convert_zero(command: LaunchCommand, config: ConfigSection) -> None:
    """Convert the section ``zero_optimization``: the ZeRO stage, offloading, and overlap and bucket size of the gradient
    reduction."""
    section = config.pop_section("zero_optimization")
    if section is None:
        return
    stage = int(section.pop_number("stage") or 0)
    _convert_zero_stage(command, f"zero_optimization.stage {stage}", stage)
    optimizer_offload, param_offload = section.pop_section("offload_optimizer"), section.pop_section("offload_param")
    if section.pop("cpu_offload"):
        optimizer_offload = optimizer_offload or ConfigSection({"device": "cpu"}, command, "cpu_offload")
    for offload_section, name in ((param_offload, "fsdp-params-cpu"), (optimizer_offload, "optimizer-cpu-offload")):
        device = offload_section.pop("device") if offload_section is not None else None
        if offload_section is not None:
            offload_section.clear()
        if device == "cpu" and "fsdp-params-cpu" not in command.flags:
            command.set_flag(name, source=f"{offload_section.name}.device cpu")  # type: ignore[union-attr]
        elif device == "nvme":
            command.unconverted.append(
                (f"{offload_section.name}.device nvme", "NVMe is not supported: state is on the device or in host memory.")  # type: ignore[union-attr]
            )
    has_overlap = section.pop("overlap_comm")
    if has_overlap and stage < 3:
        command.set_flag("overlap-grad-reduce", source="zero_optimization.overlap_comm")
    section.convert_number("reduce_bucket_size", "ddp-bucket-size", is_integer=True, is_enabled=stage in (1, 2))
    section.omit(
        "contiguous_gradients allgather_partitions allgather_bucket_size reduce_scatter round_robin_gradients sub_group_size "
        "reduce_bucket_size stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "load_from_fp32_weights elastic_checkpoint ignore_unused_parameters cpu_offload_use_pin_memory",
        "this project plans buffers and prefetching itself",
    )
    section.report_unconverted()


def _convert_fp16(command: LaunchCommand, config: ConfigSection) -> None:
    section = config.pop_section("fp16")
    if section is None:
        return
    enabled = section.pop("enabled")
    if enabled == "auto" or not enabled:
        if enabled == "auto":
            command.missing.append("the format: fp16.enabled is auto, which another program fills in. Give --fp16 or --bf16")
        section.clear()
        return
    command.set_flag("fp16", source="" if "fp16" in command.flags else "fp16.enabled")
    loss_scale = section.pop_number("loss_scale")
    if loss_scale:
        command.set_flag("loss-scale", loss_scale, source="fp16.loss_scale")
    scale_power = section.pop_number("initial_scale_power")
    if scale_power is not None and not loss_scale:
        command.set_flag("initial-loss-scale", 2 ** int(scale_power), source=f"fp16.initial_scale_power {scale_power:g}")
    for key, name in (
        ("loss_scale_window", "loss-scale-window"),
        ("hysteresis", "hysteresis"),
        ("min_loss_scale", "min-loss-scale"),
    ):
        value = section.pop_number(key)
        if value is not None and not loss_scale:
            command.set_flag(name, value, source=f"fp16.{key}" if name not in command.flags else "")
    section.omit("consecutive_hysteresis auto_cast fp16_master_weights_and_grads", "main parameters are always float32")
    section.report_unconverted()


def _build_bf16_converter(key: str) -> Callable[[LaunchCommand, ConfigSection], None]:
    """Return a function that converts the section for bfloat16, whose name depends on the version of DeepSpeed.

    Args:
        key: name of the section.
    """

    def convert(command: LaunchCommand, config: ConfigSection) -> None:
        section = config.pop_section(key)
        if section is not None:
            if section.pop("enabled") is True:
                command.set_flag("bf16", source="" if "bf16" in command.flags else f"{key}.enabled")
            section.clear()

    return convert


def _convert_optimizer(command: LaunchCommand, config: ConfigSection) -> None:
    section = config.pop_section("optimizer")
    if section is None:
        return
    optimizer_type = str(section.pop("type") or "Adam")
    optimizer = {"adam": "adam", "adamw": "adam", "lamb": "lamb", "lion": "lion", "muon": "muon", "sgd": "sgd"}.get(
        optimizer_type.lower()
    )
    params = section.pop_section("params")
    if optimizer is None:
        command.unconverted.append(
            (f"optimizer.type {optimizer_type}", "Supported are adam, sgd, lion, ademamix, adafactor, lamb, adam8bit and muon.")
        )
    elif optimizer != "adam" or "optimizer" not in command.flags:
        command.set_flag("optimizer", optimizer, source=f"optimizer.type {optimizer_type}")
    if params is None:
        return
    if optimizer == "adam" and optimizer_type.lower() == "adam" and params.pop("adam_w_mode") is False:
        command.unconverted.append(
            ("optimizer.params.adam_w_mode false", "Weight decay is always decoupled from the gradient, as in AdamW.")
        )
    for key, flag in (("lr", "lr"), ("eps", "adam-eps"), ("weight_decay", "weight-decay"), ("momentum", "sgd-momentum")):
        params.convert_number(key, flag)
    betas = params.pop("betas")
    if isinstance(betas, list) and len(betas) == 2 and optimizer in ("adam", "lamb", "lion"):
        prefix = "lion" if optimizer == "lion" else "adam"
        for i, beta in enumerate(betas, start=1):
            command.set_flag(f"{prefix}-beta{i}", beta, source=f"optimizer.params.betas[{i - 1}]")
    params.omit("torch_adam adam_w_mode bias_correction", "the update rule is AdamW")
    params.report_unconverted()


def _convert_scheduler(command: LaunchCommand, config: ConfigSection) -> None:
    section = config.pop_section("scheduler")
    if section is None:
        return
    scheduler_type, params = section.pop("type"), section.pop_section("params") or ConfigSection({}, command, "scheduler.params")
    style = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(str(scheduler_type))
    if style is None:
        command.unconverted.append((f"scheduler.type {scheduler_type}", "--explain lr-decay-style lists the supported schedules."))
        params.clear()
        return
    previous = command.flags.get("lr-decay-style")
    if previous not in (None, (style,)):
        command.unconverted.append(
            (f"scheduler.type {scheduler_type}", f"--lr-decay-style {previous[0]} is used, which was set before.")
        )
    else:
        command.set_flag("lr-decay-style", style, source=f"scheduler.type {scheduler_type}")
    if params.pop("warmup_type") in (None, "log"):
        command.unconverted.append(("scheduler.params.warmup_type log", "The rate warms up linearly (log is DeepSpeed's default)."))
    params.convert_number("warmup_num_steps", "lr-warmup-iters")
    params.convert_number("warmup_min_lr", "lr-warmup-init")
    params.convert_number("warmup_max_lr", "lr")
    params.convert_number("total_num_steps", "train-iters" if "train-iters" not in command.flags else "lr-decay-iters")
    for key in ("warmup_min_ratio", "cos_min_ratio"):
        ratio, lr = params.pop_number(key), command.get_number("lr")
        if ratio is not None and lr is not None:
            command.set_flag("min-lr" if key == "cos_min_ratio" else "lr-warmup-init", ratio * lr, source=f"scheduler.params.{key}")
    params.report_unconverted()


def _convert_tensorboard(command: LaunchCommand, config: ConfigSection) -> None:
    section = config.pop_section("tensorboard")
    if section is not None:
        if section.pop("enabled"):
            folder = "/".join(str(name) for name in (section.pop("output_path"), section.pop("job_name")) if name) or "tensorboard"
            command.set_flag("tensorboard-dir", folder, source="tensorboard.enabled")
        section.clear()


def _convert_wandb(command: LaunchCommand, config: ConfigSection) -> None:
    section = config.pop_section("wandb")
    if section is not None:
        if section.pop("enabled") and (project := section.pop("project")):
            command.set_flag("wandb-project", project, source="wandb.project")
        section.report_unconverted()


_SECTION_CONVERTERS: dict[str, Callable[[LaunchCommand, ConfigSection], Any]] = {
    "fp16": _convert_fp16,
    "bf16": _build_bf16_converter("bf16"),
    "bfloat16": _build_bf16_converter("bfloat16"),
    "zero_optimization": _convert_zero,
    "optimizer": _convert_optimizer,
    "scheduler": _convert_scheduler,
    "tensorboard": _convert_tensorboard,
    "wandb": _convert_wandb,
}
"""Converter of each section whose keys cannot be converted one by one."""
