"""Work and size of the model, counted from its configuration.

FLOPs are those that the model itself needs in matrix products, forward and backward. What counts: `megatron.config.model_flops`.

Shapes: `h` hidden size, `d` head size, `n` query heads, `k` key-value heads, `f` MLP size.
"""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.config.model_flops import attention_flops, layer_flops, output_flops
from megatron.spec.activations import activation_of


def flops_per_token(model: ModelConfig, vocab_size: int) -> int:
    """Forward and backward FLOPs for one token, averaged over a sequence.

    Backward does two products for each of forward (the gradients of both factors), so the whole is three times forward.

    Args:
        model: Shape of the model.
        vocab_size: Rows of the output layer, without padding.
    """
    return 3 * (model.num_layers * layer_flops(model) + output_flops(model, vocab_size))


def flops_per_step(model: ModelConfig, vocab_size: int, num_sequences: int, attended_sequences: float | None = None) -> float:
    """Forward and backward FLOPs of `num_sequences` sequences (over all devices when that is the global batch size).

    Args:
        attended_sequences: where attention stays within documents, as many whole sequences take as much of it: the sum over all
            documents of (length / sequence length) squared. By default each sequence is one document.
    """
    whole = flops_per_token(model, vocab_size) * model.seq_length * num_sequences
    if attended_sequences is None:
        return whole
    return whole - 3 * model.num_layers * attention_flops(model) * model.seq_length * (num_sequences - attended_sequences)


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, with each tied weight once and without padding of the vocabulary."""
    h, d, f = model.hidden_size, model.head_size, model.ffn_size
    n, k = model.num_attention_heads, model.num_key_value_heads
    bias = not model.disable_bias_linear
    qkv_rows = (n + 2 * k) * d
    up_rows = 2 * f if activation_of(model).gated else f
    tensors_of_norm = 2 if model.normalization == "LayerNorm" else 1  # RMSNorm has no bias

    attention = qkv_rows * h + h * n * d
    if bias or model.add_qkv_bias:
        attention += qkv_rows
    if bias:
        attention += h
    if model.qk_layernorm:
        attention += 2 * tensors_of_norm * d
    mlp = up_rows * h + h * f + (up_rows + h if bias else 0)
    layer = attention + mlp + 2 * tensors_of_norm * h

    positions = model.num_positions if model.position_embedding_type == "learned_absolute" else 0
    vocabularies = 1 if model.tied else 2
    return model.num_layers * layer + tensors_of_norm * h + (vocabularies * vocab_size + positions) * h
