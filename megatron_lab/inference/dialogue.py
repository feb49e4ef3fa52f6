"""State of a dialogue with a model: a conversation of several turns, or texts that the model continues.

`Conversation` and `Completion` have the same methods, so the terminal (`chat_loop.py`) treats both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.data.tokenizer import Tokenizer
from megatron_lab.inference.chat_format import ChatFormat, StopText
from megatron_lab.inference.continuation import TextStream, encode_prompt

_RESERVED_SHARE = 4
"""At most one token in so many of the context is kept free for an answer, when older messages are left out."""


@dataclass(frozen=True)
class Answer:
    """Text that the model has generated in one turn."""

    text: str
    num_tokens: int
    has_ended: bool
    """True if the model has ended the text; False if it was stopped, or reached the limit on tokens."""


class AnswerStream:
    """Converter of the generated tokens of one answer to text.

    Args:
        prompt: token ids before the answer.
        stop_text: text before which the answer ends; None if only tokens end it.
        on_text: called with each new text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop_text: str | None, on_text: Callable[[str], None]) -> None:
        self._stream, self._stop = TextStream(tokenizer.decode, prompt), StopText(stop_text)
        self._on_text, self._text = on_text, ""
        self._num_tokens = 0
        self.has_ended = False
        """Whether the model has ended the answer, by a token or by the stop text."""

    def add(self, id: int | None) -> None:
        """Add the next token; None if the model has ended the answer."""
        if id is None:
            self.has_ended = True
            return
        self._num_tokens += 1
        self._show(self._stop.add(self._stream.add(id)))
        self.has_ended = self._stop.has_ended

    def finish(self) -> Answer:
        """Return the complete answer, after the last token. If it was stopped within a character, that character is dropped."""
        end = self._stream.finish()
        self._show(self._stop.add(end if self.has_ended else end.rstrip("\ufffd")) + self._stop.finish())
        return Answer(self._text, self._num_tokens, self.has_ended)

    def _show(self, text: str) -> None:
        self._text += text
        if text:
            self._on_text(text)


class Dialogue(Protocol):
    """Interface of `Conversation` and `Completion`."""

    stop_ids: frozenset[int]
    """Ids that end an answer."""
    stop_text: str | None
    """Text before which an answer ends, if no token ends it."""
    num_turns: int
    """Number of prompts so far, whose random numbers differ."""
    continues_on_empty_entry: bool
    """Whether an empty entry has a meaning."""

    def start_turn(self, entry: str) -> None:
        """Add what the user has entered."""

    def build_prompt(self, max_new_tokens: int) -> tuple[list[int], str | None]:
        """Return the token ids that the model continues, and a note for the user if something had to be left out.

        Raises:
            ValueError: the entry does not fit in the context, or the template refuses it.
        """

    def finish_turn(self, text: str) -> None:
        """Store the answer of the model."""

    def undo_turn(self) -> bool:
        """Remove the last turn. Return False if there is none."""

    def remove_answer(self) -> bool:
        """Remove the last answer, so that it can be generated again. Return False if there is none."""

    def reset(self) -> None:
        """Start from the beginning."""

    def to_record(self) -> dict[str, Any] | None:
        """Return the dialogue as a JSON object in the form that tools/preprocess_data.py reads; None if it is empty."""


class Conversation:
    """Conversation of several turns, in the chat template of the tokenizer.

    If the context is full, the oldest turns are left out of the prompt. They stay in `messages`.

    Args:
        context_length: maximum number of tokens of prompt and answer.
        system: first message, with the role `system`; None for none.
    """

    continues_on_empty_entry = False

    def __init__(self, chat_format: ChatFormat, context_length: int, system: str | None = None) -> None:
        self._format, self._context_length, self._system = chat_format, context_length, system
        self.stop_ids, self.stop_text = chat_format.stop_ids, chat_format.stop_text
        self.num_turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages: list[dict[str, Any]] = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._num_first = len(self.messages)
        self._first_kept = self._num_first

    def start_turn(self, entry: str) -> None:
        """Add a message of the user."""
        self.messages.append({"role": "user", "content": entry})
        self.num_turns += 1

    def build_prompt(self, max_new_tokens: int) -> tuple[list[int], str | None]:
        """Return the token ids of the conversation and of the start of the answer. Leave out the oldest turns if the context is
        full."""
        num_reserved = min(max_new_tokens, max(1, self._context_length // _RESERVED_SHARE))
        first_kept = self._first_kept
        while True:
            ids = self._format.encode([*self.messages[: self._num_first], *self.messages[first_kept:]])
            if len(ids) + num_reserved <= self._context_length:
                break
            later_turns = (i for i in range(first_kept + 1, len(self.messages)) if self.messages[i]["role"] == "user")
            next_turn = next(later_turns, None)
            if next_turn is None:
                raise ValueError(
                    f"this message and what the template adds need {len(ids):,} tokens, but the context has "
                    f"{self._context_length:,}, of which {num_reserved:,} are for the answer. Shorten the message"
                )
            first_kept = next_turn
        num_dropped, self._first_kept = first_kept - self._first_kept, first_kept
        if not num_dropped:
            return ids, None
        return ids, (
            f"the context of {self._context_length:,} tokens is full: from now on the model does not see the "
            f"{first_kept - self._num_first} oldest messages"
        )

    def finish_turn(self, text: str) -> None:
        """Add the answer of the model."""
        self.messages.append({"role": "assistant", "content": text})

    def undo_turn(self) -> bool:
        """Remove the last message of the user and what follows it."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            return False
        del self.messages[users[-1] :]
        self._first_kept = min(self._first_kept, max(self._num_first, users[-1]))
        return True

    def remove_answer(self) -> bool:
        """Remove the last answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        del self.messages[-1]
        return True

    def to_record(self) -> dict[str, Any] | None:
        """Return {"messages": [...]}, also with the messages that the model does not see any more."""
        return {"messages": self.messages} if len(self.messages) > self._num_first else None


class Completion:
    """Text that the model continues, without a template. Each entry starts a new text; an empty entry continues the last one.

    Args:
        context_length: maximum number of tokens of prompt and continuation.
        stop_ids: ids that end a text.
    """

    stop_text: str | None = None
    continues_on_empty_entry = True

    def __init__(self, tokenizer: Tokenizer, context_length: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._context_length = tokenizer, context_length
        self.stop_ids = stop_ids
        self.num_turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._prompt: str | None = None
        self._continuation: str | None = None
        self._previous: list[tuple[str | None, str | None]] = []

    def start_turn(self, entry: str) -> None:
        """Start a new text, or with an empty entry continue the last one."""
        self._previous.append((self._prompt, self._continuation))
        self._prompt = entry or (self._prompt or "") + (self._continuation or "")
        self._continuation = None
        self.num_turns += 1

    def build_prompt(self, max_new_tokens: int) -> tuple[list[int], str | None]:
        """Return the token ids of the text; only the last ones if the text is longer than the context."""
        ids = encode_prompt(self._tokenizer, self._prompt or "")
        max_tokens = self._context_length - min(max_new_tokens, max(1, self._context_length // _RESERVED_SHARE))
        if len(ids) <= max_tokens:
            return ids, None
        return ids[-max_tokens:], f"the model sees only the last {max_tokens:,} of {len(ids):,} tokens"

    def finish_turn(self, text: str) -> None:
        """Store the continuation."""
        self._continuation = text

    def undo_turn(self) -> bool:
        """Return to the text before the last entry."""
        if not self._previous:
            return False
        self._prompt, self._continuation = self._previous.pop()
        return True

    def remove_answer(self) -> bool:
        """Remove the last continuation."""
        if self._continuation is None:
            return False
        self._continuation = None
        return True

    def to_record(self) -> dict[str, Any] | None:
        """Return {"text": ...}: the last text with its continuation."""
        return None if self._prompt is None else {"text": self._prompt + (self._continuation or "")}
