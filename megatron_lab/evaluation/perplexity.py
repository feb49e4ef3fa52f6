"""Perplexity of texts: per token, and per byte of UTF-8, which compares models of different tokenizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megatron.data.tokenizer import Tokenizer
from megatron_lab.evaluation.scores import Scorer
from megatron_lab.evaluation.texts import Document, begins_with

_AT_ONCE = 256
"""Documents whose windows are put into batches together."""


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text."""

    documents: int
    tokens: int
    """Those that were scored."""
    num_bytes: int | None
    """Bytes of the text in UTF-8; None where no tokenizer says."""
    loss: float
    """Nats a token: the mean of -log(probability)."""

    @property
    def per_token(self) -> float:
        """exp of the mean loss of a token."""
        return _exp(self.loss)

    @property
    def per_byte(self) -> float | None:
        """exp of the loss of a byte."""
        return None if not self.num_bytes else _exp(self.loss * self.tokens / self.num_bytes)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits a byte of text."""
        return None if not self.num_bytes else self.loss * self.tokens / self.num_bytes / math.log(2)

    def to_json(self) -> dict[str, Any]:
        """In types that JSON has."""
        derived = {"perplexity": self.per_token, "byte_perplexity": self.per_byte, "bits_per_byte": self.bits_per_byte}
        return asdict(self) | derived

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}, perplexity {self.per_token:.4g} on {self.tokens:,} tokens of {self.documents:,} documents"
        if self.per_byte is None:
            return text
        return f"{text}; {self.bits_per_byte:.4f} bits a byte, perplexity {self.per_byte:.4f} a byte ({self.num_bytes:,} bytes)"


def perplexity(scorer: Scorer, documents: Iterable[Document], tokenizer: Tokenizer | None) -> Perplexity:
    """Score every token of the documents. Each is read by itself, behind the token that begins one; without a tokenizer that is
    not known, and a document's first token is not scored.

    Raises:
        ValueError: there is no token to be scored, or an id is outside the vocabulary.
    """
    before = begins_with(tokenizer)
    count, tokens, num_bytes, total = 0, 0, 0, 0.0
    known = True
    for group in _groups(documents):
        for score in scorer.score([([*before, *one.ids], 1) for one in group]):
            tokens += len(score.log_probabilities)
            total -= score.total
        for one in group:
            count += 1
            known = known and one.num_bytes is not None
            num_bytes += one.num_bytes or 0
    if not tokens:
        raise ValueError("there is no token to be scored")
    return Perplexity(count, tokens, num_bytes if known else None, total / tokens)


def _groups(documents: Iterable[Document]) -> Iterable[tuple[Document, ...]]:
    rest = iter(documents)
    while group := tuple(itertools.islice(rest, _AT_ONCE)):
        yield group


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
