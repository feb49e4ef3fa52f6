"""What the number behind each flag counts or measures."""

from __future__ import annotations

UNITS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers"),
            "decoder_last_pipeline_num_layers",
        ),
        "layers",
    ),
    **dict.fromkeys(("hidden_size", "ffn_hidden_size", "kv_channels"), "channels"),
    **dict.fromkeys(("num_attention_heads", "num_query_groups"), "heads"),
    **dict.fromkeys(("seq_length", "tiktoken_num_special_tokens"), "tokens"),
    **dict.fromkeys(("max_position_embeddings", "make_vocab_size_divisible_by", "vocab_size"), "rows of a table"),
    **dict.fromkeys(
        (
            *("micro_batch_size", "global_batch_size", "rampup_batch_size", "train_samples"),
            *("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"),
        ),
        "sequences",
    ),
    **dict.fromkeys(
        (
            *("train_iters", "eval_interval", "exit_interval", "manual_gc_interval", "lr_decay_iters", "lr_warmup_iters"),
            *("lr_wsd_decay_iters", "loss_scale_window", "save_interval", "save_retain_interval", "log_interval"),
            *("tensorboard_log_interval", "check_replicas_every", "trace_steps"),
        ),
        "steps",
    ),
    **dict.fromkeys(("iterations_to_skip", "ckpt_step", "profile_step_start", "profile_step_end"), "number of a step, from 1 on"),
    "eval_iters": "global batches",
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "fsdp_shard_size"),
        ),
        "ranks",
    ),
    "profile_ranks": "number of a rank, from 0 on",
    "num_virtual_stages_per_pipeline_rank": "chunks of layers",
    "ddp_bucket_size": "elements",
    **dict.fromkeys(("distributed_timeout_minutes", "exit_duration_in_mins"), "minutes"),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), "probability"),
    **dict.fromkeys(("rotary_percent", "lr_warmup_fraction", "optimizer_offload_fraction"), "share, 1 for all"),
    "init_method_std": "standard deviation",
    **dict.fromkeys(("rotary_seq_len_interpolation_factor", "rope_scaling_factor"), "factor"),
    **dict.fromkeys(("rotary_base", "norm_epsilon", "adam_eps"), "plain number"),
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_init"), "step length of the update"),
    **dict.fromkeys(
        ("weight_decay", "start_weight_decay", "end_weight_decay"), "share of a weight taken off in an update, in units of the rate"
    ),
    "clip_grad": "norm of the whole gradient",
    **dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum"), "share that is kept from one update to the next"),
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale"), "factor on the loss"),
    "hysteresis": "overflows",
    "num_workers": "threads",
    "keep_last": "checkpoints",
    "timing_log_level": "level of detail",
    "seed": "plain number",
}
"""By the name of the field; every setting that is a number has one."""
