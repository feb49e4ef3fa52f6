"""Llama and what is like it.

The defaults of fields that a file leaves out are those of the configuration classes of transformers.
"""

from __future__ import annotations

from megatron_lab.foreign.huggingface.family import Family, FieldGroup, Settings
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    Biases,
    Dropouts,
    Number,
    Only,
    Reciprocal,
    ScoreScale,
    Sizes,
    untied,
)
from megatron_lab.foreign.huggingface.latent_fields import LatentSizes
from megatron_lab.foreign.huggingface.layer_fields import NoRotaryLayers, WindowFields
from megatron_lab.foreign.huggingface.rotary_fields import Rotary

_SILU = ActivationField("hidden_act", gated=True, default="silu")


def like_llama(
    name: str,
    architecture: str,
    *groups: FieldGroup,
    sizes: Sizes | LatentSizes,
    tied: bool = False,
    epsilon: float = 1e-6,
    rotary: Rotary | None = None,
    epsilon_name: str = "rms_norm_eps",
    activation: ActivationField = _SILU,
    always: Settings | None = None,
    names: dict[str, str] | None = None,
    without_effect: tuple[str, ...] = (),
    later_tokens: tuple[str, ...] = (),
) -> Family:
    """Llama and what is like it: rotary positions, RMSNorm, gated MLP, grouped queries; with what is otherwise."""
    return Family(
        model_type=name,
        architecture=architecture,
        always={"position_embedding_type": "rope", "normalization": "RMSNorm", "hidden_dropout": 0.0, **(always or {})},
        groups=(
            sizes,
            rotary or Rotary(max_positions=sizes.max_positions),
            activation,
            Number(epsilon_name, "norm_epsilon", epsilon),
            Number("attention_dropout", "attention_dropout", 0.0),
            Number("initializer_range", "init_method_std", 0.02),
            untied(tied),
            *groups,
        ),
        without_effect=(*without_effect, *later_tokens),
        later_tokens=later_tokens,
        prefix="model.",
        layer="layers.{}",
        names={
            "embedding.word": "embed_tokens",
            "attention_norm": "input_layernorm",
            "attention": "self_attn",
            "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "attention.output": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.gate_proj mlp.up_proj",
            "mlp.down": "mlp.down_proj",
            "final_norm": "norm",
            "output": "lm_head",
            **(names or {}),
        },
        buffers=r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # frequencies
    )


ATTENTION_AND_MLP_BIAS = Biases(switches={"attention_bias": ("qkv", "output"), "mlp_bias": ("mlp",)})
ATTENTION_BIAS = Biases(switches={"attention_bias": ("qkv", "output")})
_QWEN_WINDOWS = WindowFields(default=4096, where="switched")

LLAMA = like_llama("llama", "LlamaForCausalLM", ATTENTION_AND_MLP_BIAS, sizes=Sizes(max_positions=2048, heads_divide_hidden=True))
QWEN2 = like_llama(
    "qwen2", "Qwen2ForCausalLM", Biases(always=("qkv",)), _QWEN_WINDOWS, sizes=Sizes(max_positions=32768, kv_heads=32)
)
QWEN3 = like_llama(
    "qwen3",
    "Qwen3ForCausalLM",
    ATTENTION_BIAS,
    _QWEN_WINDOWS,
    sizes=Sizes(max_positions=32768, kv_heads=32, head_size=128),
    always={"qk_layernorm": True},
)
MISTRAL = like_llama(
    "mistral", "MistralForCausalLM", Biases(), WindowFields(default=4096), sizes=Sizes(max_positions=4096 * 32, kv_heads=8)
)
PHI3 = like_llama(
    "phi3",
    "Phi3ForCausalLM",
    Biases(),
    Dropouts("resid_pdrop", "embd_pdrop", 0.0),
    WindowFields(default=None),
    sizes=Sizes(max_positions=4096),
    rotary=Rotary(max_positions=4096, partial=1.0, types=("longrope",), original_outside=4096),
    epsilon=1e-5,
    names={"attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"},
)

SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3ForCausalLM",
    ATTENTION_AND_MLP_BIAS,
    NoRotaryLayers(every=4),
    WindowFields(default=None, where="switched", unrotated=NoRotaryLayers(every=4)),
    sizes=Sizes(max_positions=32768, kv_heads=4),
    rotary=Rotary(max_positions=32768, theta=2e6),
    tied=True,
)

STABLELM = like_llama(
    "stablelm",
    "StableLmForCausalLM",
    Biases(switches={"use_qkv_bias": ("qkv",)}),
    Number("hidden_dropout", "hidden_dropout", 0.0),
    Only("use_parallel_residual", False, "its attention and MLP side by side share one norm, which cannot be built here"),
    Only("qk_layernorm", False, "it has a norm of its own for each query and key head, which cannot be built here"),
    sizes=Sizes(max_positions=4096, kv_heads=32, free_heads=False),
    rotary=Rotary(max_positions=4096, partial=0.25),
    epsilon=1e-5,
    epsilon_name="layer_norm_eps",
    always={"normalization": "LayerNorm"},
)
_GRANITE_SIZES = Sizes(max_positions=2048)
GRANITE = like_llama(
    "granite",
    "GraniteForCausalLM",
    ATTENTION_AND_MLP_BIAS,
    Number("embedding_multiplier", "embedding_multiplier", 1.0),
    Number("residual_multiplier", "residual_multiplier", 1.0),
    ScoreScale("attention_multiplier", 1.0, _GRANITE_SIZES),
    Reciprocal("logits_scaling", "output_multiplier"),
    sizes=_GRANITE_SIZES,
)
