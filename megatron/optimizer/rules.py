"""Table of update rules by the value of --optimizer, and the choice of the rule for each parameter. AdamW is in `rule.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.config.flags import get_flag
from megatron.config.imports import import_object
from megatron.config.training import OptimizerConfig
from megatron.optimizer.rule import (
    AdamW,
    Target,
    TensorLists,
    Update,
    Updater,
    UpdateRule,
    build_param_groups,
    fused,
    load_apex_optimizer,
    scaled,
    wrap_torch_optimizer,
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
from megatron.spec.groups import build_group_lookup

# ---- Elementwise update rules: SGD, Lion and AdEMAMix.


class ExpertCountsRule(UpdateRule):
    """Update rule for vectors that are updated from the number of tokens per expert instead of a gradient, such as the router's
    expert bias.

    `CountUpdate` defines the update, and `RouterTracker.compute_excess_load` provides the load of each expert. Learning rate,
    weight decay and clipping do not apply.
    """

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters of vectors such as the router's expert bias) in place."""

        def apply_counts(update: Update) -> None:
            for target in targets:
                assert target.record.count_update is not None
                step = target.record.count_update.update_rate
                if step is None:
                    torch.add(target.grad, 1.0, out=target.main)
                else:
                    target.main.sub_(target.grad.sign(), alpha=step)

        return apply_counts


class SGD(UpdateRule):
    """Stochastic gradient descent with momentum. The weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum, self._uses_apex = config.sgd_momentum, config.use_apex
        self.moments = ("momentum_buffer",) if config.sgd_momentum else ()

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets by torch's fused SGD or, with --use-apex, by NVIDIA apex."""
        if self._uses_apex:
            return wrap_torch_optimizer(
                targets, load_apex_optimizer("FusedSGD")(build_param_groups(targets), lr=0.0, momentum=self._momentum)
            )
        return fused(targets, self.moments, self._kernel)

    def _kernel(self, lists: TensorLists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Call torch's fused SGD. The momentum is zero at the first update, so the first step needs no special case."""
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
    """Lion (Chen et al. 2023, algorithm 2): the update is the sign of an average of momentum and gradient. The weight decay is
    decoupled."""

    moments = ("exp_avg",)

    def __init__(self, config: OptimizerConfig) -> None:
        self._betas = config.lion_beta1, config.lion_beta2

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters with their gradients and momentum) in place."""
        return scaled(targets, self.moments, self._kernel)

    def _kernel(self, lists: TensorLists, update: Update) -> None:
        rate, (momentum,) = update.rate(lists.group), lists.moments
        signs = foreach_lerp(momentum, lists.grads, 1.0 - self._betas[0])
        foreach_sign_(signs)
        foreach_lerp_(momentum, lists.grads, 1.0 - self._betas[1])
        foreach_mul_(lists.main_params, 1.0 - rate * update.decay(lists.group))
        foreach_add_(lists.main_params, signs, alpha=-rate)


class AdEMAMix(UpdateRule):
    """AdamW with a second, slow moving average of the gradients (Pagliardini et al. 2024, algorithm 1).

    The update is (m / (1 - beta1^t) + alpha * slow) / (sqrt(v / (1 - beta2^t)) + eps), where m and v are AdamW's moments, slow is
    the slow average and t the number of the update. During the warm-up, alpha grows linearly from 0. The decay rate of the slow
    average grows from beta1 to beta3 so that its half-life, ln(1/2) / ln(rate), grows linearly.
    """

    moments = ("exp_avg", "exp_avg_sq", "exp_avg_slow")

    def __init__(self, config: OptimizerConfig) -> None:
        self._beta3, self._alpha = config.ademamix_beta3, config.ademamix_alpha
        self._warmup = config.ademamix_warmup_iters or 0

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters with their gradients and moments) in place."""
        return scaled(targets, self.moments, self._kernel)

    def _kernel(self, lists: TensorLists, update: Update) -> None:
        rate, (beta1, beta2), step = update.rate(lists.group), lists.group.betas, update.step
        (fast, second, slow), grads = lists.moments, lists.grads
        alpha, beta3 = self._compute_slow_schedule(step, beta1)
        foreach_lerp_(fast, grads, 1.0 - beta1)
        foreach_lerp_(slow, grads, 1.0 - beta3)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grads, grads, value=1.0 - beta2)
        foreach_copy_(grads, second)  # the gradient is no longer needed: reuse its memory for the denominator
        foreach_div_(grads, 1.0 - beta2**step)
        foreach_sqrt_(grads)
        foreach_add_(grads, lists.group.eps)
        steps = foreach_div(fast, 1.0 - beta1**step)
        foreach_add_(steps, slow, alpha=alpha)
        foreach_mul_(lists.main_params, 1.0 - rate * update.decay(lists.group))
        foreach_addcdiv_(lists.main_params, steps, grads, value=-rate)

    def _compute_slow_schedule(self, step: int, beta1: float) -> tuple[float, float]:
        """Return alpha (the weight of the slow average) and the decay rate of the slow average, for update number `step`."""
        if step >= self._warmup:
            return self._alpha, self._beta3
        progress = step / self._warmup
        if not beta1:  # its half-life is zero
            return progress * self._alpha, self._beta3 ** (1.0 / progress)
        log_beta1, log_beta3 = math.log(beta1), math.log(self._beta3)
        return progress * self._alpha, math.exp(log_beta1 * log_beta3 / ((1.0 - progress) * log_beta3 + progress * log_beta1))


RuleSelector = Callable[[ParamRecord], UpdateRule]
"""Function that returns the update rule of a parameter."""


def use_for_all(rule: UpdateRule) -> RuleSelector:
    """Return a function that selects the same update rule for every parameter."""
    return lambda record: rule


def use_by_param_type(vector_rule: UpdateRule, matrix_rule: UpdateRule) -> RuleSelector:
    """Return a function that selects one update rule for biases and the weights of norms, and another rule for matrices and
    embedding tables."""
    return lambda record: vector_rule if record.param_type == "vector" else matrix_rule


RULES: dict[str, Callable[[OptimizerConfig], RuleSelector]] = {
    "adam": lambda config: use_for_all(AdamW(config)),
    "sgd": lambda config: use_for_all(SGD(config)),
    "lion": lambda config: use_for_all(Lion(config)),
    "ademamix": lambda config: use_for_all(AdEMAMix(config)),
    "adafactor": lambda config: use_for_all(import_object("megatron.optimizer.adafactor:Adafactor")(config)),
    "adam8bit": lambda config: use_by_param_type(
        AdamW(config), import_object("megatron.optimizer.eight_bits:EightBitAdamW")(config)
    ),
    "lamb": lambda config: use_by_param_type(AdamW(config), import_object("megatron.optimizer.lamb:Lamb")()),
    "muon": lambda config: use_for_all(import_object("megatron.optimizer.muon:Muon")(config)),
}
"""For each optimizer name, a function that builds the rule selector from the settings. A name is a value of --optimizer or the
optimizer of a parameter group."""


def register_optimizer(
    name: str, make: Callable[[OptimizerConfig], UpdateRule | RuleSelector], *, reads: Iterable[str] = ()
) -> None:
    """Register a custom update rule for `--optimizer NAME`.

    Args:
        make: returns, for the settings of a run, the rule of all parameters, or a function that returns the rule of each parameter.
        reads: field names of settings of other optimizers that apply to this optimizer too, for example `adam_beta1`.

    Raises:
        ValueError: the name is already registered or is not allowed on a command line.
    """
    add_choice("optimizer", name, get_flag("optimizer").builtin_choices, reads)

    def build_selector(config: OptimizerConfig) -> RuleSelector:
        rule = make(config)
        return use_for_all(rule) if isinstance(rule, UpdateRule) else rule

    RULES[name] = build_selector


def build_rule_selector(config: OptimizerConfig) -> RuleSelector:
    """Return a function that selects the update rule of each parameter by the optimizer of its parameter group. Vectors that are
    updated from token counts get `ExpertCountsRule`.

    The returned function raises a ValueError if no module has registered the optimizer.
    """
    get_group = build_group_lookup(config)
    selectors: dict[str, RuleSelector] = {}
    expert_counts_rule = ExpertCountsRule()

    def select_rule(record: ParamRecord) -> UpdateRule:
        if record.count_update is not None:
            return expert_counts_rule
        optimizer = get_group(record).optimizer
        if optimizer not in RULES:
            raise ValueError(f"--optimizer {optimizer} is not registered: add the module that registers it to --imports")
        if optimizer not in selectors:
            selectors[optimizer] = RULES[optimizer](config)
        return selectors[optimizer](record)

    return select_rule
