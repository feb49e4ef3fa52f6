"""The architectures of transformers that can be converted. The defaults of fields that a file leaves out are those of transformers'
configuration classes."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.huggingface.family import Family, FieldGroup, Settings
from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.groups import ActivationField, Biases, Dropouts, NotBuilt, Number, Only, Sizes, Switch
from megatron.checkpoint.huggingface.latent_fields import OF_EXPERTS, LatentSizes
from megatron.checkpoint.huggingface.layer_fields import NoRotaryLayers, WindowFields
from megatron.checkpoint.huggingface.rotary_fields import Rotary
from megatron.config.model import ModelConfig

_ALIASES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Second names of fields, which transformers takes too."""


class _GPT2Sizes:
    """GPT-2's names of sizes."""

    def read(self, fields: Fields) -> Settings:
        sizes = {name: self._size(fields, name, alias) for name, alias in _ALIASES.items()}
        hidden, heads = sizes["n_embd"], sizes["n_head"]
        if hidden % heads:
            fields.refuse("n_head", f"does not divide n_embd = {hidden}")
        return {
            "num_layers": sizes["n_layer"],
            "hidden_size": hidden,
            "ffn_hidden_size": fields.size("n_inner", 4 * hidden),
            "num_attention_heads": heads,
            "seq_length": sizes["n_positions"],
            "max_position_embeddings": sizes["n_positions"],
        }

    def _size(self, fields: Fields, name: str, alias: str) -> int:
        given = fields.raw(name) is None and fields.raw(alias) is not None
        size = fields.size(alias if given else name)
        if fields.raw(alias) not in (None, size):
            fields.refuse(alias, f"differs from {name} = {size}")
        return size

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_layer": model.num_layers,
            "n_positions": model.num_positions,
            "n_inner": model.ffn_size,
        }


_UNTIED = "untie_embeddings_and_output_weights"

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    always={"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
    groups=(
        _GPT2Sizes(),
        ActivationField("activation_function", gated=False, default="gelu_new"),
        Biases(always=("qkv", "output", "mlp")),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Number("attn_pdrop", "attention_dropout", 0.1),
        Number("initializer_range", "init_method_std", 0.02),
        Dropouts("resid_pdrop", "embd_pdrop", 0.1),
        Switch("tie_word_embeddings", _UNTIED, True, opposite=True),
        Only("scale_attn_weights", True),
        Only("scale_attn_by_inverse_layer_idx", False, "layers scale all attention alike here"),
    ),
    without_effect=(
        "n_ctx",  # the former name of n_positions
        "reorder_and_upcast_attn",  # float32 scores, which are always used here
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
    prefix="transformer.",
    layer="h.{}",
    names={
        "embedding.word": "wte",
        "embedding.position": "wpe",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "final_norm": "ln_f",
        "output": "lm_head",
    },
    transposed=True,
    buffers=r"h\.\d+\.attn\.(?:bias|masked_bias)",  # causal masks
)


_SILU = ActivationField("hidden_act", gated=True, default="silu")


def _like_llama(
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
            Switch("tie_word_embeddings", _UNTIED, tied, opposite=True),
            *groups,
        ),
        without_effect=without_effect,
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


_ATTENTION_AND_MLP = Biases(switches={"attention_bias": ("qkv", "output"), "mlp_bias": ("mlp",)})
_ATTENTION = Biases(switches={"attention_bias": ("qkv", "output")})
_QWEN_WINDOWS = WindowFields(default=4096, where="switched")

LLAMA = _like_llama("llama", "LlamaForCausalLM", _ATTENTION_AND_MLP, sizes=Sizes(max_positions=2048, heads_divide_hidden=True))
QWEN2 = _like_llama(
    "qwen2", "Qwen2ForCausalLM", Biases(always=("qkv",)), _QWEN_WINDOWS, sizes=Sizes(max_positions=32768, kv_heads=32)
)
QWEN3 = _like_llama(
    "qwen3",
    "Qwen3ForCausalLM",
    _ATTENTION,
    _QWEN_WINDOWS,
    sizes=Sizes(max_positions=32768, kv_heads=32, head_size=128),
    always={"qk_layernorm": True},
)
MISTRAL = _like_llama(
    "mistral", "MistralForCausalLM", Biases(), WindowFields(default=4096), sizes=Sizes(max_positions=4096 * 32, kv_heads=8)
)
PHI3 = _like_llama(
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

SMOLLM3 = _like_llama(
    "smollm3",
    "SmolLM3ForCausalLM",
    _ATTENTION_AND_MLP,
    NoRotaryLayers(every=4),
    WindowFields(default=None, where="switched", unrotated=NoRotaryLayers(every=4)),
    sizes=Sizes(max_positions=32768, kv_heads=4),
    rotary=Rotary(max_positions=32768, theta=2e6),
    tied=True,
)

STABLELM = _like_llama(
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
_NESTED_TYPES = ("linear", "llama3", "yarn")
"""Where rotary parameters stand by kind of layer, transformers looks for those of the other types in another place."""
_NORMS_BEHIND = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_OLMO = {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_all_heads": True}
OLMO2 = _like_llama(
    "olmo2",
    "Olmo2ForCausalLM",
    _ATTENTION,
    sizes=Sizes(max_positions=2048),
    epsilon=1e-5,
    always=_OLMO,
    names=_NORMS_BEHIND,
)
OLMO3 = _like_llama(
    "olmo3",
    "Olmo3ForCausalLM",
    _ATTENTION,
    WindowFields(default=4096, where="layer_types", every=4),
    sizes=Sizes(max_positions=2048),
    rotary=Rotary(max_positions=2048, theta=500000.0, local_theta=500000.0, local_theta_name="rope_theta", types=_NESTED_TYPES),
    epsilon=1e-5,
    always=_OLMO,
    names=_NORMS_BEHIND,
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    always={"position_embedding_type": "rope", "normalization": "LayerNorm"},
    groups=(
        Sizes(max_positions=2048, shared_heads=False, free_heads=False),
        Rotary(max_positions=2048, partial=0.25, theta_name="rotary_emb_base", partial_name="rotary_pct"),
        ActivationField("hidden_act", gated=False, default="gelu"),
        Biases(always=("mlp",), switches={"attention_bias": ("qkv", "output")}, default=True),
        Number("layer_norm_eps", "norm_epsilon", 1e-5),
        Number("attention_dropout", "attention_dropout", 0.0),
        Number("hidden_dropout", "hidden_dropout", 0.0),
        Number("initializer_range", "init_method_std", 0.02),
        Switch("tie_word_embeddings", _UNTIED, False, opposite=True),
        Switch("use_parallel_residual", "parallel_residual", True),
    ),
    prefix="gpt_neox.",
    layer="layers.{}",
    names={
        "embedding.word": "embed_in",
        "attention_norm": "input_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "final_norm": "final_layer_norm",
        "output": "embed_out",
    },
    renamed={"lm_head.weight": "embed_out.weight"},  # transformers 5 calls it so, and takes the older name too
    grouped_heads=True,
    buffers=r"layers\.\d+\.attention\.(?:bias|masked_bias|rotary_emb\.inv_freq)",
)
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = _like_llama(
    "gpt_oss",
    "GptOssForCausalLM",
    Biases(switches={"attention_bias": ("qkv", "output")}, default=True),
    WindowFields(default=128, where="layer_types", every=2),
    NotBuilt(
        (
            *("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits", "swiglu_alpha"),
            *("swiglu_limit", "experts_per_token", "initial_context_length"),
        ),
        "its MLPs are mixtures of experts, which are not built yet; its attention is",
    ),
    sizes=Sizes(max_positions=131072, kv_heads=8, head_size=64),
    rotary=Rotary(max_positions=131072, theta=150000.0, default=_GPT_OSS_YARN),
    epsilon=1e-5,
    always={"softmax_type": "learnable"},
)

_LATENT_NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.k_rotary": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
_LATENT: Settings = {"multi_latent_attention": True, "qk_layernorm": True}
_LATER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Layers that predict tokens after the next, which change no logits; a file that holds their weights is refused for these."""

DEEPSEEK_V2 = _like_llama(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    Biases(switches={"mlp_bias": ("mlp",)}),
    sizes=LatentSizes(max_positions=2048, dense_layers=0),
    always={**_LATENT, "rotary_interleaved": True},
    names=_LATENT_NAMES,
    without_effect=OF_EXPERTS,
)
DEEPSEEK_V3 = _like_llama(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    Biases(),
    Switch("rope_interleave", "rotary_interleaved", True),
    sizes=LatentSizes(max_positions=4096, dense_layers=3),
    always=_LATENT,
    names=_LATENT_NAMES,
    without_effect=(*OF_EXPERTS, *_LATER_TOKENS),
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        PHI3,
        SMOLLM3,
        STABLELM,
        OLMO2,
        OLMO3,
        GPT_NEOX,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
"""Architectures by their name in config.json. A model is written as the first that it fits."""

_TWO_NORMS = "norms on both sides of attention and MLP with weights around zero, a scaled embedding and a GeGLU"
MISSING = {
    "gemma": "norm weights around zero, a scaled embedding and a GeGLU",
    "gemma2": f"{_TWO_NORMS}, and a soft cap of the logits",
    "gemma3_text": _TWO_NORMS,
    "granite": "multipliers of embedding, residuals and logits",
}
"""Architectures that cannot be converted, with what they have and cannot be built here."""


def fitting(model: ModelConfig, wanted: str | None = None) -> Family:
    """The family to write a model as: the one that is wanted, or the first that has all its parts.

    Raises:
        CheckpointError: none fits. The message gives the reasons, for each family if none is wanted, nearest first.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise CheckpointError(f"there is no family {wanted!r}; known are {', '.join(FAMILIES)}")
    tried = {name: family.misfits(model) for name, family in FAMILIES.items() if wanted in (None, name)}
    for name, misfits in tried.items():
        if not misfits:
            return FAMILIES[name]
    nearest = sorted(tried, key=lambda name: len(tried[name]))
    reasons = "\n  ".join(f"{name}: {'; '.join(tried[name])}" for name in nearest)
    raise CheckpointError(f"no architecture of transformers that is known here has the parts of this model:\n  {reasons}")
