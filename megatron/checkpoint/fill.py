"""Weights from any source into a model that is built, each rank only its part."""

from __future__ import annotations

import torch

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.source import WeightSource
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext


@torch.no_grad()
def fill_model(model: Model, context: ParallelContext, source: WeightSource) -> None:
    """Give every parameter of a materialized model the values of the source, rounded to the model's dtype; padding becomes 0.

    Raises:
        CheckpointError: the source lacks parameters of the model, or holds them in other shapes.
    """
    here = {entry.record.name: entry.record.shape for entry in model.params}
    wrong = [
        f"{name} ({'missing' if name not in source.weights else f'{list(source.weights[name].shape)}, not {list(shape)}'})"
        for name, shape in here.items()
        if name not in source.weights or source.weights[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{source.name} does not hold this model: {listed(wrong)}")
    sizes, coordinates = context.axis_sizes, context.coordinates
    for entry in model.params:
        box = entry.record.held_box(sizes, coordinates)
        flat = entry.param.detach().view(-1)
        if box.numel < flat.numel():
            flat.zero_()  # only the first dimension is padded, so what is held lies in front
        if box.numel:
            flat[: box.numel].copy_(source.read(entry.record.name, box).view(-1))
