"""StarCoder 2, Nemotron and OLMo: architectures with LayerNorm that otherwise resemble Llama.

StarCoder 2 and Nemotron have MLPs without a gate. The norms of Nemotron store their weights as differences from 1, and the norms of
OLMo have no weights.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    BiasFields,
    DropoutFields,
    FixedField,
    RepeatedField,
    SizeFields,
)
from megatron_lab.foreign.huggingface.layer_fields import WindowFields
from megatron_lab.foreign.huggingface.llama_families import ATTENTION_AND_MLP_BIAS, ATTENTION_BIAS, build_llama_family
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields

UNGATED_MLP_NAMES = {"mlp.up": "mlp.up_proj"}
"""Name of the first linear layer of an MLP without a gate; the second has Llama's name."""
_LAYER_NORM: Settings = {"normalization": "LayerNorm"}

STARCODER2 = build_llama_family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    BiasFields(layers_by_field={"use_bias": ("qkv", "output", "mlp")}, default=True),
    DropoutFields("residual_dropout", "embedding_dropout", 0.0),
    WindowFields(default=None),
    FixedField("mlp_type", "default"),
    FixedField("norm_type", "layer_norm"),
    sizes=SizeFields(max_positions=4096, num_kv_heads=2),
    is_tied=True,
    epsilon=1e-5,
    epsilon_name="norm_epsilon",
    init_std=0.018042,
    activation=ActivationField("hidden_act", is_gated=False, default="gelu_pytorch_tanh"),
    fixed_settings=_LAYER_NORM,
    module_names={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
)
_NEMOTRON_SIZES = SizeFields(max_positions=4096)
NEMOTRON = build_llama_family(
    "nemotron",
    "NemotronForCausalLM",
    ATTENTION_AND_MLP_BIAS,
    RepeatedField("kv_channels", "head_dim", default=_NEMOTRON_SIZES.get_head_size),
    RepeatedField("layer_norm_eps", "norm_eps", default=1e-5),
    RepeatedField("rope_percent", "partial_rotary_factor", default=0.5),
    sizes=_NEMOTRON_SIZES,
    rotary=RotaryFields(max_positions=4096, rotary_fraction=0.5),
    epsilon=1e-5,
    epsilon_name="norm_eps",
    init_std=0.0134,
    activation=ActivationField("hidden_act", is_gated=False, default="relu2"),
    fixed_settings={**_LAYER_NORM, "apply_layernorm_1p": True},
    module_names=UNGATED_MLP_NAMES,
)
OLMO = build_llama_family(
    "olmo",
    "OlmoForCausalLM",
    ATTENTION_BIAS,
    FixedField("clip_qkv", None, "limits of the values of queries, keys and values are not supported"),
    sizes=SizeFields(max_positions=2048),
    epsilon=1e-5,
    epsilon_name=None,
    fixed_settings={**_LAYER_NORM, "norm_weight": False},
)
