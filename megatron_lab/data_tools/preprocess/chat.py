"""Conversion of conversations to token ids and loss masks, with a Hugging Face chat template.

The template renders the text of a conversation (`chat_rendering.py`). The model is trained only on the answers in it
(`chat_answers.py`). The token ids equal those of transformers' `apply_chat_template` for the same folder.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import read_text
from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import IN_LOSS
from megatron_lab.data_tools.preprocess.chat_answers import ChatDocument, remove_marks, split_into_documents
from megatron_lab.data_tools.preprocess.chat_omissions import find_omissions
from megatron_lab.data_tools.preprocess.chat_records import ASSISTANT_ROLE, Chat
from megatron_lab.data_tools.preprocess.chat_rendering import ANSWER_END, ANSWER_START, ChatRenderer
from megatron_lab.data_tools.preprocess.errors import BadRecordError
from megatron_lab.data_tools.preprocess.text_records import check_encodable
from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.companion_tokens import list_name_files
from megatron_lab.tokenizers.file_names import TOKENIZER_CONFIG
from megatron_lab.tokenizers.tokenizer_json import read_completed_json, read_tokenizer_json

NAMED_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
}
"""Templates that --chat-template accepts by name, for tokenizers without a template. They mark the answers with `generation`
blocks."""
_TEMPLATE_FILE = "chat_template.jinja"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_TOOLS_TEMPLATE = "tool_use"
"""Name of the template that transformers uses for conversations with tools, if a tokenizer has several templates."""


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja program that renders a conversation as text, with the variables that the program can read besides the messages."""

    text: str
    origin: str
    """File or flag from which the template was read, for error messages."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """(name, text) of each special token of the tokenizer, such as ("bos_token", "<s>"). The template reads them as
    variables."""
    date: str | None = None
    """Date such as 2026-01-31 for templates that write the current date. None: the template cannot read a date, so that the
    dataset does not depend on the day."""
    tools_text: str | None = None
    """Template for conversations with tools, if the tokenizer has a separate one."""

    @classmethod
    def load(cls, tokenizer: Path, file: str | None, date: str | None) -> ChatTemplate:
        """Load the chat template of a tokenizer, or a template that the user selects instead.

        Args:
            tokenizer: path of tokenizer.json. The template and the special tokens are read from files in the same folder.
            file: jinja file of another template, or a name in `NAMED_TEMPLATES`; None for the tokenizer's template.
            date: date that the template may write as the current date; None for no date.

        Raises:
            ValueError: there is no template, or a file cannot be read.
        """
        tokenizer_config: dict[str, Any] = {}
        for name in reversed(list_name_files(tokenizer.parent)):
            path = tokenizer.parent / name
            if path.is_file():
                content = read_json(path, f"--chat-template: {path}", "a file of a Hugging Face tokenizer")
                tokenizer_config |= content if isinstance(content, dict) else {}
        token_contents = (
            (name, _get_content(tokenizer_config[name])) for name in sorted(tokenizer_config) if name.endswith("_token")
        )
        special_tokens = tuple((name, value) for name, value in token_contents if value is not None)
        if file in NAMED_TEMPLATES and not Path(file).is_file():
            return cls(NAMED_TEMPLATES[file], f"--chat-template {file}", special_tokens, date)
        path = Path(file) if file is not None else tokenizer.parent / _TEMPLATE_FILE
        if file is not None or path.is_file():
            tools_path = None if file is not None else tokenizer.parent / _TOOLS_TEMPLATE_FILE
            try:
                tools_text = read_text(tools_path) if tools_path is not None and tools_path.is_file() else None
                return cls(read_text(path), str(path), special_tokens, date, tools_text)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"--chat-template {path} cannot be read: {error}.\n  Check the path; the file must be UTF-8 text."
                ) from error
        template = tokenizer_config.get("chat_template")
        tools_template = None
        if isinstance(template, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in template}
            template, tools_template = named.get("default"), named.get(_TOOLS_TEMPLATE)
        if not isinstance(template, str):
            raise ValueError(
                f"--chat-template: {tokenizer.parent} has no chat template: neither {_TEMPLATE_FILE} nor chat_template in "
                "tokenizer_config.json.\n  Pass the file of a template: --chat-template FILE; or the name of one: "
                f"--chat-template {next(iter(NAMED_TEMPLATES))}."
            )
        return cls(template, str(tokenizer.parent / TOKENIZER_CONFIG), special_tokens, date, tools_template)


def describe_named_template(template: ChatTemplate, tokenizer: Path) -> Iterator[str]:
    """Yield notes for the user if the template is one of the built-in templates (`NAMED_TEMPLATES`).

    The notes list the template's special tokens that the tokenizer lacks, and say how to store the template with the tokenizer.
    """
    if template.text not in NAMED_TEMPLATES.values():
        return
    added_tokens = {token["content"] for token in read_tokenizer_json(tokenizer).added}
    if missing := [token for token in _CHATML_TOKENS if token not in added_tokens]:
        yield f"the tokenizer has no token {' and '.join(missing)}: each is encoded as ordinary text, as several tokens"
    yield f"{tokenizer.parent} does not contain this template: users of the model need it there as {_TEMPLATE_FILE}"


def _get_content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


@dataclass(frozen=True)
class EncodedChat:
    """Conversation as token ids."""

    documents: list[tuple[NDArray[np.uint32], NDArray[np.uint8]]]
    """Token ids of each document, and one byte for each token: 1 if the token belongs to an answer and therefore counts in the
    loss, otherwise 0."""
    notes: Counter[str]
    """Notes about what the template does not write and what is not learned, with counts."""


class ChatEncoder:
    """Encoder that converts conversations to token ids and loss masks.

    Args:
        template: template that renders a conversation as text.
        tokenizer: path of the tokenizer.json that encodes this text.

    Raises:
        ValueError: the template is invalid, or the `tokenizers` library is missing or cannot read the file.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Path) -> None:
        self._renderer = ChatRenderer(template.text, template.tools_text, template.origin, template.special_tokens, template.date)
        library = import_optional("tokenizers", "--chat-template needs the tokenizers library")
        tokenizer_json = read_completed_json(tokenizer)
        try:
            self._tokenizer = library.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises `Exception` itself
            raise ValueError(
                f"--tokenizer-model {tokenizer}: the tokenizers library cannot read this file: {error}.\n"
                "  The file is damaged or not a tokenizer.json: copy it again."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added_tokens = read_tokenizer_json(tokenizer).added
        special_tokens = [token["content"] for token in added_tokens if token.get("special")]
        self._forbidden_texts = [
            *special_tokens,
            *(token for token in _CHATML_TOKENS if template.text == NAMED_TEMPLATES["chatml"]),
            ANSWER_START,
            ANSWER_END,
        ]

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads from a record, besides the messages."""
        return self._renderer.variables

    def encode(self, chat: Chat) -> EncodedChat:
        """Convert a conversation to token ids and loss masks: one document, or several if the template changes earlier answers.

        Raises:
            BadRecordError: the template refuses the conversation, or a message contains the text of a special token or half of a
                surrogate pair.
        """
        self._check_chat(chat, checks_answers=True)
        documents = split_into_documents(self._renderer, chat)
        notes = Counter(find_omissions(self._renderer, chat, documents))
        return EncodedChat([self._encode_document(document) for document in documents], notes)

    def _encode_document(self, document: ChatDocument) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        encoding = self._tokenizer.encode(document.text, add_special_tokens=False)
        marks = np.zeros(len(encoding.ids), MARK_TYPE)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in document.answers:
            marks[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = IN_LOSS
        return np.array(encoding.ids, np.uint32), marks

    def encode_prompt(self, chat: Chat) -> list[int]:
        """Convert a conversation to the token ids after which a model writes the next answer.

        Answers in the conversation may contain special tokens, because the model has written them.

        Raises:
            BadRecordError: the template refuses the conversation, or a message of another role contains the text of a special
                token.
        """
        self._check_chat(chat, checks_answers=False)
        ids: list[int] = self._tokenizer.encode(self.render_prompt(chat), add_special_tokens=False).ids
        return ids

    def render_prompt(self, chat: Chat, *, add_generation_prompt: bool = True) -> str:
        """Render a conversation as text, by default with the start of the next answer at its end."""
        return remove_marks(self._renderer.render(chat, add_generation_prompt=add_generation_prompt))

    def _check_chat(self, chat: Chat, *, checks_answers: bool) -> None:
        """Raise `BadRecordError` if a conversation contains a text that the tokenizer or this module reserves.

        Args:
            checks_answers: whether the answers are checked too.
        """
        for i, message in enumerate(chat.messages):
            if checks_answers or message["role"] != ASSISTANT_ROLE:
                self._check_value(message, f"message {i}")
        for key, value in (("tools", chat.tools), ("documents", chat.documents), ("chat_template_kwargs", chat.template_kwargs)):
            self._check_value(value, f"the value of key {key!r}")

    def _check_value(self, value: object, label: str) -> None:
        for text in _iter_strings(value):
            check_encodable(text, label)
            if forbidden := next((token for token in self._forbidden_texts if token in text), None):
                raise BadRecordError(
                    f"{label} contains {forbidden!r}, which is reserved: it is a special token of the tokenizer, or a marker of "
                    "this tool. Remove it there"
                )


@functools.lru_cache(maxsize=1)
def get_encoder(template: ChatTemplate, tokenizer: Path) -> ChatEncoder:
    """Return the encoder of a chat template. Each process builds it once, and forked processes inherit it."""
    return ChatEncoder(template, tokenizer)


def _iter_strings(value: object) -> Iterator[str]:
    """Yield all strings in a message, including the keys of JSON objects in it.

    A template may write these keys too, for example the names of a tool call's arguments.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_iter_strings, itertools.chain(value, value.values())))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_iter_strings, value))
