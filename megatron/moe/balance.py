"""What the routers of a rank tell of a step, and the losses that balance them (docs/moe.md, "Balance").

Shapes: `s` tokens of a sequence on this rank, `b` microbatch, `k` experts of a token, `E` experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.memory.recompute import decided, is_remade
from megatron.moe.choice import balance_scores
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Group
from megatron.spec.mlps import RouterSpec, has_experts


@dataclass(frozen=True)
class BalanceResult:
    """How evenly a step's tokens were spread over the experts: of the global batch."""

    loss: float
    """The load-balancing loss, a mean over the layers with experts, without its coefficient."""
    z_loss: float
    """The routers' z-loss, such a mean too."""
    busiest: dict[int, float]
    """For each layer with experts, the choices of its busiest expert over the mean of all."""

    @property
    def worst(self) -> float:
        """The largest of these."""
        return max(self.busiest.values())


class Balance:
    """Collects the choices of this rank's routers over the microbatches of a step.

    Args:
        sequence_ranks: those that share each sequence.
    """

    def __init__(self, model: ModelConfig, sequence_ranks: Group, device: torch.device) -> None:
        assert model.num_experts is not None
        self.layers = [layer for layer in range(model.num_layers) if has_experts(model, layer)]
        self._sequence_ranks, self._experts = sequence_ranks, model.num_experts
        self.found = torch.zeros(model.num_layers, model.num_experts + 2, dtype=torch.float64, device=device)
        """For each layer the choices of each expert, the load-balancing loss and the z-loss, as far as this rank has them."""
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
        self, weights: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor, layer: int, spec: RouterSpec
    ) -> torch.Tensor:
        """Take the choices of a microbatch, and let its losses be minimised with what is made of the weights.

        Args:
            weights: [s, b, k], returned as they are.
            logits: [s, b, E], in at least float32.
            chosen: [s, b, k].
        """
        if self._scale is None:
            return weights
        counts = decided(lambda: self._counts(chosen, layer, spec))
        tokens = logits[..., 0].numel() * self._sequence_ranks.size
        if spec.balancing == "aux_loss":
            shares = counts.sum(0) / (spec.chosen * tokens)
        else:
            shares = counts * len(counts) / (spec.chosen * tokens)
        balance = (balance_scores(logits, spec) * shares.to(logits.dtype)).sum() * (spec.experts / tokens)
        z = logits.logsumexp(-1).square().sum() / tokens
        if not is_remade():
            self.found[layer, -2:] += torch.stack([balance, z]).detach()
        if spec.balancing != "none" and spec.balance_coeff:
            weights = _Minimised.apply(weights, balance, spec.balance_coeff * self._scale)
        return _Minimised.apply(weights, z, spec.z_coeff * self._scale) if spec.z_coeff else weights

    def _counts(self, chosen: torch.Tensor, layer: int, spec: RouterSpec) -> torch.Tensor:
        """The choices of each expert in each whole sequence of a microbatch [b, E], float64."""
        flat = chosen.transpose(0, 1).flatten(1)
        counts = self.found.new_zeros(len(flat), spec.experts)
        counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=counts.dtype))
        self.found[layer, :-2] += counts.sum(0)
        return all_reduce(counts, self._sequence_ranks)

    def summed(self, world: Group, microbatches: int) -> torch.Tensor:
        """What all ranks have found in a step of so many microbatches altogether, on the device: the numbers of `result`."""
        found = all_reduce(self.found, world)[self.layers]
        counts, losses = found[:, :-2], (found[:, -2:] / microbatches).mean(0)
        return torch.cat([losses, counts.amax(1) / counts.mean(1)])

    def result(self, numbers: Sequence[float]) -> BalanceResult:
        """The numbers of `summed` by their names."""
        return BalanceResult(numbers[0], numbers[1], dict(zip(self.layers, numbers[2:], strict=True)))


class _Minimised(torch.autograd.Function):
    """Forward: the input. Backward: its gradient as it comes, and that of a loss, which is a scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None
