"""Config.json fields of mixture-of-experts models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.spec.layer_pattern import format_pattern
from megatron.spec.mlps import build_experts_spec, has_experts
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields


@dataclass(frozen=True, kw_only=True)
class MixtureFields:
    """Converter of the config.json fields of a mixture of experts with a softmax router: number and sizes of the experts, and the
    layers that have experts."""

    num_experts_field: str
    """Name of the field with the number of experts."""
    num_experts: int
    """Number of experts if config.json does not contain the field `num_experts_field`."""
    top_k: int
    """Number of experts per token if config.json has no field `num_experts_per_tok`."""
    ffn_size: int | None = None
    """Hidden size of an expert if config.json has no field `moe_intermediate_size`; None if the experts have the size
    `intermediate_size`."""
    has_norm_topk_field: bool = False
    """Whether the architecture has the field `norm_topk_prob`. If the field is true, the probabilities of a token's experts are
    divided by their sum. In architectures without the field, this is always done."""
    shared_ffn_size: int | None = None
    """Hidden size of the shared expert if config.json has no field `shared_expert_intermediate_size`; None if there is no shared
    expert."""
    has_sparse_step_field: bool = False
    """Whether the architecture has the fields `decoder_sparse_step` and `mlp_only_layers`, which select the layers with
    experts. In architectures without these fields, all layers have experts."""

    def parse(self, fields: Fields) -> Settings:
        # Transformers 5 writes the number of experts as num_local_experts.
        num_layers, num_local_experts = fields.get_size("num_hidden_layers"), fields.get_raw("num_local_experts")
        num_experts = fields.get_size(
            self.num_experts_field, num_local_experts if type(num_local_experts) is int else self.num_experts
        )
        fields.expect("num_local_experts", (num_experts,), num_experts, f"differs from {self.num_experts_field}")
        parsed: Settings = {
            "num_experts": num_experts,
            "moe_router_topk": fields.get_size("num_experts_per_tok", self.top_k),
            "moe_router_pre_softmax": self.has_norm_topk_field and not fields.get_bool("norm_topk_prob", False),
        }
        if num_experts < 2:
            fields.refuse(
                self.num_experts_field, "must be at least 2; a model with one MLP in each layer is of another architecture"
            )
        if self.ffn_size is not None:
            parsed["moe_ffn_hidden_size"] = fields.get_size("moe_intermediate_size", self.ffn_size)
        if self.shared_ffn_size is not None:
            parsed["moe_shared_expert_intermediate_size"] = fields.get_size("shared_expert_intermediate_size", self.shared_ffn_size)
            parsed["moe_shared_expert_gate"] = True
        if self.has_sparse_step_field:
            step, dense_layers = fields.get_size("decoder_sparse_step", 1), fields.get_raw("mlp_only_layers") or []
            if not isinstance(dense_layers, list) or any(type(layer) is not int for layer in dense_layers):
                fields.refuse("mlp_only_layers", "must be a list of layer indices")
                dense_layers = []
            has_experts_in_layer = tuple(layer not in dense_layers and (layer + 1) % step == 0 for layer in range(num_layers))
            if not any(has_experts_in_layer):
                fields.refuse("mlp_only_layers", "leaves no layer with experts")
            parsed["moe_layer_freq"] = "1" if all(has_experts_in_layer) else format_pattern(has_experts_in_layer)
        return parsed

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_experts is None:
            return {}
        spec = build_experts_spec(model)
        fields: dict[str, Any] = {self.num_experts_field: spec.router.num_experts, "num_experts_per_tok": spec.router.top_k}
        if self.ffn_size is not None:
            fields["moe_intermediate_size"] = spec.expert.ffn_size
        if self.has_norm_topk_field:
            fields["norm_topk_prob"] = not spec.router.pre_softmax
        if self.shared_ffn_size is not None and spec.shared_expert is not None:
            fields["shared_expert_intermediate_size"] = spec.shared_expert.ffn_size
        if self.has_sparse_step_field:
            dense_layers = [layer for layer in range(model.num_layers) if not has_experts(model, layer)]
            fields |= {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers}
        return fields


_TRAINING_FIELDS = ("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size")
"""Fields of DeepSeek's experts that affect only training."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekMixtureFields:
    """Converter of the config.json fields of DeepSeek's mixture of experts. The first layers, or all layers, have no experts (are
    dense).

    In group-limited routing, a token selects the groups of experts with the highest scores. No field says how the score of a group
    is computed: V2 uses the score of the group's best expert, V3 the sum of the two best scores. This framework uses the sum of the
    best top_k / top_k_groups scores.
    """

    score_function: Literal["softmax", "sigmoid"]
    """Function that converts logits to scores: "softmax" in V2, "sigmoid" in V3."""
    group_score_top_k: int
    """Number of a group's best experts whose scores are summed to the score of the group."""
    num_experts_alias: str
    """Alternative name of the field `n_routed_experts` in config.json."""
    num_dense_layers: int
    """Number of layers without experts before the first layer with experts, if config.json has no field
    `first_k_dense_replace`."""
    num_experts: int
    """Number of experts if config.json has no field `n_routed_experts`."""
    top_k: int | None
    """Number of experts per token if config.json has no field `num_experts_per_tok`; None if the field is required."""
    num_shared_experts: int
    """Number of shared experts if config.json has no field `n_shared_experts`. Each shared expert has the size
    `moe_intermediate_size`."""
    ffn_size: int
    """Hidden size of an expert if config.json has no field `moe_intermediate_size`."""
    scaling_factor: float
    """Factor by which the weights of a token's experts are multiplied, if config.json has no field `routed_scaling_factor`."""
    groups: tuple[int | None, int | None]
    """Defaults of two config.json fields: number of groups of experts (`n_group`), and number of groups from which a token may
    select experts (`topk_group`). None: the field is required."""

    def parse(self, fields: Fields) -> Settings:
        num_layers, num_dense_layers = (
            fields.get_size("num_hidden_layers"),
            fields.get_raw("first_k_dense_replace", self.num_dense_layers),
        )
        for name in (*_TRAINING_FIELDS, *_DEEPSEEK_FIELDS):  # without experts these fields have no effect
            fields.get_raw(name)
        if type(num_dense_layers) is not int or num_dense_layers < 0:
            fields.refuse("first_k_dense_replace", "must be the number of dense layers before the layers with experts")
        elif num_dense_layers < num_layers:
            return self._parse_experts(fields, num_layers, num_dense_layers)
        return {}

    def _parse_experts(self, fields: Fields, num_layers: int, num_dense_layers: int) -> Settings:
        """Convert the fields of a model that has layers with experts to settings.

        Args:
            fields: fields of config.json.
            num_layers: number of layers of the model.
            num_dense_layers: number of layers without experts, before the layers with experts.
        """
        num_experts = fields.get_size("n_routed_experts", self.num_experts)
        fields.expect(self.num_experts_alias, (num_experts, None), num_experts, "differs from n_routed_experts")
        top_k, ffn_size = (
            fields.get_size("num_experts_per_tok", self.top_k),
            fields.get_size("moe_intermediate_size", self.ffn_size),
        )
        num_shared_experts = fields.get_size("n_shared_experts", self.num_shared_experts)
        scaling_factor = fields.get_number("routed_scaling_factor", self.scaling_factor)
        if not scaling_factor:
            fields.refuse("routed_scaling_factor", "must be above 0")
        if num_experts < 2:
            fields.refuse("n_routed_experts", "must be at least 2; a model with one MLP in each layer is of another architecture")
        fields.expect(
            "scoring_func",
            (self.score_function,),
            self.score_function,
            "transformers always uses this function, whatever the field says",
        )
        fields.expect("moe_layer_freq", (1,), 1, "all layers after the dense layers have experts")
        parsed: Settings = {
            "num_experts": num_experts,
            "moe_layer_freq": format_pattern((False,) * num_dense_layers + (True,) * (num_layers - num_dense_layers))
            if num_dense_layers
            else "1",
            "moe_ffn_hidden_size": ffn_size,
            "moe_router_topk": top_k,
            "moe_shared_expert_intermediate_size": num_shared_experts * ffn_size,
            "moe_router_topk_scaling_factor": scaling_factor,
            "moe_router_score_function": self.score_function,
            "moe_router_dtype": "fp32",
        }
        if self.score_function == "sigmoid":
            fields.expect(
                "topk_method", ("noaux_tc",), "noaux_tc", "transformers always selects experts this way, whatever the field says"
            )
            fields.expect(
                "norm_topk_prob",
                (top_k > 1,),
                True,
                "in this framework the probabilities sum to 1 for several experts per token, but not for one",
            )
            return parsed | {"moe_router_enable_expert_bias": True} | self._parse_groups(fields, top_k)
        fields.expect("norm_topk_prob", (False,), False, "transformers never normalizes the probabilities, whatever the field says")
        method = fields.expect("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        parsed["moe_router_pre_softmax"] = True
        return parsed | (self._parse_groups(fields, top_k) if method == "group_limited_greedy" else {})

    def _parse_groups(self, fields: Fields, top_k: int) -> Settings:
        """Convert the fields of group-limited routing to settings. Return an empty dictionary if a token may use experts of all
        groups.

        Args:
            fields: fields of config.json.
            top_k: number of experts per token.
        """
        num_groups, top_k_groups = (
            fields.get_size(name, default) for name, default in zip(("n_group", "topk_group"), self.groups, strict=True)
        )
        if top_k_groups >= num_groups:  # a token may use all groups
            return {}
        if top_k != self.group_score_top_k * top_k_groups:
            fields.refuse(
                "topk_group",
                f"transformers scores a group by its {self.group_score_top_k} best expert{'s' * (self.group_score_top_k > 1)}, "
                f"this framework by its num_experts_per_tok / topk_group best = {top_k} / {top_k_groups}; the selected experts are "
                f"the same only if that is {self.group_score_top_k}",
            )
        return {"moe_router_num_groups": num_groups, "moe_router_group_topk": top_k_groups}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_experts is None:
            return {"first_k_dense_replace": model.num_layers}
        spec = build_experts_spec(model)
        router, ffn_size = spec.router, spec.expert.ffn_size
        has_experts_in_layer = [has_experts(model, layer) for layer in range(model.num_layers)]
        fields: dict[str, Any] = {
            "first_k_dense_replace": has_experts_in_layer.index(True),
            "n_routed_experts": router.num_experts,
            "n_shared_experts": 0 if spec.shared_expert is None else spec.shared_expert.ffn_size // ffn_size,
            "moe_intermediate_size": ffn_size,
            "num_experts_per_tok": router.top_k,
            "routed_scaling_factor": router.scaling_factor,
            "n_group": router.num_groups,
            "topk_group": router.top_k_groups if router.num_groups > 1 else 1,
            "moe_layer_freq": 1,
            "scoring_func": self.score_function,
        }
        if self.score_function == "sigmoid":
            return fields | {"norm_topk_prob": router.top_k > 1, "topk_method": "noaux_tc"}
        return fields | {"norm_topk_prob": False, "topk_method": "group_limited_greedy" if router.num_groups > 1 else "greedy"}


_DEEPSEEK_FIELDS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_layer_freq", "num_experts_per_tok", "n_group"),
    *("topk_group", "topk_method", "norm_topk_prob", "scoring_func", "routed_scaling_factor", "num_experts", "num_local_experts"),
)
