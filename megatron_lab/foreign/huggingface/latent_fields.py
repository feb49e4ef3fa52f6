"""Config.json fields of DeepSeek-V2 and DeepSeek-V3 for latent attention and model sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.groups import get_max_positions

_LATENT_EPSILON = 1e-6
"""Epsilon of the latent norms in transformers, which does not depend on rms_norm_eps."""


@dataclass(frozen=True)
class LatentSizeFields:
    """Converter of the config.json fields for the model sizes of architectures with multi-head latent attention."""

    max_positions: int
    """Maximum sequence length if config.json has no field max_position_embeddings."""

    def parse(self, fields: Fields) -> Settings:
        num_layers, num_heads = fields.get_size("num_hidden_layers"), fields.get_size("num_attention_heads")
        if fields.get_size("num_key_value_heads", num_heads) != num_heads:
            fields.refuse(
                "num_key_value_heads", f"must be num_attention_heads = {num_heads}: latent attention does not share heads"
            )
        if fields.get_number("rms_norm_eps", _LATENT_EPSILON) != _LATENT_EPSILON:
            fields.refuse(
                "rms_norm_eps",
                f"transformers uses {_LATENT_EPSILON:g} in the latent norms; in this framework all norms have the same epsilon",
            )
        fields.expect("attention_bias", (False,), False, "the projections of latent attention have no biases in this framework")
        nope_dim, rope_dim = fields.get_size("qk_nope_head_dim", 128), fields.get_size("qk_rope_head_dim", 64)
        for name, size in (("head_dim", rope_dim), ("qk_head_dim", nope_dim + rope_dim)):  # transformers computes both fields
            fields.expect(name, (size, None), size, "does not follow from qk_nope_head_dim and qk_rope_head_dim")
        num_positions = get_max_positions(fields, self.max_positions)
        return {
            "num_layers": num_layers,
            "hidden_size": fields.get_size("hidden_size"),
            "ffn_hidden_size": fields.get_size("intermediate_size"),
            "num_attention_heads": num_heads,
            "q_lora_rank": None if fields.get_raw("q_lora_rank", 1536) is None else fields.get_size("q_lora_rank", 1536),
            "kv_lora_rank": fields.get_size("kv_lora_rank", 512),
            "qk_head_dim": nope_dim,
            "qk_pos_emb_head_dim": rope_dim,
            "v_head_dim": fields.get_size("v_head_dim", 128),
            "seq_length": num_positions,
            "max_position_embeddings": num_positions,
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_attention_heads,
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_nope_head_dim": model.qk_head_dim,
            "qk_rope_head_dim": model.qk_pos_emb_head_dim,
            "v_head_dim": model.v_head_dim,
            "attention_bias": False,
            "max_position_embeddings": model.num_positions,
        }
