"""The architectures of transformers that can be converted, and which of them a model is written as."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.expert_families import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.gpt_families import GPT2, GPT_NEOX
from megatron_lab.foreign.huggingface.llama_families import GRANITE, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, SMOLLM3, STABLELM
from megatron_lab.foreign.huggingface.norm_families import GEMMA, GEMMA2, GEMMA3, OLMO2, OLMO3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        PHI3,
        SMOLLM3,
        STABLELM,
        OLMO2,
        OLMO3,
        GPT_NEOX,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GRANITE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
    )
}
"""Architectures by their name in config.json. A model is written as the first that it fits."""

MISSING = {
    "gemma3": "a part that sees images; the text model alone is gemma3_text",
}
"""Architectures that cannot be converted, with what they have and cannot be built here."""


def fitting(model: ModelConfig, wanted: str | None = None) -> Family:
    """The family to write a model as: the one that is wanted, or the first that has all its parts.

    Raises:
        CheckpointError: none fits. The message gives the reasons, for each family if none is wanted, nearest first.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise CheckpointError(f"there is no family {wanted!r}; known are {', '.join(FAMILIES)}")
    families = [family for name, family in FAMILIES.items() if wanted in (None, name)]
    for family in families:
        if family.fits(model):
            return family
    tried = {family.model_type: family.misfits(model) for family in families}
    nearest = sorted(tried, key=lambda name: len(tried[name]))
    reasons = "\n  ".join(f"{name}: {'; '.join(tried[name])}" for name in nearest)
    raise CheckpointError(f"no architecture of transformers that is known here has the parts of this model:\n  {reasons}")
