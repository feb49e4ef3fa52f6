"""The update rules by the value of --optimizer, and which parameters each of them gets. AdamW is in `rule.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.config.flags import flag_for
from megatron.config.imports import named
from megatron.config.training import OptimizerConfig
from megatron.optimizer.rule import (
    AdamW,
    Lists,
    Target,
    Update,
    Updater,
    UpdateRule,
    apex_optimizer,
    by_torch,
    fused,
    param_groups,
    scaled,
)
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.torch_private import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div,
    foreach_div_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
    foreach_sqrt_,
    fused_sgd_,
)
from megatron.spec.activations import add_choice
from megatron.spec.groups import groups_of

# ---- Update rules that see each element by itself: SGD, Lion and AdEMAMix.


class CountsRule(UpdateRule):
    """Moves what choices of experts move (`ByCounts`), by what `Balance.gradient` gives. There is no rate, decay or clipping."""

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""

        def move(update: Update) -> None:
            for target in targets:
                assert target.record.by_counts is not None
                step = target.record.by_counts.step
                if step is None:
                    torch.add(target.grad, 1.0, out=target.main)
                else:
                    target.main.sub_(target.grad.sign(), alpha=step)

        return move


class SGD(UpdateRule):
    """Gradient descent with momentum. The weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum, self._apex = config.sgd_momentum, config.use_apex
        self.moments = ("momentum_buffer",) if config.sgd_momentum else ()

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        if self._apex:
            return by_torch(targets, apex_optimizer("FusedSGD")(param_groups(targets), lr=0.0, momentum=self._momentum))
        return fused(targets, self.moments, self._kernel)

    def _kernel(self, lists: Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Update by torch's fused SGD. At the first update the momentum is zero, so no case of its own is needed."""
        fused_sgd_(
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


class Lion(UpdateRule):
    """The sign of an average of momentum and gradient (Chen et al. 2023, algorithm 2), with decoupled weight decay."""

    moments = ("exp_avg",)

    def __init__(self, config: OptimizerConfig) -> None:
        self._betas = config.lion_beta1, config.lion_beta2

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        return scaled(targets, self.moments, self._kernel)

    def _kernel(self, lists: Lists, update: Update) -> None:
        rate, (momentum,) = update.rate(lists.group), lists.moments
        signs = foreach_lerp(momentum, lists.grads, 1.0 - self._betas[0])
        foreach_sign_(signs)
        foreach_lerp_(momentum, lists.grads, 1.0 - self._betas[1])
        foreach_mul_(lists.main_params, 1.0 - rate * update.decay(lists.group))
        foreach_add_(lists.main_params, signs, alpha=-rate)


class AdEMAMix(UpdateRule):
    """AdamW with a second, slow average of gradients (Pagliardini et al. 2024, algorithm 1).

    The update is (m / (1 - beta1^t) + alpha slow) / (sqrt(v / (1 - beta2^t)) + eps). Over a warm-up alpha grows linearly from 0,
    and the decay rate of the slow average from beta1 to beta3, so that its half-life, ln(1/2) / ln(rate), grows linearly.
    """

    moments = ("exp_avg", "exp_avg_sq", "exp_avg_slow")

    def __init__(self, config: OptimizerConfig) -> None:
        self._beta3, self._alpha = config.ademamix_beta3, config.ademamix_alpha
        self._warmup = config.ademamix_warmup_iters or 0

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        return scaled(targets, self.moments, self._kernel)

    def _kernel(self, lists: Lists, update: Update) -> None:
        rate, (beta1, beta2), number = update.rate(lists.group), lists.group.betas, update.number
        (fast, second, slow), grads = lists.moments, lists.grads
        alpha, beta3 = self._slow_at(number, beta1)
        foreach_lerp_(fast, grads, 1.0 - beta1)
        foreach_lerp_(slow, grads, 1.0 - beta3)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grads, grads, value=1.0 - beta2)
        foreach_copy_(grads, second)  # the gradient has served: its place takes the denominator
        foreach_div_(grads, 1.0 - beta2**number)
        foreach_sqrt_(grads)
        foreach_add_(grads, lists.group.eps)
        steps = foreach_div(fast, 1.0 - beta1**number)
        foreach_add_(steps, slow, alpha=alpha)
        foreach_mul_(lists.main_params, 1.0 - rate * update.decay(lists.group))
        foreach_addcdiv_(lists.main_params, steps, grads, value=-rate)

    def _slow_at(self, number: int, beta1: float) -> tuple[float, float]:
        """Weight of the slow average in an update, and its decay rate."""
        if number >= self._warmup:
            return self._alpha, self._beta3
        way = number / self._warmup
        if not beta1:  # whose half-life is zero
            return way * self._alpha, self._beta3 ** (1.0 / way)
        first, last = math.log(beta1), math.log(self._beta3)
        return way * self._alpha, math.exp(first * last / ((1.0 - way) * last + way * first))


RuleOf = Callable[[ParamRecord], UpdateRule]
"""Gives the rule that updates a parameter."""


def for_all(rule: UpdateRule) -> RuleOf:
    """Use one rule for every parameter."""
    return lambda record: rule


def vectors_by(of_vectors: UpdateRule, others: UpdateRule) -> RuleOf:
    """Use one rule for biases and the weights of norms, another for matrices and tables."""
    return lambda record: of_vectors if record.kind == "vector" else others


RULES: dict[str, Callable[[OptimizerConfig], RuleOf]] = {
    "adam": lambda config: for_all(AdamW(config)),
    "sgd": lambda config: for_all(SGD(config)),
    "lion": lambda config: for_all(Lion(config)),
    "ademamix": lambda config: for_all(AdEMAMix(config)),
    "adafactor": lambda config: for_all(named("megatron.optimizer.adafactor:Adafactor")(config)),
    "adam8bit": lambda config: vectors_by(AdamW(config), named("megatron.optimizer.eight_bits:EightBitAdamW")(config)),
    "lamb": lambda config: vectors_by(AdamW(config), named("megatron.optimizer.lamb:Lamb")()),
    "muon": lambda config: for_all(named("megatron.optimizer.muon:Muon")(config)),
}
"""The rules by the value of --optimizer, or of a group's."""


def register_optimizer(name: str, make: Callable[[OptimizerConfig], UpdateRule | RuleOf], *, reads: Iterable[str] = ()) -> None:
    """Add an update rule of the user's own, for `--optimizer NAME`.

    Args:
        make: makes the rule of all parameters, or what gives each parameter its rule, for a run with these settings.
        reads: settings of other optimizers that act with this one too, by their fields: `adam_beta1`.

    Raises:
        ValueError: the name is taken, or cannot stand in a command line.
    """
    add_choice("optimizer", name, flag_for("optimizer").built_in, reads)

    def rule_of(config: OptimizerConfig) -> RuleOf:
        made = make(config)
        return for_all(made) if isinstance(made, UpdateRule) else made

    RULES[name] = rule_of


def rules_of(config: OptimizerConfig) -> RuleOf:
    """The rule of each parameter in a run with these settings: that of its group.

    It raises a ValueError where no module has registered it.
    """
    group_of = groups_of(config)
    made: dict[str, RuleOf] = {}
    by_counts = CountsRule()

    def rule_of(record: ParamRecord) -> UpdateRule:
        if record.by_counts is not None:
            return by_counts
        optimizer = group_of(record).optimizer
        if optimizer not in RULES:
            raise ValueError(f"--optimizer {optimizer} is registered by no module here: name the one that does by --imports")
        if optimizer not in made:
            made[optimizer] = RULES[optimizer](config)
        return made[optimizer](record)

    return rule_of
