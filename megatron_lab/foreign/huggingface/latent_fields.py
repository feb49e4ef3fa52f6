"""Fields of DeepSeek-V2 and V3 about their attention and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.groups import max_positions

_LATENT_EPSILON = 1e-6
"""What transformers adds in the norms of latents, whatever rms_norm_eps is."""


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of a model with latent attention."""

    max_positions: int
    """Default of max_position_embeddings."""

    def read(self, fields: Fields) -> Settings:
        depth, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
        if fields.size("num_key_value_heads", heads) != heads:
            fields.refuse("num_key_value_heads", f"must be num_attention_heads = {heads}: the heads of a latent are not shared")
        if fields.number("rms_norm_eps", _LATENT_EPSILON) != _LATENT_EPSILON:
            fields.refuse(
                "rms_norm_eps", f"transformers has {_LATENT_EPSILON:g} in the norms of latents; here all norms have the same"
            )
        fields.expect("attention_bias", (False,), False, "the products in front of latent attention have no biases here")
        plain, rotated = fields.size("qk_nope_head_dim", 128), fields.size("qk_rope_head_dim", 64)
        for name, size in (("head_dim", rotated), ("qk_head_dim", plain + rotated)):  # transformers computes both
            fields.expect(name, (size, None), size, "qk_nope_head_dim and qk_rope_head_dim say another size")
        positions = max_positions(fields, self.max_positions)
        return {
            "num_layers": depth,
            "hidden_size": fields.size("hidden_size"),
            "ffn_hidden_size": fields.size("intermediate_size"),
            "num_attention_heads": heads,
            "q_lora_rank": None if fields.raw("q_lora_rank", 1536) is None else fields.size("q_lora_rank", 1536),
            "kv_lora_rank": fields.size("kv_lora_rank", 512),
            "qk_head_dim": plain,
            "qk_pos_emb_head_dim": rotated,
            "v_head_dim": fields.size("v_head_dim", 128),
            "seq_length": positions,
            "max_position_embeddings": positions,
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
