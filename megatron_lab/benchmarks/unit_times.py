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
    """Clock that times each unit of a model (embedding, block, final norm, output layer) during training steps.

    The model must be on one pipeline stage, in one model chunk. The clock records from its creation on. The forward of a unit lasts
    until the forward of the next unit. The backward of a unit begins when the gradient of its output is complete, and lasts until
    the gradient of the preceding unit's output is complete.
    """

    def __init__(self, train_step: TrainStep) -> None:
        self._forward: list[list[float]] = []
        self._backward: list[list[float]] = []
        (chunk,) = train_step.model.chunks.values()
        for unit in chunk.get_units():
            unit.register_forward_pre_hook(self._on_enter)
            unit.register_forward_hook(self._on_leave)
        train_step.executor.recorder = self

    def start(self, op: Op) -> None:
        """Start a list of timestamps for an operation (a forward or a backward). The executor calls this method when the operation
        starts."""
        self._get_timestamps(op).append([])

    def end(self, op: Op) -> None:
        """Append the current time to the operation's timestamps. The executor calls this method when the operation ends."""
        self._get_timestamps(op)[-1].append(time.perf_counter())

    def compute_times(self) -> list[UnitTimes]:
        """Return the forward and backward times of each unit, in forward order: the shortest times over all microbatches so far."""
        forward, backward = _compute_min_intervals(self._forward), _compute_min_intervals(self._backward)
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


def _compute_min_intervals(timestamps: Sequence[Sequence[float]]) -> list[float]:
    gaps = [[end - start for start, end in pairwise(row)] for row in timestamps]
    return [min(column) for column in zip(*gaps, strict=True)]
