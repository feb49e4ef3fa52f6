"""Text generation with the model of a training run, between two steps and at any layout.

`megatron_lab/inference/generate.py` reads each token once and keeps keys and values. That needs a model without sequence
parallelism and with all weights in memory. The sampler of this module instead runs the complete sequence for each new token, as an
evaluation does. So it supports the layouts of training: sharded weights, sequence and context parallelism, and every assignment of
layers to stages. A sample of 64 tokens costs 64 short forward passes.

Shapes: `s` tokens of a sequence with padding, `b` rows (sequences), `h` hidden size, `v` vocabulary size, `tp` tensor ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatron.attention.documents import build_unpacked_documents
from megatron.config.config import Config
from megatron.config.precision import Fp8
from megatron.data.tokenizer import Tokenizer
from megatron.model.build import Model
from megatron.model.experts import MoELayer
from megatron.model.gpt import GPTChunk
from megatron.model.inputs import ModelInputs
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.sequence_split import SequenceSplit, split_zigzag
from megatron.training.step import TrainStep
from megatron_lab.inference.forward import compute_last_hidden_states
from megatron_lab.inference.generate import Sampling, sample_tokens


@dataclass(frozen=True)
class TrainingPrompt:
    """Prompt of a sample: its token ids, and the number of tokens that follow it at most."""

    ids: list[int]
    max_new_tokens: int


@dataclass
class _Row:
    """Sequence that grows while its sample is generated."""

    ids: list[int]
    num_prompt_tokens: int
    max_length: int
    uniform: list[float]
    """Random number of each new token, uniform in [0, 1)."""
    has_ended: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the next token of the sequence is part of its sample."""
        return not self.has_ended and len(self.ids) < self.max_length


class TrainingSampler:
    """Generates texts with the current weights of a training step. All ranks call its methods together and get the same texts.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the run. Ids that it has no text for are never selected.
    """

    def __init__(self, config: Config, step: TrainStep, tokenizer: Tokenizer) -> None:
        self._step, self._model, self._context = step, step.model, step.context
        self._eod, self._num_ids = tokenizer.eod, min(tokenizer.vocab_size, step.model.vocab_size)
        self._max_tokens = config.training.micro_batch_size * config.model.seq_length
        """Tokens of a microbatch of training, which a forward pass of the sampler does not exceed, except with a single row."""
        topology, precision = step.context.topology, config.precision
        self._length_unit = math.lcm(
            2 * topology.cp if topology.cp > 1 else 1, topology.cp * (topology.tp if step.model.sequence_parallel else 1)
        )
        """Unit of the length of a sequence, so that context and tensor ranks divide it evenly."""
        if precision.fp8_format is not None:  # a rank's tokens are a dimension of the matrix products
            self._length_unit *= Fp8(precision.fp8_format, precision.fp8_recipe).alignment * topology.tp

    def generate(
        self, prompts: Sequence[TrainingPrompt], sampling: Sampling, has_exit_signal: Callable[[], bool]
    ) -> list[list[int]] | None:
        """Generate the new token ids of each prompt, without the end-of-document token.

        Neither weights nor gradients, statistics or random states of the training change.

        Args:
            has_exit_signal: returns whether this rank has received an exit signal. It is called for each token.

        Returns:
            the ids in the order of the prompts; None if any rank has received an exit signal.
        """
        rows = [
            _Row(
                [*prompt.ids],
                len(prompt.ids),
                len(prompt.ids) + prompt.max_new_tokens,
                sampling.draw_uniform(index, 0, prompt.max_new_tokens).tolist(),
            )
            for index, prompt in enumerate(prompts)
        ]
        self._step.finish_param_gather()
        try:
            with torch.no_grad(), _without_expert_capacity(self._model):
                for batch in self._split_rows(rows):
                    if not self._generate_batch(batch, sampling, has_exit_signal):
                        return None
        finally:
            for provider in self._step.providers:
                provider.finish_evaluation()
        return [row.ids[row.num_prompt_tokens :] for row in rows]

    def _split_rows(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        """Divide the rows into batches that need no more memory than a microbatch of training. Rows of similar length share a
        batch."""
        batches: list[list[_Row]] = []
        for row in sorted(rows, key=lambda row: row.max_length):
            if batches and (len(batches[-1]) + 1) * self._pad_length(row.max_length) <= self._max_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _pad_length(self, length: int) -> int:
        return -(-length // self._length_unit) * self._length_unit

    def _generate_batch(self, rows: Sequence[_Row], sampling: Sampling, has_exit_signal: Callable[[], bool]) -> bool:
        """Add tokens to the rows of a batch until all are complete. Returns False if any rank has received an exit signal."""
        forward = _BatchForward(self._model, self._context, len(rows), self._pad_length(max(row.max_length for row in rows)))
        before_output = [chunk for index, chunk in self._model.chunks.items() if index == len(self._model.layer_table) - 1]
        while any(row.is_active for row in rows):
            hidden = forward.compute_hidden_states(rows)
            ids = torch.zeros(len(rows), dtype=torch.long, device=self._context.device)
            if hidden is not None:
                (chunk,) = before_output
                self._gather_output_params(chunk)
                logits = forward.compute_next_logits(chunk, hidden, rows)[:, : self._num_ids]
                uniform = [row.uniform[len(row.ids) - row.num_prompt_tokens] if row.is_active else 0.0 for row in rows]
                next_ids = sample_tokens(logits, sampling, torch.tensor(uniform, dtype=torch.float64, device=logits.device))
                ids = torch.where(forward.find_counted_rows(rows), next_ids, 0)
            # Only one rank has a non-zero id of a row, so that the sum over all ranks is the id. The vote is reduced with the ids.
            totals = all_reduce(torch.cat([ids, ids.new_full((1,), has_exit_signal())]), self._context.world).tolist()
            if totals.pop():
                return False
            for row, id in zip(rows, totals, strict=True):
                if row.is_active and id == self._eod:
                    row.has_ended = True
                elif row.is_active:
                    row.ids.append(id)
        return True

    def _gather_output_params(self, chunk: GPTChunk) -> None:
        """Gather the sharded parameters of final norm and output layer. They are called without their hooks, because the output
        layer computes logits here, and no loss."""
        modules: list[nn.Module | None] = [chunk.final_norm, chunk.output] if chunk.mtp is None else [chunk.mtp]
        for provider in self._step.providers:
            provider.before_recompute([module for module in modules if module is not None])


class _BatchForward:
    """Forward passes of a batch of sequences that grow up to a fixed length.

    Args:
        num_rows: sequences of the batch.
        length: tokens of each sequence, with padding on the right. Attention is causal, so padding changes no earlier token.
    """

    def __init__(self, model: Model, context: ParallelContext, num_rows: int, length: int) -> None:
        self._model, self._context = model, context
        context_group, device = context.context_group, context.device
        split: SequenceSplit | None = split_zigzag(length, context_group.size) if context_group.size > 1 else None
        self._documents = None if split is None else build_unpacked_documents(length, num_rows, split, device)
        self._local_positions = np.arange(length) if split is None else split.get_positions(context_group.rank)
        self._index_of_position = np.zeros(length, np.int64)
        """Index of each token among those of its context rank."""
        self._context_rank_of_position = np.zeros(length, np.int64)
        for rank in range(context_group.size):
            rank_positions = np.arange(length) if split is None else split.get_positions(rank)
            self._index_of_position[rank_positions] = np.arange(len(rank_positions))
            self._context_rank_of_position[rank_positions] = rank
        # The embedding has no positions beyond the sequence length of the model, where only padding can be.
        last_position = model.config.seq_length - 1
        positions = torch.from_numpy(self._local_positions).clamp(max=last_position).to(device)
        self._positions = positions.unsqueeze(1).expand(-1, num_rows).contiguous()
        self._tokens = torch.zeros(length, num_rows, dtype=torch.long)

    def compute_hidden_states(self, rows: Sequence[_Row]) -> torch.Tensor | None:
        """Return the hidden states after the last layer for this rank's tokens: [s/tp, b, h] with sequence parallelism, else
        [s, b, h]. None on stages without the output layer."""
        for row_index, row in enumerate(rows):
            self._tokens[: len(row.ids), row_index] = torch.tensor(row.ids)
        local_tokens = self._tokens[torch.from_numpy(self._local_positions)].to(self._context.device)
        inputs = ModelInputs(self._positions, local_tokens, documents=self._documents)
        return compute_last_hidden_states(self._model, self._context, inputs)

    def compute_next_logits(self, chunk: GPTChunk, hidden: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        """Return the logits [b, v] of the token after the last one of each row. They are meaningless on context ranks that do not
        have the last token.

        The output layer processes only the last token of each row. With sequence parallelism, each tensor rank contributes one of
        its own tokens of each row, and the logits of the rank that has the last token are selected.
        """
        assert chunk.final_norm is not None and chunk.output is not None
        tensor_ranks, offsets = np.divmod(self._find_last_indices(rows), len(hidden))
        row_indices = torch.arange(len(rows), device=hidden.device)
        last_hidden = hidden[torch.from_numpy(offsets).to(hidden.device), row_indices]
        logits = chunk.output.compute_logits(chunk.final_norm.forward(last_hidden.unsqueeze(0)))
        return logits[torch.from_numpy(tensor_ranks).to(hidden.device), row_indices]

    def find_counted_rows(self, rows: Sequence[_Row]) -> torch.Tensor:
        """Return for each row whether this rank's logits count: bool [b]. Of all ranks with the output layer, exactly one counts a
        row. It has the last token of the row."""
        context = self._context
        is_first_replica = context.data_group.rank == 0 and context.group("tp").rank == 0
        owners = self._context_rank_of_position[self._get_last_positions(rows)]
        return torch.from_numpy((owners == context.context_group.rank) & is_first_replica).to(context.device)

    def _find_last_indices(self, rows: Sequence[_Row]) -> NDArray[np.int64]:
        return self._index_of_position[self._get_last_positions(rows)]

    @staticmethod
    def _get_last_positions(rows: Sequence[_Row]) -> NDArray[np.int64]:
        return np.array([len(row.ids) - 1 for row in rows])


@contextlib.contextmanager
def _without_expert_capacity(model: Model) -> Iterator[None]:
    """Let experts accept all tokens within the context, as in inference. With a capacity, the padding could displace tokens."""
    layers = [block.mlp for chunk in model.chunks.values() for block in chunk.blocks]
    routers = [layer.router for layer in layers if isinstance(layer, MoELayer)]
    specs = [router.spec for router in routers]
    for router in routers:
        router.spec = replace(router.spec, capacity_factor=None)
    try:
        yield
    finally:
        for router, spec in zip(routers, specs, strict=True):
            router.spec = spec
