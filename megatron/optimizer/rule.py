"""Update rules: the interface between the sharded optimizer and an algorithm such as AdamW. AdamW itself is also here.

A rule declares its optimizer states and its statistics of full parameters (such as norms), and builds the functions that update.
The parameter group (`spec/groups.py`) and the record of a parameter (its name, shape and sharding) select its rule. An optimizer
may therefore treat some parameters differently, as Muon leaves vectors and embeddings to AdamW.

A rule updates targets: the main parameters of this rank, each with its parameter's record and group. `Update.rate` and
`Update.decay` give the group's learning rate and weight decay. A rule does not depend on how states are sharded, reduced, gathered,
saved or offloaded, and the code for these tasks does not depend on the rule. To add a rule, write a subclass of UpdateRule and
define in `rules.py` which parameters use it.

A target is a flat view of a main parameter and its gradient, or of any part of them. It may be divided further unless the rule sets
`elementwise` to False. A rule that needs numbers about full parameters declares statistics. A rule that needs full matrices, such
as Muon, runs a computation on all ranks of a stage (`StageUpdate`).

Torch's fused kernels are called directly because an update in host memory calls them for a few hundred thousand elements at a time.
At this size, the bookkeeping of `torch.optim.AdamW.step` takes a third as long as the kernel, because the kernel's data evicts the
bookkeeping's data from the CPU cache.
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
from megatron.optimizer.statistics import StatisticsRounds
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition, ParamRecord
from megatron.parallel.state_shape import PER_ELEMENT, StateShape
from megatron.parallel.tensor_slice import FlatRange, align_numel
from megatron.parallel.torch_private import foreach_mul_, fused_adamw_
from megatron.spec.groups import DEFAULT_LR_BOUNDS, LearningRateBounds, ParamGroup


@dataclass(frozen=True)
class Target:
    """Input of an update rule: a main parameter, or a part of it, with its gradient and optimizer states."""

    main: torch.Tensor
    """Elements of the main parameter. Updated in place."""
    grad: torch.Tensor
    """Gradient of the elements in `main`, not yet multiplied by `Update.grad_factor`, which unscales and clips it."""
    moments: dict[str, torch.Tensor]
    """Optimizer states by name, initially zero. Updated in place. States with one number per element have the shape of `main`."""
    record: ParamRecord
    group: ParamGroup
    flat_range: FlatRange
    """Range, in this rank's flattened local parameter, of the elements in `main`."""
    norm_range: range
    """Indices in `main` of the elements that this rank contributes to sums over the full parameter."""
    shard_boundaries: tuple[int, ...]
    """Indices of this rank's flattened local parameter at which another rank's shard starts (see `ParamPartition`)."""
    statistics: Mapping[str, torch.Tensor]
    """Statistics of the full parameter (such as norms) that `UpdateRule.statistics` declares, by name."""


@dataclass
class Update:
    """One update of all parameters: its number, learning rates, weight decay and the number by which gradients are multiplied."""

    learning_rate: float
    """Current value of the --lr schedule. `rate` returns the learning rate of a parameter group."""
    weight_decay: float
    """Current weight decay, without the factors of the parameter groups. `decay` returns the weight decay of a parameter group."""
    grad_factor: float
    """Number by which every gradient is multiplied: clip coefficient / loss scale."""
    step: int
    """Number of the update, starting at 1."""
    group_rates: Mapping[LearningRateBounds, float] = field(default_factory=dict)
    """Current learning rates of the parameter groups whose bounds differ from --lr and --min-lr, by these bounds."""
    _scalars: dict[tuple[float, torch.device], torch.Tensor] = field(default_factory=dict)

    def get_scalar(self, value: float, device: torch.device) -> torch.Tensor:
        """Return `value` as a float32 scalar tensor on a device. Each value is created once and cached."""
        if (value, device) not in self._scalars:
            self._scalars[value, device] = torch.full((), value, dtype=torch.float32, device=device)
        return self._scalars[value, device]

    def rate(self, group: ParamGroup) -> float:
        """Return the learning rate of a parameter group."""
        return group.lr_mult * (self.learning_rate if group.lr_bounds == DEFAULT_LR_BOUNDS else self.group_rates[group.lr_bounds])

    def decay(self, group: ParamGroup) -> float:
        """Return the weight decay of a parameter group, not yet multiplied by the learning rate."""
        return group.wd_mult * self.weight_decay


Updater = Callable[[Update], Iterator[None] | None]
"""Function that updates some targets in place.

An updater that needs statistics of full parameters (such as norms) is a generator. In each round it adds this rank's contribution
to `Target.statistics` and yields. When it continues, `Target.statistics` has the values reduced over all ranks.
"""


@dataclass(frozen=True)
class StateSpec:
    """Name, shape and dtype of an optimizer state that an update rule keeps for a parameter."""

    name: str
    """Name of the state. A checkpoint stores it as `<name>.<parameter>`."""
    shape: StateShape = PER_ELEMENT
    """Shape of the state relative to the parameter: one number per element, row, column or block."""
    dtype: torch.dtype | None = None
    """Dtype of the state; None for the dtype of the main parameter."""

    def compute_max_numel(self, record: ParamRecord, axis_sizes: dict[str, int], numel: int) -> int:
        """Return the number of elements of this state to allocate for a shard of `numel` parameter elements. It is the same on all
        ranks.

        Args:
            record: global shape of the parameter, and how ranks split it.
            axis_sizes: number of ranks along each axis.
        """
        return self.shape.compute_max_numel(record.shape, record.get_local_shape(axis_sizes), numel)

    def compute_num_bytes(
        self, record: ParamRecord, axis_sizes: dict[str, int], numel: int, main_dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of this state to allocate for a shard of `numel` parameter elements, and how many of these bytes are
        padding.

        Args:
            record: global shape of the parameter, and how ranks split it.
            axis_sizes: number of ranks along each axis.
            main_dtype: dtype of the main parameter.
        """
        numel_max = self.compute_max_numel(record, axis_sizes, numel)
        itemsize = (self.dtype or main_dtype).itemsize
        return align_numel(numel_max) * itemsize, (align_numel(numel_max) - numel_max) * itemsize


class StageUpdate(ABC):
    """Computation that all ranks of a pipeline stage run together to update parameters, for rules that need full matrices.

    The computation runs after each rank has added its gradients to its optimizer states.
    """

    @property
    @abstractmethod
    def buffers(self) -> list[torch.Tensor]:
        """Buffers of the computation, which stay allocated between steps."""

    @abstractmethod
    def run(self, update: Update) -> None:
        """Update this rank's main parameters. All ranks of the stage must call this together."""


@dataclass(frozen=True)
class StageUpdateSize:
    """Memory and traffic of a `StageUpdate`, the same on all ranks of a stage."""

    buffer_bytes: int = 0
    """Bytes of device memory for the buffers of the computation."""
    max_sent_bytes: int = 0
    """Bytes that a rank sends in an update; the maximum over the ranks."""
    statistics_bytes: int = 0
    """Bytes that each rank sends to ranks of its stage, for statistics of full parameters."""
    tied_statistics_bytes: int = 0
    """Bytes that the first and the last stage exchange, for statistics of tied parameters."""

    def add(self, size: StageUpdateSize) -> StageUpdateSize:
        """Return the sum of this object and `size`, field by field."""
        return StageUpdateSize(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(size)))


class UpdateRule(ABC):
    """Algorithm that updates parameters, such as AdamW: declares its optimizer states, and builds the functions that update."""

    has_stage_update = False
    """Whether all ranks of a stage compute a part of the update together. If so, an updater is a generator that yields before this
    part."""

    elementwise = True
    """Whether the update of an element depends on no other element. If so, a main parameter may be updated in several parts."""
    moments: tuple[str, ...] = ()
    """Names of the optimizer states that have one value per element. Every parameter has these states, in the dtype of the main
    parameters."""

    def states(self, record: ParamRecord) -> tuple[StateSpec, ...]:
        """Return the optimizer states of a parameter."""
        return tuple(StateSpec(name) for name in self.moments)

    def statistics(self, param: ParamPartition, context: ParallelContext) -> StatisticsRounds:
        """Return the statistics (sums or maxima over a full parameter, such as norms) that an update needs, one list for each round
        of reductions. Statistics of the second round may depend on results of the first.

        The returned lists may depend on the layout and the shape of the parameter, but not on its values.
        """
        return ()

    def build_stage_update(
        self, targets: Sequence[Target], params: Sequence[ParamPartition], context: ParallelContext
    ) -> StageUpdate:
        """Build the computation that all ranks of a pipeline stage run together. Only for rules that need full matrices.

        Args:
            targets: main parameters of this rank with their gradients and states; each target has all elements of its shard.
            params: parameters of the stage with this rule, in an order that is the same on all ranks of the stage.
        """
        raise NotImplementedError

    def compute_stage_update_size(self, params: Sequence[ParamPartition], context: ParallelContext) -> StageUpdateSize:
        """Return the memory and traffic of the computation that all ranks of a stage run together for these parameters. Both are 0
        for rules that need no full matrices."""
        return StageUpdateSize()

    @abstractmethod
    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters with their gradients and states) in place.

        Raises:
            ValueError: a package that the settings need is not installed.
        """


@dataclass(frozen=True)
class TensorLists:
    """Main parameters, gradients and states of one parameter group, as one list of tensors for each of these types. Foreach and
    fused kernels take such lists."""

    group: ParamGroup
    main_params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]


def build_tensor_lists(targets: Sequence[Target], moments: Sequence[str]) -> list[TensorLists]:
    """Return the tensors of the targets (main parameters with their gradients and states) as lists, one `TensorLists` for each
    parameter group.

    Args:
        moments: names of the states, in the order in which the kernel takes them.
    """
    return [
        TensorLists(
            group,
            [t.main for t in group_members],
            [t.grad for t in group_members],
            [[t.moments[name] for t in group_members] for name in moments],
        )
        for group, group_members in group_targets(targets)
    ]


def fused(
    targets: Sequence[Target], moments: Sequence[str], kernel: Callable[[TensorLists, Update, torch.Tensor | None], None]
) -> Updater:
    """Build a function that updates the targets by a fused torch kernel. All tensors of the targets must be on one device and in
    one dtype.

    Args:
        moments: names of the states, in the order in which the kernel takes them.
        kernel: updates the targets of one parameter group. It divides the gradients by its third argument, a float32 scalar on the
            device, unless this argument is None.
    """
    all_lists = build_tensor_lists(targets, moments)

    def step(update: Update) -> None:
        for lists in all_lists:
            scale: torch.Tensor | None = None
            if update.grad_factor != 1.0:
                if lists.grads[0].dtype == torch.float64:  # a float32 scalar is too coarse for float64
                    foreach_mul_(lists.grads, update.grad_factor)
                else:
                    scale = update.get_scalar(1.0 / update.grad_factor, lists.grads[0].device)
            kernel(lists, update, scale)

    return step


def scaled(targets: Sequence[Target], moments: Sequence[str], kernel: Callable[[TensorLists, Update], None]) -> Updater:
    """Build a function that unscales and clips the gradients of the targets, and then calls operations on lists of tensors. All
    tensors of the targets must be on one device and in one dtype.

    Multiplying the gradients by `Update.grad_factor` costs an extra pass over their memory.

    Args:
        moments: names of the states, in the order in which the kernel takes them.
        kernel: updates the targets of one parameter group from their unscaled, clipped gradients. It may overwrite the gradients.
    """
    all_lists = build_tensor_lists(targets, moments)

    def step(update: Update) -> None:
        for lists in all_lists:
            if update.grad_factor != 1.0:
                foreach_mul_(lists.grads, update.grad_factor)
            kernel(lists, update)

    return step


def wrap_torch_optimizer(targets: Sequence[Target], optimizer: torch.optim.Optimizer) -> Updater:
    """Build a function that updates the targets by a `torch.optim.Optimizer`. The optimizer reads gradients from `.grad` and keeps
    its states in `optimizer.state`.

    Multiplying the gradients by `Update.grad_factor` (unscaling and clipping) costs an extra pass over their memory.

    Args:
        optimizer: optimizer that was constructed with the result of `build_param_groups` for these targets.
    """
    grads = [target.grad for target in targets]
    for target in targets:
        target.main.grad = target.grad
        optimizer.state[target.main].update(target.moments)

    def step(update: Update) -> None:
        if update.grad_factor != 1.0:
            foreach_mul_(grads, update.grad_factor)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = update.rate(group["group"]), update.decay(group["group"])
            group["step"] = update.step - 1  # NVIDIA apex increments this count in each step
        optimizer.step()

    return step


def build_param_groups(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return the targets as param groups of a torch optimizer, for `wrap_torch_optimizer`."""
    return [
        {"params": [target.main for target in group_members], "group": group, "betas": group.betas, "eps": group.eps}
        for group, group_members in group_targets(targets)
    ]


def group_targets(targets: Sequence[Target]) -> list[tuple[ParamGroup, list[Target]]]:
    """Group targets by their parameter group, in the order in which the groups first occur."""
    targets_by_group: dict[ParamGroup, list[Target]] = {}
    for target in targets:
        targets_by_group.setdefault(target.group, []).append(target)
    return list(targets_by_group.items())


def load_apex_optimizer(name: str) -> Any:
    """Return an optimizer class of NVIDIA apex (--use-apex).

    Raises:
        ValueError: apex is not installed.
    """
    try:
        from apex import optimizers
    except ImportError as error:
        raise ValueError(
            "--use-apex is set, but NVIDIA apex is not installed (the package named apex on PyPI is another project). "
            "Leave the flag out: torch's fused optimizers compute the same updates."
        ) from error
    return getattr(optimizers, name)


# ---- The default update rule. Other rules are in `rules.py`.


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig) -> None:
        self._uses_apex = config.use_apex

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets by torch's fused AdamW or, with --use-apex, by NVIDIA apex."""
        if self._uses_apex:
            return wrap_torch_optimizer(
                targets, load_apex_optimizer("FusedAdam")(build_param_groups(targets), adam_w_mode=True, lr=0.0)
            )
        return fused(targets, self.moments, self._kernel)

    def _kernel(self, lists: TensorLists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Call torch's fused AdamW. The kernel reads the step of each tensor from a scalar on the tensor's device."""
        step = update.get_scalar(float(update.step), lists.main_params[0].device)
        first, second = lists.moments
        fused_adamw_(
            lists.main_params,
            lists.grads,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=[step] * len(lists.main_params),
            lr=update.rate(lists.group),
            beta1=lists.group.betas[0],
            beta2=lists.group.betas[1],
            weight_decay=update.decay(lists.group),
            eps=lists.group.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )
