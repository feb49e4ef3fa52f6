"""Work of the parts of the model, counted from its configuration.

FLOPs are those that the model itself needs in matrix products: a multiply-add is two, causal attention does half of the full
square, the lookup of the embedding does none. Norms, activations, softmax and rotation do not count, nor does anything that is
computed a second time to save memory. All is forward, for one token.

Shapes: `h` hidden size, `d` head size, `n` query heads, `k` key-value heads, `f` MLP size.
"""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.spec.activations import activation_of


def layer_flops(model: ModelConfig) -> int:
    """Forward FLOPs of one transformer layer for one token, averaged over a sequence."""
    h, d, f = model.hidden_size, model.head_size, model.ffn_size
    n, k = model.num_attention_heads, model.num_key_value_heads
    projections = 2 * h * (n + 2 * k) * d + 2 * n * d * h
    mlp = 2 * h * f * (3 if activation_of(model).gated else 2)
    return projections + attention_flops(model) + mlp


def attention_flops(model: ModelConfig) -> int:
    """Forward FLOPs of the scores and values of one layer for one token, averaged over a sequence that is one document."""
    # Two products over the sequence; causal: half of each.
    return 2 * (2 * model.num_attention_heads * model.head_size * model.seq_length) // 2


def output_flops(model: ModelConfig, vocab_size: int) -> int:
    """Forward FLOPs of the output layer for one token. `vocab_size` counts its rows, without padding."""
    return 2 * model.hidden_size * vocab_size
