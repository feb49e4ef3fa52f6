"""What the routers of a rank tell of a step, and the losses that balance them (docs/moe.md, "Balance").

Shapes: `s` tokens of a sequence on this rank, `b` microbatch, `k` experts of a token, `E` experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.memory.recompute import decided, is_remade
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Group
from megatron.parallel.params import ParamRecord
from megatron.spec.mlps import RouterSpec, has_experts
from megatron.spec.weights import depth_of, in_layer

# ---- Which experts a token passes, and with what probabilities (docs/moe.md, "What is computed").
#
# Shapes: `t` tokens (any leading dimensions), `E` experts, `k` chosen ones, `G` groups of experts.


def scores_of(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """What experts are chosen by [t, E], of the logits."""
    if spec.score_function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if spec.pre_softmax else logits


def choose(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The numbers of the experts with the best scores, int64 [t, k], the best first; of equal ones the lower number first."""
    if spec.groups > 1:
        scores = scores.masked_fill(~_open(scores, spec), -torch.inf)
    return _best(scores, spec.chosen)


def _open(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Which experts are in a group that is open to the token: bool [t, E]."""
    groups = scores.unflatten(-1, (spec.groups, -1))  # [t, G, E/G]
    of_groups = groups.topk(spec.chosen // spec.open_groups, sorted=False).values.sum(-1)
    is_open = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, _best(of_groups, spec.open_groups), True)
    return is_open.unsqueeze(-1).expand_as(groups).flatten(-2)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the best of the last dimension. (torch.topk says nothing of ties.)"""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def probabilities(logits: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The probabilities [t, k] of the chosen experts."""
    if spec.score_function == "softmax" and not spec.pre_softmax:
        found = logits.gather(-1, chosen).softmax(-1)
    else:
        found = scores.gather(-1, chosen)
        if spec.score_function == "sigmoid" and spec.chosen > 1:
            found = found / (found.sum(-1, keepdim=True) + _LITTLE)
    return found if spec.scaling == 1.0 else found * spec.scaling


_LITTLE = 1e-20
"""Added to sums of sigmoids, as DeepSeek-V3 and Megatron-LM do."""


def balance_scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The scores [t, E] of which the load-balancing loss is made: they sum to 1."""
    if spec.score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + _LITTLE)


@dataclass(frozen=True)
class BalanceResult:
    """How evenly a step's tokens were spread over the experts: of the global batch."""

    loss: float
    """The load-balancing loss, a mean over the layers with experts, without its coefficient."""
    z_loss: float
    """The routers' z-loss, such a mean too."""
    dropped: float | None
    """The share of the choices that experts did not take, such a mean too; None where they take all."""
    busiest: dict[str, float]
    """For each layer with experts ("layers.3", "mtp.0"), the choices of its busiest expert over the mean of all."""

    @property
    def worst(self) -> float:
        """The largest of these."""
        return max(self.busiest.values())

    @staticmethod
    def log_values(results: Sequence[BalanceResult]) -> dict[str, float]:
        """Return the means and maxima over some steps, at least one, by the names of the metrics file."""
        count, first = len(results), results[0]
        layers = {layer: math.fsum(one.busiest[layer] for one in results) / count for layer in first.busiest}
        return {
            "load_balancing_loss": math.fsum(one.loss for one in results) / count,
            "moe_z_loss": math.fsum(one.z_loss for one in results) / count,
            "busiest_expert": max(one.worst for one in results),
            **({} if first.dropped is None else {"dropped_share": math.fsum(one.dropped or 0.0 for one in results) / count}),
            **{f"busiest_expert/{layer}": value for layer, value in layers.items()},
        }


class Balance:
    """Collects the choices of this rank's routers over the microbatches of a step.

    Args:
        sequence_ranks: those that share each sequence.
    """

    def __init__(self, model: ModelConfig, sequence_ranks: Group, device: torch.device) -> None:
        assert model.num_experts is not None
        places = [has_experts(model, layer) for layer in range(model.num_layers)]
        places += places[-1:] * model.mtp_num_layers
        self._num_layers, self.layers = model.num_layers, [place for place, experts in enumerate(places) if experts]
        """The layers with experts; depths of multi-token prediction have numbers behind those of the model."""
        self._sequence_ranks, self._drops = sequence_ranks, model.moe_expert_capacity_factor is not None
        self.found = torch.zeros(len(places), model.num_experts + 3, dtype=torch.float64, device=device)
        """For each layer the choices of each expert, the load-balancing loss, the z-loss and the dropped choices, as far as this
        rank has them."""
        self._rows = torch.tensor(self.layers, device=device)
        self._counts: torch.Tensor | None = None
        """The choices of each expert in the global batch of the last step, once they are summed: [layers, E]."""
        self._scale: float | None = None

    @contextlib.contextmanager
    def watching(self, scale: float) -> Iterator[None]:
        """Begin anew, and take what runs inside; outside, as in evaluations, nothing is taken and no loss minimised.

        Args:
            scale: what the losses of a microbatch are multiplied by where they are minimised.
        """
        self.found.zero_()
        self._scale = scale
        try:
            yield
        finally:
            self._scale = None

    def minimise(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        layer: int,
        spec: RouterSpec,
        shares_before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take the choices of a microbatch, and let its losses be minimised with what is made of the weights.

        Args:
            weights: [s, b, k], returned as they are.
            logits: [s, b, E], in at least float32.
            chosen: [s, b, k].
            shares_before: the shares of the experts in the update before, over the mean: [E].
        """
        if self._scale is None:
            return weights
        counts = decided(lambda: self._count(chosen, layer, spec))
        tokens = logits[..., 0].numel() * self._sequence_ranks.size
        if shares_before is not None:
            shares = shares_before / spec.experts
        elif spec.balancing == "aux_loss":
            shares = counts.sum(0) / (spec.chosen * tokens)
        else:
            shares = counts * len(counts) / (spec.chosen * tokens)
        balance = (balance_scores(logits, spec) * shares.to(logits.dtype)).sum() * (spec.experts / tokens)
        z = logits.logsumexp(-1).square().sum() / tokens
        if not is_remade():
            self.found[layer, -3:-1] += torch.stack([balance, z]).detach()
        if spec.balancing != "none" and spec.balance_coeff:
            weights = _Minimised.apply(weights, balance, spec.balance_coeff * self._scale)
        return _Minimised.apply(weights, z, spec.z_coeff * self._scale) if spec.z_coeff else weights

    def drop(self, layer: int, takes: torch.Tensor) -> None:
        """Take which of a microbatch's choices experts take, bool [s, b, k]."""
        if self._scale is not None:
            self.found[layer, -1] += takes.logical_not().sum()

    def _count(self, chosen: torch.Tensor, layer: int, spec: RouterSpec) -> torch.Tensor:
        """The choices of each expert in each whole sequence of a microbatch [b, E], float64."""
        flat = chosen.transpose(0, 1).flatten(1)
        counts = self.found.new_zeros(len(flat), spec.experts)
        counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=counts.dtype))
        self.found[layer, :-3] += counts.sum(0)
        return all_reduce(counts, self._sequence_ranks)

    def summed(self, world: Group, microbatches: int) -> torch.Tensor:
        """What all ranks have found in a step of so many microbatches altogether, on the device: the numbers of `result`."""
        whole = all_reduce(self.found, world)
        self._counts, found = whole[:, :-3], whole.index_select(0, self._rows)
        counts, losses = found[:, :-3], (found[:, -3:-1] / microbatches).mean(0)
        return torch.cat([losses, (found[:, -1] / counts.sum(1)).mean(0, keepdim=True), counts.amax(1) / counts.mean(1)])

    def gradient(self, record: ParamRecord) -> torch.Tensor:
        """What stands for the gradient of a vector that counts move (`ByCounts`), once they are summed: the choices of each expert
        over the mean, less 1, [E]."""
        (layer, _), depth = in_layer(record.name), depth_of(record.name)
        place = layer if depth is None else self._num_layers + depth
        assert self._counts is not None and place is not None
        counts, total = self._counts[place], self._counts[place].sum()
        return (counts * len(counts) - total) / total  # whole numbers: exactly 0 at the mean, which CUDA's mean may round

    @property
    def num_results(self) -> int:
        """How many numbers `summed` gives."""
        return 3 + len(self.layers)

    def result(self, numbers: Sequence[float]) -> BalanceResult:
        """The numbers of `summed` by their names."""
        loss, z_loss, dropped = numbers[:3]
        busiest = {self._name(place): number for place, number in zip(self.layers, numbers[3:], strict=True)}
        return BalanceResult(loss, z_loss, dropped if self._drops else None, busiest)

    def _name(self, place: int) -> str:
        return f"layers.{place}" if place < self._num_layers else f"mtp.{place - self._num_layers}"


class _Minimised(torch.autograd.Function):
    """Forward: the input. Backward: its gradient as it comes, and that of a loss, which is a scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None
