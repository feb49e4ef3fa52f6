"""Masked cross entropy over a vocabulary that is split over the tensor group. No rank ever holds the full logits.

The result is the sum over tokens of mask x loss, with loss = log(sum_v exp(logit_v)) - logit_target. Each rank reduces its own
columns; three numbers a token travel (maximum, sum of exponentials, target logit). The gradient, mask x (softmax - one-hot), is
written over the logits already in forward, in their dtype, so no second tensor of that size exists. Everything is computed in at
least float32, in blocks of rows that fit a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Group

_BLOCK_ELEMENTS = 1 << 21
# float16 has no number between 0 and 6e-8, where most of a softmax lies: there softmax - onehot is kept times this (exact: a power
# of two).
_HALF_HEADROOM = 1024.0


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, group: Group, first: int, num_valid: int
    ) -> torch.Tensor:
        columns = logits.shape[-1]
        rows = logits.view(-1, columns)
        wide = torch.promote_types(logits.dtype, torch.float32)
        local = labels.reshape(-1) - first
        here = (local >= 0) & (local < num_valid)
        local = local.masked_fill(~here, 0).unsqueeze(-1)
        if num_valid < columns:
            rows[:, num_valid:] = torch.finfo(logits.dtype).min  # padding: exp() of it is exactly 0 beside any real logit
        blocks = [slice(i, i + max(1, _BLOCK_ELEMENTS // columns)) for i in range(0, len(rows), max(1, _BLOCK_ELEMENTS // columns))]

        log_sum = torch.empty(len(rows), dtype=wide, device=logits.device)
        for block in blocks:
            torch.logsumexp(rows[block].to(wide), -1, out=log_sum[block])
        target = rows.gather(-1, local).squeeze(-1).to(wide).masked_fill(~here, 0.0)
        if group.size > 1:
            largest = all_reduce(log_sum.clone(), group, dist.ReduceOp.MAX)
            sums = all_reduce(torch.stack([torch.exp(log_sum - largest), target]), group)
            log_sum, target = largest + sums[0].log(), sums[1]

        mask = mask.reshape(-1).to(wide)
        if not ctx.needs_input_grad[0]:  # evaluation
            return torch.dot(log_sum - target, mask)
        gradient_factor = mask * _HALF_HEADROOM if logits.dtype == torch.float16 else mask
        for block in blocks:
            part = rows[block]
            softmax = part if part.dtype == wide else part.to(wide)
            softmax.sub_(log_sum[block].unsqueeze(-1)).exp_()
            softmax.scatter_add_(-1, local[block], -here[block].unsqueeze(-1).to(wide))
            softmax.mul_(gradient_factor[block].unsqueeze(-1))
            if softmax is not part:
                part.copy_(softmax)
        ctx.save_for_backward(logits)
        return torch.dot(log_sum - target, mask)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        if gradient.dtype == torch.float16:
            grad = grad / _HALF_HEADROOM
        # CUDA kernels round a scalar operand to the tensor's dtype (CPU kernels do not); one of one element is promoted.
        factor = grad if gradient.device.type == "cpu" else grad.view(1)
        # In place, since nobody else reads it: the logits were an intermediate result of ours.
        return gradient.mul_(factor), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    group: Group,
    *,
    first: int = 0,
    num_valid: int | None = None,
) -> torch.Tensor:
    """Sum over tokens of mask x loss; overwrites `logits`.

    Args:
        logits: this rank's columns [s, b, v/n], contiguous; destroyed.
        labels: token ids [s, b] in the whole vocabulary.
        mask: weight of each token's loss [s, b].
        group: the tensor group.
        first: id of this rank's first column.
        num_valid: columns of this rank that are no padding (perhaps 0); by default all.

    Returns:
        a scalar, in float32 or wider, the same on every rank of the group.
    """
    num_valid = logits.shape[-1] if num_valid is None else num_valid
    return _VocabParallelCrossEntropy.apply(logits, labels, mask, group, first, num_valid)
