"""What a rank holds of weights and gradients, as boxes of global tensors in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from megatron.parallel.boxes import Box
from megatron.parallel.shards import Shard
from megatron.training.step import TrainStep
from megatron.verification.observing.observation import CountedSquare, Part


def parts_of_shards(step: TrainStep, tensor_of: Callable[[Shard], torch.Tensor]) -> list[Part]:
    """What this rank's shards have of something that has a number for each of their elements."""
    parts = []
    for shard in step.optimizer.shards:
        flat = tensor_of(shard).detach()
        assert flat.shape == (shard.weights.numel(),)
        for placed in shard.boxes(step.context):
            values = flat[placed.start : placed.start + placed.box.numel].cpu().to(torch.float64, copy=True)
            parts.append(Part(shard.record.name, placed.box.offsets, shard.record.shape, values.view(placed.box.sizes)))
    return parts


def parts_of_parameters(step: TrainStep) -> list[Part]:
    """The parameters that this rank holds whole (its tensor rank's part of them), as the next forward will use them."""
    if step.overlaps_publishing:  # the next forward waits; else they are there
        step.finish_publishing()
    parts = []
    for entry in step.model.params:
        if not isinstance(entry.param, DTensor):
            box = entry.record.held_box(step.context.axis_sizes, step.context.coordinates)
            values = entry.param.detach()[tuple(slice(n) for n in box.sizes)].cpu().to(torch.float64, copy=True)
            parts.append(Part(entry.record.name, box.offsets, entry.record.shape, values))
    return parts


def counted_squares(step: TrainStep, scale: float) -> list[CountedSquare]:
    """What each shard of this rank added to the square of the global norm of the last step, which used this loss scale."""
    squares = (step.counted_squares / scale**2).tolist()
    return [
        CountedSquare(shard.record.name, tuple((p.box.offsets, p.box.sizes) for p in shard.counted_boxes(step.context)), square)
        for shard, square in zip(step.counted_shards, squares, strict=True)
    ]


def set_weights(step: TrainStep, weights: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the mains of this rank's shards by their boxes of global weights, and publish them as a resume does."""
    for shard in step.optimizer.shards:
        assert weights[shard.record.name].shape == shard.record.shape, shard.record.name
        for placed in shard.boxes(step.context):
            part = weights[shard.record.name][inside(placed.box)].reshape(-1)
            shard.main[placed.start : placed.start + placed.box.numel].copy_(part)
    step.optimizer.publish()
    step.finish_publishing()


def inside(box: Box) -> tuple[slice, ...]:
    """The box as an index of the whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
