"""Supported architectures of transformers, and the selection of an architecture for a model."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.expert_families import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.gpt_families import GPT2, GPT_NEOX
from megatron_lab.foreign.huggingface.groups import UnsupportedFields
from megatron_lab.foreign.huggingface.interleaved_families import ERNIE4_5, GLM, GLM4
from megatron_lab.foreign.huggingface.layernorm_families import NEMOTRON, OLMO, STARCODER2
from megatron_lab.foreign.huggingface.llama_families import GRANITE, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, SMOLLM3, STABLELM
from megatron_lab.foreign.huggingface.norm_families import GEMMA, GEMMA2, GEMMA3, OLMO2, OLMO3
from megatron_lab.foreign.huggingface.variant_families import ARCEE, MINISTRAL, MINISTRAL3, SEED_OSS

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
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
        STARCODER2,
        NEMOTRON,
        OLMO,
        ARCEE,
        SEED_OSS,
        GLM,
        GLM4,
        ERNIE4_5,
    )
}
"""Architectures by `model_type`. A model is written as the first architecture that supports it."""

CONVERTIBLE = tuple(
    name for name, family in FAMILIES.items() if not any(isinstance(group, UnsupportedFields) for group in family.field_groups)
)
"""`model_type` of each architecture without an unsupported feature that all its models have."""

UNSUPPORTED = {
    "gemma3": "a vision model; the text model has the type gemma3_text",
    "mistral3": "a vision model; the text model has the type mistral or ministral3",
}
"""Known architectures that cannot be converted, with the unsupported feature."""


def select_family(model: ModelConfig, requested: str | None = None) -> Family:
    """Return the transformers architecture in which to write a model: the requested architecture, or the first that supports all
    features of the model.

    Args:
        model: model to write.
        requested: `model_type` of the architecture; None for the first that supports the model.

    Raises:
        CheckpointError: no architecture supports the model, or the requested one does not. The message lists the unsupported
            properties of the model for each architecture; the architecture with the fewest comes first.
    """
    if requested is not None and requested not in FAMILIES:
        raise CheckpointError(
            f"--family {requested} is not a supported architecture of transformers. Choose one of {', '.join(CONVERTIBLE)}"
        )
    candidates = [family for name, family in FAMILIES.items() if requested in (None, name)]
    for family in candidates:
        if family.supports(model):
            return family
    mismatches = {family.model_type: family.describe_mismatches(model) for family in candidates}
    nearest = sorted(mismatches, key=lambda name: len(mismatches[name]))
    reasons = "\n  ".join(f"{name}: {'; '.join(mismatches[name])}" for name in nearest)
    raise CheckpointError(
        "no supported architecture of transformers can express this model, so it cannot be exported. Train a model without the "
        "settings below, or use the checkpoint with tools/generate_text.py and tools/evaluate.py. Reasons, by architecture:\n"
        f"  {reasons}"
    )
