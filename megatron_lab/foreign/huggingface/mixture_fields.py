"""Fields of a config.json about mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.spec.layer_pattern import pattern_text
from megatron.spec.mlps import experts_of, has_experts
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields


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


_TRAINING = ("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size")
"""Fields of DeepSeek's experts that change nothing but their training."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekExperts:
    """DeepSeek's experts, behind some dense layers; or none, where all layers are dense.

    How groups of experts are judged is no field: V2 takes the best expert of each, V3 the sum of the two best; here it is the sum
    of as many as a token passes in each of its groups.
    """

    score: Literal["softmax", "sigmoid"]
    """V2 or V3: how logits become scores."""
    judged_by: int
    """Experts of a group, the best, whose scores are summed to judge it."""
    other_count: str
    """Another name of `n_routed_experts`."""
    dense: int
    """Default of `first_k_dense_replace`."""
    experts: int
    """Default of `n_routed_experts`."""
    chosen: int | None
    """Default of `num_experts_per_tok`."""
    shared: int
    """Default of `n_shared_experts`, each as wide as `moe_intermediate_size` says."""
    width: int
    """Default of `moe_intermediate_size`."""
    scaling: float
    """Default of `routed_scaling_factor`."""
    groups: tuple[int | None, int | None]
    """Defaults of `n_group` and `topk_group`."""

    def read(self, fields: Fields) -> Settings:
        depth, dense = fields.size("num_hidden_layers"), fields.raw("first_k_dense_replace", self.dense)
        for name in (*_TRAINING, *_OF_DEEPSEEK):  # without experts all of them are without effect
            fields.raw(name)
        if type(dense) is not int or dense < 0:
            fields.refuse("first_k_dense_replace", "must be the number of dense layers in front of those with experts")
        elif dense < depth:
            return self._read_experts(fields, depth, dense)
        return {}

    def _read_experts(self, fields: Fields, depth: int, dense: int) -> Settings:
        count = fields.size("n_routed_experts", self.experts)
        fields.expect(self.other_count, (count, None), count, "n_routed_experts says another number")
        chosen, width = fields.size("num_experts_per_tok", self.chosen), fields.size("moe_intermediate_size", self.width)
        shared = fields.size("n_shared_experts", self.shared)
        scaling = fields.number("routed_scaling_factor", self.scaling)
        if not scaling:
            fields.refuse("routed_scaling_factor", "must be above 0")
        if count < 2:
            fields.refuse("n_routed_experts", "must be at least 2; a model with one MLP in each layer is of another architecture")
        fields.expect("scoring_func", (self.score,), self.score, "transformers computes that one, whatever this says")
        fields.expect("moe_layer_freq", (1,), 1, "all layers behind the dense ones have experts")
        found: Settings = {
            "num_experts": count,
            "moe_layer_freq": pattern_text((False,) * dense + (True,) * (depth - dense)) if dense else "1",
            "moe_ffn_hidden_size": width,
            "moe_router_topk": chosen,
            "moe_shared_expert_intermediate_size": shared * width,
            "moe_router_topk_scaling_factor": scaling,
            "moe_router_score_function": self.score,
            "moe_router_dtype": "fp32",
        }
        if self.score == "sigmoid":
            fields.expect("topk_method", ("noaux_tc",), "noaux_tc", "transformers chooses experts so, whatever this says")
            fields.expect(
                "norm_topk_prob", (chosen > 1,), True, "here the probabilities of several experts sum to 1, that of one is free"
            )
            return found | {"moe_router_enable_expert_bias": True} | self._read_groups(fields, chosen)
        fields.expect("norm_topk_prob", (False,), False, "transformers does not make probabilities sum to 1, whatever this says")
        method = fields.expect("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        found["moe_router_pre_softmax"] = True
        return found | (self._read_groups(fields, chosen) if method == "group_limited_greedy" else {})

    def _read_groups(self, fields: Fields, chosen: int) -> Settings:
        groups, opened = (fields.size(name, default) for name, default in zip(("n_group", "topk_group"), self.groups, strict=True))
        if opened >= groups:  # all are open
            return {}
        if chosen != self.judged_by * opened:
            fields.refuse(
                "topk_group",
                f"a group is judged by its {self.judged_by} best expert{'s' * (self.judged_by > 1)} there, and here by as many as "
                f"a token passes in each of its groups: num_experts_per_tok = {chosen} over {opened}; only where that is "
                f"{self.judged_by} are the same experts chosen",
            )
        return {"moe_router_num_groups": groups, "moe_router_group_topk": opened}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_experts is None:
            return {"first_k_dense_replace": model.num_layers}
        spec = experts_of(model)
        router, width = spec.router, spec.expert.width
        marks = [has_experts(model, layer) for layer in range(model.num_layers)]
        found: dict[str, Any] = {
            "first_k_dense_replace": marks.index(True),
            "n_routed_experts": router.experts,
            "n_shared_experts": 0 if spec.shared is None else spec.shared.width // width,
            "moe_intermediate_size": width,
            "num_experts_per_tok": router.chosen,
            "routed_scaling_factor": router.scaling,
            "n_group": router.groups,
            "topk_group": router.open_groups if router.groups > 1 else 1,
            "moe_layer_freq": 1,
            "scoring_func": self.score,
        }
        if self.score == "sigmoid":
            return found | {"norm_topk_prob": router.chosen > 1, "topk_method": "noaux_tc"}
        return found | {"norm_topk_prob": False, "topk_method": "group_limited_greedy" if router.groups > 1 else "greedy"}


_OF_DEEPSEEK = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_layer_freq", "num_experts_per_tok", "n_group"),
    *("topk_group", "topk_method", "norm_topk_prob", "scoring_func", "routed_scaling_factor", "num_experts", "num_local_experts"),
)
