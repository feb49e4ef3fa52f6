"""A training configuration of torchtitan (TOML)."""

from __future__ import annotations

import tomllib

from megatron_lab.migration.keys import Keys
from megatron_lab.migration.line import Line

_NAME = "torchtitan"
_PRESETS = {("llama3", "8B"): "llama3-8b", ("llama3", "70B"): "llama3-70b", ("llama3", "405B"): "llama3-405b"}
"""Models that are the same as one that `--model` knows."""
_DEBUG = {
    "num-layers": 6,
    "hidden-size": 256,
    "ffn-hidden-size": 768,
    "num-attention-heads": 16,
    "rotary-base": 500000,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
}
_DEBUG_SWITCHES = ("swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights")
_SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb-v"}
_MEMORY = "it changes what is kept in memory, not what is computed"


def put_config(line: Line, text: str) -> None:
    """Put a configuration.

    Raises:
        ValueError: it is no TOML.
    """
    try:
        keys = Keys(tomllib.loads(text), line)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the torchtitan configuration is no TOML ({error})") from error
    names = "job model optimizer lr_scheduler training parallelism experimental checkpoint activation_checkpoint metrics float8"
    found = {name: keys.section(name) or Keys({}, line, name) for name in names.split()}
    folder = str(found["job"].take("dump_folder", "./outputs"))
    found["job"].pass_over("description print_args use_for_integration_test config_file custom_config_module", "it names the job")
    _put_model(line, found["model"], found["float8"])
    layout = _put_layout(line, found)
    _put_training(line, found["training"], layout)
    _put_optimizer(line, found["optimizer"])
    _put_rates(line, found)
    _put_recompute(line, found["activation_checkpoint"])
    _put_checkpoints(line, found["checkpoint"], folder)
    metrics = found["metrics"]
    line.put("log-interval", int(metrics.number("log_freq") or 10), given="metrics.log_freq")
    if metrics.take("enable_tensorboard"):
        line.put("tensorboard-dir", f"{folder}/{metrics.take('save_tb_folder', 'tb')}", given="metrics.enable_tensorboard")
    if metrics.take("enable_wandb"):
        line.lost.append(
            ("metrics.enable_wandb", "Give --wandb-project and --wandb-exp-name; there they come from the environment.")
        )
    metrics.pass_over("save_tb_folder disable_color_printing save_for_all_ranks rank_0_only", "it is about how numbers are shown")
    if (validation := keys.section("validation")) is not None:
        _put_validation(line, validation)
    line.words.setdefault("eval-iters", ("0",))
    if (profiling := keys.section("profiling")) is not None:
        if profiling.take("enable_profiling") or profiling.take("run_profiler"):
            line.lost.append(
                ("profiling.enable_profiling", "--profile with --profile-step-start and --profile-step-end takes one trace.")
            )
        profiling.ignore_rest()
    keys.pass_over("comm memory_estimation", "it is about the launch, not about the run")
    for section in found.values():
        section.pass_over_rest()
    keys.pass_over_rest()


def _put_model(line: Line, model: Keys, float8: Keys) -> None:
    name, flavor = str(model.take("name", "llama3")), str(model.take("flavor", "debugmodel"))
    preset, given = _PRESETS.get((name, flavor)), f"model.name {name}, model.flavor {flavor}"
    if preset is not None:
        line.put("model", preset, given=given)
    elif name in ("llama3", "llama") and flavor == "debugmodel":
        for flag, value in _DEBUG.items():
            line.put(flag, value)
        for flag in _DEBUG_SWITCHES:
            line.put(flag)
        line.changed.append((given, "6 layers of width 256, as in its present code; earlier ones differed"))
    else:
        line.lost.append((given, "This tool does not know its sizes. Give --model NAME (--model list) or the sizes behind --."))
    line.put("attention-dropout", 0)
    line.put("hidden-dropout", 0)
    line.changed.append(("(always, torchtitan)", "--attention-dropout 0 --hidden-dropout 0: its models have no dropout"))
    line.differs.append(("initial weights and the order of samples", "They follow from --seed by this project's rules."))
    path = model.take("hf_assets_path") or model.take("tokenizer_path")
    if path:
        kind = "TikTokenizer" if str(path).endswith(".model") and name == "llama3" else "HuggingFaceTokenizer"
        line.put("tokenizer-type", kind)
        line.put("tokenizer-model", path, given=f"{model.path('tokenizer_path')} {path}", why=f"with --tokenizer-type {kind}")
    else:
        line.missing.append("the tokenizer: --tokenizer-type and --tokenizer-model")
    norm = model.take("norm_type")
    if norm not in (None, "rmsnorm", "fused_rmsnorm"):
        line.lost.append(
            (f"model.norm_type {norm}", "The model's family has RMSNorm; --normalization LayerNorm has weights and biases.")
        )
    converters = model.take("converters") or []
    converters = converters.split(",") if isinstance(converters, str) else list(converters)
    if "float8" in converters or float8.take("enable_float8_linear"):
        recipe = str(float8.take("recipe_name") or "tensorwise")
        line.put("fp8-format", "hybrid", given="the converter float8", why="products in 8 bits, gradients of outputs in e5m2")
        if recipe in ("tensorwise", "rowwise"):
            line.put("fp8-recipe", recipe)
        else:
            line.lost.append((f"float8.recipe_name {recipe}", "There are tensorwise, rowwise and blockwise."))
        float8.pass_over(
            "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd",
            "weights are gathered in bfloat16; the result is the same",
        )
        filtered = float8.take("filter_fqns")
        if filtered not in (None, "output", ["output"], []):
            line.lost.append(
                (f"float8.filter_fqns {filtered}", "Only the output layer stays in bfloat16 (see --first-last-layers-bf16).")
            )
    else:
        float8.ignore_rest()
    for converter in converters:
        if converter.strip() not in ("", "float8"):
            line.lost.append((f"model.converters {converter}", "This project does not know it."))


def _put_layout(line: Line, found: dict[str, Keys]) -> dict[str, int]:
    """Put the layout; returns the number of data ranks, if it is known, and the size of a pipeline's microbatch."""
    here, older, oldest = found["parallelism"], found["experimental"], found["training"]

    def degree(*keys: str) -> int:
        for section in (here, oldest, older):
            for key in keys:
                value = section.number(key)
                if value is not None:
                    return int(value)
        return 1

    tensor, stages = degree("tensor_parallel_degree", "sequence_parallel_degree"), degree("pipeline_parallel_degree")
    context, experts = degree("context_parallel_degree"), degree("expert_parallel_degree")
    for flag, size in (
        ("tensor-model-parallel-size", tensor),
        ("pipeline-model-parallel-size", stages),
        ("context-parallel-size", context),
        ("expert-model-parallel-size", experts),
    ):
        if size > 1:
            line.put(flag, size, given=f"parallelism: {flag.split('-')[0]} degree {size}")
    if tensor > 1:
        line.put("sequence-parallel", given="(always, torchtitan)", why="its tensor parallelism divides norms and the residual too")
        if here.take("enable_async_tensor_parallel") or older.take("enable_async_tensor_parallel"):
            if "fp8-format" in line.words:
                line.left_out.append(("parallelism.enable_async_tensor_parallel", "products in 8 bits do not come in pieces"))
            else:
                line.put("tp-comm-overlap", given="parallelism.enable_async_tensor_parallel")
    here.take("enable_async_tensor_parallel")
    if context > 1:
        way = here.take("context_parallel_rotate_method", "allgather")
        line.put(
            "cp-comm-type", "all_gather" if way == "allgather" else "p2p", given=f"parallelism.context_parallel_rotate_method {way}"
        )
    here.take("context_parallel_rotate_method")
    shard = here.number("data_parallel_shard_degree", oldest.number("data_parallel_degree", -1)) or 1
    copies = int(here.number("data_parallel_replicate_degree") or 1)
    data = (line.world_size or 0) // (tensor * stages * context)
    if shard != 1:
        line.put(
            "data-parallel-sharding-strategy", "optim_grads_params", given="parallelism.data_parallel_shard_degree", why="FSDP"
        )
        if copies > 1:
            size = int(shard) * context if shard > 0 else data * context // copies
            line.missing += [] if size else ["the number of ranks (--world-size N), which says how many share a copy of the model"]
            if size:
                line.put("fsdp-shard-size", size, given=f"parallelism.data_parallel_replicate_degree {copies}")
        reshard = here.take("fsdp_reshard_after_forward", "default")
        if reshard == "never" or (reshard == "default" and stages > 1):
            line.put("fsdp-reshard-after-forward", "never", given=f"parallelism.fsdp_reshard_after_forward {reshard}")
        if oldest.take("enable_cpu_offload"):
            line.put("fsdp-params-cpu", given="training.enable_cpu_offload")
    here.take("fsdp_reshard_after_forward")
    if shard > 0 and not data:
        data = int(shard) * copies
    _put_schedule(line, here, older, stages)
    here.pass_over("disable_loss_parallel enable_compiled_autograd expert_tensor_parallel_degree", "the loss is always divided")
    return {"data": data, "stages": stages, "micro": int(here.number("pipeline_parallel_microbatch_size") or 1)}


def _put_schedule(line: Line, here: Keys, older: Keys, stages: int) -> None:
    name = str(here.take("pipeline_parallel_schedule") or older.take("pipeline_parallel_schedule") or "1F1B")
    each = here.number("pipeline_parallel_layers_per_stage")
    points = here.take("pipeline_parallel_split_points") or older.take("pipeline_parallel_split_points")
    here.pass_over("pipeline_parallel_schedule_csv", "a schedule is named by --pipeline-schedule")
    if stages == 1:
        return
    schedule = next((ours for theirs, ours in _SCHEDULES.items() if theirs.lower() == name.lower()), None)
    if schedule is None:
        line.lost.append((f"parallelism.pipeline_parallel_schedule {name}", "See --pipeline-schedule for those that there are."))
        return
    line.put("pipeline-schedule", schedule, given=f"parallelism.pipeline_parallel_schedule {name}")
    if each is not None and schedule in ("interleaved", "zb-v"):
        line.put("num-layers-per-virtual-pipeline-stage", int(each), given="parallelism.pipeline_parallel_layers_per_stage")
    elif schedule == "interleaved":
        line.put(
            "num-virtual-stages-per-pipeline-rank", 2, given="(by default, torchtitan)", why="two stages a rank where it is looped"
        )
    if points:
        line.lost.append(("parallelism.pipeline_parallel_split_points", "--pipeline-model-parallel-layout writes stages by hand."))


def _put_training(line: Line, training: Keys, layout: dict[str, int]) -> None:
    local = int(training.number("local_batch_size", training.number("batch_size", 8)) or 8)
    total = training.number("global_batch_size", -1) or -1
    micro = min(layout["micro"], local) if layout["stages"] > 1 else local
    line.put("micro-batch-size", micro, given=f"training.local_batch_size {local}")
    if total <= 0 and micro != local:
        total = local * layout["data"] if layout["data"] else -1
        if total < 0:
            line.missing.append(
                "the number of ranks (--world-size N): a step has training.local_batch_size sequences on each data rank"
            )
    if total > 0:
        line.put("global-batch-size", int(total), given="training.global_batch_size")
    line.put("seq-length", int(training.number("seq_len") or 2048), given="training.seq_len")
    line.put("train-iters", int(training.number("steps") or 10000), given="training.steps")
    line.put("clip-grad", training.number("max_norm", 1.0) or 0, given="training.max_norm")
    if training.take("mixed_precision_param", "bfloat16") == "bfloat16":
        line.put("bf16", given="training.mixed_precision_param")
    training.pass_over("mixed_precision_reduce dtype", "gradients are reduced in float32")
    if training.take("compile"):
        line.put("compile", given="training.compile")
    seed = training.number("seed")
    if seed is not None:
        line.put("seed", int(seed), given="training.seed")
    if training.take("deterministic"):
        line.put("deterministic-mode", given="training.deterministic")
    if (interval := training.number("gc_freq")) is not None:
        line.put("manual-gc", given=f"training.gc_freq {interval:g}")
        line.put("manual-gc-interval", int(interval))
    dataset = training.take("dataset_path") or training.take("dataset", "c4_test")
    training.take("dataset")
    line.put("data-path", "$DATA_PATH")
    line.variables["DATA_PATH"] = f"prefix of {dataset} as an indexed dataset, made by tools/preprocess_data.py (docs/data.md)"
    training.pass_over("data_parallel_degree sequence_parallel_degree enable_cpu_offload gc_debug", "it is said by other keys")


def _put_optimizer(line: Line, optimizer: Keys) -> None:
    name = str(optimizer.take("name", "AdamW"))
    if name != "AdamW":
        line.lost.append((f"optimizer.name {name}", "--optimizer adam is AdamW; docs/optimizers.md lists the others."))
    for key, flag, default in (("lr", "lr", 8e-4), ("beta1", "adam-beta1", 0.9), ("beta2", "adam-beta2", 0.95)):
        if optimizer.put(key, flag) is None:
            optimizer.default(flag, default, _NAME)
    optimizer.put("eps", "adam-eps")
    if optimizer.put("weight_decay", "weight-decay") is None:
        optimizer.default("weight-decay", 0.1, _NAME)
    line.put("param-groups", "* wd-mult=1", given="(always, torchtitan)", why="weight decay acts on norms too")
    optimizer.pass_over("implementation fused early_step_in_backward", "how the update is computed is chosen here")


def _put_rates(line: Line, found: dict[str, Keys]) -> None:
    rates, training = found["lr_scheduler"], found["training"]
    warmup = int(rates.number("warmup_steps", training.number("warmup_steps", 200)) or 0)
    steps = int(line.number("train-iters") or 0)
    line.put("lr-warmup-iters", min(warmup, max(0, steps - 1)), given=f"lr_scheduler.warmup_steps {warmup}")
    line.differs.append(("learning rates", "Warm-up and decay count a step more there, so that a rate differs by a step's share."))
    kind, ratio = str(rates.take("decay_type", "linear")), rates.number("decay_ratio")
    least = rates.number("min_lr_factor", rates.number("lr_min"))
    if ratio is None and kind != "sqrt":
        line.put("lr-decay-style", kind, given=f"lr_scheduler.decay_type {kind}")
    else:
        decays = round(steps * ratio) if ratio is not None else steps - warmup
        line.put("lr-decay-style", "WSD", given=f"lr_scheduler.decay_ratio {ratio}", why="constant, then a decay at the end")
        line.put("lr-wsd-decay-style", {"sqrt": "minus_sqrt"}.get(kind, kind))
        line.put("lr-wsd-decay-iters", max(1, min(decays, steps - warmup)))
    if least:
        line.put("min-lr", least * (line.number("lr") or 0), given=f"lr_scheduler.min_lr_factor {least:g}")


def _put_recompute(line: Line, section: Keys) -> None:
    mode, option = section.take("mode", "selective"), str(section.take("selective_ac_option", "2"))
    section.pass_over("per_op_sac_force_recompute_mm_shapes_by_fqns early_stop preserve_rng_state", _MEMORY)
    if mode == "full":
        line.put("recompute-granularity", "full", given="activation_checkpoint.mode full")
        line.put("recompute-method", "uniform")
        line.put("recompute-num-layers", 1)
    elif mode == "selective" and option == "op":
        line.put("recompute-granularity", "selective", given="activation_checkpoint.mode selective, by operations", why=_MEMORY)
        line.put("recompute-modules", "layernorm", "mlp_act")
    elif mode == "selective":
        why = f"One layer in {option} cannot be named; {_MEMORY}. See --recompute-granularity and --recompute-method block."
        line.lost.append((f"activation_checkpoint.selective_ac_option {option}", why))


def _put_checkpoints(line: Line, section: Keys, folder: str) -> None:
    where, interval = section.take("folder", "checkpoint"), section.number("interval") or 500
    keep, mode = section.number("keep_latest_k"), section.take("async_mode", "disabled")
    if section.take("enable_checkpoint") or section.take("enable"):
        line.put("save", f"{folder}/{where}", given="checkpoint.enable_checkpoint")
        line.put("load", f"{folder}/{where}")
        line.put("save-interval", int(interval), given="checkpoint.interval")
        if keep:
            line.put("keep-last", int(keep), given="checkpoint.keep_latest_k")
        if mode != "disabled":
            line.put("async-save", given=f"checkpoint.async_mode {mode}")
    initial = section.take("initial_load_path")
    if initial:
        why = "Its checkpoints are not read; go by way of Hugging Face files and tools/checkpoint.py import."
        line.lost.append((f"checkpoint.initial_load_path {initial}", why))
    section.ignore_rest()


def _put_validation(line: Line, section: Keys) -> None:
    if section.take("enable") or section.take("enabled"):
        line.put("eval-interval", int(section.number("freq") or 10), given="validation.freq")
        count = int(section.number("steps") or -1)
        line.missing += [] if count > 0 else ["--eval-iters: validation.steps is all of the data there"]
        line.put("eval-iters", max(count, 1), given="validation.steps")
        line.missing.append(
            f"{section.take('dataset', 'the validation data')} as an indexed dataset: --valid-data-path, or --split"
        )
    section.ignore_rest()
