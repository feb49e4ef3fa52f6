"""The architectures of transformers that can be converted. GPT-2 (Radford et al. 2019) is defined here: learned positions,
LayerNorm, biases everywhere; projections stored [in, out]."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.layout import Family, grouped, whole
from megatron.checkpoint.huggingface.llama_style import LLAMA, MISTRAL, QWEN2, QWEN3
from megatron.config.model import ModelConfig
from megatron.spec.activations import GATED_FLAGS, activation_of, by_hugging_face_name, spelled
from megatron.spec.layers import alike, layers

_ACTIVATIONS = by_hugging_face_name(gated=False)


def _read(fields: Fields) -> ModelConfig:
    sizes = {name: _aliased(fields, name, alias) for name, alias in _ALIASES.items()}
    hidden, heads = sizes["n_embd"], sizes["n_head"]
    if hidden % heads:
        fields.refuse("n_head", f"does not divide n_embd = {hidden}")
    activation = fields.expect("activation_function", tuple(_ACTIVATIONS), "gelu_new")
    fields.expect("scale_attn_weights", (True,), True)
    fields.expect("scale_attn_by_inverse_layer_idx", (False,), False, "layers scale all attention alike here")
    dropout = fields.number("resid_pdrop", 0.1)
    if (embedding := fields.number("embd_pdrop", 0.1)) != dropout:
        fields.notes.append(
            f"the dropout of the embedding (embd_pdrop {embedding:g}) becomes that of the layers (resid_pdrop {dropout:g})"
        )
    return ModelConfig(
        num_layers=sizes["n_layer"],
        hidden_size=hidden,
        ffn_hidden_size=fields.size("n_inner", 4 * hidden),
        num_attention_heads=heads,
        seq_length=sizes["n_positions"],
        max_position_embeddings=sizes["n_positions"],
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
        **({flag: True} if (flag := _ACTIVATIONS[activation].flag) else {}),
        untie_embeddings_and_output_weights=not fields.switch("tie_word_embeddings", True),
        attention_dropout=fields.number("attn_pdrop", 0.1),
        hidden_dropout=dropout,
        init_method_std=fields.number("initializer_range", 0.02),
    )


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


def _misfits(model: ModelConfig) -> list[str]:
    wrong = {
        f"positions are {model.position_embedding_type}, not learned_absolute": model.position_embedding_type != "learned_absolute",
        f"the norm is {model.normalization}, not LayerNorm": model.normalization != "LayerNorm",
        f"the MLP is gated ({' or '.join(map(spelled, GATED_FLAGS))})": activation_of(model).gated,
        "linear layers have no biases (--disable-bias-linear)": model.disable_bias_linear,
        "queries and keys are normalised (--qk-layernorm)": model.qk_layernorm,
        f"{model.num_key_value_heads} key-value heads for {model.num_attention_heads} query heads": (
            model.num_key_value_heads != model.num_attention_heads
        ),
        f"heads of {model.head_size} channels x {model.num_attention_heads} are not the hidden size {model.hidden_size}": (
            model.head_size * model.num_attention_heads != model.hidden_size
        ),
    }
    return [text for text, is_so in wrong.items() if is_so]


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_layer": model.num_layers,
        "n_positions": model.num_positions,
        "n_inner": model.ffn_size,
        "activation_function": activation_of(model).hugging_face[0],
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": model.tied,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    layer="h.{}",
    outside={
        "embedding.word.weight": whole("wte.weight"),
        "embedding.position.weight": whole("wpe.weight"),
        "final_norm.weight": whole("ln_f.weight"),
        "final_norm.bias": whole("ln_f.bias"),
        "output.weight": whole("lm_head.weight"),
    },
    inside={
        "attention_norm.weight": whole("ln_1.weight"),
        "attention_norm.bias": whole("ln_1.bias"),
        "attention.qkv.weight": grouped("attn.c_attn.weight", transposed=True),
        "attention.qkv.bias": grouped("attn.c_attn.bias"),
        "attention.output.weight": whole("attn.c_proj.weight", transposed=True),
        "attention.output.bias": whole("attn.c_proj.bias"),
        "mlp_norm.weight": whole("ln_2.weight"),
        "mlp_norm.bias": whole("ln_2.bias"),
        "mlp.up.weight": whole("mlp.c_fc.weight", transposed=True),
        "mlp.up.bias": whole("mlp.c_fc.bias"),
        "mlp.down.weight": whole("mlp.c_proj.weight", transposed=True),
        "mlp.down.bias": whole("mlp.c_proj.bias"),
    },
    buffers=r"h\.\d+\.attn\.(?:bias|masked_bias)",  # causal masks
    without_effect=(
        "n_ctx",  # the former name of n_positions
        "reorder_and_upcast_attn",  # float32 scores, which are always used here
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
    read=_read,
    misfits=_misfits,
    write=_write,
)


FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL)}
"""Architectures by their name in config.json. A model is written as the first that it fits. The defaults of fields that a file
leaves out are those of transformers' configuration classes."""


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
