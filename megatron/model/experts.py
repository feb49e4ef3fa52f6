"""Experts in the place of an MLP (docs/moe.md): a router, a dispatcher, and the experts of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.memory.recompute import decided, is_remade
from megatron.model.mlp import FUNCTIONS, MLP
from megatron.moe.balance import Balance, choose, probabilities, scores_of
from megatron.moe.dispatch import Apply, Dispatcher, padded, taken
from megatron.moe.grouped import grouped_linear
from megatron.parallel.accumulate import through
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey, seed_device
from megatron.spec.mlps import ExpertsSpec, MLPSpec, RouterSpec
from megatron.tensor_parallel.linear import Remade

if TYPE_CHECKING:
    from megatron.attention.documents import Documents

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Chooses the experts of each token."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    """Added to the scores that experts are chosen by [E]."""
    shares: nn.Parameter | None
    """What share of the choices each expert got in the update before, over the mean [E]."""

    def __init__(self, scope: Scope, spec: RouterSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.balance: Balance | None = None
        """What takes the choices of training steps."""
        scope.parameter(self, "weight")
        scope.optional(self, "bias")
        scope.optional(self, "shares")
        self.sequence_ranks, self.coordinate = scope.context.sequence_group, scope.tp.index if scope.sequence_parallel else 0

    def forward(
        self, x: torch.Tensor, documents: Documents | None = None, key: DropoutKey | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map hidden states [s, b, h] to the weights of experts and their numbers, both [s, b, k]. The number E is an expert
        that does not take the token."""
        dtype = x.dtype if self.spec.dtype is None else torch.promote_types(x.dtype, _DTYPES[self.spec.dtype])
        x = x.to(dtype)
        if self.spec.jitter and key is not None:
            seed_device(x.device, key.site(self.layer, "router_input", self.coordinate))
            x = x * torch.empty_like(x).uniform_(1.0 - self.spec.jitter, 1.0 + self.spec.jitter)
        logits = F.linear(x, through(self.weight).to(dtype))
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        scores = scores_of(logits, self.spec)
        judged = scores.detach() if self.bias is None else scores.detach() + self.bias.detach()
        chosen = decided(lambda: choose(judged, self.spec))
        weights = probabilities(logits, scores, chosen, self.spec)
        if self.balance is not None:
            weights = self.balance.minimise(weights, logits, chosen, self.layer, self.spec, self._shares_before)
        if self.spec.capacity is not None:
            chosen = decided(lambda: self._taken(weights, chosen, documents))
        return weights, chosen

    @property
    def _shares_before(self) -> torch.Tensor | None:
        return None if self.shares is None else self.shares.detach()

    def _taken(self, weights: torch.Tensor, chosen: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """The choices without those that are dropped."""
        order = None if documents is None or documents.cut is None else documents.order_of_holders
        takes = taken(weights, chosen, self.spec, self.sequence_ranks, order)
        if self.balance is not None:
            self.balance.drop(self.layer, takes)
        return chosen.where(takes, self.spec.experts)


class ManyMLPs(nn.Module):
    """The experts of this rank: MLPs without biases, whose weights lie in one tensor each."""

    holds_experts = True
    """Marks the module for those that do not import it."""

    def __init__(self, scope: Scope, spec: MLPSpec) -> None:
        super().__init__()
        self.activation, self.gated = FUNCTIONS[spec.activation.name](spec), spec.activation.gated
        self.up, self.down = _Matrices(scope.child("up")), _Matrices(scope.child("down"))

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Map rows [n, h], of which each expert has so many, to the same shape (with several ETP ranks, to this one's summand)."""
        wide = self.up(rows, counts)
        return self.down(self.activation(wide.unflatten(-1, (2, -1)) if self.gated else wide), counts)


class _Matrices(nn.Module):
    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        scope.parameter(self, "weight")

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return grouped_linear(rows, self.weight, counts)


class Experts(nn.Module):
    """A router with its experts, of which this rank has some; and perhaps a shared expert, split over the tensor ranks."""

    def __init__(self, scope: Scope, spec: ExpertsSpec, layer: int, *, remakes_activation: bool = False) -> None:
        super().__init__()
        self.router = Router(scope.child("router"), spec.router, layer)
        self.experts = ManyMLPs(scope.child("experts"), spec.expert)
        self.shared = MLP(scope.child("shared"), spec.shared, remakes_activation=remakes_activation) if spec.shared else None
        self.shared_gate = _Gate(scope.child("shared_gate")) if spec.shared_gate else None
        self.dispatcher = Dispatcher.of(scope.context, spec.router.experts, gathers=scope.gathers_tokens)
        context = scope.context
        self.samples = len({context.topology.coordinates(rank)["dp"] for rank in context.expert_group.ranks})
        """How many microbatches the ranks that exchange tokens have between them."""

    def forward(self, x: torch.Tensor | Remade, documents: Documents | None = None, key: DropoutKey | None = None) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h] under sequence parallelism) to the same shape.

        Args:
            documents: they know which tokens each context rank holds.
            key: of random numbers; None in evaluation.
        """
        x = x.value if isinstance(x, Remade) else x
        weights, chosen = self.router(x, documents, key)
        apply: Apply = self.experts.forward if is_remade() else self.experts
        most = self.router.spec.taken(len(x) * self.router.sequence_ranks.size)
        if most is not None:
            most *= x.shape[1] * self.samples
            apply = partial(padded, apply, most) if self.router.spec.pads else apply
        y, shared = self.dispatcher.run(
            x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1), apply, lambda: self._of_shared(x), most
        )
        y = y.view_as(x)
        return y if shared is None else y + shared

    def _of_shared(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared is None:
            return None
        found: torch.Tensor = self.shared(x)
        return found if self.shared_gate is None else found * self.shared_gate(x)


class _Gate(nn.Module):
    """The sigmoid of a product of each token: [s, b, h] to [s, b, 1]."""

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        scope.parameter(self, "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, through(self.weight)).sigmoid()
