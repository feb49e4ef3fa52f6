"""A forward through all chunks, stage after stage, at any tensor and pipeline layout: of whole sequences for their logits, or of
prompts at once and then of one token a row. All ranks of the model call it together.

Shapes: `s` the longest prompt, `b` rows, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.attention.documents import samples
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.cut import mirrored


def last_hidden_states(model: Model, context: ParallelContext, inputs: ModelInputs) -> torch.Tensor | None:
    """Hidden states after the last layer, [s, b, h] (or [s/n, b, h]), on the stage that holds the output layer; None on others.

    All ranks of the model call it together. Nothing is kept for a backward.

    Args:
        inputs: the same on all ranks.
    """
    stage, table = context.group("pp").index, model.layer_table
    length, batch = inputs.positions.shape
    spec = model.boundary(batch, context.topology)["hidden"]
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
    """The model's inputs for whole samples [b, s]: positions from 0, no dropout."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).unsqueeze(1).expand(-1, batch)
    return ModelInputs(positions.contiguous(), tokens.t().contiguous())


@torch.no_grad()
def sequence_logits(model: Model, context: ParallelContext, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the next token at every position, [b, s, v] in the model's dtype, without padding, on every rank.

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


class Decoder:
    """Reads tokens one by one, with a cache of keys and values, so that no earlier token is computed again.

    Args:
        capacity: tokens in the longest row, prompt and new ones.
    """

    def __init__(self, model: Model, context: ParallelContext, capacity: int) -> None:
        assert not model.sequence_parallel, "one token cannot be split over tensor ranks"
        self._model, self._context = model, context
        self.cache = KeyValueCache(capacity)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Sequence[int]], copies: int = 1) -> torch.Tensor | None:
        """Read the prompts; each becomes `copies` rows, side by side.

        Returns:
            logits of the next token of each row [b, v], without padding, on the stage with the output layer; None on others.
        """
        device, sharers, lengths = self._context.device, self._context.context_group, [len(prompt) for prompt in prompts]
        unit = 2 * sharers.size if sharers.size > 1 else 1  # context ranks hold two pieces each
        room = -(-max(lengths) // unit) * unit
        tokens = torch.zeros(room, len(prompts), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[: len(prompt), row] = torch.tensor(prompt)
        documents, places = None, torch.arange(room)
        if sharers.size > 1:
            documents = samples(room, len(prompts), mirrored(room, sharers.size), device)
            places = torch.from_numpy(mirrored(room, sharers.size).places(sharers.index))
        # What fills up the last piece has no position of its own: the model may have learned no more than there are tokens.
        positions = places.clamp(max=max(lengths) - 1).to(device).unsqueeze(1).expand(-1, len(prompts)).contiguous()
        self.cache.expect(lengths, device)
        inputs = ModelInputs(positions, tokens[places].to(device), documents=documents, cache=self.cache)
        hidden = last_hidden_states(self._model, self._context, inputs)
        self.cache.begin(copies)
        if hidden is None:
            return None
        last = torch.tensor(lengths) - 1
        at = torch.searchsorted(places, last).clamp(max=len(places) - 1)
        found = hidden[at.to(device), torch.arange(len(prompts), device=device)]
        if sharers.size > 1:  # one of them has it
            found = all_reduce(found.masked_fill((places[at] != last).to(device)[:, None], 0.0), sharers)
        return self._logits(found.unsqueeze(0)).repeat_interleave(copies, 0)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Read one more token a row, [b]; returns logits like `read`."""
        inputs = ModelInputs(self.cache.lengths.unsqueeze(0), ids.unsqueeze(0), cache=self.cache)
        hidden = last_hidden_states(self._model, self._context, inputs)
        self.cache.advance()
        return None if hidden is None else self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.chunks[len(self._model.layer_table) - 1].logits(hidden)[0]
