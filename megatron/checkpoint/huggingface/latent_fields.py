"""Fields of DeepSeek-V2 and V3 about their attention, and about the experts that only models without experts may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.huggingface.family import Settings
from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.groups import max_positions
from megatron.config.model import ModelConfig

_LATENT_EPSILON = 1e-6
"""What transformers adds in the norms of latents, whatever rms_norm_eps is."""

OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_layer_freq", "num_experts_per_tok", "ep_size"),
    *("n_group", "topk_group", "topk_method", "norm_topk_prob", "scoring_func", "routed_scaling_factor", "num_experts"),
    *("num_local_experts", "output_router_logits", "aux_loss_alpha", "seq_aux"),
)
"""Fields that change nothing where no layer has experts."""


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of a model with latent attention, all of whose layers are dense."""

    max_positions: int
    """Default of max_position_embeddings."""
    dense_layers: int
    """Default of first_k_dense_replace: the layers in front of those with experts."""

    def read(self, fields: Fields) -> Settings:
        depth, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
        dense = fields.raw("first_k_dense_replace", self.dense_layers)
        if type(dense) is not int or dense < depth:
            said = f"layers from number {dense} on have experts (n_routed_experts), which cannot be built here"
            fields.refuse("first_k_dense_replace", f"{said}; a model of {depth} dense layers has {depth} or more")
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
            "first_k_dense_replace": model.num_layers,
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
