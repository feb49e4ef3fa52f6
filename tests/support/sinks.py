"""Gradient sinks for tests of layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.parallel.accumulate import GradSink


def sink_over(main_grad: torch.Tensor, on_write: Callable[[], None] = lambda: None) -> GradSink:
    """A sink that has its memory from the start."""
    sink = GradSink(main_grad.dtype, on_write, lambda: main_grad)
    sink.main_grad = main_grad
    return sink


def summed(sink: GradSink) -> torch.Tensor:
    assert sink.main_grad is not None
    return sink.main_grad
