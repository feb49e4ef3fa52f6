"""Texts that go on from prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.data.tokenizers.protocol import Tokenizer
from megatron.inference.generate import Request, generate
from megatron.inference.text_stream import TextStream
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext


@dataclass(frozen=True)
class Continuation:
    """What was made for one sample of one prompt."""

    prompt: int
    """Number of the prompt."""
    sample: int
    text: str
    """The new text alone."""
    tokens: list[int]
    """The new tokens, without the end of document."""
    ended: bool
    """Whether the document ended; else the room for tokens did."""


def continuations(
    model: Model,
    context: ParallelContext,
    tokenizer: Tokenizer,
    request: Request,
    say: Callable[[str], None] | None = None,
) -> list[Continuation]:
    """Make all texts of a request. All ranks of the model call it together and get the same.

    Args:
        say: is given the first sequence's text piece by piece, as it is made.
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
