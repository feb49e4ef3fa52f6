"""Settings that change nothing beside the others, although what they ask for holds: accepted, and named in the start-up log."""

from __future__ import annotations

from megatron.config.checks.finding import data_size, is_changed, shown
from megatron.config.config import Config
from megatron.config.data_words import has_own_splits
from megatron.config.sharding_effects import sharding_notes

_SPREADING = (
    "pipeline_split",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
_SCHEDULING = (
    "pipeline_schedule",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def notes(config: Config, world_size: int) -> list[str]:
    """One line for each such setting, with the reason. The settings must have passed the rules."""
    model, parallel, training, precision = config.model, config.parallel, config.training, config.precision
    data, logging = config.data, config.logging
    copies = data_size(config, world_size)
    chunks = parallel.pipeline_model_parallel_size * parallel.chunks_per_stage(model.num_layers)
    cases = (
        ("sequence_parallel", parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1, "there is one tensor rank"),
        ("overlap_grad_reduce", parallel.overlap_grad_reduce and copies == 1, "there is one data rank"),
        ("overlap_param_gather", parallel.overlap_param_gather and copies == 1, "there is one data rank"),
        (
            "use_distributed_optimizer",
            parallel.use_distributed_optimizer and is_changed(config, "data_parallel_sharding_strategy"),
            f"{shown(config, 'data_parallel_sharding_strategy')} shards the optimizer's state too",
        ),
        (
            "use_tp_pp_dp_mapping",
            parallel.use_tp_pp_dp_mapping and (copies == 1 or parallel.pipeline_model_parallel_size == 1),
            "both numberings of the ranks are the same here",
        ),
        (
            "overlap_p2p_communication",
            not parallel.overlap_p2p_communication and parallel.pipeline_model_parallel_size == 1,
            "nothing is sent between pipeline stages",
        ),
        *((field, is_changed(config, field) and chunks == 1, "one rank computes all layers in one piece") for field in _SPREADING),
        (
            "fp32_residual_connection",
            model.fp32_residual_connection and not (precision.fp16 or precision.bf16),
            "the model does not compute in 16 bits",
        ),
        ("add_qkv_bias", model.add_qkv_bias and not model.disable_bias_linear, "all linear layers have biases"),
        (
            "max_position_embeddings",
            model.max_position_embeddings is not None and model.position_embedding_type != "learned_absolute",
            "there is no learned position table",
        ),
        ("split", data.mock_data and is_changed(config, "split"), "--mock-data makes up tokens for each split"),
        (
            "reset_position_ids",
            data.reset_position_ids and model.position_embedding_type == "none",
            "--position-embedding-type none uses no positions",
        ),
        ("split", has_own_splits(data) and is_changed(config, "split"), "each split has datasets of its own"),
        (
            "timing_log_option",
            logging.timing_log_level == 0 and is_changed(config, "timing_log_option"),
            "--timing-log-level 0 switches timers off",
        ),
        (
            "log_timers_to_tensorboard",
            logging.timing_log_level == 0 and logging.log_timers_to_tensorboard,
            "--timing-log-level 0 switches timers off",
        ),
        (
            "log_memory_to_tensorboard",
            logging.log_memory_to_tensorboard and parallel.device == "cpu",
            "only the memory of CUDA devices is measured",
        ),
        (
            "eval_interval",
            training.eval_interval is not None and training.eval_iters == 0,
            "--eval-iters 0 switches evaluation off",
        ),
    )
    return [
        *(f"{shown(config, field)} has no effect: {reason}." for field, idle, reason in cases if idle),
        *_without_pipeline(config, chunks),
        *sharding_notes(config, copies or 1),
    ]


def _without_pipeline(config: Config, chunks: int) -> list[str]:
    """Settings that order the work of a pipeline where there is none: what they change costs or saves memory, but no time."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1 or (chunks == 1 and parallel.schedule == "1f1b"):
        return []
    fields = (field for field in (_SCHEDULING if chunks > 1 else _SCHEDULING[:1]) if is_changed(config, field))
    return [
        f"{shown(config, field)} saves no time: there is one pipeline stage, which never waits for another." for field in fields
    ]
