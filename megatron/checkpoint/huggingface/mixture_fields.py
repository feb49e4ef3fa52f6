"""Fields of a config.json about mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.huggingface.family import Settings
from megatron.checkpoint.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.spec.layer_pattern import pattern_text
from megatron.spec.mlps import experts_of, has_experts


@dataclass(frozen=True, kw_only=True)
class MixtureFields:
    """Experts chosen by a softmax: how many there are, how wide they are, which layers have them."""

    count: str
    """Field of the number of experts."""
    experts: int
    """Its default."""
    chosen: int
    """Default of `num_experts_per_tok`."""
    width: int | None = None
    """Default of `moe_intermediate_size`; None where experts are as wide as `intermediate_size` says."""
    may_sum_to_1: bool = False
    """Whether `norm_topk_prob` says that the probabilities of the chosen experts sum to 1; otherwise they always do."""
    shared: int | None = None
    """Default of `shared_expert_intermediate_size`; None where there is no shared expert."""
    in_steps: bool = False
    """Whether `decoder_sparse_step` and `mlp_only_layers` say which layers have experts; otherwise all do."""

    def read(self, fields: Fields) -> Settings:
        depth, other = fields.size("num_hidden_layers"), fields.raw("num_local_experts")  # its name in files of transformers 5
        count = fields.size(self.count, other if type(other) is int else self.experts)
        fields.expect("num_local_experts", (count,), count, f"{self.count} says another number")
        found: Settings = {
            "num_experts": count,
            "moe_router_topk": fields.size("num_experts_per_tok", self.chosen),
            "moe_router_pre_softmax": self.may_sum_to_1 and not fields.switch("norm_topk_prob", False),
        }
        if count < 2:
            fields.refuse(self.count, "must be at least 2; a model with one MLP in each layer is of another architecture")
        if self.width is not None:
            found["moe_ffn_hidden_size"] = fields.size("moe_intermediate_size", self.width)
        if self.shared is not None:
            found["moe_shared_expert_intermediate_size"] = fields.size("shared_expert_intermediate_size", self.shared)
            found["moe_shared_expert_gate"] = True
        if self.in_steps:
            step, dense = fields.size("decoder_sparse_step", 1), fields.raw("mlp_only_layers") or []
            if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
                fields.refuse("mlp_only_layers", "must be a list of numbers of layers")
                dense = []
            marks = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(depth))
            if not any(marks):
                fields.refuse("mlp_only_layers", "leaves no layer with experts")
            found["moe_layer_freq"] = "1" if all(marks) else pattern_text(marks)
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_experts is None:
            return {}
        spec = experts_of(model)
        found: dict[str, Any] = {self.count: spec.router.experts, "num_experts_per_tok": spec.router.chosen}
        if self.width is not None:
            found["moe_intermediate_size"] = spec.expert.width
        if self.may_sum_to_1:
            found["norm_topk_prob"] = not spec.router.pre_softmax
        if self.shared is not None and spec.shared is not None:
            found["shared_expert_intermediate_size"] = spec.shared.width
        if self.in_steps:
            dense = [layer for layer in range(model.num_layers) if not has_experts(model, layer)]
            found |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return found
