"""Update rules: what each must see of a parameter, which state it keeps, and the code that updates.

A rule is chosen for each parameter by its group (`spec/groups.py`) and its record, so an optimizer may treat some parameters
differently (as Muon leaves vectors and embeddings to AdamW). It gets targets: the main parameters that lie on this rank, each with
its parameter's record and group, which gives its rate and decay (`Update.rate`, `Update.decay`). A rule does not know how state is
cut over the data ranks, reduced, published, saved or kept in host memory; and the code that does these things does not know the
rule. To add one, write a subclass of UpdateRule and enter in RULES which parameters it gets.

A target is a view of the main parameter with a view of its gradient. It is flat and any part of the parameter, and may be cut
further, so the rule may not sum over it. If the rule `sees_whole`, it is this rank's whole tensor in its shape instead, and the
matrix, or matrices, are its last two dimensions (see `record.kind`). Tensor parallelism has cut the parameter before that, see
`record.splits`; there, rows of padding may follow, whose gradient is zero.

torch's fused kernels are called directly because an update in host memory calls them for a few hundred thousand elements at a time:
there the bookkeeping of `torch.optim.AdamW.step`, driven out of the cache by the data, takes a third as long as the kernel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config.training import OptimizerConfig
from megatron.parallel.boxes import aligned
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.shards import Granularity, Shard
from megatron.parallel.state_shape import ELEMENTS, StateShape
from megatron.spec.groups import RUN_ENDS, ParamGroup, RateEnds, groups_of


@dataclass(frozen=True)
class Target:
    """One main parameter, or a part of one, as an update rule sees it."""

    main: torch.Tensor
    """The elements, which are updated in place."""
    grad: torch.Tensor
    """Their gradient, neither unscaled nor clipped; see `Update.factor`."""
    moments: dict[str, torch.Tensor]
    """The states by name; zeros at first, updated in place. One with a number for each element has the shape of `main`."""
    record: ParamRecord
    group: ParamGroup


@dataclass
class Update:
    """The numbers of one update of all parameters."""

    learning_rate: float
    """That of --lr; a group's is `rate`."""
    weight_decay: float
    """Weight decay before a group's factor; a group's is `decay`."""
    factor: float
    """Multiplies every gradient: clip coefficient / loss scale."""
    number: int
    """Number of the update, counted from 1."""
    own_rates: Mapping[RateEnds, float] = field(default_factory=dict)
    """The learning rates of courses that end elsewhere than the run's."""
    _made: dict[tuple[float, torch.device], torch.Tensor] = field(default_factory=dict)

    def scalar(self, value: float, device: torch.device) -> torch.Tensor:
        """A float32 scalar on a device, made once for each value."""
        if (value, device) not in self._made:
            self._made[value, device] = torch.full((), value, dtype=torch.float32, device=device)
        return self._made[value, device]

    def rate(self, group: ParamGroup) -> float:
        """The learning rate of a group."""
        return group.lr_mult * (self.learning_rate if group.ends == RUN_ENDS else self.own_rates[group.ends])

    def decay(self, group: ParamGroup) -> float:
        """The weight decay of a group, before its learning rate multiplies it."""
        return group.wd_mult * self.weight_decay


Updater = Callable[[Update], None]
"""Updates some targets in place."""


@dataclass(frozen=True)
class KeptState:
    """Something that a rule keeps of a parameter."""

    name: str
    """In a checkpoint it is `<name>.<parameter>`."""
    shape: StateShape = ELEMENTS
    """How it lies over the parameter."""
    dtype: torch.dtype | None = None
    """None: that of the main parameter."""

    def num_bytes(self, local_shape: tuple[int, ...], numel: int, main: torch.dtype) -> tuple[int, int]:
        """(bytes that it takes for a shard of `numel` elements, those of them that are padding)."""
        room = self.shape.room(local_shape, numel)
        each = (self.dtype or main).itemsize
        return aligned(room) * each, (aligned(room) - room) * each


class UpdateRule(ABC):
    """One way to update parameters."""

    sees_whole = False
    """Whether a target must be all of this rank's tensor. If not, it may be any of its elements."""
    moments: tuple[str, ...] = ()
    """Names of what the rule keeps for each element of every parameter, in the dtype of the main parameters."""

    def states(self, record: ParamRecord) -> tuple[KeptState, ...]:
        """What the rule keeps of a parameter."""
        return tuple(KeptState(name) for name in self.moments)

    @abstractmethod
    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Make the updater of these targets.

        Raises:
            ValueError: a package that the settings need is not installed.
        """


def as_seen(tensor: torch.Tensor, rule: UpdateRule, shard: Shard, context: ParallelContext) -> torch.Tensor:
    """A shard's flat tensor in the shape in which the rule sees it."""
    if not rule.sees_whole:
        return tensor
    shape = shard.record.local_shape(context.axis_sizes)
    assert tensor.numel() == math.prod(shape), f"{shard.piece} of {shard.record.name} {shape} is not the whole"
    return tensor.view(shape)


@dataclass(frozen=True)
class _Lists:
    """Targets of one group, as the kernels take them."""

    group: ParamGroup
    main_params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]


def fused(
    targets: Sequence[Target], moments: Sequence[str], kernel: Callable[[_Lists, Update, torch.Tensor | None], None]
) -> Updater:
    """Update targets on one device, in one dtype, by a kernel of torch's.

    Args:
        moments: their names, in the order in which the kernel takes them.
        kernel: updates the targets of one group. It divides their gradients by a float32 scalar on their device, if given.
    """
    all_lists = [
        _Lists(group, [t.main for t in some], [t.grad for t in some], [[t.moments[name] for t in some] for name in moments])
        for group, some in by_group(targets)
    ]

    def step(update: Update) -> None:
        for lists in all_lists:
            scale: torch.Tensor | None = None
            if update.factor != 1.0:
                if lists.grads[0].dtype == torch.float64:  # for which a float32 scalar is too coarse
                    torch._foreach_mul_(lists.grads, update.factor)
                else:
                    scale = update.scalar(1.0 / update.factor, lists.grads[0].device)
            kernel(lists, update, scale)

    return step


def by_torch(targets: Sequence[Target], optimizer: torch.optim.Optimizer) -> Updater:
    """Update targets by a torch optimizer. It finds gradients in `.grad`, moments in its state. The factor costs a pass over the
    gradients.

    Args:
        optimizer: made with `param_groups` of the targets.
    """
    grads = [target.grad for target in targets]
    for target in targets:
        target.main.grad = target.grad
        optimizer.state[target.main].update(target.moments)

    def step(update: Update) -> None:
        if update.factor != 1.0:
            torch._foreach_mul_(grads, update.factor)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = update.rate(group["group"]), update.decay(group["group"])
            group["step"] = update.number - 1  # NVIDIA apex counts updates here
        optimizer.step()

    return step


def param_groups(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Param groups for `by_torch`, one for each group of the targets."""
    return [
        {"params": [target.main for target in some], "group": group, "betas": group.betas, "eps": group.eps}
        for group, some in by_group(targets)
    ]


def by_group(targets: Sequence[Target]) -> list[tuple[ParamGroup, list[Target]]]:
    """Targets by their group, in the order in which each group first occurs."""
    found: dict[ParamGroup, list[Target]] = {}
    for target in targets:
        found.setdefault(target.group, []).append(target)
    return list(found.items())


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

    def _kernel(self, lists: _Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
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

    def _kernel(self, lists: _Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
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


RuleOf = Callable[[ParamRecord], UpdateRule]
"""Gives the rule that updates a parameter."""


def for_all(rule: UpdateRule) -> RuleOf:
    """Use one rule for every parameter."""
    return lambda record: rule


RULES: dict[str, Callable[[OptimizerConfig], RuleOf]] = {
    "adam": lambda config: for_all(AdamW(config)),
    "sgd": lambda config: for_all(SGD(config)),
}
"""The rules by the value of --optimizer, or of a group's."""


def rules_of(config: OptimizerConfig) -> RuleOf:
    """The rule of each parameter in a run with these settings: that of its group."""
    group_of = groups_of(config)
    made: dict[str, RuleOf] = {}

    def rule_of(record: ParamRecord) -> UpdateRule:
        optimizer = group_of(record).optimizer
        if optimizer not in made:
            made[optimizer] = RULES[optimizer](config)
        return made[optimizer](record)

    return rule_of


def granularity_of(config: OptimizerConfig) -> Granularity:
    """How finely the state of each parameter may be cut in a run with these settings."""
    rule_of = rules_of(config)
    return lambda record: rule_of(record).sees_whole


def _apex(name: str) -> Any:
    try:
        from apex import optimizers
    except ImportError as error:
        raise ValueError(
            "--use-apex, but NVIDIA apex is not installed (the package named apex on the Python index is another project). "
            "Leave the flag out: torch's fused optimizers do the same."
        ) from error
    return getattr(optimizers, name)
