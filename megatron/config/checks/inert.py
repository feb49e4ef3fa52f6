"""Settings that would do nothing beside the others: refused, so that nobody believes they act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.config.checks.data import TOKENIZER_NEEDS, TOKENIZER_SETTINGS, run_settings
from megatron.config.checks.finding import Change, Finding, Rule, change, is_changed, shown
from megatron.config.checks.sharding import shards_parameters
from megatron.config.config import Config


@dataclass(frozen=True)
class Condition:
    """When some settings act."""

    fields: tuple[str, ...]
    acts: Callable[[Config], bool]
    needs: str
    """The condition in words, after "it acts only"."""
    fix: Change | None = None
    """A change that makes them act, where one is likely to be meant."""


def _made_from(field: str) -> Callable[[Config], bool]:
    """Whether the tokenizer is made from this setting (or is not known yet)."""
    return lambda config: config.data.tokenizer_type is None or field in run_settings(config.data.tokenizer_type)


def _kinds_made_from(field: str) -> str:
    kinds = [kind for kind in TOKENIZER_NEEDS if field in run_settings(kind)]
    return f"with --tokenizer-type {' or '.join(kinds)}"


def _has_warmup(config: Config) -> bool:
    optimizer = config.optimizer
    return bool(optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction)


def _draws_curves(config: Config) -> bool:
    return config.logging.tensorboard_dir is not None or config.logging.wandb_project is not None


CONDITIONS = (
    Condition(
        ("num_query_groups",),
        lambda config: config.model.group_query_attention,
        "with --group-query-attention",
        change(group_query_attention=True),
    ),
    Condition(
        ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "use_rope_scaling"),
        lambda config: config.model.position_embedding_type == "rope",
        "with --position-embedding-type rope",
        change(position_embedding_type="rope"),
    ),
    Condition(
        ("rope_scaling_factor",),
        lambda config: config.model.use_rope_scaling,
        "with --use-rope-scaling",
        change(use_rope_scaling=True),
    ),
    Condition(("loss_scale",), lambda config: config.precision.fp16, "with --fp16", change(fp16=True)),
    Condition(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda config: config.precision.fp16 and config.precision.loss_scale is None,
        "with --fp16 and without --loss-scale, when the scale is dynamic",
    ),
    Condition(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda config: config.optimizer.optimizer == "adam",
        "with --optimizer adam",
        change(optimizer="adam"),
    ),
    Condition(
        ("sgd_momentum",), lambda config: config.optimizer.optimizer == "sgd", "with --optimizer sgd", change(optimizer="sgd")
    ),
    Condition(
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda config: config.optimizer.lr_decay_style == "WSD",
        "with --lr-decay-style WSD",
        change(lr_decay_style="WSD"),
    ),
    Condition(
        ("min_lr",), lambda config: config.optimizer.lr_decay_style != "constant", "with a --lr-decay-style other than constant"
    ),
    Condition(
        ("lr_decay_iters", "lr_decay_samples"),
        lambda config: config.optimizer.lr_decay_style != "constant" or bool(config.optimizer.lr_warmup_fraction),
        "with a --lr-decay-style other than constant, or with --lr-warmup-fraction",
    ),
    Condition(("lr_warmup_init",), _has_warmup, "with --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction"),
    Condition(
        ("start_weight_decay", "end_weight_decay"),
        lambda config: config.optimizer.weight_decay_incr_style != "constant",
        "with --weight-decay-incr-style linear or cosine",
        change(weight_decay_incr_style="linear"),
    ),
    Condition(
        ("weight_decay",),
        lambda config: config.optimizer.weight_decay_incr_style == "constant",
        "with --weight-decay-incr-style constant; otherwise --start-weight-decay and --end-weight-decay do",
    ),
    Condition(
        ("fsdp_shard_size", "fsdp_reshard_after_forward"),
        shards_parameters,
        "with --data-parallel-sharding-strategy optim_grads_params",
        change(data_parallel_sharding_strategy="optim_grads_params"),
    ),
    Condition(
        ("overlap_param_gather",),
        lambda config: config.parallel.sharding != "no_shard",
        "with --use-distributed-optimizer, or a --data-parallel-sharding-strategy other than no_shard",
        change(use_distributed_optimizer=True),
    ),
    Condition(
        ("optimizer_cpu_offload",),
        lambda config: config.optimizer.optimizer_offload_fraction != 0,
        "with an --optimizer-offload-fraction above 0",
        change(optimizer_offload_fraction=1.0),
    ),
    Condition(
        ("optimizer_offload_fraction",),
        lambda config: config.optimizer.optimizer_cpu_offload,
        "with --optimizer-cpu-offload",
        change(optimizer_cpu_offload=True),
    ),
    Condition(("manual_gc_interval",), lambda config: config.training.manual_gc, "with --manual-gc", change(manual_gc=True)),
    Condition(("profile_step_end", "profile_ranks"), lambda config: config.logging.profile, "with --profile", change(profile=True)),
    Condition(
        ("profile_step_start", "profile_dir"),
        lambda config: config.logging.profile or config.logging.profile_pipeline,
        "with --profile or --profile-pipeline",
        change(profile=True),
    ),
    Condition(
        ("tensorboard_log_interval", "log_timers_to_tensorboard", "log_memory_to_tensorboard"),
        _draws_curves,
        "with --tensorboard-dir or --wandb-project",
    ),
    Condition(("trace_steps",), lambda config: config.debug.save_trace is not None, "with --save-trace"),
    Condition(
        ("log_layer_norms",),
        lambda config: _draws_curves(config) or config.logging.metrics_file is not None,
        "with --metrics-file, --tensorboard-dir or --wandb-project",
    ),
    Condition(("wandb_exp_name",), lambda config: config.logging.wandb_project is not None, "with --wandb-project"),
    Condition(
        ("save_interval", "save_retain_interval", "async_save", "keep_last", "save_optim"),
        lambda config: config.checkpoint.save is not None,
        "with --save",
    ),
    Condition(
        (
            *("ckpt_step", "load_optim", "finetune", "exit_on_missing_checkpoint"),
            *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        ),
        lambda config: config.checkpoint.load is not None,
        "with --load",
    ),
    Condition(
        ("use_checkpoint_args",),
        lambda config: config.checkpoint.load is not None or config.checkpoint.pretrained_checkpoint is not None,
        "with --load or --pretrained-checkpoint",
    ),
    Condition(
        ("data_order", "data_cache_path"),
        lambda config: not config.data.mock_data,
        "without --mock-data, whose samples are computed one by one",
        change(mock_data=False),
    ),
    *(Condition((field,), _made_from(field), _kinds_made_from(field)) for field in TOKENIZER_SETTINGS),
)
"""Settings that act only beside certain others."""


def changed_settings_act(config: Config, world_size: int) -> Iterator[Finding]:
    """A setting that differs from its default has an effect."""
    for condition in CONDITIONS:
        if condition.acts(config):
            continue
        for field in condition.fields:
            if is_changed(config, field):
                fixes = (condition.fix,) if condition.fix is not None else ()
                yield Finding(
                    (field,),
                    f"{shown(config, field)} would have no effect: it acts only {condition.needs}.",
                    "Leave it out, or make it act.",
                    (fixes,),
                )


RULES: tuple[Rule, ...] = (changed_settings_act,)
