"""Update rules: what each must see of a parameter, which state it keeps, and the code that updates. AdamW is here too.

A rule is chosen for each parameter by its group (`spec/groups.py`) and its record, so an optimizer may treat some parameters
differently (as Muon leaves vectors and embeddings to AdamW). It gets targets: the main parameters that lie on this rank, each with
its parameter's record and group, which gives its rate and decay (`Update.rate`, `Update.decay`). A rule does not know how state is
cut over the data ranks, reduced, published, saved or kept in host memory; and the code that does these things does not know the
rule. To add one, write a subclass of UpdateRule and enter in `rules.py` which parameters it gets.

A target is a view of the main parameter with a view of its gradient. It is flat and any part of the parameter, and may be cut
further unless the rule says that it is not `elementwise`. What a rule must know of whole parameters it asks for as statistics. One
that needs whole matrices has work for all ranks of a stage together (`StageWork`), as Muon has.

torch's fused kernels are called directly because an update in host memory calls them for a few hundred thousand elements at a time:
there the bookkeeping of `torch.optim.AdamW.step`, driven out of the cache by the data, takes a third as long as the kernel.
"""

from __future__ import annotations

import dataclasses
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.statistics import Rounds
from megatron.parallel.boxes import FlatPiece, aligned
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, ParamRecord
from megatron.parallel.state_shape import ELEMENTS, StateShape
from megatron.parallel.torch_private import foreach_mul_, fused_adamw_
from megatron.spec.groups import RUN_ENDS, ParamGroup, RateEnds


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
    piece: FlatPiece
    """The elements of this rank's flattened parameter that `main` holds, where it is flat."""
    counted: range
    """Indices of the elements of `main` whose shares of the whole parameter's sums this rank gives."""
    cuts: tuple[int, ...]
    """Elements of this rank's flattened parameter at which another rank's piece begins, see `DividedParam`."""
    whole: Mapping[str, torch.Tensor]
    """The numbers of the whole parameter that the rule asked for, see `statistics.py`."""


@dataclass
class Update:
    """The numbers of one update of all parameters."""

    learning_rate: float
    """The value of --lr now; `rate` gives the learning rate of a group."""
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


Updater = Callable[[Update], Iterator[None] | None]
"""Updates some targets in place. If it needs numbers of whole parameters it is a generator: in each round it adds its shares to
`Target.whole` and yields; when it goes on, they are put together."""


@dataclass(frozen=True)
class KeptState:
    """Something that a rule keeps of a parameter."""

    name: str
    """In a checkpoint it is `<name>.<parameter>`."""
    shape: StateShape = ELEMENTS
    """How it lies over the parameter."""
    dtype: torch.dtype | None = None
    """None: that of the main parameter."""

    def room(self, record: ParamRecord, axis_sizes: dict[str, int], numel: int) -> int:
        """Its elements for a shard of `numel` elements, the same on all ranks."""
        return self.shape.room(record.shape, record.local_shape(axis_sizes), numel)

    def num_bytes(self, record: ParamRecord, axis_sizes: dict[str, int], numel: int, main: torch.dtype) -> tuple[int, int]:
        """(bytes that it takes for a shard of `numel` elements, those of them that are padding)."""
        room = self.room(record, axis_sizes, numel)
        each = (self.dtype or main).itemsize
        return aligned(room) * each, (aligned(room) - room) * each


class StageWork(ABC):
    """What all ranks of a stage do together in an update, once each has taken its gradients into its states."""

    @property
    @abstractmethod
    def buffers(self) -> list[torch.Tensor]:
        """The memory that it keeps."""

    @abstractmethod
    def run(self, update: Update) -> None:
        """Do it. All ranks of the stage call it together, and all targets are updated then."""


@dataclass(frozen=True)
class StageSize:
    """The size of such work, the same on all ranks of a stage."""

    buffers: int = 0
    """Bytes of memory on the device."""
    sent: int = 0
    """Bytes that the rank which sends most sends in an update."""
    numbers: int = 0
    """Bytes that each rank sends, over the ranks of the stage, for numbers of whole parameters."""
    numbers_of_tied: int = 0
    """The same between first and last stage."""

    def plus(self, other: StageSize) -> StageSize:
        """Both together."""
        return StageSize(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


class UpdateRule(ABC):
    """One way to update parameters."""

    works_with_stage = False
    """Whether the ranks of a stage work together in an update. Then an updater is a generator that yields before that."""

    elementwise = True
    """Whether the update of an element depends on no other: then a target may be cut further."""
    moments: tuple[str, ...] = ()
    """Names of what the rule keeps for each element of every parameter, in the dtype of the main parameters."""

    def states(self, record: ParamRecord) -> tuple[KeptState, ...]:
        """What the rule keeps of a parameter."""
        return tuple(KeptState(name) for name in self.moments)

    def statistics(self, param: DividedParam, context: ParallelContext) -> Rounds:
        """Numbers of a whole parameter that an update needs, round by round. It may look at nothing but the layout's facts."""
        return ()

    def stage_work(self, targets: Sequence[Target], params: Sequence[DividedParam], context: ParallelContext) -> StageWork:
        """What the ranks of a stage do together.

        Args:
            targets: this rank's, each all of its piece of a parameter.
            params: the stage's that the rule updates, in an order that is the same on all its ranks.
        """
        raise NotImplementedError

    def stage_size(self, params: Sequence[DividedParam], context: ParallelContext) -> StageSize:
        """The size of this."""
        return StageSize()

    @abstractmethod
    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Make the updater of these targets.

        Raises:
            ValueError: a package that the settings need is not installed.
        """


@dataclass(frozen=True)
class Lists:
    """Targets of one group, as the kernels take them."""

    group: ParamGroup
    main_params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]


def lists_by_group(targets: Sequence[Target], moments: Sequence[str]) -> list[Lists]:
    """Targets as kernels take them, group by group."""
    return [
        Lists(group, [t.main for t in some], [t.grad for t in some], [[t.moments[name] for t in some] for name in moments])
        for group, some in by_group(targets)
    ]


def fused(
    targets: Sequence[Target], moments: Sequence[str], kernel: Callable[[Lists, Update, torch.Tensor | None], None]
) -> Updater:
    """Update targets on one device, in one dtype, by a kernel of torch's.

    Args:
        moments: their names, in the order in which the kernel takes them.
        kernel: updates the targets of one group. It divides their gradients by a float32 scalar on their device, if given.
    """
    all_lists = lists_by_group(targets, moments)

    def step(update: Update) -> None:
        for lists in all_lists:
            scale: torch.Tensor | None = None
            if update.factor != 1.0:
                if lists.grads[0].dtype == torch.float64:  # for which a float32 scalar is too coarse
                    foreach_mul_(lists.grads, update.factor)
                else:
                    scale = update.scalar(1.0 / update.factor, lists.grads[0].device)
            kernel(lists, update, scale)

    return step


def scaled(targets: Sequence[Target], moments: Sequence[str], kernel: Callable[[Lists, Update], None]) -> Updater:
    """Update targets on one device, in one dtype, by operations on lists. The factor costs a pass over the gradients.

    Args:
        moments: their names, in the order in which the kernel takes them.
        kernel: updates the targets of one group by their unscaled, clipped gradients, which it may change.
    """
    all_lists = lists_by_group(targets, moments)

    def step(update: Update) -> None:
        for lists in all_lists:
            if update.factor != 1.0:
                foreach_mul_(lists.grads, update.factor)
            kernel(lists, update)

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
            foreach_mul_(grads, update.factor)
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


def apex_optimizer(name: str) -> Any:
    """The class of an optimizer of NVIDIA apex (--use-apex).

    Raises:
        ValueError: apex is not installed.
    """
    try:
        from apex import optimizers
    except ImportError as error:
        raise ValueError(
            "--use-apex, but NVIDIA apex is not installed (the package named apex on the Python index is another project). "
            "Leave the flag out: torch's fused optimizers do the same."
        ) from error
    return getattr(optimizers, name)


# ---- The rule of most runs. Others are in `rules.py`.


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig) -> None:
        self._apex = config.use_apex

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Make the updater by torch's fused AdamW, or by NVIDIA apex."""
        if self._apex:
            return by_torch(targets, apex_optimizer("FusedAdam")(param_groups(targets), adam_w_mode=True, lr=0.0))
        return fused(targets, self.moments, self._kernel)

    def _kernel(self, lists: Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Update by torch's fused AdamW, which takes the number of the update for each tensor, from its device."""
        number = update.scalar(float(update.number), lists.main_params[0].device)
        first, second = lists.moments
        fused_adamw_(
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
