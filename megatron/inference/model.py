"""A model ready for use, from any source of weights."""

from __future__ import annotations

import torch

from megatron.checkpoint.fill import fill_model
from megatron.checkpoint.source import WeightSource
from megatron.model.build import Model, build_model
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import materialize


def model_from(source: WeightSource, context: ParallelContext, dtype: torch.dtype) -> Model:
    """This rank's part of the source's model with its weights, rounded to `dtype`, on the context's device.

    Raises:
        CheckpointError: the source does not hold the model that it describes, or is damaged.
        ValueError: the model cannot be cut so.
    """
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
