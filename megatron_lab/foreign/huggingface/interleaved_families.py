"""GLM and ERNIE: architectures that resemble Llama, but rotate pairs of neighbouring channels.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.groups import BiasFields, SizeFields
from megatron_lab.foreign.huggingface.llama_families import build_llama_family
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields

_INTERLEAVED: Settings = {"rotary_interleaved": True}
_GLM_SIZES = SizeFields(max_positions=131072, num_kv_heads=2, head_size=128)
_GLM_ROTARY = RotaryFields(max_positions=131072, rotary_fraction=0.5)
_GLM_BIAS = BiasFields(layers_by_field={"attention_bias": ("qkv",)}, default=True)
_GLM_NAMES = {"mlp.up": "mlp.gate_up_proj"}
_GLM_EPSILON = 1.5625e-07

GLM = build_llama_family(
    "glm",
    "GlmForCausalLM",
    _GLM_BIAS,
    sizes=_GLM_SIZES,
    rotary=_GLM_ROTARY,
    epsilon=_GLM_EPSILON,
    fixed_settings=_INTERLEAVED,
    module_names=_GLM_NAMES,
)
GLM4 = build_llama_family(
    "glm4",
    "Glm4ForCausalLM",
    _GLM_BIAS,
    sizes=_GLM_SIZES,
    rotary=_GLM_ROTARY,
    epsilon=_GLM_EPSILON,
    fixed_settings={**_INTERLEAVED, "norm_placement": "sandwich"},
    module_names={**_GLM_NAMES, "attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
)
ERNIE4_5 = build_llama_family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    BiasFields(layers_by_field={"use_bias": ("qkv", "output", "mlp")}),
    sizes=SizeFields(max_positions=131072, num_kv_heads=2, head_size=128),
    rotary=RotaryFields(max_positions=131072, theta=500000.0),
    is_tied=True,
    epsilon=1e-5,
    fixed_settings=_INTERLEAVED,
)
