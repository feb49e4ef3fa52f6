"""Update rules that see each element by itself: AdamW, SGD, Lion and AdEMAMix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.rule import Lists, Target, Update, Updater, UpdateRule, by_torch, fused, param_groups
from megatron.parallel.context import ParallelContext


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig) -> None:
        self._apex = config.use_apex

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        if self._apex:
            return by_torch(targets, _apex("FusedAdam")(param_groups(targets), adam_w_mode=True, lr=0.0))
        return fused(targets, self.moments, self._kernel)

    def _kernel(self, lists: Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Update by torch's fused AdamW, which takes the number of the update for each tensor, from its device."""
        number = update.scalar(float(update.number), lists.main_params[0].device)
        first, second = lists.moments
        torch._fused_adamw_(
            lists.main_params,
            lists.grads,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=[number] * len(lists.main_params),
            lr=update.rate(lists.group),
            beta1=lists.group.betas[0],
            beta2=lists.group.betas[1],
            weight_decay=update.decay(lists.group),
            eps=lists.group.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )


class SGD(UpdateRule):
    """Gradient descent with momentum. The weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum, self._apex = config.sgd_momentum, config.use_apex
        self.moments = ("momentum_buffer",) if config.sgd_momentum else ()

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        if self._apex:
            return by_torch(targets, _apex("FusedSGD")(param_groups(targets), lr=0.0, momentum=self._momentum))
        return fused(targets, self.moments, self._kernel)

    def _kernel(self, lists: Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Update by torch's fused SGD. At the first update the momentum is zero, so no case of its own is needed."""
        torch._fused_sgd_(
            lists.main_params,
            lists.grads,
            lists.moments[0] if lists.moments else [],
            weight_decay=update.decay(lists.group),
            momentum=self._momentum,
            lr=update.rate(lists.group),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=grad_scale,
        )


def _apex(name: str) -> Any:
    try:
        from apex import optimizers
    except ImportError as error:
        raise ValueError(
            "--use-apex, but NVIDIA apex is not installed (the package named apex on the Python index is another project). "
            "Leave the flag out: torch's fused optimizers do the same."
        ) from error
    return getattr(optimizers, name)
