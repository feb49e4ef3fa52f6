"""Logits of whole sequences, the same at every layout: what comparisons with other implementations look at."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.inference.chain import inputs_of, last_hidden_states
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext


@torch.no_grad()
def sequence_logits(model: Model, context: ParallelContext, tokens: torch.Tensor) -> torch.Tensor:
    """Scores of the next token at every place, [b, s, v] in the model's dtype, without padding, on every rank.

    All ranks of the model call it together.

    Args:
        tokens: ids [b, s], the same on all ranks.
    """
    tokens = tokens.to(context.device)
    hidden = last_hidden_states(model, context, inputs_of(tokens))
    if model.computes_loss:
        assert hidden is not None
        found = model.chunks[len(model.layer_table) - 1].logits(hidden).transpose(0, 1).contiguous()
    else:
        found = torch.empty((*tokens.shape, model.vocab_size), dtype=model.dtype, device=context.device)
    pipeline = context.group("pp")
    if pipeline.size > 1:
        dist.broadcast(found, pipeline.ranks[model.layer_table[-1].stage], group=pipeline.process_group)
    return found
