"""Log-probabilities of the tokens of texts under a model. Texts longer than the model's context are split into overlapping windows.

Shapes: `b` windows in a batch, `s` tokens of the longest window, `v` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.inference.forward import compute_sequence_logits

_TOKENS_PER_BATCH = 4096
"""Tokens of a batch of windows, if the caller sets no batch size."""
_MAX_SOFTMAX_ELEMENTS = 1 << 24
"""Maximum number of logits in one softmax, which bounds the memory of the float32 copy."""


@dataclass(frozen=True)
class Window:
    """Range of tokens of a sequence that one forward pass processes: tokens `start` to `end` - 1.

    Only the tokens from `first_scored` on are scored. The tokens before them are context.
    """

    start: int
    first_scored: int
    end: int


def split_windows(num_tokens: int, first_scored: int, length: int, stride: int) -> Iterator[Window]:
    """Split a sequence into windows that together score each token from `first_scored` on exactly once.

    Each window starts as early as its length allows, so that its scored tokens have as much context as possible.

    Args:
        num_tokens: number of tokens of the sequence.
        first_scored: index of the first token to score; at least 1, because a token is predicted from the tokens before it.
        length: number of tokens that the model reads in one forward. A window has one more token, which is only predicted.
        stride: number of tokens that each window after the first scores, at most `length`. The first window scores as many tokens
            as fit. The last window may score fewer, with more context.
    """
    assert first_scored >= 1 and 1 <= stride <= length
    num_covered = first_scored
    while num_covered < num_tokens:
        end = min(
            num_tokens, length + 1 if num_covered == first_scored and first_scored + stride <= length + 1 else num_covered + stride
        )
        yield Window(max(0, end - length - 1), num_covered, end)
        num_covered = end


@dataclass(frozen=True)
class Score:
    """Log-probabilities of the scored tokens of one sequence."""

    log_probabilities: list[float]
    """Natural logarithms of the probabilities of the scored tokens, in order."""
    is_greedy: bool
    """Whether each scored token was the most likely token, so that greedy decoding would produce exactly these tokens."""

    @property
    def total(self) -> float:
        """Log-probability of all scored tokens together: the sum of `log_probabilities`."""
        return sum(self.log_probabilities)


class Scorer:
    """Object that computes the log-probabilities of token sequences under a model, in batches.

    All ranks of the model call its methods together and get the same scores.

    Args:
        batch_size: number of windows (ranges of a sequence) in one forward; by default about 4,096 tokens, but at least one window.
        length: number of tokens that the model reads of a window; by default the model's sequence length.
        stride: number of tokens that each window after the first scores; by default `length`. A smaller stride gives each token
            more context.

    Raises:
        ValueError: the length exceeds the positions that the model has learned, or the stride exceeds the length.
    """

    def __init__(
        self,
        model: Model,
        context: ParallelContext,
        batch_size: int | None = None,
        length: int | None = None,
        stride: int | None = None,
    ) -> None:
        config = model.config
        self.length = config.seq_length if length is None else length
        self.stride = self.length if stride is None else stride
        if config.position_embedding_type == "learned_absolute" and self.length > config.num_positions:
            raise ValueError(
                f"--window {self.length} exceeds the {config.num_positions} positions that the model has learned: lower --window"
            )
        if not 1 <= self.stride <= self.length:
            raise ValueError(
                f"--stride {self.stride} must be from 1 to the {self.length} tokens of a window (--window). Correct --stride"
            )
        self._model, self._context = model, context
        self._batch_size = max(1, _TOKENS_PER_BATCH // self.length) if batch_size is None else batch_size

    def score(self, sequences: Sequence[tuple[Sequence[int], int]], *, first_index: int = 0) -> list[Score]:
        """Return the log-probabilities of the tokens of each sequence.

        Args:
            sequences: (token ids, index of the first token to score) of each sequence.
            first_index: index of the first sequence among all texts that are scored, for messages.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """
        for index, (ids, _) in enumerate(sequences, start=first_index):
            if len(ids) and max(ids) >= self._model.vocab_size:
                raise ValueError(
                    f"text {index:,} (the first is 0) has the token id {max(ids):,}, but the vocabulary of the model has only "
                    f"{self._model.vocab_size:,} ids: the tokenizer belongs to another model, or the id is that of a special token "
                    "that the model has no row for. Choose the tokenizer of this model (--tokenizer-model), or remove the text"
                )
        items = [
            (sequence_index, window)
            for sequence_index, (ids, first_scored) in enumerate(sequences)
            for window in split_windows(len(ids), first_scored, self.length, self.stride)
        ]
        items.sort(key=lambda item: item[1].start - item[1].end)  # the longest first, so that a batch has windows of similar length
        results: dict[tuple[int, int], tuple[list[float], bool]] = {}
        for start in range(0, len(items), self._batch_size):
            batch = items[start : start + self._batch_size]
            for (sequence_index, window), result in zip(batch, self._score_batch(sequences, batch), strict=True):
                results[sequence_index, window.first_scored] = result
        scores = []
        for sequence_index, (ids, first_scored) in enumerate(sequences):
            window_results = [
                results[sequence_index, window.first_scored]
                for window in split_windows(len(ids), first_scored, self.length, self.stride)
            ]
            scores.append(
                Score(
                    [value for values, _ in window_results for value in values], all(is_greedy for _, is_greedy in window_results)
                )
            )
        return scores

    @torch.no_grad()
    def _score_batch(
        self, sequences: Sequence[tuple[Sequence[int], int]], batch: Sequence[tuple[int, Window]]
    ) -> Iterator[tuple[list[float], bool]]:
        """Score the tokens of a batch of windows in one forward.

        Shorter windows are padded at the end. Because attention is causal, no real token sees the padding.

        Args:
            sequences: (token ids, index of the first token to score) of each sequence.
            batch: (index of the sequence, window of the sequence) of each row of the batch.

        Yields:
            For each window, the log-probabilities of its scored tokens, and whether each of them was the most likely token.
        """
        max_length = max(window.end - window.start for _, window in batch) - 1
        tokens = torch.zeros(len(batch), max_length, dtype=torch.long)
        for row, (sequence_index, window) in enumerate(batch):
            tokens[row, : window.end - window.start - 1] = torch.as_tensor(
                sequences[sequence_index][0][window.start : window.end - 1]
            )
        logits = compute_sequence_logits(self._model, self._context, tokens)
        for row, (sequence_index, window) in enumerate(batch):
            labels = torch.as_tensor(
                sequences[sequence_index][0][window.first_scored : window.end], dtype=torch.long, device=logits.device
            )
            scored_logits = logits[row, window.first_scored - window.start - 1 : window.end - window.start - 1]
            log_probabilities, is_greedy = [], True
            for block, block_labels in zip(
                scored_logits.split(rows_per_block := self._compute_rows_per_block(scored_logits)),
                labels.split(rows_per_block),
                strict=True,
            ):
                block_float = block if block.dtype == torch.float64 else block.float()
                log_probabilities.append(torch.log_softmax(block_float, -1).gather(-1, block_labels[:, None]).double())
                is_greedy = is_greedy and bool((block_float.argmax(-1) == block_labels).all())
            yield torch.cat(log_probabilities).flatten().tolist(), is_greedy

    @staticmethod
    def _compute_rows_per_block(logits: torch.Tensor) -> int:
        return max(1, _MAX_SOFTMAX_ELEMENTS // logits.shape[-1])
