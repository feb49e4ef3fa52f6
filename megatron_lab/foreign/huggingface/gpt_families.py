"""GPT-2 and GPT-NeoX: LayerNorm, plain MLPs, fused projections.

The defaults of fields that a file leaves out are those of the configuration classes of transformers.
"""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.family import Family, Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    Biases,
    Dropouts,
    Number,
    Only,
    Sizes,
    Switch,
    untied,
)
from megatron_lab.foreign.huggingface.rotary_fields import Rotary

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
        untied(True),
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
        untied(False),
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
