"""Texts that continue prompts, given out piece by piece as they are made, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.config.model import ModelConfig
from megatron.data.tokenizer import Tokenizer
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.inference.generate import GenerationRequest, generate

_CONTEXT = 16
"""Tokens before the new ones that are decoded with them: the text of a token may depend on the one before (a blank)."""
_LONGEST_HELD = 8
"""The most tokens that may wait for the rest of a character; a character of UTF-8 has at most four bytes."""


NEW_TOKENS = 256
"""The most tokens that are made where nobody says how many."""


def prompt_ids(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    """The tokens of a beginning; where there are none, what begins a document.

    Raises:
        ValueError: `add_bos`, and this tokenizer has none.
    """
    ids = tokenizer.encode(text)
    if add_bos:
        if tokenizer.bos is None:
            raise ValueError("--add-bos: this tokenizer has no bos")
        ids = [tokenizer.bos, *ids]
    return ids or [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]


def most_new_tokens(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens are made where nobody says it: as many as there are positions for, and not more than `NEW_TOKENS`."""
    if config.position_embedding_type != "learned_absolute":
        return NEW_TOKENS
    return max(1, min(NEW_TOKENS, config.num_positions - max(map(len, prompts))))


class TextStream:
    """Turns one sequence's tokens into text.

    Args:
        decode: text of token ids; bytes that are no UTF-8 show as U+FFFD.
        before: the tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(before[-_CONTEXT:])
        self._said = len(self._ids)

    def add(self, id: int) -> str:
        """The text that a token brings; empty while it ends within a character."""
        self._ids.append(id)
        return self._new(whole=len(self._ids) - self._said < _LONGEST_HELD)

    def finish(self) -> str:
        """The text that was held back."""
        return self._new(whole=False)

    def _new(self, *, whole: bool) -> str:
        before, text = self._decode(self._ids[: self._said]), self._decode(self._ids)
        if whole and text.endswith("\ufffd"):
            return ""
        fresh = text[len(before) :]
        if fresh:  # of the tokens already decoded, only the last are needed
            self._ids = self._ids[self._said :][-_CONTEXT:]
            self._said = len(self._ids)
        return fresh


@dataclass
class Continuation:
    """The generated text of one sample of one prompt."""

    prompt: int
    """Index of the prompt."""
    sample: int
    text: str = ""
    """The new text, without the prompt."""
    tokens: list[int] = field(default_factory=list)
    """The new tokens, without the end-of-document token."""
    ended: bool = False
    """Whether the document ended; otherwise the limit on tokens was reached."""


def continuations(
    model: Model,
    context: ParallelContext,
    tokenizer: Tokenizer,
    request: GenerationRequest,
    say: Callable[[str], None] | None = None,
) -> list[Continuation]:
    """Generate all texts of a request. All ranks of the model call it together and get the same.

    Args:
        say: called with the first sequence's text piece by piece, as it is made.
    """
    found = [Continuation(request.first_prompt + prompt, sample) for prompt, sample in request.rows]
    streams = [TextStream(tokenizer.decode, request.prompts[prompt]) for prompt, _ in request.rows]

    def take(one: Continuation, piece: str) -> None:
        one.text += piece
        if say is not None and one is found[0] and piece:
            say(piece)

    for ids in generate(model, context, request):
        for one, stream, id in zip(found, streams, ids, strict=True):
            if id is None:
                one.ended = True
            else:
                one.tokens.append(id)
                take(one, stream.add(id))
    for one, stream in zip(found, streams, strict=True):
        take(one, stream.finish())
    return found
