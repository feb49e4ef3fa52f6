"""Conversion of a training configuration of torchtitan (TOML) to flags of this project."""

from __future__ import annotations

import tomllib

from megatron_lab.migration.config_section import ConfigSection
from megatron_lab.migration.launch_command import LaunchCommand

_FRAMEWORK = "torchtitan"
"""Name of the framework in messages."""
_PRESETS = {("llama3", "8B"): "llama3-8b", ("llama3", "70B"): "llama3-70b", ("llama3", "405B"): "llama3-405b"}
"""Model of `--model` with the shape of a torchtitan model, by (name, flavor)."""
_DEBUG_MODEL = {
    "num-layers": 6,
    "hidden-size": 256,
    "ffn-hidden-size": 768,
    "num-attention-heads": 16,
    "rotary-base": 500000,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
}
"""Flags for the shape of torchtitan's debug model."""
_DEBUG_SWITCHES = ("swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights")
"""Switches of torchtitan's debug model."""
_SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb-v"}
"""Pipeline schedule for each schedule of torchtitan."""
_MEMORY_REASON = "it changes the use of memory, not the results"


def convert_config(command: LaunchCommand, text: str) -> None:
    """Convert a torchtitan configuration to flags of this project.

    Args:
        command: launch command of this project. It receives the flags, and messages about the keys that have no effect in this
            project or cannot be converted.
        text: configuration in TOML.

    Raises:
        ValueError: the text is not TOML.
    """
    try:
        config = ConfigSection(tomllib.loads(text), command)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the torchtitan configuration to migrate is not valid TOML ({error}). Correct the file") from error
    names = "job model optimizer lr_scheduler training parallelism experimental checkpoint activation_checkpoint metrics float8"
    sections = {name: config.pop_section(name) or ConfigSection({}, command, name) for name in names.split()}
    folder = str(sections["job"].pop("dump_folder", "./outputs"))
    sections["job"].omit("description print_args use_for_integration_test config_file custom_config_module", "it names the job")
    _convert_model(command, sections["model"], sections["float8"])
    layout = _convert_layout(command, sections)
    _convert_training(command, sections["training"], layout)
    _convert_optimizer(command, sections["optimizer"])
    _convert_lr_schedule(command, sections)
    _convert_recompute(command, sections["activation_checkpoint"])
    _convert_checkpoints(command, sections["checkpoint"], folder)
    metrics = sections["metrics"]
    command.set_flag("log-interval", int(metrics.pop_number("log_freq") or 10), source="metrics.log_freq")
    if metrics.pop("enable_tensorboard"):
        command.set_flag("tensorboard-dir", f"{folder}/{metrics.pop('save_tb_folder', 'tb')}", source="metrics.enable_tensorboard")
    if metrics.pop("enable_wandb"):
        command.unconverted.append(
            ("metrics.enable_wandb", "Give --wandb-project and --wandb-exp-name, which torchtitan reads from the environment.")
        )
    metrics.omit("save_tb_folder disable_color_printing save_for_all_ranks rank_0_only", "it only affects the display of metrics")
    if (validation := config.pop_section("validation")) is not None:
        _convert_validation(command, validation)
    if "full-validation" not in command.flags:
        command.flags.setdefault("eval-iters", ("0",))
    if (profiling := config.pop_section("profiling")) is not None:
        if profiling.pop("enable_profiling") or profiling.pop("run_profiler"):
            command.unconverted.append(
                (
                    "profiling.enable_profiling",
                    "Use --profile, --profile-step-start and --profile-step-end, which record one trace.",
                )
            )
        profiling.clear()
    config.omit("comm memory_estimation", "it does not affect training")
    for section in sections.values():
        section.report_unconverted()
    config.report_unconverted()


def _convert_model(command: LaunchCommand, model: ConfigSection, float8: ConfigSection) -> None:
    """Convert the section ``model``: the model's shape, its tokenizer, and the conversion of its linear layers to float8.

    Args:
        float8: section with the settings of the float8 conversion.
    """
    name, flavor = str(model.pop("name", "llama3")), str(model.pop("flavor", "debugmodel"))
    preset, source = _PRESETS.get((name, flavor)), f"model.name {name}, model.flavor {flavor}"
    if preset is not None:
        command.set_flag("model", preset, source=source)
    elif name in ("llama3", "llama") and flavor == "debugmodel":
        for flag_name, value in _DEBUG_MODEL.items():
            command.set_flag(flag_name, value)
        for flag_name in _DEBUG_SWITCHES:
            command.set_flag(flag_name)
        command.changes.append((source, "6 layers of width 256, as in torchtitan's present code; older versions differ"))
    else:
        command.unconverted.append(
            (source, "This tool does not know its sizes. Give --model NAME (--model list), or flags for the sizes after --.")
        )
    command.set_flag("attention-dropout", 0)
    command.set_flag("hidden-dropout", 0)
    command.changes.append(("(always, torchtitan)", "--attention-dropout 0 --hidden-dropout 0: its models have no dropout"))
    command.differences.append(("initial weights and the order of samples", "They follow from --seed by this project's rules."))
    tokenizer_path = model.pop("hf_assets_path") or model.pop("tokenizer_path")
    if tokenizer_path:
        tokenizer_type = "TikTokenizer" if str(tokenizer_path).endswith(".model") and name == "llama3" else "HuggingFaceTokenizer"
        command.set_flag("tokenizer-type", tokenizer_type)
        command.set_flag(
            "tokenizer-model",
            tokenizer_path,
            source=f"{model.get_path('tokenizer_path')} {tokenizer_path}",
            reason=f"with --tokenizer-type {tokenizer_type}",
        )
    else:
        command.missing.append("the tokenizer: --tokenizer-type and --tokenizer-model")
    norm = model.pop("norm_type")
    if norm not in (None, "rmsnorm", "fused_rmsnorm"):
        command.unconverted.append(
            (f"model.norm_type {norm}", "The model's family has RMSNorm; --normalization LayerNorm has weights and biases.")
        )
    converters = model.pop("converters") or []
    converters = converters.split(",") if isinstance(converters, str) else list(converters)
    if "float8" in converters or float8.pop("enable_float8_linear"):
        recipe = str(float8.pop("recipe_name") or "tensorwise")
        command.set_flag(
            "fp8-format", "hybrid", source="the converter float8", reason="FP8 matrix products, with output gradients in e5m2"
        )
        if recipe in ("tensorwise", "rowwise"):
            command.set_flag("fp8-recipe", recipe)
        else:
            command.unconverted.append((f"float8.recipe_name {recipe}", "Supported are tensorwise, rowwise and blockwise."))
        float8.omit(
            "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd",
            "weights are gathered in bfloat16; the result is the same",
        )
        excluded_modules = float8.pop("filter_fqns")
        if excluded_modules not in (None, "output", ["output"], []):
            command.unconverted.append(
                (
                    f"float8.filter_fqns {excluded_modules}",
                    "Only the output layer stays in bfloat16 (see --first-last-layers-bf16).",
                )
            )
    else:
        float8.clear()
    for converter in converters:
        if converter.strip() not in ("", "float8"):
            command.unconverted.append((f"model.converters {converter}", "This project does not know it."))


def _convert_layout(command: LaunchCommand, sections: dict[str, ConfigSection]) -> dict[str, int]:
    """Convert the parallel sizes, FSDP and the pipeline schedule.

    In older versions of torchtitan, some of the keys are in the sections ``training`` and ``experimental``.

    Args:
        sections: sections of the configuration, by name.

    Returns:
        Sizes by name. ``data``: data-parallel size, 0 if it is not known. ``stages``: number of pipeline stages. ``micro``:
        micro-batch size in pipeline parallelism.
    """
    parallelism, experimental, training = sections["parallelism"], sections["experimental"], sections["training"]

    def get_degree(*keys: str) -> int:
        for section in (parallelism, training, experimental):
            for key in keys:
                value = section.pop_number(key)
                if value is not None:
                    return int(value)
        return 1

    tp_size, pp_size = get_degree("tensor_parallel_degree", "sequence_parallel_degree"), get_degree("pipeline_parallel_degree")
    cp_size, ep_size = get_degree("context_parallel_degree"), get_degree("expert_parallel_degree")
    for name, size in (
        ("tensor-model-parallel-size", tp_size),
        ("pipeline-model-parallel-size", pp_size),
        ("context-parallel-size", cp_size),
        ("expert-model-parallel-size", ep_size),
    ):
        if size > 1:
            command.set_flag(name, size, source=f"parallelism: {name.split('-')[0]} degree {size}")
    if tp_size > 1:
        command.set_flag(
            "sequence-parallel",
            source="(always, torchtitan)",
            reason="its tensor parallelism also shards norms and the residual stream",
        )
        if parallelism.pop("enable_async_tensor_parallel") or experimental.pop("enable_async_tensor_parallel"):
            if "fp8-format" in command.flags:
                command.omitted.append(
                    ("parallelism.enable_async_tensor_parallel", "FP8 matrix products do not overlap with communication")
                )
            else:
                command.set_flag("tp-comm-overlap", source="parallelism.enable_async_tensor_parallel")
    parallelism.pop("enable_async_tensor_parallel")
    if cp_size > 1:
        rotate_method = parallelism.pop("context_parallel_rotate_method", "allgather")
        command.set_flag(
            "cp-comm-type",
            "all_gather" if rotate_method == "allgather" else "p2p",
            source=f"parallelism.context_parallel_rotate_method {rotate_method}",
        )
    parallelism.pop("context_parallel_rotate_method")
    shard_degree = parallelism.pop_number("data_parallel_shard_degree", training.pop_number("data_parallel_degree", -1)) or 1
    num_replicas = int(parallelism.pop_number("data_parallel_replicate_degree") or 1)
    dp_size = (command.world_size or 0) // (tp_size * pp_size * cp_size)
    if shard_degree != 1:
        command.set_flag(
            "data-parallel-sharding-strategy", "optim_grads_params", source="parallelism.data_parallel_shard_degree", reason="FSDP"
        )
        if num_replicas > 1:
            shard_size = int(shard_degree) * cp_size if shard_degree > 0 else dp_size * cp_size // num_replicas
            command.missing += (
                [] if shard_size else ["the number of ranks (--world-size N), from which the size of a sharding group follows"]
            )
            if shard_size:
                command.set_flag("fsdp-shard-size", shard_size, source=f"parallelism.data_parallel_replicate_degree {num_replicas}")
        reshard = parallelism.pop("fsdp_reshard_after_forward", "default")
        if reshard == "never" or (reshard == "default" and pp_size > 1):
            command.set_flag("fsdp-reshard-after-forward", "never", source=f"parallelism.fsdp_reshard_after_forward {reshard}")
        if training.pop("enable_cpu_offload"):
            command.set_flag("fsdp-params-cpu", source="training.enable_cpu_offload")
    parallelism.pop("fsdp_reshard_after_forward")
    if shard_degree > 0 and not dp_size:
        dp_size = int(shard_degree) * num_replicas
    _convert_schedule(command, parallelism, experimental, pp_size)
    parallelism.omit(
        "disable_loss_parallel enable_compiled_autograd expert_tensor_parallel_degree",
        "the loss is always sharded over the tensor ranks",
    )
    return {"data": dp_size, "stages": pp_size, "micro": int(parallelism.pop_number("pipeline_parallel_microbatch_size") or 1)}


def _convert_schedule(command: LaunchCommand, parallelism: ConfigSection, experimental: ConfigSection, pp_size: int) -> None:
    """Convert the pipeline schedule and the number of stages per rank.

    Args:
        parallelism: section ``parallelism`` of the configuration.
        experimental: section ``experimental``, which has these keys in older versions of torchtitan.
        pp_size: number of pipeline ranks. With 1, there is no schedule to convert.
    """
    name = str(parallelism.pop("pipeline_parallel_schedule") or experimental.pop("pipeline_parallel_schedule") or "1F1B")
    layers_per_stage = parallelism.pop_number("pipeline_parallel_layers_per_stage")
    split_points = parallelism.pop("pipeline_parallel_split_points") or experimental.pop("pipeline_parallel_split_points")
    parallelism.omit("pipeline_parallel_schedule_csv", "--pipeline-schedule selects the schedule by name")
    if pp_size == 1:
        return
    schedule = next(
        (schedule_name for torchtitan_name, schedule_name in _SCHEDULES.items() if torchtitan_name.lower() == name.lower()), None
    )
    if schedule is None:
        command.unconverted.append(
            (f"parallelism.pipeline_parallel_schedule {name}", "--explain pipeline-schedule lists the supported schedules.")
        )
        return
    command.set_flag("pipeline-schedule", schedule, source=f"parallelism.pipeline_parallel_schedule {name}")
    if layers_per_stage is not None and schedule in ("interleaved", "zb-v"):
        command.set_flag(
            "num-layers-per-virtual-pipeline-stage", int(layers_per_stage), source="parallelism.pipeline_parallel_layers_per_stage"
        )
    elif schedule == "interleaved":
        command.set_flag(
            "num-virtual-stages-per-pipeline-rank",
            2,
            source="(by default, torchtitan)",
            reason="a looped schedule has two stages per rank",
        )
    if split_points:
        command.unconverted.append(
            (
                "parallelism.pipeline_parallel_split_points",
                "Use --pipeline-model-parallel-layout, which sets the layers of each stage.",
            )
        )


def _convert_training(command: LaunchCommand, training: ConfigSection, layout: dict[str, int]) -> None:
    """Convert the section ``training``: batch sizes, precision, data and its other keys.

    Args:
        layout: parallel sizes that `_convert_layout` returns.
    """
    local_batch_size = int(training.pop_number("local_batch_size", training.pop_number("batch_size", 8)) or 8)
    global_batch_size = training.pop_number("global_batch_size", -1) or -1
    micro_batch_size = min(layout["micro"], local_batch_size) if layout["stages"] > 1 else local_batch_size
    command.set_flag("micro-batch-size", micro_batch_size, source=f"training.local_batch_size {local_batch_size}")
    if global_batch_size <= 0 and micro_batch_size != local_batch_size:
        global_batch_size = local_batch_size * layout["data"] if layout["data"] else -1
        if global_batch_size < 0:
            command.missing.append(
                "the number of ranks (--world-size N): the global batch size is training.local_batch_size times the data ranks"
            )
    if global_batch_size > 0:
        command.set_flag("global-batch-size", int(global_batch_size), source="training.global_batch_size")
    command.set_flag("seq-length", int(training.pop_number("seq_len") or 2048), source="training.seq_len")
    command.set_flag("train-iters", int(training.pop_number("steps") or 10000), source="training.steps")
    command.set_flag("clip-grad", training.pop_number("max_norm", 1.0) or 0, source="training.max_norm")
    if training.pop("mixed_precision_param", "bfloat16") == "bfloat16":
        command.set_flag("bf16", source="training.mixed_precision_param")
    training.omit("mixed_precision_reduce dtype", "gradients are reduced in float32")
    if training.pop("compile"):
        command.set_flag("compile", source="training.compile")
    seed = training.pop_number("seed")
    if seed is not None:
        command.set_flag("seed", int(seed), source="training.seed")
    if training.pop("deterministic"):
        command.set_flag("deterministic-mode", source="training.deterministic")
    if (interval := training.pop_number("gc_freq")) is not None:
        command.set_flag("manual-gc", source=f"training.gc_freq {interval:g}")
        command.set_flag("manual-gc-interval", int(interval))
    dataset = training.pop("dataset_path") or training.pop("dataset", "c4_test")
    training.pop("dataset")
    command.set_flag("data-path", "$DATA_PATH")
    command.variables["DATA_PATH"] = f"prefix of {dataset} as an indexed dataset, made by tools/preprocess_data.py (docs/data.md)"
    training.omit("data_parallel_degree sequence_parallel_degree enable_cpu_offload gc_debug", "it is converted with other keys")


def _convert_optimizer(command: LaunchCommand, optimizer: ConfigSection) -> None:
    name = str(optimizer.pop("name", "AdamW"))
    if name != "AdamW":
        command.unconverted.append((f"optimizer.name {name}", "--optimizer adam is AdamW; docs/optimizers.md lists the others."))
    for key, flag_name, default in (("lr", "lr", 8e-4), ("beta1", "adam-beta1", 0.9), ("beta2", "adam-beta2", 0.95)):
        if optimizer.convert_number(key, flag_name) is None:
            optimizer.set_default(flag_name, default, _FRAMEWORK)
    optimizer.convert_number("eps", "adam-eps")
    if optimizer.convert_number("weight_decay", "weight-decay") is None:
        optimizer.set_default("weight-decay", 0.1, _FRAMEWORK)
    command.set_flag("param-groups", "* wd-mult=1", source="(always, torchtitan)", reason="weight decay acts on norms too")
    optimizer.omit("implementation fused early_step_in_backward", "this project selects the implementation of the update")


def _convert_lr_schedule(command: LaunchCommand, sections: dict[str, ConfigSection]) -> None:
    """Convert the learning-rate schedule.

    If the configuration has ``decay_ratio`` (a decay over a fraction of the run) or the decay type ``sqrt``, the schedule becomes
    WSD (warm-up, stable, decay).

    Args:
        sections: sections of the configuration, by name.
    """
    schedule, training = sections["lr_scheduler"], sections["training"]
    warmup_steps = int(schedule.pop_number("warmup_steps", training.pop_number("warmup_steps", 200)) or 0)
    train_steps = int(command.get_number("train-iters") or 0)
    command.set_flag(
        "lr-warmup-iters", min(warmup_steps, max(0, train_steps - 1)), source=f"lr_scheduler.warmup_steps {warmup_steps}"
    )
    command.differences.append(
        ("learning rates", "Warm-up and decay are one step longer in torchtitan, so rates differ by the change of one step.")
    )
    decay_type, decay_ratio = str(schedule.pop("decay_type", "linear")), schedule.pop_number("decay_ratio")
    min_lr_factor = schedule.pop_number("min_lr_factor", schedule.pop_number("lr_min"))
    if decay_ratio is None and decay_type != "sqrt":
        command.set_flag("lr-decay-style", decay_type, source=f"lr_scheduler.decay_type {decay_type}")
    else:
        decay_steps = round(train_steps * decay_ratio) if decay_ratio is not None else train_steps - warmup_steps
        command.set_flag(
            "lr-decay-style", "WSD", source=f"lr_scheduler.decay_ratio {decay_ratio}", reason="constant, then a decay at the end"
        )
        command.set_flag("lr-wsd-decay-style", {"sqrt": "minus_sqrt"}.get(decay_type, decay_type))
        command.set_flag("lr-wsd-decay-iters", max(1, min(decay_steps, train_steps - warmup_steps)))
    if min_lr_factor:
        command.set_flag(
            "min-lr", min_lr_factor * (command.get_number("lr") or 0), source=f"lr_scheduler.min_lr_factor {min_lr_factor:g}"
        )


def _convert_recompute(command: LaunchCommand, section: ConfigSection) -> None:
    """Convert the section ``activation_checkpoint`` to flags for activation recomputation."""
    mode, option = section.pop("mode", "selective"), str(section.pop("selective_ac_option", "2"))
    section.omit("per_op_sac_force_recompute_mm_shapes_by_fqns early_stop preserve_rng_state", _MEMORY_REASON)
    if mode == "full":
        command.set_flag("recompute-granularity", "full", source="activation_checkpoint.mode full")
        command.set_flag("recompute-method", "uniform")
        command.set_flag("recompute-num-layers", 1)
    elif mode == "selective" and option == "op":
        command.set_flag(
            "recompute-granularity",
            "selective",
            source="activation_checkpoint.mode selective, by operations",
            reason=_MEMORY_REASON,
        )
        command.set_flag("recompute-modules", "layernorm", "mlp_act")
    elif mode == "selective":
        reason = (
            f"Recomputing one layer in {option} is not supported; {_MEMORY_REASON}. "
            "See --recompute-granularity and --recompute-method block."
        )
        command.unconverted.append((f"activation_checkpoint.selective_ac_option {option}", reason))


def _convert_checkpoints(command: LaunchCommand, section: ConfigSection, folder: str) -> None:
    """Convert the section ``checkpoint`` to flags for saving and loading checkpoints.

    Args:
        folder: output folder of the job, which contains the checkpoint folder.
    """
    checkpoint_folder, interval = section.pop("folder", "checkpoint"), section.pop_number("interval") or 500
    num_retained, async_mode = section.pop_number("keep_latest_k"), section.pop("async_mode", "disabled")
    if section.pop("enable_checkpoint") or section.pop("enable"):
        command.set_flag("save", f"{folder}/{checkpoint_folder}", source="checkpoint.enable_checkpoint")
        command.set_flag("load", f"{folder}/{checkpoint_folder}")
        command.set_flag("save-interval", int(interval), source="checkpoint.interval")
        if num_retained:
            command.set_flag("keep-last", int(num_retained), source="checkpoint.keep_latest_k")
        if async_mode != "disabled":
            command.set_flag("async-save", source=f"checkpoint.async_mode {async_mode}")
    initial_path = section.pop("initial_load_path")
    if initial_path:
        reason = "Checkpoints of torchtitan cannot be read; convert them to Hugging Face files and use tools/checkpoint.py import."
        command.unconverted.append((f"checkpoint.initial_load_path {initial_path}", reason))
    section.clear()


def _convert_validation(command: LaunchCommand, section: ConfigSection) -> None:
    if section.pop("enable") or section.pop("enabled"):
        command.set_flag("eval-interval", int(section.pop_number("freq") or 10), source="validation.freq")
        num_batches = int(section.pop_number("steps") or -1)
        if num_batches > 0:
            command.set_flag("eval-iters", num_batches, source="validation.steps")
        else:
            command.set_flag("full-validation", source=f"validation.steps {num_batches}")
        command.missing.append(
            f"{section.pop('dataset', 'the validation data')} as an indexed dataset: --valid-data-path, or --split"
        )
    section.clear()
