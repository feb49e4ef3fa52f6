"""Llama and architectures that differ from it only slightly.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from megatron_lab.foreign.huggingface.family import Family, FieldGroup, Settings
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    AttentionScaleField,
    BiasFields,
    DropoutFields,
    FixedField,
    NumberField,
    ReciprocalField,
    SizeFields,
    build_tied_embeddings_field,
)
from megatron_lab.foreign.huggingface.latent_fields import LatentSizeFields
from megatron_lab.foreign.huggingface.layer_fields import NoRotaryLayers, WindowFields
from megatron_lab.foreign.huggingface.neutral_fields import NeutralFields
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields

_SILU = ActivationField("hidden_act", is_gated=True, default="silu")


def build_llama_family(
    name: str,
    architecture: str,
    *field_groups: FieldGroup,
    sizes: SizeFields | LatentSizeFields,
    is_tied: bool = False,
    epsilon: float = 1e-6,
    rotary: RotaryFields | None = None,
    epsilon_name: str | None = "rms_norm_eps",
    init_std: float = 0.02,
    attention_dropout: float = 0.0,
    activation: FieldGroup = _SILU,
    fixed_settings: Settings | None = None,
    module_names: dict[str, str] | None = None,
    ignored_fields: tuple[str, ...] = (),
    neutral_fields: tuple[NeutralFields, ...] = (),
    mtp_fields: tuple[str, ...] = (),
) -> Family:
    """Describe an architecture that has the features of Llama except for the differences given as arguments.

    Llama has rotary embeddings, RMSNorm, a gated MLP and grouped-query attention. The arguments `fixed_settings` and `module_names`
    add entries to those of Llama, or replace them.

    Args:
        name: `model_type` in config.json.
        architecture: name of the class in transformers.
        field_groups: converters of additional config.json fields.
        sizes: converter of the config.json fields for model sizes.
        is_tied: value of tie_word_embeddings if config.json does not contain it.
        epsilon: epsilon of the norms if config.json does not contain it.
        rotary: converter of the rotary fields, if they differ from Llama's.
        epsilon_name: name of the field for epsilon; None if the architecture always uses `epsilon`.
        init_std: standard deviation of the initial weights if config.json does not contain it.
        attention_dropout: dropout of the attention weights if config.json does not contain it.
        activation: converter of the fields of the activation function.
        fixed_settings: settings that all models of the architecture share.
        module_names: Hugging Face module names by module name of this framework.
        ignored_fields: fields that do not change the logits.
        neutral_fields: fields that change nothing at some values, in addition to those of all architectures.
        mtp_fields: possible names of the field with the number of multi-token-prediction layers.
    """
    return Family(
        model_type=name,
        architecture=architecture,
        fixed_settings={
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "hidden_dropout": 0.0,
            "norm_epsilon": epsilon,
            **(fixed_settings or {}),
        },
        field_groups=(
            sizes,
            rotary or RotaryFields(max_positions=sizes.max_positions),
            activation,
            *(() if epsilon_name is None else (NumberField(epsilon_name, "norm_epsilon", epsilon),)),
            NumberField("attention_dropout", "attention_dropout", attention_dropout),
            NumberField("initializer_range", "init_method_std", init_std),
            build_tied_embeddings_field(is_tied),
            *field_groups,
        ),
        ignored_fields=(*ignored_fields, *mtp_fields),
        neutral_fields=neutral_fields,
        mtp_fields=mtp_fields,
        prefix="model.",
        layer_name="layers.{}",
        module_names={
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
            **(module_names or {}),
        },
        buffer_pattern=r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # rotary frequencies
    )


ATTENTION_AND_MLP_BIAS = BiasFields(layers_by_field={"attention_bias": ("qkv", "output"), "mlp_bias": ("mlp",)})
ATTENTION_BIAS = BiasFields(layers_by_field={"attention_bias": ("qkv", "output")})
_QWEN_WINDOWS = WindowFields(default=4096, applies_to="switched")

LLAMA = build_llama_family(
    "llama", "LlamaForCausalLM", ATTENTION_AND_MLP_BIAS, sizes=SizeFields(max_positions=2048, requires_divisible_hidden=True)
)
QWEN2 = build_llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    BiasFields(always_biased=("qkv",)),
    _QWEN_WINDOWS,
    sizes=SizeFields(max_positions=32768, num_kv_heads=32),
)
QWEN3 = build_llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    ATTENTION_BIAS,
    _QWEN_WINDOWS,
    sizes=SizeFields(max_positions=32768, num_kv_heads=32, head_size=128),
    fixed_settings={"qk_layernorm": True},
)
MISTRAL = build_llama_family(
    "mistral",
    "MistralForCausalLM",
    BiasFields(),
    WindowFields(default=4096),
    sizes=SizeFields(max_positions=4096 * 32, num_kv_heads=8),
)
PHI3 = build_llama_family(
    "phi3",
    "Phi3ForCausalLM",
    BiasFields(),
    DropoutFields("resid_pdrop", "embd_pdrop", 0.0),
    WindowFields(default=None),
    sizes=SizeFields(max_positions=4096),
    rotary=RotaryFields(max_positions=4096, rotary_fraction=1.0, scaling_types=("longrope",), default_original_context=4096),
    epsilon=1e-5,
    module_names={"attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"},
)

SMOLLM3 = build_llama_family(
    "smollm3",
    "SmolLM3ForCausalLM",
    ATTENTION_AND_MLP_BIAS,
    NoRotaryLayers(interval=4),
    WindowFields(default=None, applies_to="switched", no_rotary_layers=NoRotaryLayers(interval=4)),
    sizes=SizeFields(max_positions=32768, num_kv_heads=4),
    rotary=RotaryFields(max_positions=32768, theta=2e6),
    is_tied=True,
)

STABLELM = build_llama_family(
    "stablelm",
    "StableLmForCausalLM",
    BiasFields(layers_by_field={"use_qkv_bias": ("qkv",)}),
    NumberField("hidden_dropout", "hidden_dropout", 0.0),
    FixedField("use_parallel_residual", False, "parallel attention and MLP with a shared norm are not supported"),
    FixedField("qk_layernorm", False, "a separate norm for each query and key head is not supported"),
    sizes=SizeFields(max_positions=4096, num_kv_heads=32, has_head_dim_field=False),
    rotary=RotaryFields(max_positions=4096, rotary_fraction=0.25),
    epsilon=1e-5,
    epsilon_name="layer_norm_eps",
    fixed_settings={"normalization": "LayerNorm"},
)
_GRANITE_SIZES = SizeFields(max_positions=2048)
GRANITE = build_llama_family(
    "granite",
    "GraniteForCausalLM",
    ATTENTION_AND_MLP_BIAS,
    NumberField("embedding_multiplier", "embedding_multiplier", 1.0),
    NumberField("residual_multiplier", "residual_multiplier", 1.0),
    AttentionScaleField("attention_multiplier", 1.0, _GRANITE_SIZES),
    ReciprocalField("logits_scaling", "output_multiplier"),
    sizes=_GRANITE_SIZES,
)
