"""LAMB (You et al. 2020, algorithm 2): the update of each matrix is AdamW's, scaled to the norm of the matrix times the learning
rate.

With u = m / (sqrt(v) + eps) + decay * weights, where m and v are bias-corrected, the update is rate * |weights| / |u| * u. If one
of the two norms is zero, the update is rate * u. As in the paper's code, AdamW updates biases and the weights of norms. If a
parameter holds several matrices, each has its own norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.optimizer.matrices import add_squared_norms, count_unit_dims, get_units_shape, slice_norm_range, slice_target
from megatron.optimizer.rule import Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import Statistic, StatisticsRounds
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition


class Lamb(UpdateRule):
    """LAMB update rule, for matrices and embedding tables. Betas and eps are those of the parameter group."""

    elementwise = False
    moments = ("exp_avg", "exp_avg_sq")

    def statistics(self, param: ParamPartition, context: ParallelContext) -> StatisticsRounds:
        """Return the sums over a full parameter that an update needs: squared norms of the weights and of the update, for each
        matrix or vector of the parameter."""
        units = get_units_shape(param.record)
        return ([Statistic("weights", units), Statistic("updates", units)],)

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters with their gradients and moments) in place."""
        slices = [(slice_target(target, context), slice_norm_range(target, context)) for target in targets]

        def step(update: Update) -> Iterator[None]:
            for target, (_, norm_slices) in zip(targets, slices, strict=True):
                _compute_update(target, update)
                dims = count_unit_dims(target.record)
                add_squared_norms(target.statistics["weights"], target.main, norm_slices, dims)
                add_squared_norms(target.statistics["updates"], target.grad, norm_slices, dims)
            yield
            for target, (target_slices, _) in zip(targets, slices, strict=True):
                weights, updates = target.statistics["weights"], target.statistics["updates"]
                has_both_norms = (weights > 0) & (updates > 0)
                ratio = (
                    torch.where(has_both_norms, weights / updates, 1.0)
                    .sqrt_()
                    .mul_(update.rate(target.group))
                    .to(target.main.device)
                )
                dims = count_unit_dims(target.record)
                for target_slice in target_slices:
                    scale = ratio[target_slice.get_unit_index(dims)][(..., *(None for _ in range(dims)))]
                    target_slice.of(target.main).sub_(target_slice.of(target.grad).mul_(scale))

        return step


def _compute_update(target: Target, update: Update) -> None:
    """Update the moments of a target (main parameter with its gradient and moments). Overwrite the gradient with u = m / (sqrt(v) +
    eps) + decay * weights."""
    (beta1, beta2), grad = target.group.betas, target.grad.mul_(update.grad_factor)
    first, second = (target.moments[name] for name in Lamb.moments)
    first.lerp_(grad, 1.0 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    root = second.div(1.0 - beta2**update.step).sqrt_().add_(target.group.eps)
    torch.div(first, root, out=grad).div_(1.0 - beta1**update.step)
    grad.add_(target.main, alpha=update.decay(target.group))
