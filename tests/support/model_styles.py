"""Flags of the two families of models, for `tests.support.runs.arguments`."""

from __future__ import annotations

from typing import Any

STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "num_query_groups": 2,
    },
}
