"""Measures when each unit of a model (embedding, blocks, final norm, output) computes, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.spec.operations import Op, OpKind
from megatron.training.step import TrainStep


class UnitTimes(NamedTuple):
    """Seconds of one microbatch in one unit."""

    forward: float
    backward: float


class UnitClock:
    """Times the units of a training step on one stage of one chunk, from now on.

    A unit's forward lasts until that of the next one. Its backward begins when the gradient of its output is there, and lasts until
    that of the unit before is.
    """

    def __init__(self, train: TrainStep) -> None:
        self._forward: list[list[float]] = []
        self._backward: list[list[float]] = []
        (chunk,) = train.model.chunks.values()
        for unit in chunk.units():
            unit.register_forward_pre_hook(self._enters)
            unit.register_forward_hook(self._leaves)
        train.executor.recorder = self

    def begin(self, op: Op) -> None:
        """Called by the executor."""
        self._stamps(op).append([])

    def end(self, op: Op) -> None:
        """Called by the executor."""
        self._stamps(op)[-1].append(time.perf_counter())

    def times(self) -> list[UnitTimes]:
        """The fastest of all microbatches so far, in the order of the forward."""
        forward, backward = _least_gaps(self._forward), _least_gaps(self._backward)
        return [UnitTimes(*pair) for pair in zip(forward, reversed(backward), strict=True)]

    def _stamps(self, op: Op) -> list[list[float]]:
        return self._forward if op.kind is OpKind.FORWARD else self._backward

    def _enters(self, unit: nn.Module, args: Any) -> None:
        self._forward[-1].append(time.perf_counter())

    def _leaves(self, unit: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._returns)

    def _returns(self, grad: torch.Tensor) -> None:
        self._backward[-1].append(time.perf_counter())


def _least_gaps(stamps: Sequence[Sequence[float]]) -> list[float]:
    gaps = [[after - before for before, after in pairwise(row)] for row in stamps]
    return [min(column) for column in zip(*gaps, strict=True)]
