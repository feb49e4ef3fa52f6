"""The architectures of transformers that are known here."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.huggingface.family import Family
from megatron.checkpoint.huggingface.gpt2 import GPT2
from megatron.checkpoint.huggingface.llama_style import Style, llama_style
from megatron.checkpoint.huggingface.windows import in_every_layer, in_some_layers, never
from megatron.config.model import ModelConfig

LLAMA = llama_style(
    "llama",
    "LlamaForCausalLM",
    Style(
        biases={
            "none": {"attention_bias": False, "mlp_bias": False},
            "all": {"attention_bias": True, "mlp_bias": True},
        },
        window=never,
        no_window={},
        max_positions=2048,
        heads_divide_hidden=True,
    ),
)
QWEN2 = llama_style(
    "qwen2",
    "Qwen2ForCausalLM",
    Style(
        biases={"qkv": {}},
        window=in_some_layers,
        no_window={"use_sliding_window": False, "sliding_window": None},
        kv_heads=32,
    ),
)
QWEN3 = llama_style(
    "qwen3",
    "Qwen3ForCausalLM",
    Style(
        biases={"none": {"attention_bias": False}},
        window=in_some_layers,
        no_window={"use_sliding_window": False, "sliding_window": None},
        kv_heads=32,
        head_size=128,
        qk_norm=True,
    ),
)
MISTRAL = llama_style(
    "mistral",
    "MistralForCausalLM",
    Style(biases={"none": {}}, window=in_every_layer, no_window={"sliding_window": None}, kv_heads=8, max_positions=4096 * 32),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL)}
"""By their name in config.json; a model is written as the first that it fits. The defaults of fields that a file leaves out are
those of the configuration classes of transformers."""


def fitting(model: ModelConfig, wanted: str | None = None) -> Family:
    """The family to write a model as: the one that is wanted, or the first that has all its parts.

    Raises:
        CheckpointError: it does not fit; with what stands against it, or for each family if none fits, nearest first.
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
