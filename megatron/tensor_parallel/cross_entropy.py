"""Masked cross entropy over a vocabulary that is split over the tensor group. No rank ever holds the full logits.

The loss of a token is log Z - logit_target, with Z = sum_v exp(logit_v). Each rank reduces its own columns; three numbers a token
travel (maximum, sum of exponentials, target logit). Everything is computed in at least float32, in blocks of rows that fit a cache.

A z-loss may stand beside it: coefficient x (log Z)^2 for each token, which keeps log Z near 0 (Chowdhery et al. 2022, section 5).
Together their gradient is mask x (softmax x (1 + 2 x coefficient x log Z) - one-hot).

Here the logits of a microbatch are there as a whole. `chunked_loss.py` makes the same of these parts, a chunk of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Group

_BLOCK_ELEMENTS = 1 << 21
# float16 has no number between 0 and 6e-8, where most of a softmax lies: there softmax - onehot is kept times this (exact: a power
# of two).
_HALF_HEADROOM = 1024.0


@dataclass(frozen=True)
class Columns:
    """The part of the vocabulary that a rank has, and what the loss is."""

    group: Group
    """The tensor group."""
    first: int
    """Id of the first column."""
    num_valid: int
    """Columns that are no padding (perhaps 0)."""
    z_coeff: float = 0.0
    """Coefficient of the z-loss; 0 for none."""


class Targets:
    """Where the labels of some tokens lie among a rank's columns.

    Args:
        labels: ids [t] in the whole vocabulary.
    """

    def __init__(self, labels: torch.Tensor, columns: Columns) -> None:
        local = labels - columns.first
        self.here = (local >= 0) & (local < columns.num_valid)
        self.local = local.masked_fill(~self.here, 0)

    def reduce(self, logits: torch.Tensor, columns: Columns, place: slice, log_sum: torch.Tensor, target: torch.Tensor) -> None:
        """Write log(sum(exp)) over the rank's columns, and the label's logit or 0.

        Args:
            logits: [t, v/n] of the tokens at `place`; padding is set so low that it counts as exactly nothing.
            log_sum: [t] of these tokens, as `target`.
        """
        if columns.num_valid < logits.shape[-1]:
            logits[:, columns.num_valid :] = torch.finfo(logits.dtype).min  # exp() of it is exactly 0 beside any real logit
        for block in _blocks(logits):
            torch.logsumexp(logits[block].to(log_sum.dtype), -1, out=log_sum[block])
        own = logits.gather(-1, self.local[place].unsqueeze(-1)).squeeze(-1)
        target.copy_(own).masked_fill_(~self.here[place], 0.0)

    def write_gradient(
        self, logits: torch.Tensor, columns: Columns, place: slice, log_z: torch.Tensor, factor: torch.Tensor
    ) -> None:
        """Overwrite logits by factor x the gradient of their losses, in their dtype. Padding must have been set low.

        Args:
            logits: [t, v/n] of the tokens at `place`.
            log_z: [t] of these tokens, as `factor`.
        """
        local, here = self.local[place].unsqueeze(-1), self.here[place].unsqueeze(-1)
        for block in _blocks(logits):
            part = logits[block]
            softmax = part if part.dtype == log_z.dtype else part.to(log_z.dtype)
            softmax.sub_(log_z[block].unsqueeze(-1)).exp_()
            if columns.z_coeff:
                softmax.mul_((1.0 + 2.0 * columns.z_coeff * log_z[block]).unsqueeze(-1))
            softmax.scatter_add_(-1, local[block], -here[block].to(softmax.dtype))
            softmax.mul_(factor[block].unsqueeze(-1))
            if softmax is not part:
                part.copy_(softmax)


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // rows.shape[-1])
    return (slice(start, start + size) for start in range(0, len(rows), size))


def joined(log_sum: torch.Tensor, target: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """log Z and the target's logit [t] over the whole vocabulary, from those of each rank's columns: one reduction by MAX, one by
    SUM."""
    if group.size == 1:
        return log_sum, target
    largest = all_reduce(log_sum.clone(), group, dist.ReduceOp.MAX)
    sums = all_reduce(torch.stack([torch.exp(log_sum - largest), target]), group)
    return largest + sums[0].log(), sums[1]


def loss_sums(log_z: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, z_coeff: float) -> torch.Tensor:
    """Sum over tokens of mask x loss, a scalar; with a z-loss [2], that sum and the one of the z-loss."""
    cross_entropy = torch.dot(log_z - target, mask)
    if not z_coeff:
        return cross_entropy
    return torch.stack([cross_entropy, z_coeff * torch.dot(log_z.square(), mask)])


def minimised(sums: torch.Tensor) -> torch.Tensor:
    """What a backward begins with, a scalar, from `loss_sums`."""
    return sums.sum() if sums.dim() else sums


def one_factor(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of `minimised`, a scalar, from that of `loss_sums`, all of whose elements have the same."""
    return grad[0] if grad.dim() else grad


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, columns: Columns
    ) -> torch.Tensor:
        rows = logits.view(-1, logits.shape[-1])
        wide = torch.promote_types(logits.dtype, torch.float32)
        targets, everywhere = Targets(labels.reshape(-1), columns), slice(None)
        log_sum, target = torch.empty(2, len(rows), dtype=wide, device=logits.device)
        targets.reduce(rows, columns, everywhere, log_sum, target)
        log_z, target = joined(log_sum, target, columns.group)
        mask = mask.reshape(-1).to(wide)
        if ctx.needs_input_grad[0]:  # not in evaluation
            factor = mask * _HALF_HEADROOM if logits.dtype == torch.float16 else mask
            targets.write_gradient(rows, columns, everywhere, log_z, factor)
            ctx.save_for_backward(logits)
        return loss_sums(log_z, target, mask, columns.z_coeff)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        grad = one_factor(grad)
        if gradient.dtype == torch.float16:
            grad = grad / _HALF_HEADROOM
        # CUDA kernels round a scalar operand to the tensor's dtype (CPU kernels do not); one of one element is promoted.
        factor = grad if gradient.device.type == "cpu" else grad.view(1)
        # In place, since nobody else reads it: the logits were an intermediate result of ours.
        return gradient.mul_(factor), None, None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Sum over tokens of mask x loss. The gradient is written over the logits already in forward, in their dtype, so no second
    tensor of that size exists.

    Args:
        logits: this rank's columns [s, b, v/n], contiguous; destroyed.
        labels: token ids [s, b] in the whole vocabulary.
        mask: weight of each token's loss [s, b].

    Returns:
        see `loss_sums`; in float32 or wider, the same on every rank of the group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, mask, columns)
