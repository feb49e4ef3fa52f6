"""Clock that times the units of a model (embedding, blocks, final norm, output layer) in forward and backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.spec.operations import Op, OpType
from megatron.training.step import TrainStep


class UnitTimes(NamedTuple):
    """Seconds that one unit of a model (embedding, block, final norm or output layer) takes for one microbatch."""

    forward: float
    backward: float


class UnitClock:
    """Clock that times each unit of a model during training steps, on one pipeline stage with one model chunk.

    It records as soon as it is created. The forward of a unit lasts until the forward of the next unit. The backward of a unit
    begins when the gradient of its output is complete, and lasts until the gradient of the preceding unit's output is complete.
    """

    def __init__(self, train_step: TrainStep) -> None:
        self._forward: list[list[float]] = []
        self._backward: list[list[float]] = []
        (chunk,) = train_step.model.chunks.values()
        for unit in chunk.units():
            unit.register_forward_pre_hook(self._on_enter)
            unit.register_forward_hook(self._on_leave)
        train_step.executor.recorder = self

    def start(self, op: Op) -> None:
        """Start a list of timestamps for an operation. The executor calls this method when the operation starts."""
        self._get_timestamps(op).append([])

    def end(self, op: Op) -> None:
        """Add the time at which the operation ends. The executor calls this method."""
        self._get_timestamps(op)[-1].append(time.perf_counter())

    def times(self) -> list[UnitTimes]:
        """Return the times of each unit, in forward order: the shortest over all microbatches so far."""
        forward, backward = _min_intervals(self._forward), _min_intervals(self._backward)
        return [UnitTimes(*pair) for pair in zip(forward, reversed(backward), strict=True)]

    def _get_timestamps(self, op: Op) -> list[list[float]]:
        return self._forward if op.type is OpType.FORWARD else self._backward

    def _on_enter(self, unit: nn.Module, args: Any) -> None:
        self._forward[-1].append(time.perf_counter())

    def _on_leave(self, unit: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._on_output_grad)

    def _on_output_grad(self, grad: torch.Tensor) -> None:
        self._backward[-1].append(time.perf_counter())


def _min_intervals(timestamps: Sequence[Sequence[float]]) -> list[float]:
    gaps = [[end - start for start, end in pairwise(row)] for row in timestamps]
    return [min(column) for column in zip(*gaps, strict=True)]
