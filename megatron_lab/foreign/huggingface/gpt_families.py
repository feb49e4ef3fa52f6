"""GPT-2 and GPT-NeoX architectures: LayerNorm, ungated MLPs and fused query-key-value projections.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.family import Family, Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    BiasFields,
    BoolField,
    DropoutFields,
    FixedField,
    NumberField,
    SizeFields,
    build_tied_embeddings_field,
)
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields

_ALIASES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Alternative names of fields that transformers also accepts."""


class _GPT2SizeFields:
    """Converter of the config.json fields for model sizes, with the names that GPT-2 uses (`n_embd`, `n_head`, `n_layer`,
    `n_positions`, `n_inner`)."""

    def parse(self, fields: Fields) -> Settings:
        sizes = {name: self._get_aliased_size(fields, name, alias) for name, alias in _ALIASES.items()}
        hidden, heads = sizes["n_embd"], sizes["n_head"]
        if hidden % heads:
            fields.refuse("n_head", f"does not divide n_embd = {hidden}")
        return {
            "num_layers": sizes["n_layer"],
            "hidden_size": hidden,
            "ffn_hidden_size": fields.get_size("n_inner", 4 * hidden),
            "num_attention_heads": heads,
            "seq_length": sizes["n_positions"],
            "max_position_embeddings": sizes["n_positions"],
        }

    def _get_aliased_size(self, fields: Fields, name: str, alias: str) -> int:
        uses_alias = fields.get_raw(name) is None and fields.get_raw(alias) is not None
        size = fields.get_size(alias if uses_alias else name)
        if fields.get_raw(alias) not in (None, size):
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


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed_settings={"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
    field_groups=(
        _GPT2SizeFields(),
        ActivationField("activation_function", is_gated=False, default="gelu_new"),
        BiasFields(always_biased=("qkv", "output", "mlp")),
        NumberField("layer_norm_epsilon", "norm_epsilon", 1e-5),
        NumberField("attn_pdrop", "attention_dropout", 0.1),
        NumberField("initializer_range", "init_method_std", 0.02),
        DropoutFields("resid_pdrop", "embd_pdrop", 0.1),
        build_tied_embeddings_field(True),
        FixedField("scale_attn_weights", True),
        FixedField("scale_attn_by_inverse_layer_idx", False, "in this framework all layers use the same attention scale"),
    ),
    ignored_fields=(
        "n_ctx",  # the former name of n_positions
        "reorder_and_upcast_attn",  # float32 attention scores, which this framework always uses
    ),
    prefix="transformer.",
    layer_name="h.{}",
    module_names={
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
    is_transposed=True,
    buffer_pattern=r"h\.\d+\.attn\.(?:bias|masked_bias)",  # causal masks
)


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fixed_settings={"position_embedding_type": "rope", "normalization": "LayerNorm"},
    field_groups=(
        SizeFields(max_positions=2048, has_kv_heads_field=False, has_head_dim_field=False),
        RotaryFields(max_positions=2048, rotary_fraction=0.25, theta_field="rotary_emb_base", rotary_fraction_field="rotary_pct"),
        ActivationField("hidden_act", is_gated=False, default="gelu"),
        BiasFields(always_biased=("mlp",), layers_by_field={"attention_bias": ("qkv", "output")}, default=True),
        NumberField("layer_norm_eps", "norm_epsilon", 1e-5),
        NumberField("attention_dropout", "attention_dropout", 0.0),
        NumberField("hidden_dropout", "hidden_dropout", 0.0),
        NumberField("initializer_range", "init_method_std", 0.02),
        build_tied_embeddings_field(False),
        BoolField("use_parallel_residual", "parallel_residual", True),
    ),
    prefix="gpt_neox.",
    layer_name="layers.{}",
    module_names={
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
    aliases={"lm_head.weight": "embed_out.weight"},  # the name in transformers 5, which accepts both names
    has_grouped_qkv=True,
    buffer_pattern=r"layers\.\d+\.attention\.(?:bias|masked_bias|rotary_emb\.inv_freq)",
)
