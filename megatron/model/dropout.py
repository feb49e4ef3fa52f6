"""Dropout whose mask follows from a seed of its own, the same in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.parallel.handles import OUTSIDE_CUDA_GRAPHS, Handles
from megatron.parallel.random import seed_device

Seeds = Sequence[int] | torch.Tensor
"""Seeds of several masks. A compiled graph gets the handle of a `GraphSeeds`, so that they are not a part of it."""


class GraphSeeds:
    """The seeds of the dropout masks in one call of a compiled graph. They live as long as that call.

    The host needs their values, to seed the device with. So they stay in Python, and the graph gets a handle.
    """

    def __init__(self, values: Sequence[int], device: torch.device) -> None:
        self.values = values
        self.handle = _GRAPH_SEEDS.create(self, device)


_GRAPH_SEEDS: Handles[GraphSeeds] = Handles("set of dropout seeds")


def dropout(x: torch.Tensor, probability: float, seeds: Seeds | None, number: int = 0) -> torch.Tensor:
    """Zero elements with a probability and scale up the rest; without seeds, do nothing.

    Args:
        number: that of the seed which the mask follows from.
    """
    if seeds is None or probability == 0.0:
        return x
    if isinstance(seeds, torch.Tensor):
        return _dropout(x, probability, seeds, number)[0]
    seed_device(x.device, seeds[number])
    return F.dropout(x, probability)


@torch.library.custom_op("megatron::dropout", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _dropout(x: torch.Tensor, probability: float, seeds: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what its backward needs: the kept elements, on CPU with their scale, as torch's dropout does there."""
    seed_device(x.device, _GRAPH_SEEDS.find(seeds).values[number])
    if x.is_cuda:
        return torch.native_dropout(x, probability, True)
    kept = torch.empty_like(x).bernoulli_(1.0 - probability).div_(1.0 - probability)
    return x * kept, kept


@_dropout.register_fake
def _(x: torch.Tensor, probability: float, seeds: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = 1.0 / (1.0 - inputs[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (kept,) = ctx.saved_tensors
    if grad.is_cuda:
        return torch.ops.aten.native_dropout_backward(grad, kept, ctx.scale), None, None, None
    return grad * kept, None, None, None


_dropout.register_autograd(_differentiate, setup_context=_save)
