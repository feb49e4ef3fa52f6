"""Perplexity of texts per token, and per UTF-8 byte, which is comparable between models with different tokenizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megatron.data.tokenizer import Tokenizer
from megatron_lab.evaluation.scores import Scorer
from megatron_lab.evaluation.texts import Document, get_document_prefix

_DOCUMENTS_PER_GROUP = 256
"""Documents that are scored together, so that their windows fill batches."""


@dataclass(frozen=True)
class Perplexity:
    """Result of scoring documents with a model: the mean loss, and the perplexities that follow from it."""

    documents: int
    tokens: int
    """Number of tokens that were scored."""
    num_bytes: int | None
    """UTF-8 bytes of all documents; None if the documents are token ids and there is no tokenizer to decode them."""
    loss: float
    """Mean of -log(probability) over the scored tokens, in nats."""

    @property
    def per_token(self) -> float:
        """Perplexity per token: exp of the mean loss per token."""
        return _exp_or_inf(self.loss)

    @property
    def per_byte(self) -> float | None:
        """Perplexity per byte: exp of the loss per UTF-8 byte. None if the number of bytes is unknown or 0."""
        return None if not self.num_bytes else _exp_or_inf(self.loss * self.tokens / self.num_bytes)

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per UTF-8 byte. None if the number of bytes is unknown or 0."""
        return None if not self.num_bytes else self.loss * self.tokens / self.num_bytes / math.log(2)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the derived perplexities as a dict for JSON."""
        derived = {"perplexity": self.per_token, "byte_perplexity": self.per_byte, "bits_per_byte": self.bits_per_byte}
        return asdict(self) | derived

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}, perplexity {self.per_token:.4g} on {self.tokens:,} tokens of {self.documents:,} documents"
        if self.per_byte is None:
            return text
        return f"{text}; {self.bits_per_byte:.4f} bits a byte, perplexity {self.per_byte:.4f} a byte ({self.num_bytes:,} bytes)"


def compute_perplexity(scorer: Scorer, documents: Iterable[Document], tokenizer: Tokenizer | None) -> Perplexity:
    """Score every token of the documents, and return the perplexity over all of them.

    Each document is scored separately. The model first reads the token that starts a document (bos, or else eod; see
    `Tokenizer.document_start`), which is not scored. A document that begins with this token gets no second one. Without a tokenizer
    this token is unknown, so the first token of each document is not scored.

    Raises:
        ValueError: there is no token to score, or a token id is outside the vocabulary.
    """
    prefix = get_document_prefix(tokenizer)
    num_documents, num_tokens, num_bytes, total_loss = 0, 0, 0, 0.0
    has_num_bytes = True
    for group in _group_documents(documents):
        for score in scorer.score([_prepare(document, prefix) for document in group], first_index=num_documents):
            num_tokens += len(score.log_probabilities)
            total_loss -= score.total
        for document in group:
            num_documents += 1
            has_num_bytes = has_num_bytes and document.num_bytes is not None
            num_bytes += document.num_bytes or 0
    if not num_tokens:
        raise ValueError(
            "the documents to evaluate have no token to score: they are empty or, without a tokenizer, have only one token each. "
            "Choose longer documents"
        )
    return Perplexity(num_documents, num_tokens, num_bytes if has_num_bytes else None, total_loss / num_tokens)


def _prepare(document: Document, prefix: list[int]) -> tuple[list[int], int]:
    """Return the ids of a document after the ids that start a document, and the index of the first id to score."""
    has_prefix = document.ids[: len(prefix)] == prefix
    return document.ids if has_prefix else [*prefix, *document.ids], max(1, len(prefix))


def _group_documents(documents: Iterable[Document]) -> Iterable[tuple[Document, ...]]:
    iterator = iter(documents)
    while group := tuple(itertools.islice(iterator, _DOCUMENTS_PER_GROUP)):
        yield group


def _exp_or_inf(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
