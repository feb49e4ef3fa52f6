"""Forward passes without a backward pass: logits of complete sequences, and decoding token by token with a key-value cache.

A forward pass runs all model chunks of the pipeline, one stage after another. It supports tensor, context and pipeline parallelism.
All ranks of the model call these functions together.

Shapes: `s` tokens of the longest prompt or sequence, `b` rows of the batch, `h` hidden size, `v` vocabulary size, `tp`
tensor-parallel size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.attention.documents import build_unpacked_documents
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.sequence_split import split_zigzag


def compute_last_hidden_states(model: Model, context: ParallelContext, inputs: ModelInputs) -> torch.Tensor | None:
    """Run a forward pass through all pipeline stages, and return the hidden states after the last layer.

    No activations are kept for a backward pass. All ranks of the model call this function together.

    Args:
        inputs: tokens and positions, equal on all ranks.

    Returns:
        On the stage with the output layer [s, b, h], or [s/tp, b, h] with sequence parallelism; None on other stages. s: tokens of
        the longest sequence, b: sequences, h: hidden size, tp: tensor-parallel size.
    """
    stage, layer_table = context.group("pp").rank, model.layer_table
    length, batch = inputs.positions.shape
    boundary = model.get_stage_boundary(batch, context.topology)["hidden"]
    if model.sequence_parallel:
        assert length % context.topology.tp == 0, (
            f"{length} tokens cannot be split evenly over {context.topology.tp} tensor parallel ranks"
        )
        length //= context.topology.tp
    hidden: torch.Tensor | None = None
    for chunk in layer_table:
        if chunk.stage != stage:
            hidden = None
            continue
        if not chunk.is_first and (source := layer_table[chunk.index - 1].stage) != stage:
            channel = context.get_pipeline_channel(source, stage)
            hidden = torch.empty((length, batch, boundary.shape[-1]), dtype=boundary.dtype, device=context.device)
            dist.recv(hidden, channel.ranks[source], group=channel.process_group)
        hidden = model.chunks[chunk.index].compute_hidden_states(inputs, hidden)
        if not chunk.is_last and (destination := layer_table[chunk.index + 1].stage) != stage:
            channel = context.get_pipeline_channel(stage, destination)
            dist.send(hidden.contiguous(), channel.ranks[destination], group=channel.process_group)
    return hidden if model.computes_loss else None


def build_inputs(tokens: torch.Tensor) -> ModelInputs:
    """Return the model inputs for complete sequences, with positions from 0.

    Args:
        tokens: token ids [b, s] of b sequences with s tokens each.
    """
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).unsqueeze(1).expand(-1, batch)
    return ModelInputs(positions.contiguous(), tokens.t().contiguous())


@torch.no_grad()
def compute_sequence_logits(model: Model, context: ParallelContext, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the next token at every position, on every rank. All ranks of the model call this function together.

    Args:
        tokens: token ids [b, s] of b sequences with s tokens each, the same on all ranks.

    Returns:
        Logits [b, s, v] in the model's dtype, where v is the vocabulary size without padding.
    """
    tokens = tokens.to(context.device)
    hidden = compute_last_hidden_states(model, context, build_inputs(tokens))
    if model.computes_loss:
        assert hidden is not None
        logits = model.chunks[len(model.layer_table) - 1].compute_logits(hidden).transpose(0, 1).contiguous()
    else:
        logits = torch.empty((*tokens.shape, model.vocab_size), dtype=model.dtype, device=context.device)
    pipeline = context.group("pp")
    if pipeline.size > 1:
        dist.broadcast(logits, pipeline.ranks[model.layer_table[-1].stage], group=pipeline.process_group)
    return logits


_BYTES_PER_THREAD = 8 * 2**20
"""Weight bytes of an average matrix product for each CPU thread, if a forward pass has few tokens. A core reads so many bytes in
about half a millisecond. With less work, threads mostly wait for each other, and they wait long if other processes use the
cores."""
_TOKENS_PER_READ = 4
"""Number of tokens for which a matrix product takes as long as reading the weight from memory."""


def select_num_threads(model: Model, num_tokens: int, max_threads: int) -> int:
    """Return the number of CPU threads with which to compute a forward pass of `num_tokens` tokens.

    The number depends only on the sizes of the weights and on `num_tokens`. If speed were measured instead, equal calls could use
    different numbers of threads, and round differently.
    """
    matrices = [entry.param for entry in model.params if entry.param.dim() >= 2]
    bytes_per_product = sum(matrix.nbytes for matrix in matrices) / max(1, len(matrices))
    num_threads = bytes_per_product * max(1.0, num_tokens / _TOKENS_PER_READ) / _BYTES_PER_THREAD
    return max(1, min(max_threads, int(num_threads)))


class _ThreadLimit:
    """Limit of the CPU threads in forward passes of one model. It has no effect on GPUs, and if the user has chosen a number of
    threads by OMP_NUM_THREADS."""

    def __init__(self, model: Model, context: ParallelContext) -> None:
        self._model, self._has_effect = model, context.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ
        self._selected: dict[tuple[int, int], int] = {}

    @contextmanager
    def limit(self, num_tokens: int) -> Iterator[None]:
        """Context manager in which torch uses at most as many threads as a forward pass of `num_tokens` tokens can use."""
        max_threads = torch.get_num_threads()
        if not self._has_effect or max_threads == 1:
            yield
            return
        key = (num_tokens, max_threads)
        if key not in self._selected:
            self._selected[key] = select_num_threads(self._model, *key)
        torch.set_num_threads(self._selected[key])
        try:
            yield
        finally:
            torch.set_num_threads(max_threads)


class Decoder:
    """Decoder that computes the logits of a batch of sequences token by token.

    A cache holds the keys and values of earlier tokens, so each step processes only one token per sequence.

    Args:
        capacity: maximum number of tokens of a sequence, prompt and new tokens together.
    """

    def __init__(self, model: Model, context: ParallelContext, capacity: int) -> None:
        assert not model.sequence_parallel, (
            "incremental decoding does not support sequence parallelism: one token cannot be split over tensor ranks"
        )
        self._model, self._context = model, context
        self._threads = _ThreadLimit(model, context)
        self.cache = KeyValueCache(capacity)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], num_samples: int = 1) -> torch.Tensor | None:
        """Process the prompts and fill the key-value cache. Each prompt becomes `num_samples` consecutive rows of the batch.

        Args:
            prompts: token ids of each prompt.
            num_samples: number of sequences that will continue each prompt.

        Returns:
            Logits [b, v] of the next token of each row, on the stage with the output layer; None on other stages. b: rows of the
            batch, v: vocabulary size without padding.
        """
        device, context_group, lengths = self._context.device, self._context.context_group, [len(prompt) for prompt in prompts]
        # Each context rank holds two segments of a sequence (zigzag split).
        alignment = 2 * context_group.size if context_group.size > 1 else 1
        padded_length = -(-max(lengths) // alignment) * alignment
        tokens = torch.zeros(padded_length, len(prompts), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[: len(prompt), row] = torch.tensor(prompt)
        documents, local_positions = None, torch.arange(padded_length)
        if context_group.size > 1:
            documents = build_unpacked_documents(
                padded_length, len(prompts), split_zigzag(padded_length, context_group.size), device
            )
            local_positions = torch.from_numpy(split_zigzag(padded_length, context_group.size).get_positions(context_group.rank))
        # Padding gets the last token's position: a learned embedding may have no positions beyond the longest prompt.
        positions = local_positions.clamp(max=max(lengths) - 1).to(device).unsqueeze(1).expand(-1, len(prompts)).contiguous()
        self.cache.prepare_prefill(lengths, device)
        inputs = ModelInputs(positions, tokens[local_positions].to(device), documents=documents, cache=self.cache)
        with self._threads.limit(positions.numel()):
            hidden = compute_last_hidden_states(self._model, self._context, inputs)
        self.cache.finish_prefill(num_samples)
        if hidden is None:
            return None
        last_positions = torch.tensor(lengths) - 1
        local_rows = torch.searchsorted(local_positions, last_positions).clamp(max=len(local_positions) - 1)
        last_hidden = hidden[local_rows.to(device), torch.arange(len(prompts), device=device)]
        if context_group.size > 1:  # only one context rank has the last token of a row
            last_hidden = all_reduce(
                last_hidden.masked_fill((local_positions[local_rows] != last_positions).to(device)[:, None], 0.0), context_group
            )
        return self._compute_logits(last_hidden.unsqueeze(0)).repeat_interleave(num_samples, 0)

    @torch.inference_mode()
    def decode(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Process one more token of each row, and return the logits of the token after it.

        Args:
            ids: next token id of each row [b].

        Returns:
            Logits [b, v] on the stage with the output layer; None on other stages. b: rows of the batch, v: vocabulary size without
            padding.
        """
        inputs = ModelInputs(self.cache.lengths.unsqueeze(0), ids.unsqueeze(0), cache=self.cache)
        with self._threads.limit(len(ids)):
            hidden = compute_last_hidden_states(self._model, self._context, inputs)
        self.cache.advance()
        return None if hidden is None else self._compute_logits(hidden)

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._threads.limit(hidden.shape[1]):
            return self._model.chunks[len(self._model.layer_table) - 1].compute_logits(hidden)[0]
