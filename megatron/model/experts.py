"""Mixture-of-experts layer (docs/moe.md): a router, a token dispatcher, the local experts and an optional shared expert.

Shapes: `s` local tokens of a sequence, `b` microbatch, `h` hidden size, `E` experts of the layer, `k` experts per token, `n` rows
for the local experts. Under sequence parallelism a rank has s/tp tokens, where `tp` is the number of tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.memory.recompute import is_recomputing, reuse_in_recompute
from megatron.model.mlp import ACTIVATION_FUNCTIONS, MLP
from megatron.moe.balance import RouterTracker, compute_router_weights, compute_selection_scores, select_experts
from megatron.moe.dispatch import Dispatcher, ExpertFunction, apply_with_padding, select_within_capacity
from megatron.moe.grouped import grouped_linear
from megatron.parallel.accumulate import route_grad
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey, seed_device
from megatron.spec.mlps import ExpertsSpec, MLPSpec, RouterSpec
from megatron.tensor_parallel.linear import RecomputableInput

if TYPE_CHECKING:
    from megatron.attention.documents import DataTokens, Documents

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Router of a mixture-of-experts layer: selects the experts of each token and computes the weights of the experts' outputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    """Bias [experts] that is added to the scores for the selection of experts. It does not change the router weights."""
    shares: nn.Parameter | None
    """Load of each expert in the previous step, [experts]: its assigned tokens in the global batch, divided by the mean over the
    experts. Only the balance loss over the global batch (--moe-router-load-balancing-type global_aux_loss) needs the load,
    otherwise None. A parameter without gradient, so that checkpoints contain it."""

    def __init__(self, scope: Scope, spec: RouterSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.num_ahead = 0
        """Number of positions between a token and the last token that the layer reads at its position. Above 0 only in multi-token
        prediction."""
        self.tracker: RouterTracker | None = None
        """Records assignments and attaches the router losses in training steps; None to do neither."""
        scope.register_param(self, "weight")
        scope.register_optional_param(self, "bias")
        scope.register_optional_param(self, "shares")
        self.sequence_group, self.sequence_parallel_rank = (
            scope.context.sequence_group,
            scope.tp.rank if scope.sequence_parallel else 0,
        )

    def forward(
        self, x: torch.Tensor, documents: Documents | None = None, key: DropoutKey | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the experts of each token.

        Args:
            x: hidden states [s, b, h].
            documents: contains the padding of the samples, which is assigned to no expert and not counted, and the split of the
                sequence over context ranks.
            key: key of the random input jitter; None switches the jitter off (evaluation).

        Returns:
            the router weights and the expert ids, both [s, b, k] for k experts per token. The id E, the number of experts, marks an
            assignment that is dropped or of a padding token.
        """
        dtype = x.dtype if self.spec.dtype is None else torch.promote_types(x.dtype, _DTYPES[self.spec.dtype])
        x = x.to(dtype)
        if self.spec.input_jitter and key is not None:
            seed_device(x.device, key.get_site_seed(self.layer, "router_input", self.sequence_parallel_rank))
            x = x * torch.empty_like(x).uniform_(1.0 - self.spec.input_jitter, 1.0 + self.spec.input_jitter)
        logits = F.linear(x, route_grad(self.weight).to(dtype))
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        scores = compute_selection_scores(logits, self.spec)
        selection_scores = scores.detach() if self.bias is None else scores.detach() + self.bias.detach()
        expert_ids = reuse_in_recompute(lambda: select_experts(selection_scores, self.spec))
        router_weights = compute_router_weights(logits, scores, expert_ids, self.spec)
        data_tokens = (
            None
            if documents is None
            else documents.find_data_tokens(self.num_ahead, self.sequence_group.rank, self.sequence_group.size)
        )
        if self.tracker is not None:
            router_weights = self.tracker.attach_losses(
                router_weights, logits, expert_ids, self.layer, self.spec, self._previous_load, data_tokens
            )
        if data_tokens is not None:
            expert_ids = expert_ids.where(data_tokens.is_data.unsqueeze(-1), self.spec.num_experts)
        if self.spec.capacity_factor is not None:
            expert_ids = reuse_in_recompute(lambda: self._drop_over_capacity(router_weights, expert_ids, documents, data_tokens))
        return router_weights, expert_ids

    @property
    def _previous_load(self) -> torch.Tensor | None:
        return None if self.shares is None else self.shares.detach()

    def _drop_over_capacity(
        self,
        router_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        documents: Documents | None,
        data_tokens: DataTokens | None,
    ) -> torch.Tensor:
        """Replace the expert id by the number of experts for each assignment of a token that exceeds the capacity of its expert.
        The id then marks the assignment as dropped."""
        token_order = None if documents is None or documents.sequence_split is None else documents.context_rank_order
        num_data_tokens = None if data_tokens is None else data_tokens.counts
        is_accepted = select_within_capacity(
            router_weights, expert_ids, self.spec, self.sequence_group, token_order, num_data_tokens
        )
        if data_tokens is not None:  # padding is not dropped
            is_accepted |= data_tokens.is_data.logical_not().unsqueeze(-1)
        if self.tracker is not None:
            self.tracker.record_drops(self.layer, is_accepted)
        return expert_ids.where(is_accepted, self.spec.num_experts)


class GroupedMLP(nn.Module):
    """Local experts of a layer, MLPs without biases. The weight matrices of all local experts are stacked in one tensor for each
    linear layer."""

    holds_experts = True
    """Identifies modules of experts, for code that does not import this file."""

    def __init__(self, scope: Scope, spec: MLPSpec) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATION_FUNCTIONS[spec.activation.name](spec), spec.activation.is_gated
        self.up, self.down = _GroupedWeight(scope.get_child("up")), _GroupedWeight(scope.get_child("down"))

    def forward(self, rows: torch.Tensor, rows_per_expert: Sequence[int]) -> torch.Tensor:
        """Apply the local experts to n rows (hidden states of tokens) [n, h], sorted by expert, and return [n, h].

        With several ETP ranks (expert tensor parallelism), each rank returns partial sums, which must be added over the ranks.

        Args:
            rows_per_expert: number of rows of each expert.
        """
        hidden = self.up(rows, rows_per_expert)
        return self.down(self.activation(hidden.unflatten(-1, (2, -1)) if self.gated else hidden), rows_per_expert)


class _GroupedWeight(nn.Module):
    """Weight matrices of one linear layer for all local experts, in one parameter."""

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        scope.register_param(self, "weight")

    def forward(self, rows: torch.Tensor, rows_per_expert: Sequence[int]) -> torch.Tensor:
        return grouped_linear(rows, self.weight, rows_per_expert)


class MoELayer(nn.Module):
    """Mixture-of-experts layer: a router, the experts of this rank, and an optional shared expert, which is split over the tensor
    ranks."""

    def __init__(self, scope: Scope, spec: ExpertsSpec, layer: int, *, recomputes_activation: bool = False) -> None:
        super().__init__()
        self.router = Router(scope.get_child("router"), spec.router, layer)
        self.experts = GroupedMLP(scope.get_child("experts"), spec.expert)
        self.shared = (
            MLP(scope.get_child("shared"), spec.shared_expert, recomputes_activation=recomputes_activation)
            if spec.shared_expert
            else None
        )
        self.shared_gate = _SharedExpertGate(scope.get_child("shared_gate")) if spec.has_shared_gate else None
        self.dispatcher = Dispatcher.of(scope.context, spec.router.num_experts, uses_allgather=scope.uses_allgather_dispatch)
        context = scope.context
        self.num_data_ranks = len({context.topology.get_coordinates(rank)["dp"] for rank in context.expert_group.ranks})
        """Number of data ranks in the expert group: the microbatches whose tokens the group exchanges."""

    def forward(
        self, x: torch.Tensor | RecomputableInput, documents: Documents | None = None, key: DropoutKey | None = None
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/tp, b, h] under sequence parallelism) to the same shape.

        Args:
            documents: contains the padding of the samples, and the split of the sequence over context ranks.
            key: key of the router's random input jitter; None in evaluation.
        """
        x = x.value if isinstance(x, RecomputableInput) else x
        router_weights, expert_ids = self.router(x, documents, key)
        apply_experts: ExpertFunction = self.experts.forward if is_recomputing() else self.experts
        capacity = self.router.spec.get_capacity(len(x) * self.router.sequence_group.size)
        if capacity is not None:
            capacity *= x.shape[1] * self.num_data_ranks
            apply_experts = (
                partial(apply_with_padding, apply_experts, capacity) if self.router.spec.pads_to_capacity else apply_experts
            )
        y, shared_output = self.dispatcher.run(
            x.flatten(0, 1),
            router_weights.flatten(0, 1),
            expert_ids.flatten(0, 1),
            apply_experts,
            lambda: self._apply_shared_expert(x),
            capacity,
        )
        y = y.view_as(x)
        return y if shared_output is None else y + shared_output

    def _apply_shared_expert(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared is None:
            return None
        output: torch.Tensor = self.shared(x)
        return output if self.shared_gate is None else output * self.shared_gate(x)


class _SharedExpertGate(nn.Module):
    """Gate of the shared expert: the sigmoid of a linear projection of each token, [s, b, h] to [s, b, 1]."""

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        scope.register_param(self, "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, route_grad(self.weight)).sigmoid()
