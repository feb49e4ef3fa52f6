"""Builds a model from any source of weights, ready for use."""

from __future__ import annotations

import torch

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.config.checks.experts import experts_divide_by_their_ranks, shared_expert_divides_by_tensor
from megatron.config.checks.parallel import heads_divide_by_tensor, mlp_divides_by_tensor, query_groups_fit_tensor
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.model.build import Model, build_model
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import materialize
from megatron.spec.layers import context_ways
from megatron_lab.foreign.as_used import as_used
from megatron_lab.foreign.source import WeightSource, misfits

_SPLITS = (
    *(heads_divide_by_tensor, query_groups_fit_tensor, mlp_divides_by_tensor),
    *(experts_divide_by_their_ranks, shared_expert_divides_by_tensor),
)
"""Rules about what tensor ranks divide."""


def model_from(source: WeightSource, context: ParallelContext, dtype: torch.dtype) -> Model:
    """This rank's part of the source's model with its weights, rounded to `dtype`, on the context's device; without what
    only training needs (`as_used`).

    Raises:
        CheckpointError: the source does not hold the model that it describes, or is damaged.
        ValueError: the model cannot be split over this layout.
    """
    source = as_used(source)
    topology = context.topology
    parallel = ParallelConfig(tensor_model_parallel_size=topology.tp, expert_tensor_parallel_size=topology.expert_tensor)
    config = Config(model=source.model, parallel=parallel)
    for rule in _SPLITS:
        for finding in rule(config, context.topology.world_size):
            raise ValueError(f"{source.name}: {finding.message}\n  {finding.why}")
    model = build_model(
        source.model,
        context,
        dtype=dtype,
        vocab_size=source.vocab_size,
        sequence_parallel=False,
        seed=0,
        ways=context_ways(source.model, ()),
        materialized=False,  # no initial values: every weight comes from the source
    )
    for chunk in model.chunks.values():
        materialize(chunk, model.params, context.device)
    fill_model(model, context, source)
    return model


def usual_dtype(source: WeightSource, context: ParallelContext) -> torch.dtype:
    """The dtype of the weights as they are stored; float32 in the place of float16 on a CPU, which has no products in it."""
    stored = source.weights["embedding.word.weight"].dtype
    return torch.float32 if stored == torch.float16 and context.device.type == "cpu" else stored


@torch.no_grad()
def fill_model(model: Model, context: ParallelContext, source: WeightSource) -> None:
    """Give every parameter of a materialized model the values of the source, rounded to the model's dtype; padding becomes 0.

    Raises:
        CheckpointError: the source lacks parameters of the model, or holds them in other shapes.
    """
    wrong = misfits(source.weights, {entry.record.name: entry.record.shape for entry in model.params})
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
