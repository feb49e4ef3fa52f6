"""LAMB (You et al. 2020, algorithm 2): AdamW's update of each matrix, made as long as the matrix is, times the learning rate.

With u = m / (sqrt(v) + eps) + decay * weights, m and v without their bias, the update is rate * |weights| / |u| * u; where one of
the two norms is zero it is rate * u. As in the paper's code, biases and the weights of norms are updated by AdamW. Several matrices
in one parameter are matrices of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.optimizer.matrices import add_squares, counted_parts, parts_of, unit_dims, units_of
from megatron.optimizer.rule import Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import Rounds, Statistic
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam


class Lamb(UpdateRule):
    """See above. Betas and eps are those of the parameter's group."""

    elementwise = False
    moments = ("exp_avg", "exp_avg_sq")

    def statistics(self, param: DividedParam, context: ParallelContext) -> Rounds:
        """See `UpdateRule`."""
        units = units_of(param.record)
        return ([Statistic("weights", units), Statistic("updates", units)],)

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        parts = [(parts_of(target, context), counted_parts(target, context)) for target in targets]

        def step(update: Update) -> Iterator[None]:
            for target, (_, counted) in zip(targets, parts, strict=True):
                _to_update(target, update)
                dims = unit_dims(target.record)
                add_squares(target.whole["weights"], target.main, counted, dims)
                add_squares(target.whole["updates"], target.grad, counted, dims)
            yield
            for target, (own, _) in zip(targets, parts, strict=True):
                weights, updates = target.whole["weights"], target.whole["updates"]
                both = (weights > 0) & (updates > 0)
                ratio = torch.where(both, weights / updates, 1.0).sqrt_().mul_(update.rate(target.group)).to(target.main.device)
                dims = unit_dims(target.record)
                for part in own:
                    scale = ratio[part.units(dims)][(..., *(None for _ in range(dims)))]
                    part.of(target.main).sub_(part.of(target.grad).mul_(scale))

        return step


def _to_update(target: Target, update: Update) -> None:
    """Take the gradient into the moments, and put u in its place."""
    (beta1, beta2), grad = target.group.betas, target.grad.mul_(update.factor)
    first, second = (target.moments[name] for name in Lamb.moments)
    first.lerp_(grad, 1.0 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    root = second.div(1.0 - beta2**update.number).sqrt_().add_(target.group.eps)
    torch.div(first, root, out=grad).div_(1.0 - beta1**update.number)
    grad.add_(target.main, alpha=update.decay(target.group))
