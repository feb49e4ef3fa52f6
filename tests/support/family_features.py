"""Features that the models of a Hugging Face family may have, found by trying small models with the feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.setting import get_flag_name
from megatron_lab.foreign.huggingface.families import FAMILIES
from megatron_lab.foreign.huggingface.family import compute_signature
from tests.support.published_configs import published, read_config, shrunk

Settings = dict[str, Any]


class Feature(NamedTuple):
    """A property of models. Each way is some settings, which replace those of a model."""

    title: str
    having: Sequence[Settings | Callable[[ModelConfig], Settings]]
    """Ways to give a model the feature."""
    without: Sequence[Settings]
    """Ways to take the feature from a model. A model has the feature only if it computes something else than all of these."""
    flags: tuple[str, ...] = ()
    """Names of settings for the page, if they are not those of the first way to have the feature."""

    def spell(self) -> str:
        """The flags of the feature, with a value where it is a word."""
        first = self.having[0]
        settings = {} if callable(first) else first
        words = (_spell(name, settings.get(name)) for name in self.flags or settings)
        return ", ".join(f"`{word}`" for word in words)


def _spell(name: str, value: Any) -> str:
    flag = get_flag_name(name)
    if value is False:
        return flag.replace("--", "--no-", 1)
    return f"{flag} {value}" if isinstance(value, str) and value.isalpha() else flag


def _switch(title: str, name: str, having: Any = True, without: Any = False) -> Feature:
    return Feature(title, ({name: having},), ({name: without},))


_NO_BIAS: Settings = dict(disable_bias_linear=True, add_qkv_bias=False, add_attn_output_bias=False, add_mlp_bias=False)
_ATTENTION_BIAS = _NO_BIAS | dict(add_qkv_bias=True, add_attn_output_bias=True)
_MLP_BIAS = _NO_BIAS | dict(add_mlp_bias=True)
_ALL_BIASES = _NO_BIAS | dict(disable_bias_linear=False)
_NO_WINDOW: Settings = dict(window_size=None, window_attn_skip_freq=None, rotary_base_local=None)
_SOME_WINDOWS: Settings = dict(window_size="5,0", window_attn_skip_freq="2")
_GATED = dict.fromkeys(("relu", "squared_relu", "gelu_exact", "geglu", "geglu_exact"), False) | {"swiglu": True}
_UNGATED = _GATED | {"swiglu": False}
_UNSCALED: Settings = dict(
    rotary_seq_len_interpolation_factor=1.0,
    use_rope_scaling=False,
    rope_type="rope",
    rotary_scaling_factor=1.0,
    original_max_position_embeddings=None,
    mscale=1.0,
    mscale_all_dim=0.0,
    rope_attention_factor=None,
    rope_short_factors=(),
    rope_long_factors=(),
)
_DENSE: Settings = dict(
    num_experts=None,
    moe_layer_freq="1",
    moe_ffn_hidden_size=None,
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=None,
    moe_shared_expert_gate=False,
    moe_router_score_function="softmax",
    moe_router_pre_softmax=False,
    moe_router_topk_scaling_factor=None,
    moe_router_num_groups=None,
    moe_router_group_topk=1,
    moe_router_enable_expert_bias=False,
)


def _dynamic(model: ModelConfig) -> Settings:
    original = {"original_max_position_embeddings": model.seq_length}
    return _UNSCALED | original | {"rope_type": "dynamic", "rotary_scaling_factor": 2.0}


def _longrope(model: ModelConfig) -> Settings:
    pairs = int((model.qk_pos_emb_head_dim if model.multi_latent_attention else model.head_size) * model.rotary_percent) // 2
    factors = dict(rope_short_factors=(1.0,) * pairs, rope_long_factors=(2.0,) * pairs)
    return _UNSCALED | factors | dict(rope_type="longrope", rotary_scaling_factor=2.0, original_max_position_embeddings=32)


FEATURES = (
    Feature(
        "fewer key-value heads",
        ({"group_query_attention": True, "num_query_groups": 2},),
        ({"group_query_attention": False, "num_query_groups": 1},),
    ),
    _switch("size of a head", "kv_channels", 32, None),
    Feature(
        "sizes of the parts of a head",
        ({"qk_head_dim": 24, "qk_pos_emb_head_dim": 16, "v_head_dim": 24},),
        ({"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16},),
    ),
    Feature("biases of query, key and value only", (_NO_BIAS | {"add_qkv_bias": True},), (_NO_BIAS,), ("add_qkv_bias",)),
    Feature(
        "biases of all of attention",
        (_ATTENTION_BIAS, _ALL_BIASES),
        (_NO_BIAS, _MLP_BIAS),
        ("add_qkv_bias", "add_attn_output_bias"),
    ),
    Feature("biases of the MLP", (_MLP_BIAS, _ALL_BIASES), (_NO_BIAS, _ATTENTION_BIAS), ("add_mlp_bias",)),
    Feature(
        "norm of queries and keys (QK norm) for each head, or of the latents",
        ({"qk_layernorm": True, "qk_layernorm_all_heads": False},),
        ({"qk_layernorm": False, "qk_layernorm_all_heads": False},),
        ("qk_layernorm",),
    ),
    Feature(
        "QK norm over all heads together",
        ({"qk_layernorm": True, "qk_layernorm_all_heads": True},),
        ({"qk_layernorm": False, "qk_layernorm_all_heads": False}, {"qk_layernorm": True, "qk_layernorm_all_heads": False}),
    ),
    Feature(
        "sliding window in all layers",
        (_NO_WINDOW | {"window_size": "5,0"}, {"window_size": "5,0", "window_attn_skip_freq": None}),
        (_NO_WINDOW,),
        ("window_size",),
    ),
    Feature(
        "sliding window in some layers",
        (_SOME_WINDOWS, _SOME_WINDOWS | {"rotary_base_local": None}),
        (_NO_WINDOW, _NO_WINDOW | {"window_size": "5,0"}),
    ),
    Feature(
        "separate rotary base in layers with a window",
        (_SOME_WINDOWS | {"rotary_base_local": 1234.0},),
        (_NO_WINDOW, _SOME_WINDOWS | {"rotary_base_local": None}),
        ("rotary_base_local",),
    ),
    _switch("layers without rotary positions", "no_rope_freq", "2", None),
    _switch("rotary positions on a fraction of the head size", "rotary_percent", 0.5, 1.0),
    _switch("rotary positions on pairs of neighbouring channels", "rotary_interleaved"),
    _switch("base of the rotary frequencies", "rotary_base", 1234.0, 10000.0),
    Feature(
        "scaled rotary frequencies: linear",
        (_UNSCALED | {"rotary_seq_len_interpolation_factor": 2.0},),
        (_UNSCALED,),
        ("rotary_seq_len_interpolation_factor",),
    ),
    Feature(
        "scaled rotary frequencies: llama3",
        (_UNSCALED | {"use_rope_scaling": True, "original_max_position_embeddings": 32},),
        (_UNSCALED,),
        ("use_rope_scaling",),
    ),
    Feature(
        "scaled rotary frequencies: yarn",
        (_UNSCALED | {"rope_type": "yarn", "rotary_scaling_factor": 2.0, "original_max_position_embeddings": 32},),
        (_UNSCALED,),
        ("rope_type",),
    ),
    Feature("scaled rotary frequencies: dynamic", (_dynamic,), (_UNSCALED,), ("rope_type",)),
    Feature("scaled rotary frequencies: longrope", (_longrope,), (_UNSCALED,), ("rope_short_factors", "rope_long_factors")),
    Feature(
        "latents of keys and values",
        ({"multi_latent_attention": True},),
        ({"multi_latent_attention": False},),
        ("multi_latent_attention", "kv_lora_rank"),
    ),
    _switch("latents of queries", "q_lora_rank", 24, None),
    _switch("scale of the attention scores", "softmax_scale", 0.3, None),
    _switch("soft cap of the attention scores", "attn_logit_softcapping", 50.0, None),
    _switch("soft cap of the logits", "final_logit_softcapping", 30.0, None),
    Feature("activation without gate: tanh GELU (default)", (_UNGATED,), (_GATED, _UNGATED | {"relu": True}), ("swiglu",)),
    *(
        Feature(f"activation without gate: {title}", (_UNGATED | {name: True},), (_GATED, _UNGATED), (name,))
        for title, name in (("exact GELU", "gelu_exact"), ("ReLU", "relu"), ("ReLU²", "squared_relu"))
    ),
    Feature("GELU gate (GeGLU)", (_UNGATED | {"geglu": True},), (_GATED,), ("geglu",)),
    Feature(
        "LayerNorm",
        ({"normalization": "LayerNorm"},),
        ({"normalization": "RMSNorm"}, {"normalization": "RMSNorm", "norm_weight": True}),
    ),
    _switch("norms without weights", "norm_weight", having=False, without=True),
    _switch("norm weights stored as offsets from 1", "apply_layernorm_1p"),
    _switch("norms after attention and MLP: post", "norm_placement", "post", "pre"),
    _switch("norms before and after attention and MLP: sandwich", "norm_placement", "sandwich", "pre"),
    _switch("attention and MLP in parallel", "parallel_residual"),
    Feature(
        "embedding multiplied by the square root of the hidden size",
        (lambda model: {"embedding_multiplier": model.hidden_size**0.5},),
        ({"embedding_multiplier": 1.0},),
        ("embedding_multiplier",),
    ),
    _switch("embedding multiplied by any other number", "embedding_multiplier", 3.0, 1.0),
    _switch("multiplier of the residual branches", "residual_multiplier", 0.5, 1.0),
    _switch("multiplier of the logits", "output_multiplier", 0.5, 1.0),
    _switch("separate output layer", "untie_embeddings_and_output_weights"),
    Feature("experts", ({"num_experts": 16},), (_DENSE,)),
    Feature("first layers without experts", ({"moe_layer_freq": "[0,1]"},), ({"moe_layer_freq": "1"},), ("moe_layer_freq",)),
    Feature("any layers without experts", ({"moe_layer_freq": "[1,0]"},), ({"moe_layer_freq": "1"},), ("moe_layer_freq",)),
    _switch("softmax over all experts, before top-k", "moe_router_pre_softmax"),
    Feature(
        "shared expert",
        ({"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": False},),
        ({"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False},),
        ("moe_shared_expert_intermediate_size",),
    ),
    Feature(
        "shared expert with a gate",
        ({"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},),
        tuple({"moe_shared_expert_intermediate_size": size, "moe_shared_expert_gate": False} for size in (None, 48)),
        ("moe_shared_expert_gate",),
    ),
    Feature(
        "sigmoid router scores, with biases for the selection",
        ({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},),
        ({"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},),
    ),
    _switch("scaling factor of the router weights", "moe_router_topk_scaling_factor", 2.5, None),
    *(
        Feature(
            f"groups of experts, of which a token uses {count} of each selected group",
            ({"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": topk},),
            ({"moe_router_num_groups": None, "moe_router_group_topk": 1, "moe_router_topk": topk},),
            ("moe_router_num_groups", "moe_router_group_topk"),
        )
        for count, topk in (("one", 2), ("two", 4))
    ),
)


@functools.cache
def _small_models(family: str) -> tuple[ModelConfig, ...]:
    return tuple(read_config(shrunk(config))[0] for config, _ in published().values() if config["model_type"] == family)


def _changed(models: Iterable[ModelConfig], ways: Iterable[Any]) -> Iterable[tuple[ModelConfig, ModelConfig]]:
    return ((model, dataclasses.replace(model, **(way(model) if callable(way) else way))) for way in ways for model in models)


def find_presence(feature: Feature, family: str) -> Literal["yes", "always", ""]:
    """Whether models of a family may have a feature, always have it, or cannot have it."""
    models = _small_models(family)

    def is_given(model: ModelConfig, given: ModelConfig) -> bool:
        taken = [other for _, other in _changed([model], feature.without)]
        return FAMILIES[family].supports(given) and all(compute_signature(given) != compute_signature(other) for other in taken)

    if not any(is_given(*pair) for pair in _changed(models, feature.having)):
        return ""
    return "yes" if any(FAMILIES[family].supports(taken) for _, taken in _changed(models, feature.without)) else "always"
