"""A DeepSpeed configuration (JSON), alone or beside a launch line of Megatron-DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megatron_lab.migration.keys import Keys
from megatron_lab.migration.line import Line

_STRATEGY = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def put_flags(line: Line, flags: dict[str, tuple[str, ...]]) -> None:
    """Put what a launch line says of DeepSpeed beside its configuration."""
    stage = flags.get("zero-stage", ())
    if stage and stage[0].isdigit():
        _put_stage(line, f"--zero-stage {stage[0]}", int(stage[0]))
    if "deepspeed-activation-checkpointing" in flags and "recompute-granularity" not in line.words:
        line.put("recompute-granularity", "full", given="--deepspeed-activation-checkpointing")
        line.put("recompute-method", "uniform")
        line.put("recompute-num-layers", 1)
    for name in ("deepspeed", "no-pipeline-parallel"):
        if name in flags:
            line.left_out.append((f"--{name}", "the settings say what is sharded and in how many stages"))


def put_config(line: Line, text: str) -> None:
    """Put a configuration.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the DeepSpeed configuration is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("the DeepSpeed configuration is no JSON object")
    keys = Keys(found, line)
    for section in ("fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "tensorboard", "wandb"):
        _SECTIONS[section](line, keys)
    _put_batch(line, keys)
    keys.put("gradient_clipping", "clip-grad")
    keys.put("steps_per_print", "log-interval")
    if keys.take("wall_clock_breakdown"):
        line.put("timing-log-level", 1, given="wall_clock_breakdown", why="--timing-log-level 2 tells more")
    kind = keys.take("communication_data_type")
    if kind in ("bf16", "bfp16", "bfloat16"):
        line.put("grad-reduce-in-bf16", given=f"communication_data_type {kind}")
    elif kind not in (None, "fp32", "fp16"):
        line.lost.append((f"communication_data_type {kind}", "Gradients are reduced in float32, or with --bf16 in bfloat16."))
    if keys.take("activation_checkpointing") is not None and "recompute-granularity" not in line.words:
        why = "It says how what is kept is stored. What is computed again says --recompute-granularity; here nothing is."
        line.lost.append(("activation_checkpointing", why))
    keys.pass_over(
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio "
        "memory_breakdown dump_state flops_profiler comms_logger checkpoint data_types amp",
        "it does not change what is computed, or asks for what is always so",
    )
    keys.pass_over_rest()


def _put_batch(line: Line, keys: Keys) -> None:
    micro, total = keys.number("train_micro_batch_size_per_gpu"), keys.number("train_batch_size")
    steps = keys.number("gradient_accumulation_steps")
    ranks = (line.world_size or 0) // line.model_ranks
    if micro is None and total and steps and ranks:
        micro = total / steps / ranks
    if total is None and micro and steps and ranks:
        total = micro * steps * ranks
    elif total is None and steps not in (None, 1):
        line.missing.append(
            f"the number of ranks (--world-size N): gradient_accumulation_steps {steps:g} becomes --global-batch-size"
        )
    if micro is None and total is not None and "micro-batch-size" not in line.words:
        line.missing.append("--micro-batch-size: train_batch_size alone does not say how it is cut (--world-size N may tell)")
    for flag, value, key in (
        ("micro-batch-size", micro, "train_micro_batch_size_per_gpu"),
        ("global-batch-size", total, "train_batch_size"),
    ):
        before = line.number(flag)
        if value is not None and before is not None and before != value:
            line.lost.append((f"{key} {value:g}", f"The launch line says --{flag} {before:g}, which is taken."))
        elif value is not None:
            line.put(flag, int(value), given=key if before is None else "")


def _put_stage(line: Line, given: str, stage: int) -> None:
    strategy = _STRATEGY.get(stage)
    before = line.words.get("data-parallel-sharding-strategy")
    if strategy is None:
        line.lost.append((given, "There are the stages 0 to 3."))
    elif before is not None and before != (strategy,):
        line.lost.append((given, f"{before[0]} is taken, which was given before."))
    elif before is None and stage:
        line.put("data-parallel-sharding-strategy", strategy, given=given)


def _zero(line: Line, keys: Keys) -> None:
    section = keys.section("zero_optimization")
    if section is None:
        return
    stage = int(section.number("stage") or 0)
    _put_stage(line, f"zero_optimization.stage {stage}", stage)
    offload, params = section.section("offload_optimizer"), section.section("offload_param")
    if section.take("cpu_offload"):
        offload = offload or Keys({"device": "cpu"}, line, "cpu_offload")
    for found, flag in ((params, "fsdp-params-cpu"), (offload, "optimizer-cpu-offload")):
        device = found.take("device") if found is not None else None
        if found is not None:
            found.ignore_rest()
        if device == "cpu" and "fsdp-params-cpu" not in line.words:
            line.put(flag, given=f"{found.name}.device cpu")  # type: ignore[union-attr]
        elif device == "nvme":
            line.lost.append((f"{found.name}.device nvme", "State is kept on the device or in host memory."))  # type: ignore[union-attr]
    overlap = section.take("overlap_comm")
    if overlap and stage < 3:
        line.put("overlap-grad-reduce", given="zero_optimization.overlap_comm")
    section.put("reduce_bucket_size", "ddp-bucket-size", whole=True, when=stage in (1, 2))
    section.pass_over(
        "contiguous_gradients allgather_partitions allgather_bucket_size reduce_scatter round_robin_gradients sub_group_size "
        "reduce_bucket_size stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "load_from_fp32_weights elastic_checkpoint ignore_unused_parameters cpu_offload_use_pin_memory",
        "buffers and prefetching are laid out by this project itself",
    )
    section.pass_over_rest()


def _fp16(line: Line, keys: Keys) -> None:
    section = keys.section("fp16")
    if section is None:
        return
    enabled = section.take("enabled")
    if enabled == "auto" or not enabled:
        if enabled == "auto":
            line.missing.append("the format: fp16.enabled is auto, which another program fills in. Give --fp16 or --bf16")
        section.ignore_rest()
        return
    line.put("fp16", given="" if "fp16" in line.words else "fp16.enabled")
    scale = section.number("loss_scale")
    if scale:
        line.put("loss-scale", scale, given="fp16.loss_scale")
    power = section.number("initial_scale_power")
    if power is not None and not scale:
        line.put("initial-loss-scale", 2 ** int(power), given=f"fp16.initial_scale_power {power:g}")
    for key, flag in (
        ("loss_scale_window", "loss-scale-window"),
        ("hysteresis", "hysteresis"),
        ("min_loss_scale", "min-loss-scale"),
    ):
        value = section.number(key)
        if value is not None and not scale:
            line.put(flag, value, given=f"fp16.{key}" if flag not in line.words else "")
    section.pass_over("consecutive_hysteresis auto_cast fp16_master_weights_and_grads", "main parameters are always float32")
    section.pass_over_rest()


def _bf16(key: str) -> Callable[[Line, Keys], None]:
    def put(line: Line, keys: Keys) -> None:
        section = keys.section(key)
        if section is not None:
            if section.take("enabled") is True:
                line.put("bf16", given="" if "bf16" in line.words else f"{key}.enabled")
            section.ignore_rest()

    return put


def _optimizer(line: Line, keys: Keys) -> None:
    section = keys.section("optimizer")
    if section is None:
        return
    kind = str(section.take("type") or "Adam")
    name = {"adam": "adam", "adamw": "adam", "lamb": "lamb", "lion": "lion", "muon": "muon", "sgd": "sgd"}.get(kind.lower())
    params = section.section("params")
    if name is None:
        line.lost.append((f"optimizer.type {kind}", "There are adam, sgd, lion, ademamix, adafactor, lamb, adam8bit and muon."))
    elif name != "adam" or "optimizer" not in line.words:
        line.put("optimizer", name, given=f"optimizer.type {kind}")
    if params is None:
        return
    if name == "adam" and kind.lower() == "adam" and params.take("adam_w_mode") is False:
        line.lost.append(("optimizer.params.adam_w_mode false", "Weight decay is always decoupled from the gradient, as in AdamW."))
    for key, flag in (("lr", "lr"), ("eps", "adam-eps"), ("weight_decay", "weight-decay"), ("momentum", "sgd-momentum")):
        params.put(key, flag)
    betas = params.take("betas")
    if isinstance(betas, list) and len(betas) == 2 and name in ("adam", "lamb", "lion"):
        prefix = "lion" if name == "lion" else "adam"
        for number, beta in enumerate(betas, start=1):
            line.put(f"{prefix}-beta{number}", beta, given=f"optimizer.params.betas[{number - 1}]")
    params.pass_over("torch_adam adam_w_mode bias_correction", "the update rule is AdamW")
    params.pass_over_rest()


def _scheduler(line: Line, keys: Keys) -> None:
    section = keys.section("scheduler")
    if section is None:
        return
    kind, params = section.take("type"), section.section("params") or Keys({}, line, "scheduler.params")
    style = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(str(kind))
    if style is None:
        line.lost.append((f"scheduler.type {kind}", "See --lr-decay-style for the courses that there are."))
        params.ignore_rest()
        return
    before = line.words.get("lr-decay-style")
    if before not in (None, (style,)):
        line.lost.append((f"scheduler.type {kind}", f"--lr-decay-style {before[0]} is taken, which was given before."))
    else:
        line.put("lr-decay-style", style, given=f"scheduler.type {kind}")
    if params.take("warmup_type") in (None, "log"):
        line.lost.append(("scheduler.params.warmup_type log", "The rate warms up linearly (log is DeepSpeed's default)."))
    params.put("warmup_num_steps", "lr-warmup-iters")
    params.put("warmup_min_lr", "lr-warmup-init")
    params.put("warmup_max_lr", "lr")
    params.put("total_num_steps", "train-iters" if "train-iters" not in line.words else "lr-decay-iters")
    for key in ("warmup_min_ratio", "cos_min_ratio"):
        ratio, lr = params.number(key), line.number("lr")
        if ratio is not None and lr is not None:
            line.put("min-lr" if key == "cos_min_ratio" else "lr-warmup-init", ratio * lr, given=f"scheduler.params.{key}")
    params.pass_over_rest()


def _tensorboard(line: Line, keys: Keys) -> None:
    section = keys.section("tensorboard")
    if section is not None:
        if section.take("enabled"):
            folder = (
                "/".join(str(part) for part in (section.take("output_path"), section.take("job_name")) if part) or "tensorboard"
            )
            line.put("tensorboard-dir", folder, given="tensorboard.enabled")
        section.ignore_rest()


def _wandb(line: Line, keys: Keys) -> None:
    section = keys.section("wandb")
    if section is not None:
        if section.take("enabled") and (project := section.take("project")):
            line.put("wandb-project", project, given="wandb.project")
        section.pass_over_rest()


_SECTIONS: dict[str, Callable[[Line, Keys], Any]] = {
    "fp16": _fp16,
    "bf16": _bf16("bf16"),
    "bfloat16": _bf16("bfloat16"),
    "zero_optimization": _zero,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
