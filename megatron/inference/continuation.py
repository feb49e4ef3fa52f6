"""Texts that continue prompts, given out piece by piece as they are made, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.data.tokenizers.simple_tokenizers import Tokenizer
from megatron.inference.generate import GenerationRequest, generate
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext

_CONTEXT = 16
"""Tokens before the new ones that are decoded with them: the text of a token may depend on the one before (a blank)."""
_LONGEST_HELD = 8
"""The most tokens that may wait for the rest of a character; a character of UTF-8 has at most four bytes."""


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


@dataclass(frozen=True)
class Continuation:
    """The generated text of one sample of one prompt."""

    prompt: int
    """Index of the prompt."""
    sample: int
    text: str
    """The new text, without the prompt."""
    tokens: list[int]
    """The new tokens, without the end-of-document token."""
    ended: bool
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
    rows = [(prompt, sample) for prompt in range(len(request.prompts)) for sample in range(request.num_samples)]
    tokens: list[list[int]] = [[] for _ in rows]
    ended = [False] * len(rows)
    stream = TextStream(tokenizer.decode, request.prompts[0])
    for ids in generate(model, context, request):
        for row, id in enumerate(ids):
            if id is None:
                ended[row] = True
            else:
                tokens[row].append(id)
        if say is not None and ids[0] is not None and (piece := stream.add(ids[0])):
            say(piece)
    if say is not None:
        say(stream.finish())
    return [
        Continuation(
            request.first_prompt + prompt, sample, _text(tokenizer, request.prompts[prompt], tokens[row]), tokens[row], ended[row]
        )
        for row, (prompt, sample) in enumerate(rows)
    ]


def _text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    stream = TextStream(tokenizer.decode, prompt)
    return "".join([*(stream.add(id) for id in tokens), stream.finish()])
