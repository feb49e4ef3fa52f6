"""Builds a model from any source of weights, ready for use."""

from __future__ import annotations

import torch

from megatron.checkpoint.source import WeightSource, fill_model
from megatron.config.checks.parallel import heads_divide_by_tensor, mlp_divides_by_tensor, query_groups_divide_by_tensor
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.model.build import Model, build_model
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import materialize


def model_from(source: WeightSource, context: ParallelContext, dtype: torch.dtype) -> Model:
    """This rank's part of the source's model with its weights, rounded to `dtype`, on the context's device.

    Raises:
        CheckpointError: the source does not hold the model that it describes, or is damaged.
        ValueError: the model cannot be split over this layout.
    """
    config = Config(model=source.model, parallel=ParallelConfig(tensor_model_parallel_size=context.topology.tp))
    for rule in (heads_divide_by_tensor, query_groups_divide_by_tensor, mlp_divides_by_tensor):
        for finding in rule(config, context.topology.world_size):
            raise ValueError(f"{source.name}: {finding.message}\n  {finding.why}")
    model = build_model(
        source.model,
        context,
        dtype=dtype,
        vocab_size=source.vocab_size,
        sequence_parallel=False,
        seed=0,
        materialized=False,  # no initial values: every weight comes from the source
    )
    for chunk in model.chunks.values():
        materialize(chunk, model.params, context.device)
    fill_model(model, context, source)
    return model
