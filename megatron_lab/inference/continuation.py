"""Text generation. Sampled tokens are decoded to text at once, but only complete characters are returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.config.model import ModelConfig
from megatron.data.tokenizer import Tokenizer
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.inference.generate import GenerationRequest, generate

_NUM_CONTEXT_TOKENS = 16
"""Already decoded tokens that are decoded again with each new token, because the text of a token may depend on the previous one
(for example a leading space)."""
_MAX_PENDING_TOKENS = 8
"""Maximum number of tokens that `TextStream` holds back while they end within a character. A UTF-8 character has at most four
bytes."""


DEFAULT_MAX_NEW_TOKENS = 256
"""Default limit on the generated tokens of one sequence."""
DEFAULT_ANSWER_TOKENS = 1024
"""Default limit on the tokens of one answer in a conversation. The model usually ends its answer earlier."""


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a prompt.

    If the prompt is empty, return the ids that start a document (`Tokenizer.document_start`).
    """
    return tokenizer.encode(text) or tokenizer.document_start


def select_max_new_tokens(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> int:
    """Return the default limit on the number of generated tokens per sequence.

    The limit is `DEFAULT_MAX_NEW_TOKENS`. A model with learned position embeddings generates only as many tokens as positions
    remain after the longest prompt.

    Args:
        prompts: token ids of each prompt.
    """
    if config.position_embedding_type != "learned_absolute":
        return DEFAULT_MAX_NEW_TOKENS
    return max(1, min(DEFAULT_MAX_NEW_TOKENS, config.num_positions - max(map(len, prompts))))


class TextStream:
    """Converter of a growing sequence of tokens to text: each new token gives text as soon as its characters are complete.

    Args:
        decode: returns the text of token ids. Bytes that are not valid UTF-8 appear as U+FFFD.
        prompt: token ids before the first new token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-_NUM_CONTEXT_TOKENS:])
        self._num_decoded = len(self._ids)

    def add(self, id: int) -> str:
        """Add a token and return the text that it completes. The text is empty while a character is still incomplete."""
        self._ids.append(id)
        return self._decode_pending(hold_incomplete=len(self._ids) - self._num_decoded < _MAX_PENDING_TOKENS)

    def finish(self) -> str:
        """Return the remaining text at the end of the sequence, even if its last character is incomplete."""
        return self._decode_pending(hold_incomplete=False)

    def _decode_pending(self, *, hold_incomplete: bool) -> str:
        """Return the text of the tokens whose text has not been returned yet.

        Args:
            hold_incomplete: return an empty text if the last character is incomplete.
        """
        decoded, text = self._decode(self._ids[: self._num_decoded]), self._decode(self._ids)
        if hold_incomplete and text.endswith("\ufffd"):
            return ""
        new_text = text[len(decoded) :]
        if new_text:  # only the last decoded tokens affect the text of the next ones
            self._ids = self._ids[self._num_decoded :][-_NUM_CONTEXT_TOKENS:]
            self._num_decoded = len(self._ids)
        return new_text


@dataclass
class Continuation:
    """Generated text that continues a prompt."""

    prompt_index: int
    """Index of the prompt in the list of all prompts."""
    sample_index: int
    text: str = ""
    """Generated text, without the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Generated token ids, without the token that ends the text."""
    has_ended: bool = False
    """True if the model generated a token that ends the text; False if generation stopped at the limit on tokens."""


def generate_texts(
    model: Model,
    context: ParallelContext,
    tokenizer: Tokenizer,
    request: GenerationRequest,
    on_text: Callable[[str], None] | None = None,
) -> list[Continuation]:
    """Generate the text of each sequence of a request (prompts and generation settings).

    All ranks of the model call this function together and get the same texts.

    Args:
        request: prompts as token ids, and the settings for generating text.
        on_text: called with each new text of the first sequence while it is generated.

    Returns:
        The texts in the order of the prompts. The samples of a prompt are next to each other.
    """
    continuations = [Continuation(request.first_prompt + prompt, sample) for prompt, sample in request.sequences]
    streams = [TextStream(tokenizer.decode, request.prompts[prompt]) for prompt, _ in request.sequences]

    def append_text(continuation: Continuation, text: str) -> None:
        continuation.text += text
        if on_text is not None and continuation is continuations[0] and text:
            on_text(text)

    for ids in generate(model, context, request):
        for continuation, stream, id in zip(continuations, streams, ids, strict=True):
            if id is None:
                continuation.has_ended = True
            else:
                continuation.tokens.append(id)
                append_text(continuation, stream.add(id))
    for continuation, stream in zip(continuations, streams, strict=True):
        append_text(continuation, stream.finish())
    return continuations
