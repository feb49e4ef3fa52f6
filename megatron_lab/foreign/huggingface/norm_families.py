"""OLMo and Gemma: like Llama, with norms behind what they belong to, or with weights around zero.

The defaults of fields that a file leaves out are those of the configuration classes of transformers.
"""

from __future__ import annotations

from typing import Any

from megatron_lab.foreign.huggingface.family import Family, FieldGroup
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    EmbeddingTimesRoot,
    Number,
    Only,
    ScoreScale,
    Sizes,
)
from megatron_lab.foreign.huggingface.layer_fields import WindowFields
from megatron_lab.foreign.huggingface.llama_families import ATTENTION_BIAS, like_llama
from megatron_lab.foreign.huggingface.rotary_fields import DEFAULT_THETA, Rotary

_NESTED_TYPES = ("linear", "llama3", "yarn")
"""Where rotary parameters stand by kind of layer, transformers looks for those of the other types in another place."""
_NORMS_BEHIND = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_OLMO = {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_all_heads": True}
OLMO2 = like_llama(
    "olmo2",
    "Olmo2ForCausalLM",
    ATTENTION_BIAS,
    sizes=Sizes(max_positions=2048),
    epsilon=1e-5,
    always=_OLMO,
    names=_NORMS_BEHIND,
)
OLMO3 = like_llama(
    "olmo3",
    "Olmo3ForCausalLM",
    ATTENTION_BIAS,
    WindowFields(default=4096, where="layer_types", every=4),
    sizes=Sizes(max_positions=2048),
    rotary=Rotary(max_positions=2048, theta=500000.0, local_theta=500000.0, local_theta_name="rope_theta", types=_NESTED_TYPES),
    epsilon=1e-5,
    always=_OLMO,
    names=_NORMS_BEHIND,
)
_GEMMA2_SIZES = Sizes(max_positions=8192, kv_heads=4, head_size=256, heads_divide_hidden=True)
_GEMMA3_SIZES = Sizes(max_positions=131072, kv_heads=4, head_size=256, heads_divide_hidden=True)


def _gemma(name: str, architecture: str, *groups: FieldGroup, sizes: Sizes, **otherwise: Any) -> Family:
    """What all Gemmas have."""
    always = {"apply_layernorm_1p": True, **otherwise.pop("always", {})}
    common = EmbeddingTimesRoot(), Only("use_bidirectional_attention", None, "attention is causal here", also=(False,))
    return like_llama(name, architecture, ATTENTION_BIAS, *common, *groups, sizes=sizes, tied=True, always=always, **otherwise)


_SANDWICH: dict[str, Any] = dict(
    activation=ActivationField("hidden_activation", gated=True, default="gelu_pytorch_tanh"),
    names={**_NORMS_BEHIND, "mlp_norm": "pre_feedforward_layernorm"},
    # The activation is the other field's, and where the pattern has this name there are `layer_types`.
    without_effect=("hidden_act", "cache_implementation", "_sliding_window_pattern"),
)
GEMMA = _gemma(
    "gemma",
    "GemmaForCausalLM",
    Only("hidden_activation", None),
    sizes=Sizes(max_positions=8192, kv_heads=16, head_size=256),
    activation=ActivationField("hidden_act", gated=True, default="gelu_pytorch_tanh", means={"gelu": "gelu_pytorch_tanh"}),
)
GEMMA2 = _gemma(
    "gemma2",
    "Gemma2ForCausalLM",
    WindowFields(default=4096, where="layer_types", every=2),
    ScoreScale("query_pre_attn_scalar", 256, _GEMMA2_SIZES, of_channels=True),
    Number("attn_logit_softcapping", "attn_logit_softcapping", 50.0, optional=True),
    Number("final_logit_softcapping", "final_logit_softcapping", 30.0, optional=True),
    sizes=_GEMMA2_SIZES,
    always={"norm_placement": "sandwich"},
    **_SANDWICH,
)
GEMMA3 = _gemma(
    "gemma3_text",
    "Gemma3ForCausalLM",
    WindowFields(default=4096, where="layer_types", every=6, every_name="sliding_window_pattern"),
    ScoreScale("query_pre_attn_scalar", 256, _GEMMA3_SIZES, of_channels=True),
    Number("attn_logit_softcapping", "attn_logit_softcapping", None, optional=True),
    Number("final_logit_softcapping", "final_logit_softcapping", None, optional=True),
    sizes=_GEMMA3_SIZES,
    rotary=Rotary(max_positions=131072, theta=1e6, local_theta=DEFAULT_THETA, types=_NESTED_TYPES),
    always={"norm_placement": "sandwich", "qk_layernorm": True},
    **_SANDWICH,
)
