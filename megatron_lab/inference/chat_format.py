"""Token ids of a conversation with a model, and the tokens that end its answers.

The chat template of a Hugging Face tokenizer renders the conversation (`megatron_lab/data_tools/preprocess/chat.py`). Its token ids
equal those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from megatron.data.tokenizer import Tokenizer
from megatron_lab.data_tools.preprocess.chat import NAMED_TEMPLATES, ChatEncoder, ChatTemplate
from megatron_lab.data_tools.preprocess.chat_records import Chat, Messages, read_message
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_lab.tokenizers.stop_ids import find_stop_ids
from megatron_lab.tokenizers.tokenizer_json import read_tokenizer_json

_PROBE = "\ue001answer\ue001"
"""Text of an answer that is rendered to learn how the template ends answers."""


class ChatFormat:
    """Conversion of conversations to token ids, with the tokens and texts that end an answer.

    Args:
        tokenizer: tokenizer of the model, which must be that of a Hugging Face folder.
        template: file of a chat template, or the name of a built-in one (chatml); None for the template of the tokenizer's folder.
        template_kwargs: further variables of the template for all conversations, such as `enable_thinking`.

    Raises:
        ValueError: there is no template, or it is invalid.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(
                "a conversation needs the tokenizer of a Hugging Face folder, whose special tokens separate the messages; the "
                f"tokenizer of this model is a {type(tokenizer).__name__}. Set --tokenizer-type HuggingFaceTokenizer and "
                "--tokenizer-model FOLDER, or continue texts without a template: --interactive"
            )
        try:
            chat_template = ChatTemplate.load(tokenizer.path, template, datetime.datetime.now().date().isoformat())
        except ValueError as error:
            if template is not None:
                raise
            raise ValueError(
                f"{tokenizer.path.parent} has no chat template (neither chat_template.jinja, nor chat_template in "
                "tokenizer_config.json), so this may be a base model, which continues texts and does not answer: use "
                "--interactive. "
                "Or set the template with which the model was trained: --chat-template FILE, or --chat-template "
                f"{next(iter(NAMED_TEMPLATES))}"
            ) from error
        self.origin = chat_template.origin
        """File or flag from which the template was read."""
        self._template_kwargs = dict(template_kwargs or {})
        self._encoder = ChatEncoder(chat_template, tokenizer.path)
        added_ids = {token["content"]: int(token["id"]) for token in read_tokenizer_json(tokenizer.path).added}
        self.stop_ids, self.stop_text = self._find_end_of_answer(tokenizer, added_ids)
        """Ids that end an answer: those of `find_stop_ids`, and the token that the template writes after an answer. If the template
        writes ordinary text there, an answer ends before `stop_text`."""

    def check_system(self, system: str | None) -> None:
        """Check that the template accepts a system message.

        Raises:
            ValueError: the template refuses it.
        """
        if system is None:
            return
        try:
            self.encode([{"role": "system", "content": system}, {"role": "user", "content": "question"}])
        except ValueError as error:
            raise ValueError(f"--system does not fit the chat template of {self.origin}: {error}") from error

    def encode(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation and of the start of the next answer.

        Args:
            messages: messages so far, the oldest first.
            tools: tools that the model may call, as JSON schemas; None for none.
            documents: documents for retrieval-augmented generation; None for none.
            template_kwargs: further variables of the template, such as `enable_thinking`, for this conversation.

        Raises:
            ValueError: the template refuses the conversation, or a message contains the text of a special token.
        """
        read_messages = [read_message(message, f"message {i}") for i, message in enumerate(messages)]
        return self._encoder.encode_prompt(
            Chat(read_messages, tools, documents, self._template_kwargs | dict(template_kwargs or {}))
        )

    def _find_end_of_answer(self, tokenizer: HuggingFaceTokenizer, added_ids: dict[str, int]) -> tuple[frozenset[int], str | None]:
        stop_ids = find_stop_ids(tokenizer)
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
        try:
            ending = (
                self._encoder.render_prompt(Chat(probe, template_kwargs=self._template_kwargs), add_generation_prompt=False)
                .rpartition(_PROBE)[2]
                .strip()
            )
        except ValueError:  # the template needs other messages
            return stop_ids, None
        token = next((token for token in sorted(added_ids, key=len, reverse=True) if ending.startswith(token)), None)
        if token is not None:
            return stop_ids | {added_ids[token]}, None
        return stop_ids, ending.partition("\n")[0] or None


class StopText:
    """Filter of a streamed text that ends before a certain text. It holds back what may be the start of that text.

    Args:
        stop: text before which the stream ends; None to let everything pass.
    """

    def __init__(self, stop: str | None) -> None:
        self._stop, self._pending = stop, ""
        self.has_ended = False
        """Whether the text has occurred. Everything after it is dropped."""

    def add(self, text: str) -> str:
        """Add a part of the stream, and return the text that can be shown."""
        if self._stop is None or self.has_ended:
            return "" if self.has_ended else text
        shown, found, _ = (self._pending + text).partition(self._stop)
        self.has_ended, self._pending = bool(found), ""
        if not found:
            num_held = next((n for n in range(min(len(self._stop) - 1, len(shown)), 0, -1) if shown.endswith(self._stop[:n])), 0)
            shown, self._pending = shown[: len(shown) - num_held], shown[len(shown) - num_held :]
        return shown

    def finish(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        pending, self._pending = self._pending, ""
        return pending
