"""Update rules: what each must see of a parameter, what it keeps for it, and the torch optimizer that does it.

A rule gets targets: the mains that lie on this rank, each in the shape that the rule's granularity promises, with the record of
what it is a part of. How state is cut over the data ranks, reduced, published, saved or kept in host memory is not the rule's
affair; and none of those who see to that know the rule. To add one, write a subclass of UpdateRule and enter it in RULES.

A target is a view of the main, its `.grad` a view of the gradient (unscaled and clipped when `step()` runs, or to be divided by
the optimizer's `grad_scale` if it says that it supports this, as torch's fused ones do). What a target looks like:
    ELEMENTS  flat, any part of the parameter. It may be cut further, so a rule may not sum over it.
    ROWS      [rows, row length]: whole rows of this rank's tensor. A sum over columns is over some of the rows only; the other rows
              are with the other ranks of `context.group(*record.partial_over)`.
    MATRICES  this rank's whole tensor in its shape: the matrix, or matrices, are `record.matrix_dims`.
Tensor parallelism has cut the parameter before that, see `record.splits`; where it does, rows of padding may follow, whose
gradient is zero. A rule that treats some parameters differently (as Muon leaves vectors and embeddings to AdamW) puts them into
param groups of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.updaters import ByTorch, FusedAdamW, FusedSGD, Target, Updater, by_decay
from megatron.parallel.boxes import DimPiece, FlatPiece, Piece
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.shards import Granularity


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
