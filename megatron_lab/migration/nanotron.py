"""A training configuration of nanotron (YAML)."""

from __future__ import annotations

from typing import Any

import yaml

from megatron_lab.migration.keys import Keys
from megatron_lab.migration.line import Line

_MODEL = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "max_position_embeddings": "max-position-embeddings",
    "rms_norm_eps": "norm-epsilon",
    "rope_theta": "rotary-base",
}
_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}


def put_config(line: Line, text: str) -> None:
    """Put a configuration.

    Raises:
        ValueError: it is no YAML mapping.
    """
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the nanotron configuration is no YAML ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("the nanotron configuration is no YAML mapping")
    keys = Keys(found, line)
    sections = {
        name: keys.section(name) or Keys({}, line, name) for name in ("model", "parallelism", "tokens", "optimizer", "checkpoints")
    }
    data_ranks = _put_layout(line, sections["parallelism"])
    _put_tokens(line, sections["tokens"], data_ranks)
    _put_model(line, sections["model"])
    _put_optimizer(line, sections["optimizer"])
    _put_checkpoints(line, sections["checkpoints"])
    general = keys.section("general") or Keys({}, line)
    line.put("seed", int(general.number("seed") or 42), given="general.seed")
    general.pass_over(
        "project run step consumed_train_samples benchmark_csv_path ignore_sanity_checks", "it names the run, or its place"
    )
    logging = keys.section("logging") or Keys({}, line)
    line.put("log-interval", int(logging.number("iteration_step_info_interval") or 1), given="logging.iteration_step_info_interval")
    logging.pass_over("log_level log_level_replica", "the log has one level")
    _put_data(line, keys)
    line.differs.append(("initial weights and the order of samples", "They follow from --seed by this project's rules."))
    tokenizer = keys.section("tokenizer") or Keys({}, line)
    if name := tokenizer.take("tokenizer_name_or_path"):
        line.put("tokenizer-type", "HuggingFaceTokenizer")
        line.put("tokenizer-model", name, given=f"tokenizer.tokenizer_name_or_path {name}", why="a folder with its tokenizer.json")
    tokenizer.pass_over("tokenizer_revision tokenizer_max_length", "the tokenizer is a local folder")
    for section in (*sections.values(), general, logging, tokenizer):
        section.pass_over_rest()
    keys.pass_over_rest()


def _put_layout(line: Line, section: Keys) -> int:
    sizes = {key: int(section.number(key) or 1) for key in ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size")}
    for key, flag in (
        ("tp", "tensor-model-parallel-size"),
        ("pp", "pipeline-model-parallel-size"),
        ("context_parallel_size", "context-parallel-size"),
        ("expert_parallel_size", "expert-model-parallel-size"),
    ):
        if sizes[key] > 1:
            line.put(flag, sizes[key], given=f"parallelism.{key} {sizes[key]}")
    ranks = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["context_parallel_size"]
    line.world_size = line.world_size or ranks
    engine, mode = str(section.take("pp_engine", "1f1b")), str(section.take("tp_mode", "ALL_REDUCE"))
    if sizes["pp"] > 1:
        line.put("pipeline-schedule", {"afab": "gpipe"}.get(engine, engine), given=f"parallelism.pp_engine {engine}")
    overlaps = section.take("tp_linear_async_communication")
    if sizes["tp"] > 1 and mode.upper() == "REDUCE_SCATTER":
        line.put("sequence-parallel", given="parallelism.tp_mode REDUCE_SCATTER")
        if overlaps:
            line.put("tp-comm-overlap", given="parallelism.tp_linear_async_communication")
    if section.take("recompute_layer"):
        line.put("recompute-granularity", "full", given="parallelism.recompute_layer")
        line.put("recompute-method", "uniform")
        line.put("recompute-num-layers", 1)
    section.pass_over("tp_recompute_allgather moe_layer_recompute", "it changes what is kept in memory, not what is computed")
    return sizes["dp"]


def _put_tokens(line: Line, section: Keys, data_ranks: int) -> None:
    micro, steps = int(section.number("micro_batch_size") or 1), int(section.number("batch_accumulation_per_replica") or 1)
    line.put("micro-batch-size", micro, given="tokens.micro_batch_size")
    line.put(
        "global-batch-size",
        micro * steps * data_ranks,
        given="tokens.batch_accumulation_per_replica",
        why=f"{micro} x {steps} x {data_ranks} data ranks",
    )
    section.put("sequence_length", "seq-length", whole=True)
    section.put("train_steps", "train-iters", whole=True)
    interval, batches = section.number("val_check_interval", -1) or -1, int(section.number("limit_val_batches") or 0)
    if interval > 0 and batches:
        line.put("eval-interval", int(interval), given="tokens.val_check_interval")
        line.put("eval-iters", batches, given="tokens.limit_val_batches")
    else:
        line.put("eval-iters", 0, given="tokens.val_check_interval", why="no validation")
    section.pass_over("limit_test_batches", "a test at the end has --eval-iters batches")


def _put_model(line: Line, section: Keys) -> None:
    kind = str(section.take("dtype", "bfloat16")).removeprefix("torch.")
    flag = {"bfloat16": "bf16", "float16": "fp16", "double": "fp64", "float64": "fp64"}.get(kind)
    if flag is not None:
        line.put(flag, given=f"model.dtype {kind}")
    elif kind not in ("float32", "float"):
        line.lost.append((f"model.dtype {kind}", "There are float32, --bf16, --fp16 and --fp64."))
    init = section.section("init_method") or Keys({}, line, "model.init_method")
    init.put("std", "init-method-std")
    if path := init.take("path"):
        line.lost.append(
            (f"model.init_method.path {path}", "Its checkpoints are not read; import Hugging Face files (docs/checkpoints.md).")
        )
    section.put("make_vocab_size_divisible_by", "make-vocab-size-divisible-by", whole=True)
    section.pass_over("ddp_bucket_cap_mb", "buckets of gradients have --ddp-bucket-size elements")
    model = section.section("model_config")
    if model is None:
        line.lost.append(("model.model_config", "It is missing."))
        return
    for key, name in _MODEL.items():
        model.put(key, name, whole=key not in ("rms_norm_eps", "rope_theta"))
    heads, groups = line.number("num-attention-heads"), model.number("num_key_value_heads")
    if groups is not None and groups != heads:
        line.put("group-query-attention")
        line.put(
            "num-query-groups", int(groups), given="model.model_config.num_key_value_heads", why="with --group-query-attention"
        )
    if (size := model.number("vocab_size")) is not None:
        line.put("vocab-size", int(size), given="model.model_config.vocab_size")
    line.put("position-embedding-type", "rope")
    line.put("normalization", "RMSNorm")
    qwen = bool(model.take("is_qwen2_config"))
    if not (model.take("is_llama_config") or qwen):
        line.lost.append(("model.model_config", "It is no Llama or Qwen 2 model; what is not listed here is taken as in these."))
    line.changed.append((f"a {'Qwen 2' if qwen else 'Llama'} model", "--position-embedding-type rope --normalization RMSNorm"))
    activation = model.take("hidden_act", "silu")
    if activation == "silu":
        line.put("swiglu", given="model.model_config.hidden_act silu", why="its MLP is gated")
    elif activation == "gelu":
        line.put("geglu", given="model.model_config.hidden_act gelu", why="its MLP is gated")
    else:
        line.lost.append((f"model.model_config.hidden_act {activation}", "See --swiglu, --geglu, --relu and their neighbours."))
    line.put("disable-bias-linear")
    if model.take("attention_bias"):
        line.put("add-qkv-bias", given="model.model_config.attention_bias")
    if not model.take("tie_word_embeddings", True):
        line.put("untie-embeddings-and-output-weights", given="model.model_config.tie_word_embeddings false")
    if model.take("rope_interleaved") or model.take("interleaved_rotary"):
        line.put("rotary-interleaved", given="model.model_config.rope_interleaved")
    if window := model.number("sliding_window_size"):
        line.put("window-size", f"{window - 1:g},0", given=f"model.model_config.sliding_window_size {window:g}")
    if model.take("z_loss_enabled"):
        model.put("z_loss_coefficient", "z-loss-coeff")
    scaling = model.take("rope_scaling")
    if scaling:
        line.lost.append((f"model.model_config.rope_scaling {scaling}", "See --use-rope-scaling and --rope-type."))
    line.put("attention-dropout", 0)
    line.put("hidden-dropout", 0)
    line.changed.append(("(always, nanotron)", "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear"))
    model.pass_over(
        "bos_token_id eos_token_id pad_token_id initializer_range pretraining_tp use_cache z_loss_coefficient _attn_implementation "
        "flex_attention_mask attn_implementation rope_interleaved interleaved_rotary is_qwen2_config is_llama_config",
        "training does not read it, or --attention-backend and the tokenizer say it",
    )
    if experts := model.take("moe_config"):
        line.lost.append(
            (f"model.model_config.moe_config {_names(experts)}", "Mixtures of experts: see --num-experts and docs/moe.md.")
        )
    model.pass_over_rest()


def _put_optimizer(line: Line, section: Keys) -> None:
    rule = section.section("optimizer_factory") or Keys({}, line, "optimizer.optimizer_factory")
    name = str(rule.take("name", "adamW"))
    if name.lower() == "adamw":
        for key, flag in (("adam_beta1", "adam-beta1"), ("adam_beta2", "adam-beta2"), ("adam_eps", "adam-eps")):
            rule.put(key, flag)
    else:
        line.put("optimizer", name, given=f"optimizer.optimizer_factory.name {name}")
        if name == "sgd":
            line.put("sgd-momentum", 0)
    rule.pass_over("torch_adam_is_fused adam_beta1 adam_beta2 adam_eps", "how the update is computed is chosen here")
    rule.pass_over_rest()
    section.put("weight_decay", "weight-decay")
    excluded = section.take("weight_decay_exclude_named_params") or []
    if excluded:
        why = "Biases and norms have no decay by themselves here; name others by --param-groups 'PATTERN wd-mult=0'."
        line.lost.append((f"optimizer.weight_decay_exclude_named_params {excluded}", why))
    else:
        line.put("param-groups", "* wd-mult=1", given="(always, nanotron)", why="weight decay acts on norms too")
    clip = section.number("clip_grad")
    line.put("clip-grad", clip or 0, given="optimizer.clip_grad")
    if section.take("accumulate_grad_in_fp32", True):
        line.left_out.append(("optimizer.accumulate_grad_in_fp32", "gradients of a 16-bit model are always summed in float32"))
    else:
        line.lost.append(("optimizer.accumulate_grad_in_fp32 false", "Gradients of a 16-bit model are always summed in float32."))
    stage = int(section.number("zero_stage") or 0)
    if stage:
        strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        line.put("data-parallel-sharding-strategy", strategies[min(stage, 3)], given=f"optimizer.zero_stage {stage}")
    rates = section.section("learning_rate_scheduler") or Keys({}, line, "optimizer.learning_rate_scheduler")
    _put_rates(line, rates)


def _put_rates(line: Line, rates: Keys) -> None:
    rates.put("learning_rate", "lr")
    warmup, steps = int(rates.number("lr_warmup_steps") or 0), int(line.number("train-iters") or 0)
    line.put("lr-warmup-iters", min(warmup, max(0, steps - 1)), given=f"{rates.path('lr_warmup_steps')} {warmup}")
    if rates.take("lr_warmup_style", "linear") == "constant":
        line.lost.append((f"{rates.path('lr_warmup_style')} constant", "The rate warms up linearly."))
    style = str(rates.take("lr_decay_style") or "linear")
    if style not in _STYLES:
        line.lost.append((f"{rates.path('lr_decay_style')} {style}", "See --lr-decay-style for the courses that there are."))
        rates.ignore_rest()
        return
    start = rates.number("lr_decay_starting_step")
    begin = int(start if start is not None else warmup)
    decays = int(rates.number("lr_decay_steps") or max(1, steps - warmup))
    given = f"{rates.path('lr_decay_style')} {style} from step {begin} on, over {decays} steps"
    if begin == warmup and style != "1-sqrt":
        line.put("lr-decay-style", style, given=given, why="--lr-decay-iters counts from the start, the warm-up too")
    else:
        line.put("lr-decay-style", "WSD", given=given, why="constant, then a decay at the end")
        line.put("lr-wsd-decay-style", _STYLES[style])
        line.put("lr-wsd-decay-iters", decays)
    line.put("lr-decay-iters", begin + decays)
    least = rates.number("min_decay_lr")
    if least is not None:
        line.put("min-lr", least, given=f"{rates.path('min_decay_lr')} {least:g}")
    else:
        line.lost.append(
            (rates.path("min_decay_lr"), "It is the learning rate itself where it is not given, so nothing decays there.")
        )
    rates.pass_over_rest()


def _put_checkpoints(line: Line, section: Keys) -> None:
    if path := section.take("checkpoints_path"):
        line.put("save", path, given="checkpoints.checkpoints_path")
        line.put("load", path)
        section.put("checkpoint_interval", "save-interval", whole=True)
    if resumed := section.take("resume_checkpoint_path"):
        why = "Its checkpoints are not read; go by way of Hugging Face files and tools/checkpoint.py import."
        line.lost.append((f"checkpoints.resume_checkpoint_path {resumed}", why))
    why = "the last state is always saved, and files may be shared or not"
    section.pass_over(
        "save_initial_state save_final_state checkpoints_path_is_shared_file_system load_lr_scheduler load_optimizer", why
    )


def _put_data(line: Line, keys: Keys) -> None:
    stages = keys.sections("data_stages")
    for number, stage in enumerate(stages):
        data = stage.section("data") or Keys({}, line)
        dataset = data.take("dataset")
        what = _names(dataset) if dataset is not None else "made-up data"
        if number == 0:
            workers = data.number("num_loading_workers")
            if workers is not None:
                line.put("num-workers", int(workers), given="data_stages[0].data.num_loading_workers")
            if dataset is None:
                line.put("mock-data", given="data_stages[0].data.dataset null")
            else:
                line.put("data-path", "$DATA_PATH")
                line.variables["DATA_PATH"] = (
                    f"prefix of {what} as an indexed dataset, made by tools/preprocess_data.py (docs/data.md)"
                )
        else:
            why = (
                "A line reads one blend: end the run there (--exit-interval), and go on with the same line and another --data-path."
            )
            line.lost.append((f"data_stages[{number}], from step {stage.take('start_training_step')} on: {what}", why))


def _names(value: Any) -> str:
    """What a section names, in a few words."""
    if isinstance(value, dict):
        for key in ("hf_dataset_or_datasets", "dataset_folder", "dataset_path"):
            if value.get(key):
                return _names(value[key])
        return ", ".join(f"{key} {each}" for key, each in value.items())[:80]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
