"""One forward through all chunks, stage after stage, at any tensor and pipeline layout."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext


def last_hidden_states(model: Model, context: ParallelContext, inputs: ModelInputs) -> torch.Tensor | None:
    """Hidden states behind the last layer, [s, b, h] (or [s/n, b, h]), on the stage that holds the output layer; None on others.

    All ranks of the model call it together. Nothing is kept for a backward.

    Args:
        inputs: the same on all ranks.
    """
    stage, table = context.group("pp").index, model.layer_table
    length, batch = inputs.positions.shape
    spec = model.boundary(batch, context.topology.tp)["hidden"]
    if model.sequence_parallel:
        assert length % context.topology.tp == 0, f"{length} tokens do not divide by {context.topology.tp} tensor ranks"
        length //= context.topology.tp
    hidden: torch.Tensor | None = None
    for chunk in table:
        if chunk.stage != stage:
            hidden = None
            continue
        if not chunk.first and (source := table[chunk.index - 1].stage) != stage:
            channel = context.pipeline_channel(source, stage)
            hidden = torch.empty((length, batch, spec.shape[-1]), dtype=spec.dtype, device=context.device)
            dist.recv(hidden, channel.ranks[source], group=channel.process_group)
        hidden = model.chunks[chunk.index].hidden_states(inputs, hidden)
        if not chunk.last and (destination := table[chunk.index + 1].stage) != stage:
            channel = context.pipeline_channel(stage, destination)
            dist.send(hidden.contiguous(), channel.ranks[destination], group=channel.process_group)
    return hidden if model.computes_loss else None


def inputs_of(tokens: torch.Tensor) -> ModelInputs:
    """Whole samples [b, s] as the model takes them, positions from 0; no dropout."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).unsqueeze(1).expand(-1, batch)
    return ModelInputs(positions.contiguous(), tokens.t().contiguous())
