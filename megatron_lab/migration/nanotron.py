"""Conversion of a training configuration of nanotron (YAML) to flags of this project."""

from __future__ import annotations

from typing import Any

import yaml

from megatron_lab.migration.config_section import ConfigSection
from megatron_lab.migration.launch_command import LaunchCommand

_MODEL_FLAGS = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "max_position_embeddings": "max-position-embeddings",
    "rms_norm_eps": "norm-epsilon",
    "rope_theta": "rotary-base",
}
"""Flag for each numeric key of ``model.model_config`` with the same meaning."""
_DECAY_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""Decay style for each decay style of nanotron."""


def convert_config(command: LaunchCommand, text: str) -> None:
    """Convert a nanotron configuration to flags of this project.

    Args:
        command: launch command of this project. It receives the flags, and messages about the keys that have no effect in this
            project or cannot be converted.
        text: configuration in YAML.

    Raises:
        ValueError: the text is not a YAML mapping.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the nanotron configuration to migrate is not valid YAML ({error}). Correct the file") from error
    if not isinstance(content, dict):
        raise ValueError("the nanotron configuration to migrate is not a YAML mapping. Choose another file")
    config = ConfigSection(content, command)
    sections = {
        name: config.pop_section(name) or ConfigSection({}, command, name)
        for name in ("model", "parallelism", "tokens", "optimizer", "checkpoints")
    }
    dp_size = _convert_layout(command, sections["parallelism"])
    _convert_tokens(command, sections["tokens"], dp_size)
    _convert_model(command, sections["model"])
    _convert_optimizer(command, sections["optimizer"])
    _convert_checkpoints(command, sections["checkpoints"])
    general = config.pop_section("general") or ConfigSection({}, command)
    command.set_flag("seed", int(general.pop_number("seed") or 42), source="general.seed")
    general.omit(
        "project run step consumed_train_samples benchmark_csv_path ignore_sanity_checks", "it names the run or its progress"
    )
    logging = config.pop_section("logging") or ConfigSection({}, command)
    command.set_flag(
        "log-interval", int(logging.pop_number("iteration_step_info_interval") or 1), source="logging.iteration_step_info_interval"
    )
    logging.omit("log_level log_level_replica", "the log has one level")
    _convert_data(command, config)
    command.differences.append(("initial weights and the order of samples", "They follow from --seed by this project's rules."))
    tokenizer = config.pop_section("tokenizer") or ConfigSection({}, command)
    if name := tokenizer.pop("tokenizer_name_or_path"):
        command.set_flag("tokenizer-type", "HuggingFaceTokenizer")
        command.set_flag(
            "tokenizer-model", name, source=f"tokenizer.tokenizer_name_or_path {name}", reason="a folder with its tokenizer.json"
        )
    tokenizer.omit("tokenizer_revision tokenizer_max_length", "the tokenizer is a local folder")
    for section in (*sections.values(), general, logging, tokenizer):
        section.report_unconverted()
    config.report_unconverted()


def _convert_layout(command: LaunchCommand, section: ConfigSection) -> int:
    """Convert the section ``parallelism`` (parallel sizes, pipeline schedule, sequence parallelism). Return the data-parallel
    size."""
    sizes = {key: int(section.pop_number(key) or 1) for key in ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size")}
    for key, name in (
        ("tp", "tensor-model-parallel-size"),
        ("pp", "pipeline-model-parallel-size"),
        ("context_parallel_size", "context-parallel-size"),
        ("expert_parallel_size", "expert-model-parallel-size"),
    ):
        if sizes[key] > 1:
            command.set_flag(name, sizes[key], source=f"parallelism.{key} {sizes[key]}")
    world_size = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["context_parallel_size"]
    command.world_size = command.world_size or world_size
    schedule, tp_mode = str(section.pop("pp_engine", "1f1b")), str(section.pop("tp_mode", "ALL_REDUCE"))
    if sizes["pp"] > 1:
        command.set_flag("pipeline-schedule", {"afab": "gpipe"}.get(schedule, schedule), source=f"parallelism.pp_engine {schedule}")
    has_overlap = section.pop("tp_linear_async_communication")
    if sizes["tp"] > 1 and tp_mode.upper() == "REDUCE_SCATTER":
        command.set_flag("sequence-parallel", source="parallelism.tp_mode REDUCE_SCATTER")
        if has_overlap:
            command.set_flag("tp-comm-overlap", source="parallelism.tp_linear_async_communication")
    if section.pop("recompute_layer"):
        command.set_flag("recompute-granularity", "full", source="parallelism.recompute_layer")
        command.set_flag("recompute-method", "uniform")
        command.set_flag("recompute-num-layers", 1)
    section.omit("tp_recompute_allgather moe_layer_recompute", "it changes the use of memory, not the results")
    return sizes["dp"]


def _convert_tokens(command: LaunchCommand, section: ConfigSection, dp_size: int) -> None:
    micro_batch_size, num_microbatches = (
        int(section.pop_number("micro_batch_size") or 1),
        int(section.pop_number("batch_accumulation_per_replica") or 1),
    )
    command.set_flag("micro-batch-size", micro_batch_size, source="tokens.micro_batch_size")
    command.set_flag(
        "global-batch-size",
        micro_batch_size * num_microbatches * dp_size,
        source="tokens.batch_accumulation_per_replica",
        reason=f"{micro_batch_size} x {num_microbatches} x {dp_size} data ranks",
    )
    section.convert_number("sequence_length", "seq-length", is_integer=True)
    section.convert_number("train_steps", "train-iters", is_integer=True)
    interval, num_batches = section.pop_number("val_check_interval", -1) or -1, int(section.pop_number("limit_val_batches") or 0)
    if interval > 0 and num_batches:
        command.set_flag("eval-interval", int(interval), source="tokens.val_check_interval")
        command.set_flag("eval-iters", num_batches, source="tokens.limit_val_batches")
    else:
        command.set_flag("eval-iters", 0, source="tokens.val_check_interval", reason="no validation")
    section.omit("limit_test_batches", "a test at the end has --eval-iters batches")


def _convert_model(command: LaunchCommand, section: ConfigSection) -> None:
    dtype = str(section.pop("dtype", "bfloat16")).removeprefix("torch.")
    dtype_flag = {"bfloat16": "bf16", "float16": "fp16", "double": "fp64", "float64": "fp64"}.get(dtype)
    if dtype_flag is not None:
        command.set_flag(dtype_flag, source=f"model.dtype {dtype}")
    elif dtype not in ("float32", "float"):
        command.unconverted.append((f"model.dtype {dtype}", "Supported are float32, --bf16, --fp16 and --fp64."))
    init_section = section.pop_section("init_method") or ConfigSection({}, command, "model.init_method")
    init_section.convert_number("std", "init-method-std")
    if path := init_section.pop("path"):
        command.unconverted.append(
            (
                f"model.init_method.path {path}",
                "Checkpoints of nanotron cannot be read; import Hugging Face files (docs/checkpoints.md).",
            )
        )
    section.convert_number("make_vocab_size_divisible_by", "make-vocab-size-divisible-by", is_integer=True)
    section.omit("ddp_bucket_cap_mb", "buckets of gradients have --ddp-bucket-size elements")
    model = section.pop_section("model_config")
    if model is None:
        command.unconverted.append(("model.model_config", "It is missing."))
        return
    for key, name in _MODEL_FLAGS.items():
        model.convert_number(key, name, is_integer=key not in ("rms_norm_eps", "rope_theta"))
    num_heads, num_kv_heads = command.get_number("num-attention-heads"), model.pop_number("num_key_value_heads")
    if num_kv_heads is not None and num_kv_heads != num_heads:
        command.set_flag("group-query-attention")
        command.set_flag(
            "num-query-groups",
            int(num_kv_heads),
            source="model.model_config.num_key_value_heads",
            reason="with --group-query-attention",
        )
    if (vocab_size := model.pop_number("vocab_size")) is not None:
        command.set_flag("vocab-size", int(vocab_size), source="model.model_config.vocab_size")
    command.set_flag("position-embedding-type", "rope")
    command.set_flag("normalization", "RMSNorm")
    is_qwen = bool(model.pop("is_qwen2_config"))
    if not (model.pop("is_llama_config") or is_qwen):
        command.unconverted.append(
            (
                "model.model_config",
                "It is not a Llama or Qwen 2 model; settings that are not listed here are converted as for these models.",
            )
        )
    command.changes.append(
        (f"a {'Qwen 2' if is_qwen else 'Llama'} model", "--position-embedding-type rope --normalization RMSNorm")
    )
    activation = model.pop("hidden_act", "silu")
    if activation == "silu":
        command.set_flag("swiglu", source="model.model_config.hidden_act silu", reason="its MLP is gated")
    elif activation == "gelu":
        command.set_flag("geglu", source="model.model_config.hidden_act gelu", reason="its MLP is gated")
    else:
        command.unconverted.append(
            (f"model.model_config.hidden_act {activation}", "See --swiglu, --geglu, --relu and similar flags.")
        )
    command.set_flag("disable-bias-linear")
    if model.pop("attention_bias"):
        command.set_flag("add-qkv-bias", source="model.model_config.attention_bias")
    if not model.pop("tie_word_embeddings", True):
        command.set_flag("untie-embeddings-and-output-weights", source="model.model_config.tie_word_embeddings false")
    if model.pop("rope_interleaved") or model.pop("interleaved_rotary"):
        command.set_flag("rotary-interleaved", source="model.model_config.rope_interleaved")
    if window_size := model.pop_number("sliding_window_size"):
        command.set_flag("window-size", f"{window_size - 1:g},0", source=f"model.model_config.sliding_window_size {window_size:g}")
    if model.pop("z_loss_enabled"):
        model.convert_number("z_loss_coefficient", "z-loss-coeff")
    scaling = model.pop("rope_scaling")
    if scaling:
        command.unconverted.append((f"model.model_config.rope_scaling {scaling}", "See --use-rope-scaling and --rope-type."))
    command.set_flag("attention-dropout", 0)
    command.set_flag("hidden-dropout", 0)
    command.changes.append(("(always, nanotron)", "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear"))
    model.omit(
        "bos_token_id eos_token_id pad_token_id initializer_range pretraining_tp use_cache z_loss_coefficient _attn_implementation "
        "flex_attention_mask attn_implementation rope_interleaved interleaved_rotary is_qwen2_config is_llama_config",
        "training does not use it, or it follows from --attention-backend and the tokenizer",
    )
    if experts := model.pop("moe_config"):
        command.unconverted.append(
            (
                f"model.model_config.moe_config {_describe_section(experts)}",
                "Mixtures of experts: see --num-experts and docs/moe.md.",
            )
        )
    model.report_unconverted()


def _convert_optimizer(command: LaunchCommand, section: ConfigSection) -> None:
    factory = section.pop_section("optimizer_factory") or ConfigSection({}, command, "optimizer.optimizer_factory")
    name = str(factory.pop("name", "adamW"))
    if name.lower() == "adamw":
        for key, flag_name in (("adam_beta1", "adam-beta1"), ("adam_beta2", "adam-beta2"), ("adam_eps", "adam-eps")):
            factory.convert_number(key, flag_name)
    else:
        command.set_flag("optimizer", name, source=f"optimizer.optimizer_factory.name {name}")
        if name == "sgd":
            command.set_flag("sgd-momentum", 0)
    factory.omit("torch_adam_is_fused adam_beta1 adam_beta2 adam_eps", "this project selects the implementation of the update")
    factory.report_unconverted()
    section.convert_number("weight_decay", "weight-decay")
    excluded = section.pop("weight_decay_exclude_named_params") or []
    if excluded:
        reason = "Biases and norms have no weight decay by default; exclude other parameters by --param-groups 'PATTERN wd-mult=0'."
        command.unconverted.append((f"optimizer.weight_decay_exclude_named_params {excluded}", reason))
    else:
        command.set_flag("param-groups", "* wd-mult=1", source="(always, nanotron)", reason="weight decay acts on norms too")
    clip_grad = section.pop_number("clip_grad")
    command.set_flag("clip-grad", clip_grad or 0, source="optimizer.clip_grad")
    if section.pop("accumulate_grad_in_fp32", True):
        command.omitted.append(("optimizer.accumulate_grad_in_fp32", "gradients of a 16-bit model are always summed in float32"))
    else:
        command.unconverted.append(
            ("optimizer.accumulate_grad_in_fp32 false", "Gradients of a 16-bit model are always summed in float32.")
        )
    zero_stage = int(section.pop_number("zero_stage") or 0)
    if zero_stage:
        strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        command.set_flag(
            "data-parallel-sharding-strategy", strategies[min(zero_stage, 3)], source=f"optimizer.zero_stage {zero_stage}"
        )
    schedule = section.pop_section("learning_rate_scheduler") or ConfigSection({}, command, "optimizer.learning_rate_scheduler")
    _convert_lr_schedule(command, schedule)


def _convert_lr_schedule(command: LaunchCommand, section: ConfigSection) -> None:
    """Convert the learning-rate schedule.

    A decay that starts directly after the warm-up becomes a schedule without a constant phase. A decay that starts later, or has
    the style 1-sqrt, becomes the schedule WSD (warm-up, stable, decay).
    """
    section.convert_number("learning_rate", "lr")
    warmup_steps, train_steps = int(section.pop_number("lr_warmup_steps") or 0), int(command.get_number("train-iters") or 0)
    command.set_flag(
        "lr-warmup-iters",
        min(warmup_steps, max(0, train_steps - 1)),
        source=f"{section.get_path('lr_warmup_steps')} {warmup_steps}",
    )
    if section.pop("lr_warmup_style", "linear") == "constant":
        command.unconverted.append((f"{section.get_path('lr_warmup_style')} constant", "The rate warms up linearly."))
    style = str(section.pop("lr_decay_style") or "linear")
    if style not in _DECAY_STYLES:
        command.unconverted.append(
            (f"{section.get_path('lr_decay_style')} {style}", "--explain lr-decay-style lists the supported schedules.")
        )
        section.clear()
        return
    starting_step = section.pop_number("lr_decay_starting_step")
    decay_start = int(starting_step if starting_step is not None else warmup_steps)
    decay_steps = int(section.pop_number("lr_decay_steps") or max(1, train_steps - warmup_steps))
    source = f"{section.get_path('lr_decay_style')} {style} from step {decay_start} on, over {decay_steps} steps"
    if decay_start == warmup_steps and style != "1-sqrt":
        command.set_flag(
            "lr-decay-style", style, source=source, reason="--lr-decay-iters counts from the start and includes the warm-up"
        )
    else:
        command.set_flag("lr-decay-style", "WSD", source=source, reason="constant, then a decay at the end")
        command.set_flag("lr-wsd-decay-style", _DECAY_STYLES[style])
        command.set_flag("lr-wsd-decay-iters", decay_steps)
    command.set_flag("lr-decay-iters", decay_start + decay_steps)
    min_lr = section.pop_number("min_decay_lr")
    if min_lr is not None:
        command.set_flag("min-lr", min_lr, source=f"{section.get_path('min_decay_lr')} {min_lr:g}")
    else:
        command.unconverted.append(
            (
                section.get_path("min_decay_lr"),
                "Its default in nanotron is the learning rate itself, with which the rate does not decay.",
            )
        )
    section.report_unconverted()


def _convert_checkpoints(command: LaunchCommand, section: ConfigSection) -> None:
    if path := section.pop("checkpoints_path"):
        command.set_flag("save", path, source="checkpoints.checkpoints_path")
        command.set_flag("load", path)
        section.convert_number("checkpoint_interval", "save-interval", is_integer=True)
    if resume_path := section.pop("resume_checkpoint_path"):
        reason = "Checkpoints of nanotron cannot be read; convert them to Hugging Face files and use tools/checkpoint.py import."
        command.unconverted.append((f"checkpoints.resume_checkpoint_path {resume_path}", reason))
    reason = "the last state is always saved, and the file system may be shared or not"
    section.omit(
        "save_initial_state save_final_state checkpoints_path_is_shared_file_system load_lr_scheduler load_optimizer", reason
    )


def _convert_data(command: LaunchCommand, config: ConfigSection) -> None:
    """Convert the datasets of the first entry of ``data_stages``.

    Later data stages are reported as unconverted, because a command reads only one blend of datasets.
    """
    stages = config.pop_sections("data_stages")
    for i, stage in enumerate(stages):
        data = stage.pop_section("data") or ConfigSection({}, command)
        dataset = data.pop("dataset")
        dataset_name = _describe_section(dataset) if dataset is not None else "dummy data"
        if i == 0:
            num_workers = data.pop_number("num_loading_workers")
            if num_workers is not None:
                command.set_flag("num-workers", int(num_workers), source="data_stages[0].data.num_loading_workers")
            if dataset is None:
                command.set_flag("mock-data", source="data_stages[0].data.dataset null")
            else:
                command.set_flag("data-path", "$DATA_PATH")
                command.variables["DATA_PATH"] = (
                    f"prefix of {dataset_name} as an indexed dataset, made by tools/preprocess_data.py (docs/data.md)"
                )
        else:
            reason = (
                "A run reads one blend of datasets: end it at this step (--exit-interval) and continue with another --data-path."
            )
            command.unconverted.append(
                (f"data_stages[{i}], from step {stage.pop('start_training_step')} on: {dataset_name}", reason)
            )


def _describe_section(value: Any) -> str:
    """Return a short description of a dataset section for messages, such as the names of its datasets."""
    if isinstance(value, dict):
        for key in ("hf_dataset_or_datasets", "dataset_folder", "dataset_path"):
            if value.get(key):
                return _describe_section(value[key])
        return ", ".join(f"{key} {item}" for key, item in value.items())[:80]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
