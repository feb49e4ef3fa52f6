"""Expert selection, load-balancing losses and load statistics of the routers of one rank (docs/moe.md, "Balance").

Shapes: `s` local tokens of a sequence, `b` microbatch, `t = s * b` local tokens of the microbatch, `k` experts per token, `E`
experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.memory.recompute import is_recomputing, reuse_in_recompute
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Group
from megatron.parallel.params import ParamRecord
from megatron.spec.mlps import RouterSpec, has_experts
from megatron.spec.weights import parse_mtp_depth, split_layer_name

# ---- Selection of the experts of each token and their weights (docs/moe.md, "What is computed").
#
# Shapes: `t` tokens (any leading dimensions), `E` experts, `k` selected experts per token, `G` groups of experts.


def compute_selection_scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Compute the scores [t, E] by which experts are selected, from the router logits [t, E] of t tokens and E experts."""
    if spec.score_function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if spec.pre_softmax else logits


def select_experts(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return the ids of the `top_k` experts with the largest scores for each token.

    Of equal scores the lower id comes first. With groups of experts, only the best `top_k_groups` groups of a token are searched.

    Args:
        scores: [tokens, experts].

    Returns:
        int64 [tokens, top_k], in descending order of the score.
    """
    if spec.num_groups > 1:
        scores = scores.masked_fill(~_is_in_selected_group(scores, spec), -torch.inf)
    return _find_top_indices(scores, spec.top_k)


def _is_in_selected_group(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return for each token and expert whether the expert's group is among the token's best `top_k_groups` groups: bool [t, E].

    The score of a group is the sum of its top_k / top_k_groups largest expert scores.

    Args:
        scores: [t, E] for t tokens and E experts.
    """
    groups = scores.unflatten(-1, (spec.num_groups, -1))  # [t, G, E/G]
    group_scores = groups.topk(spec.top_k // spec.top_k_groups, sorted=False).values.sum(-1)
    is_selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
        -1, _find_top_indices(group_scores, spec.top_k_groups), True
    )
    return is_selected.unsqueeze(-1).expand_as(groups).flatten(-2)


def _find_top_indices(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest scores along the last dimension, the lower index first among equal scores.

    A stable sort is used because `torch.topk` does not define the order of equal values.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def compute_router_weights(logits: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Compute the weights by which the outputs of the selected experts are multiplied: [t, k] for t tokens and k experts per token.

    Args:
        logits: router logits [t, E] for E experts.
        scores: result of `compute_selection_scores`, without a bias, [t, E].
        expert_ids: selected experts, int64 [t, k].
    """
    if spec.score_function == "softmax" and not spec.pre_softmax:
        weights = logits.gather(-1, expert_ids).softmax(-1)
    else:
        weights = scores.gather(-1, expert_ids)
        if spec.score_function == "sigmoid" and spec.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    return weights if spec.scaling_factor == 1.0 else weights * spec.scaling_factor


_EPSILON = 1e-20
"""Added to the sum of sigmoids before the division, as in DeepSeek-V3 and Megatron-LM."""


def compute_balancing_probs(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Compute the probabilities that enter the load-balancing loss, from the router logits. Both are [t, E] for t tokens and E
    experts. The probabilities of a token sum to 1."""
    if spec.score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + _EPSILON)


@dataclass(frozen=True)
class RouterMetrics:
    """Metrics of the routers in one step, over the global batch: their losses and the load of the experts."""

    load_balancing_loss: float
    """Load-balancing loss without its coefficient, averaged over the layers with experts."""
    z_loss: float
    """Router z-loss without its coefficient, averaged over the layers with experts."""
    dropped_share: float | None
    """Fraction of the assignments that exceed the capacity of their expert, averaged over the layers with experts. None without
    a capacity limit."""
    busiest_expert: dict[str, float]
    """Number of assignments of the busiest expert divided by the mean over the experts, by layer with experts ("layers.3",
    "mtp.0")."""

    @property
    def max_busiest_expert(self) -> float:
        """Largest value of `busiest_expert` over the layers."""
        return max(self.busiest_expert.values())

    @staticmethod
    def log_values(results: Sequence[RouterMetrics]) -> dict[str, float]:
        """Return the means of all metrics over several steps, by their names in the metrics file. Only `busiest_expert`, the
        maximum over the layers, is a maximum over the steps too.

        Args:
            results: metrics of each step; at least one.
        """
        num_steps, first = len(results), results[0]
        layers = {
            layer: math.fsum(result.busiest_expert[layer] for result in results) / num_steps for layer in first.busiest_expert
        }
        return {
            "load_balancing_loss": math.fsum(result.load_balancing_loss for result in results) / num_steps,
            "moe_z_loss": math.fsum(result.z_loss for result in results) / num_steps,
            "busiest_expert": max(result.max_busiest_expert for result in results),
            **(
                {}
                if first.dropped_share is None
                else {"dropped_share": math.fsum(result.dropped_share or 0.0 for result in results) / num_steps}
            ),
            **{f"busiest_expert/{layer}": value for layer, value in layers.items()},
        }


class RouterTracker:
    """Collects the losses and expert loads of all routers over the microbatches of a step. Adds the gradients of these losses in
    backward.

    Args:
        sequence_group: ranks that share each sequence.
    """

    def __init__(self, model: ModelConfig, sequence_group: Group, device: torch.device) -> None:
        assert model.num_experts is not None
        is_moe_layer = [has_experts(model, layer) for layer in range(model.num_layers)]
        is_moe_layer += is_moe_layer[-1:] * model.mtp_num_layers
        self._num_layers, self.moe_layers = (
            model.num_layers,
            [layer_index for layer_index, is_moe in enumerate(is_moe_layer) if is_moe],
        )
        """Indices of the layers with experts. The depths of multi-token prediction follow the layers of the model."""
        self._sequence_group, self._drops_tokens = sequence_group, model.moe_expert_capacity_factor is not None
        self.totals = torch.zeros(len(is_moe_layer), model.num_experts + 3, dtype=torch.float64, device=device)
        """Totals of this rank's microbatches, one row per layer: assignments of each expert, load-balancing loss, z-loss, dropped
        assignments; float64 [layers, E + 3]."""
        self._moe_layer_rows = torch.tensor(self.moe_layers, device=device)
        self._assignment_counts: torch.Tensor | None = None
        """Assignments of each expert in the global batch of the last step: [layers, E]. Set by `reduce`."""
        self._loss_scale: float | None = None

    @contextlib.contextmanager
    def recording(self, loss_scale: float) -> Iterator[None]:
        """Within the context, count the tokens of each expert and add the gradients of the router losses in backward.

        The totals are reset first. Outside the context, for example in evaluation, the tracker does nothing.

        Args:
            loss_scale: backward multiplies the gradients of a microbatch's load-balancing loss and z-loss by this number.
        """
        self.totals.zero_()
        self._loss_scale = loss_scale
        try:
            yield
        finally:
            self._loss_scale = None

    def attach_losses(
        self,
        router_weights: torch.Tensor,
        logits: torch.Tensor,
        expert_ids: torch.Tensor,
        layer: int,
        spec: RouterSpec,
        previous_load: torch.Tensor | None = None,
        data_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Record the experts assigned to the tokens of a microbatch, and add the gradients of its load-balancing loss and z-loss in
        backward.

        Args:
            router_weights: [s, b, k] for k experts per token.
            logits: router logits [s, b, E] for E experts, in at least float32.
            expert_ids: selected experts [s, b, k], before any is dropped.
            layer: row of the layer in `totals`.
            previous_load: number of tokens assigned to each expert in the global batch of the previous update, divided by the mean
                over the experts: [E]. Replaces the numbers of this microbatch in the load-balancing loss (`global_aux_loss`).
            data_tokens: whether each token counts, bool [s, b], and the number of these tokens in each complete sequence, int64
                [b]. None if all count, because the samples have no padding. With padding, a mean over tokens is the mean over the
                sequences of the means over their tokens, except in the load-balancing loss of a microbatch (`aux_loss`).

        Returns:
            `router_weights` unchanged. Backward through the returned tensor adds the gradients of the losses.
        """
        if self._loss_scale is None:
            return router_weights
        is_data = None if data_tokens is None else data_tokens[0]
        assignment_counts = reuse_in_recompute(lambda: self._count_assignments(expert_ids, layer, spec, is_data))
        num_tokens = logits[..., 0].numel() * self._sequence_group.size
        if data_tokens is not None:
            # Sums over tokens are divided by the number of all tokens below, so scale them as if padding had not been there.
            counts = data_tokens[1].double()
            sequence_scale = num_tokens / len(counts) / counts.clamp(min=1.0)
            scale = num_tokens / counts.sum().clamp(min=1.0).expand_as(counts) if spec.balancing == "aux_loss" else sequence_scale
            assignment_counts = assignment_counts * scale.unsqueeze(1)
        if previous_load is not None:
            assignment_fractions = previous_load / spec.num_experts
        elif spec.balancing == "aux_loss":
            assignment_fractions = assignment_counts.sum(0) / (spec.top_k * num_tokens)
        else:
            assignment_fractions = assignment_counts * len(assignment_counts) / (spec.top_k * num_tokens)
        token_terms = compute_balancing_probs(logits, spec) * assignment_fractions.to(logits.dtype)
        if is_data is not None:
            token_terms = token_terms * (is_data * scale).to(logits.dtype).unsqueeze(-1)
        balancing_loss = token_terms.sum() * (spec.num_experts / num_tokens)
        z_terms = logits.logsumexp(-1).square()
        if is_data is not None:
            z_terms = z_terms * (is_data * sequence_scale).to(logits.dtype)
        z_loss = z_terms.sum() / num_tokens
        if not is_recomputing():
            self.totals[layer, -3:-1] += torch.stack([balancing_loss, z_loss]).detach()
        if spec.balancing != "none" and spec.aux_loss_coeff:
            router_weights = _AttachLoss.apply(router_weights, balancing_loss, spec.aux_loss_coeff * self._loss_scale)
        return (
            _AttachLoss.apply(router_weights, z_loss, spec.z_loss_coeff * self._loss_scale) if spec.z_loss_coeff else router_weights
        )

    def record_drops(self, layer: int, is_accepted: torch.Tensor) -> None:
        """Count the (token, expert) assignments of a microbatch that are dropped.

        Args:
            layer: row of the layer in `totals`.
            is_accepted: bool [s, b, k] for k experts per token, False for assignments that exceed the capacity of their expert.
        """
        if self._loss_scale is not None:
            self.totals[layer, -1] += is_accepted.logical_not().sum()

    def _count_assignments(
        self, expert_ids: torch.Tensor, layer: int, spec: RouterSpec, is_data: torch.Tensor | None
    ) -> torch.Tensor:
        """Count the tokens assigned to each of E experts in each of b full sequences of a microbatch: float64 [b, E]. Also add the
        counts of this rank's tokens to `totals`. Only tokens of `is_data` count, bool [s, b]; None for all."""
        flat_ids = expert_ids.transpose(0, 1).flatten(1)
        counts = self.totals.new_zeros(len(flat_ids), spec.num_experts)
        increments = torch.ones_like(flat_ids, dtype=counts.dtype)
        if is_data is not None:
            increments *= is_data.t().repeat_interleave(spec.top_k, 1)
        counts.scatter_add_(1, flat_ids, increments)
        self.totals[layer, :-3] += counts.sum(0)
        return all_reduce(counts, self._sequence_group)

    def reduce(self, world: Group, num_microbatches: int) -> torch.Tensor:
        """Sum the totals of a step over all ranks and return the values that `to_metrics` reads.

        Args:
            num_microbatches: microbatches of the step, over all data ranks.

        Returns:
            load-balancing loss, z-loss and share of dropped assignments (means over the layers with experts), then the load of the
            busiest expert of each of these layers; float64 [num_values], on the device.
        """
        totals = all_reduce(self.totals, world)
        self._assignment_counts, moe_totals = totals[:, :-3], totals.index_select(0, self._moe_layer_rows)
        counts, losses = moe_totals[:, :-3], (moe_totals[:, -3:-1] / num_microbatches).mean(0)
        num_assignments = counts.sum(1).clamp(min=1.0)  # 0 if a layer of multi-token prediction reads padding at every position
        busiest = counts.amax(1) / counts.mean(1).clamp(min=1.0 / counts.shape[1])
        return torch.cat([losses, (moe_totals[:, -1] / num_assignments).mean(0, keepdim=True), busiest])

    def compute_excess_load(self, record: ParamRecord) -> torch.Tensor:
        """Return for each expert by how much its number of assigned tokens exceeds the mean, count / mean - 1: [experts]. Call it
        after `reduce`.

        The returned tensor takes the place of a gradient for parameters that are updated from expert counts (`CountUpdate`): expert
        biases and shares.

        Args:
            record: parameter to update. The layer follows from its name.
        """
        (layer_index, _), depth = split_layer_name(record.name), parse_mtp_depth(record.name)
        row = layer_index if depth is None else self._num_layers + depth
        assert self._assignment_counts is not None and row is not None
        counts, total = self._assignment_counts[row], self._assignment_counts[row].sum()
        return (counts * len(counts) - total) / total.clamp(min=1.0)  # integers, so exactly 0 at the mean; CUDA's `mean` may round

    @property
    def num_values(self) -> int:
        """Number of values in the result of `reduce`: the losses, the share of dropped assignments, and one load for each layer
        with experts."""
        return 3 + len(self.moe_layers)

    def to_metrics(self, values: Sequence[float]) -> RouterMetrics:
        """Convert the values returned by `reduce`, copied to the host, to metrics."""
        load_balancing_loss, z_loss, dropped_share = values[:3]
        busiest_expert = {self._get_layer_name(layer): value for layer, value in zip(self.moe_layers, values[3:], strict=True)}
        return RouterMetrics(load_balancing_loss, z_loss, dropped_share if self._drops_tokens else None, busiest_expert)

    def _get_layer_name(self, layer: int) -> str:
        return f"layers.{layer}" if layer < self._num_layers else f"mtp.{layer - self._num_layers}"


class _AttachLoss(torch.autograd.Function):
    """Autograd function that returns x unchanged. Its backward also passes the gradient `scale` to the scalar `loss`. So the
    backward of a router's weights also computes the gradients of the router's losses.

    Megatron-LM: `MoEAuxLossAutoScaler`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None
