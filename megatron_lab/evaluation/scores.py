"""Log-probabilities of tokens under a model, in windows where a text is longer than what the model reads.

Shapes: `b` windows in a batch, `s` tokens of the longest, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.inference.forward import sequence_logits

_TOKENS = 4096
_CHUNK = 1 << 24
"""Logits, at most, of which the softmax is taken at once."""


@dataclass(frozen=True)
class Window:
    """A stretch of a sequence that is read at once: tokens `start` to `stop` - 1, of which those from `scored` on are scored."""

    start: int
    scored: int
    stop: int


def windows(num_tokens: int, first: int, length: int, stride: int) -> Iterator[Window]:
    """Cut a sequence so that each of its tokens from `first` on is scored once, with as many before it as fit.

    Args:
        first: the first token to be scored; at least 1, since a token is predicted from those before it.
        length: tokens that the model reads at once. A window has one more, which is only predicted.
        stride: tokens that a window scores, but for the first, which scores all that it can; at most `length`. The last window
            has the full length too, if there is so much.
    """
    assert first >= 1 and 1 <= stride <= length
    done = first
    while done < num_tokens:
        stop = min(num_tokens, length + 1 if done == first and first + stride <= length + 1 else done + stride)
        yield Window(max(0, stop - length - 1), done, stop)
        done = stop


@dataclass(frozen=True)
class Score:
    """What a model makes of a sequence."""

    log_probabilities: list[float]
    """Natural logarithms, of the scored tokens in order."""
    greedy: bool
    """Whether each of them was the likeliest."""

    @property
    def total(self) -> float:
        """Logarithm of the probability of all scored tokens together."""
        return sum(self.log_probabilities)


class Scorer:
    """Scores sequences in batches. All ranks of the model call it together and get the same.

    Args:
        batch_size: windows in a forward; by default as many as have 4,096 tokens, and at least one.
        length: tokens of a window, by default the model's sequence length.
        stride: see `windows`; by default the length.

    Raises:
        ValueError: the length is more than the model has positions for, or the stride more than the length.
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
            raise ValueError(f"--window {self.length} is more than the {config.num_positions} positions that the model has learned")
        if not 1 <= self.stride <= self.length:
            raise ValueError(f"--stride {self.stride} must be from 1 to the {self.length} tokens of a window (--window)")
        self._model, self._context = model, context
        self._batch_size = max(1, _TOKENS // self.length) if batch_size is None else batch_size

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[Score]:
        """Score sequences of token ids, each from the given place on.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        most = max((max(ids) for ids, _ in sequences if len(ids)), default=0)
        if most >= self._model.vocab_size:
            raise ValueError(f"a text holds the id {most:,}, but the model's vocabulary has {self._model.vocab_size:,}")
        work = [
            (at, one) for at, (ids, first) in enumerate(sequences) for one in windows(len(ids), first, self.length, self.stride)
        ]
        work.sort(key=lambda each: each[1].start - each[1].stop)  # those of like length together; the longest first
        found: dict[tuple[int, int], tuple[list[float], bool]] = {}
        for begin in range(0, len(work), self._batch_size):
            batch = work[begin : begin + self._batch_size]
            for (at, window), made in zip(batch, self._forward(sequences, batch), strict=True):
                found[at, window.scored] = made
        scores = []
        for at, (ids, first) in enumerate(sequences):
            parts = [found[at, one.scored] for one in windows(len(ids), first, self.length, self.stride)]
            scores.append(Score([value for part, _ in parts for value in part], all(greedy for _, greedy in parts)))
        return scores

    @torch.no_grad()
    def _forward(
        self, sequences: Sequence[tuple[Sequence[int], int]], batch: Sequence[tuple[int, Window]]
    ) -> Iterator[tuple[list[float], bool]]:
        """Read a batch of windows. What fills up the shorter ones lies behind them, where no token sees it."""
        longest = max(one.stop - one.start for _, one in batch) - 1
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, (at, one) in enumerate(batch):
            tokens[row, : one.stop - one.start - 1] = torch.as_tensor(sequences[at][0][one.start : one.stop - 1])
        logits = sequence_logits(self._model, self._context, tokens)
        for row, (at, one) in enumerate(batch):
            labels = torch.as_tensor(sequences[at][0][one.scored : one.stop], dtype=torch.long, device=logits.device)
            of_row = logits[row, one.scored - one.start - 1 : one.stop - one.start - 1]
            values, greedy = [], True
            for part, wanted in zip(of_row.split(rows := self._rows(of_row)), labels.split(rows), strict=True):
                wide = part if part.dtype == torch.float64 else part.float()
                values.append(torch.log_softmax(wide, -1).gather(-1, wanted[:, None]).double())
                greedy = greedy and bool((wide.argmax(-1) == wanted).all())
            yield torch.cat(values).flatten().tolist(), greedy

    @staticmethod
    def _rows(logits: torch.Tensor) -> int:
        return max(1, _CHUNK // logits.shape[-1])
