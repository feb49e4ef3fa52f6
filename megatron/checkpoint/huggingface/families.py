"""The architectures of transformers that can be converted. The defaults of fields that a file leaves out are those of transformers'
configuration classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.huggingface.family import Family
from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.rotary_fields import read_rope, read_window, write_rope
from megatron.config.model import ModelConfig
from megatron.spec.layers import alike, layers


class _GPT2(Family):
    """GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere; projections stored [in, out]."""

    def read_shape(self, fields: Fields) -> dict[str, Any]:
        sizes = {name: _aliased(fields, name, alias) for name, alias in _ALIASES.items()}
        hidden, heads = sizes["n_embd"], sizes["n_head"]
        if hidden % heads:
            fields.refuse("n_head", f"does not divide n_embd = {hidden}")
        fields.expect("scale_attn_weights", (True,), True)
        fields.expect("scale_attn_by_inverse_layer_idx", (False,), False, "layers scale all attention alike here")
        dropout = fields.number("resid_pdrop", 0.1)
        if (embedding := fields.number("embd_pdrop", 0.1)) != dropout:
            fields.notes.append(
                f"the dropout of the embedding (embd_pdrop {embedding:g}) becomes that of the layers (resid_pdrop {dropout:g})"
            )
        return {
            "num_layers": sizes["n_layer"],
            "hidden_size": hidden,
            "ffn_hidden_size": fields.size("n_inner", 4 * hidden),
            "num_attention_heads": heads,
            "seq_length": sizes["n_positions"],
            "max_position_embeddings": sizes["n_positions"],
            "hidden_dropout": dropout,
        }

    def write_shape(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_layer": model.num_layers,
            "n_positions": model.num_positions,
            "n_inner": model.ffn_size,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        }


_ALIASES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Second names of fields, which transformers takes too."""


def _aliased(fields: Fields, name: str, alias: str) -> int:
    given = fields.raw(name) is None and fields.raw(alias) is not None
    size = fields.size(alias if given else name)
    if fields.raw(alias) not in (None, size):
        fields.refuse(alias, f"differs from {name} = {size}")
    return size


GPT2 = _GPT2(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    positions="learned_absolute",
    normalization="LayerNorm",
    gated=False,
    biases={"all": {}},
    free_heads=False,
    activation="activation_function",
    numbers={
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "attn_pdrop": ("attention_dropout", 0.1),
        "initializer_range": ("init_method_std", 0.02),
    },
    tied=True,
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


@dataclass(frozen=True, kw_only=True)
class _LlamaStyle(Family):
    """Llama and what is like it: rotary positions, RMSNorm, gated MLP, grouped queries."""

    no_window: dict[str, Any]
    """The fields for no attention window, if it can have one."""
    kv_heads: int | None = None
    """Default of key-value heads (None: as many as query heads)."""
    head_size: int | None = None
    """Default of channels of a head (None: hidden / heads)."""
    max_positions: int = 32768
    """Default of max_position_embeddings."""

    def read_shape(self, fields: Fields) -> dict[str, Any]:
        hidden, heads, layers = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        kv_heads = _or_null(fields, "num_key_value_heads", absent=self.kv_heads or heads, null=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
        size = _or_null(fields, "head_dim", absent=self.head_size or 0, null=0)
        if not size and hidden % heads:
            fields.refuse("hidden_size", f"does not divide by num_attention_heads = {heads}, and there is no head_dim")
        size = size or hidden // heads
        if size % 2:
            fields.refuse("hidden_size", f"heads of {size} channels cannot be rotated in pairs")
        positions = fields.size("max_position_embeddings", self.max_positions)
        window = read_window(fields, self.no_window, layers)
        if window is not None and window < positions:
            fields.notes.append(
                f"attention is within a window of {window} tokens there, which is not known here: the same up to that length, so "
                f"sequences are limited to {window} tokens"
            )
        return {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": fields.size("intermediate_size"),
            "num_attention_heads": heads,
            "kv_channels": size,
            "group_query_attention": kv_heads != heads,
            "num_query_groups": kv_heads if kv_heads != heads else 1,
            "seq_length": min(positions, window or positions),
            "max_position_embeddings": positions,
            **read_rope(fields, positions),
            "hidden_dropout": 0.0,
        }

    def write_shape(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_size,
            "max_position_embeddings": model.num_positions,
            **write_rope(model),
            **self.no_window,
        }


def _or_null(fields: Fields, name: str, *, absent: int, null: int) -> int:
    """A size for which absence and null mean different things."""
    value = fields.raw(name, "absent")
    return absent if value == "absent" else null if value is None else fields.size(name)


_LIKE_LLAMA: dict[str, Any] = dict(
    positions="rope",
    normalization="RMSNorm",
    gated=True,
    activation="hidden_act",
    numbers={
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "initializer_range": ("init_method_std", 0.02),
    },
    tied=False,
    prefix="model.",
    layer="layers.{}",
    names={
        "embedding.word": "embed_tokens",
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.gate_proj mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "final_norm": "norm",
        "output": "lm_head",
    },
    buffers=r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # frequencies
)

LLAMA = _LlamaStyle(
    model_type="llama",
    architecture="LlamaForCausalLM",
    biases={
        "none": {"attention_bias": False, "mlp_bias": False},
        "all": {"attention_bias": True, "mlp_bias": True},
    },
    heads_divide_hidden=True,
    no_window={},
    max_positions=2048,
    **_LIKE_LLAMA,
)
QWEN2 = _LlamaStyle(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    biases={"qkv": {}},
    no_window={"use_sliding_window": False, "sliding_window": None},
    kv_heads=32,
    **_LIKE_LLAMA,
)
QWEN3 = _LlamaStyle(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    biases={"none": {"attention_bias": False}},
    qk_norm=True,
    no_window={"use_sliding_window": False, "sliding_window": None},
    kv_heads=32,
    head_size=128,
    **_LIKE_LLAMA,
)
MISTRAL = _LlamaStyle(
    model_type="mistral",
    architecture="MistralForCausalLM",
    biases={"none": {}},
    no_window={"sliding_window": None},
    kv_heads=8,
    max_positions=4096 * 32,
    **_LIKE_LLAMA,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL)}
"""Architectures by their name in config.json. A model is written as the first that it fits."""


def fitting(model: ModelConfig, wanted: str | None = None) -> Family:
    """The family to write a model as: the one that is wanted, or the first that has all its parts.

    Raises:
        CheckpointError: none fits. The message gives the reasons, for each family if none is wanted, nearest first.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise CheckpointError(f"there is no family {wanted!r}; known are {', '.join(FAMILIES)}")
    unlike = ["layers are of several kinds"] if len(alike(layers(model))) > 1 else []
    tried = {name: [*unlike, *family.misfits(model)] for name, family in FAMILIES.items() if wanted in (None, name)}
    for name, misfits in tried.items():
        if not misfits:
            return FAMILIES[name]
    nearest = sorted(tried, key=lambda name: len(tried[name]))
    reasons = "\n  ".join(f"{name}: {'; '.join(tried[name])}" for name in nearest)
    raise CheckpointError(f"no architecture of transformers that is known here has the parts of this model:\n  {reasons}")
