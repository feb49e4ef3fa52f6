"""The settings of a run in the words of the reference."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.training import OptimizerConfig
from megatron.spec.activations import activation_of
from megatron.verification.reference.schedules import Course, Growth
from megatron.verification.reference.shape import ReferenceShape
from megatron.verification.reference.update import Rule


def reference_shape(model: ModelConfig, vocab_size: int) -> ReferenceShape:
    """The model."""
    return ReferenceShape(
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_size=model.head_size,
        vocab=vocab_size,
        seq=model.seq_length,
        positions="learned" if model.position_embedding_type == "learned_absolute" else model.position_embedding_type,
        num_positions=model.num_positions,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rotary_interpolation=model.rotary_seq_len_interpolation_factor,
        rope_scaling_factor=model.rope_scaling_factor if model.use_rope_scaling else None,
        norm=model.normalization,
        epsilon=model.norm_epsilon,
        activation=activation_of(model).name,
        bias=not model.disable_bias_linear,
        qkv_bias=model.add_qkv_bias,
        qk_norm=model.qk_layernorm,
        tied=not model.untie_embeddings_and_output_weights,
    )


def update_rule(optimizer: OptimizerConfig) -> Rule:
    """The optimizer."""
    return Rule(
        optimizer.optimizer,
        optimizer.clip_grad or None,
        (optimizer.adam_beta1, optimizer.adam_beta2),
        optimizer.adam_eps,
        optimizer.sgd_momentum,
    )


def learning_rate_course(config: Config, samples_of: Callable[[int], int], total_samples: int) -> Course:
    """The learning rate.

    Args:
        samples_of: the first steps of the run, of which there may be more than it has.
        total_samples: of the run.
    """
    settings = config.optimizer
    assert settings.lr is not None, "required"
    if config.training.train_samples is None:
        steps = config.training.train_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
        assert steps is not None, "required"
        warmup: float = samples_of(settings.lr_warmup_iters)
        end: int | None = samples_of(steps)
        final = samples_of(steps) - samples_of(steps - (settings.lr_wsd_decay_iters or 0))
    else:
        warmup, end, final = settings.lr_warmup_samples, settings.lr_decay_samples, settings.lr_wsd_decay_samples or 0
    end = total_samples if end is None else end
    if settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * end
    return Course(
        settings.lr,
        settings.min_lr,
        settings.lr_warmup_init,
        warmup,
        settings.lr_decay_style,
        end,
        final,
        settings.lr_wsd_decay_style,
    )


def decay_growth(settings: OptimizerConfig, total_samples: int) -> Growth:
    """Weight decay, which may change over the whole run."""
    if settings.weight_decay_incr_style == "constant":
        return Growth(settings.weight_decay, settings.weight_decay, total_samples)
    assert settings.start_weight_decay is not None and settings.end_weight_decay is not None, "required"
    return Growth(settings.start_weight_decay, settings.end_weight_decay, total_samples, settings.weight_decay_incr_style)
