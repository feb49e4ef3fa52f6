"""What carries out an update: torch's fused kernels, called directly, or any torch optimizer.

The kernels are called directly because an update in host memory calls them for a few hundred thousand elements at a time: there the
bookkeeping of `torch.optim.AdamW.step`, driven out of the cache by the data, takes a third as long as the kernel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config.training import OptimizerConfig
from megatron.parallel.boxes import DimPiece, FlatPiece, Piece
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.shards import Granularity


@dataclass(frozen=True)
class Target:
    """One main, or a part of one, as an update rule sees it."""

    main: torch.Tensor
    """What is updated in place."""
    grad: torch.Tensor
    moments: dict[str, torch.Tensor]
    """By the names that the rule gave; zeros at first, updated in place. All have the shape and dtype of the main."""
    record: ParamRecord


@dataclass
class Update:
    """One update of everything."""

    learning_rate: float
    weight_decay: float
    """Of what decays."""
    factor: float
    """Multiplies every gradient: clip coefficient / loss scale."""
    number: int
    """Counted from 1."""
    _made: dict[tuple[float, torch.device], torch.Tensor] = field(default_factory=dict)

    def scalar(self, value: float, device: torch.device) -> torch.Tensor:
        """A float32 scalar on a device, made once."""
        if (value, device) not in self._made:
            self._made[value, device] = torch.full((), value, dtype=torch.float32, device=device)
        return self._made[value, device]

    def decay(self, decays: bool) -> float:
        """Weight decay of what decays, or not."""
        return self.weight_decay if decays else 0.0


class Updater(ABC):
    """Updates some targets in place."""

    @abstractmethod
    def step(self, update: Update) -> None:
        """One update."""


@dataclass(frozen=True)
class _Lists:
    """Targets of one decay class, as the kernels take them."""

    decays: bool
    mains: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]


class Fused(Updater):
    """Targets on one device, in one dtype, by a kernel of torch's.

    Args:
        moments: their names, in the order in which the kernel takes them.
    """

    def __init__(self, targets: Sequence[Target], moments: Sequence[str]) -> None:
        self._classes = []
        for decays in (True, False):
            some = [target for target in targets if target.record.decay is decays]
            if some:
                lists = [[target.moments[name] for target in some] for name in moments]
                self._classes.append(_Lists(decays, [target.main for target in some], [target.grad for target in some], lists))

    def step(self, update: Update) -> None:
        """One update. The kernel divides the gradients by a float32 scalar as it goes; for float64 that is too coarse."""
        for lists in self._classes:
            scale: torch.Tensor | None = None
            if update.factor != 1.0:
                if lists.grads[0].dtype == torch.float64:
                    torch._foreach_mul_(lists.grads, update.factor)
                else:
                    scale = update.scalar(1.0 / update.factor, lists.grads[0].device)
            self.call_kernel(lists, update, scale)

    @abstractmethod
    def call_kernel(self, lists: _Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Update one class."""


class FusedAdamW(Fused):
    """Loshchilov and Hutter 2019, algorithm 2."""

    def __init__(self, targets: Sequence[Target], betas: tuple[float, float], eps: float) -> None:
        super().__init__(targets, ("exp_avg", "exp_avg_sq"))
        self._betas, self._eps = betas, eps

    def call_kernel(self, lists: _Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Of AdamW; it takes the number of the update for each tensor, from its device."""
        first, second = lists.moments
        number = update.scalar(float(update.number), lists.mains[0].device)
        torch._fused_adamw_(
            lists.mains,
            lists.grads,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=[number] * len(lists.mains),
            lr=update.learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=update.decay(lists.decays),
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )


class FusedSGD(Fused):
    """Momentum, with the weight decay added to the gradient."""

    def __init__(self, targets: Sequence[Target], momentum: float) -> None:
        super().__init__(targets, ("momentum_buffer",) if momentum else ())
        self._momentum = momentum

    def call_kernel(self, lists: _Lists, update: Update, grad_scale: torch.Tensor | None) -> None:
        """Of SGD. The first update finds zeros in the momentum, so it needs no case of its own."""
        torch._fused_sgd_(
            lists.mains,
            lists.grads,
            lists.moments[0] if lists.moments else [],
            weight_decay=update.decay(lists.decays),
            momentum=self._momentum,
            lr=update.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=grad_scale,
        )


class ByTorch(Updater):
    """A torch optimizer. It finds gradients in `.grad`, moments in its state.

    Args:
        optimizer: with a bool "decays" in each of its param groups.
    """

    def __init__(self, targets: Sequence[Target], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._grads = optimizer, [target.grad for target in targets]
        for target in targets:
            target.main.grad = target.grad
            optimizer.state[target.main].update(target.moments)

    def step(self, update: Update) -> None:
        """One update; the factor costs a pass over the gradients."""
        if update.factor != 1.0:
            torch._foreach_mul_(self._grads, update.factor)
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = update.learning_rate, update.decay(group["decays"])
            group["step"] = update.number - 1  # NVIDIA apex counts here
        self._optimizer.step()


def by_decay(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Param groups for `ByTorch`: those that decay, and the others."""
    groups = [
        {"params": [target.main for target in targets if target.record.decay is decays], "decays": decays}
        for decays in (True, False)
    ]
    return [group for group in groups if group["params"]]


class UpdateRule(ABC):
    """One way to update."""

    granularity: Granularity
    """What a target must hold in one piece."""

    @abstractmethod
    def moments(self, config: OptimizerConfig) -> tuple[str, ...]:
        """Names of the tensors that the rule keeps for each target, which is given them."""

    @abstractmethod
    def make(self, targets: Sequence[Target], config: OptimizerConfig, context: ParallelContext) -> Updater:
        """What updates these targets.

        Raises:
            ValueError: something that the settings ask for is not installed.
        """


def as_seen(
    tensor: torch.Tensor, granularity: Granularity, record: ParamRecord, piece: Piece, context: ParallelContext
) -> torch.Tensor:
    """A shard's flat tensor in the shape that a granularity promises."""
    if granularity is Granularity.ELEMENTS:
        return tensor
    shape = list(record.local_shape(context.axis_sizes))
    length, numel = shape[-1], math.prod(shape)
    if isinstance(piece, DimPiece):
        whole_rows = piece.dim < len(shape) - 1 or (piece.start, piece.stop) == (0, length)
        whole = (piece.start, piece.stop) == (0, shape[piece.dim])
    else:
        whole_rows = piece.start % length == 0 and piece.stop % length == 0
        whole = piece == FlatPiece(0, numel)
    if granularity is Granularity.ROWS:
        assert whole_rows, f"{piece} of {record.name} {shape} cuts a row"
        return tensor.view(-1, length)
    assert whole, f"{piece} of {record.name} {shape} is not the whole"
    return tensor.view(shape)


class _AdamW(UpdateRule):
    granularity = Granularity.ELEMENTS

    def moments(self, config: OptimizerConfig) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def make(self, targets: Sequence[Target], config: OptimizerConfig, context: ParallelContext) -> Updater:
        betas = (config.adam_beta1, config.adam_beta2)
        if config.use_apex:
            made = _apex("FusedAdam")(by_decay(targets), adam_w_mode=True, lr=0.0, betas=betas, eps=config.adam_eps)
            return ByTorch(targets, made)
        return FusedAdamW(targets, betas, config.adam_eps)


class _SGD(UpdateRule):
    granularity = Granularity.ELEMENTS

    def moments(self, config: OptimizerConfig) -> tuple[str, ...]:
        return ("momentum_buffer",) if config.sgd_momentum else ()

    def make(self, targets: Sequence[Target], config: OptimizerConfig, context: ParallelContext) -> Updater:
        if config.use_apex:
            return ByTorch(targets, _apex("FusedSGD")(by_decay(targets), lr=0.0, momentum=config.sgd_momentum))
        return FusedSGD(targets, config.sgd_momentum)


RULES: dict[str, UpdateRule] = {"adam": _AdamW(), "sgd": _SGD()}
"""By the value of --optimizer."""


def _apex(name: str) -> Any:
    try:
        from apex import optimizers
    except ImportError as error:
        raise ValueError(
            "--use-apex, but NVIDIA apex is not installed (the package named apex on the Python index is another project). "
            "Leave the flag out: torch's fused optimizers do the same."
        ) from error
    return getattr(optimizers, name)
