"""Conversion of conversations to token ids and loss masks, with a Hugging Face chat template.

The template renders the text of a conversation. The model is trained only on the answers in it. A template is a program from an
untrusted source, so jinja runs it in its sandbox. There it can read only the messages, the special tokens and a date that the user
sets.

The token ids equal those of transformers' `apply_chat_template` for the same folder. The answers are the text in the template's
``{% generation %}`` ... ``{% endgeneration %}`` blocks. A template without this block renders the previous messages with the
generation prompt, and these messages with the answer. The answer is the text by which the second rendering is longer.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jinja2 import nodes
from numpy.typing import NDArray

from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import read_text
from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import IN_LOSS
from megatron_lab.data_tools.preprocess.errors import BadRecordError
from megatron_lab.data_tools.preprocess.text_records import check_encodable
from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.tokenizer_json import read_completed_json, read_tokenizer_json

Messages = list[dict[str, Any]]
"""Conversation: a list of messages with the fields `role`, `content` and others."""
CharacterSpan = tuple[int, int]
"""First character of a span, and the character after the last one."""

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
_ASSISTANT_ROLE = "assistant"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_ANSWER_START, _ANSWER_END = "\0\ue000(\ue000\0", "\0\ue000)\ue000\0"
"""Markers around the text of a `generation` block. No message may contain them."""


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
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
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
            try:
                return cls(read_text(path), str(path), special_tokens, date)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"--chat-template {path} cannot be read: {error}.\n  Check the path; the file must be UTF-8 text."
                ) from error
        template = tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
        if not isinstance(template, str):
            raise ValueError(
                f"--chat-template: {tokenizer.parent} has no chat template: neither {_TEMPLATE_FILE} nor chat_template in "
                "tokenizer_config.json.\n  Pass the file of a template: --chat-template FILE; or the name of one: "
                f"--chat-template {next(iter(NAMED_TEMPLATES))}."
            )
        return cls(template, str(tokenizer.parent / "tokenizer_config.json"), special_tokens, date)


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


class ChatEncoder:
    """Encoder that converts conversations to token ids and loss masks.

    Args:
        template: template that renders a conversation as text.
        tokenizer: path of the tokenizer.json that encodes this text.

    Raises:
        ValueError: the template is invalid, or the `tokenizers` library is missing or cannot read the file.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Path) -> None:
        self._render = _build_renderer(template)
        self._marks_answers = "generation" in _find_block_names(template.text)
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
            _ANSWER_START,
            _ANSWER_END,
        ]

    def encode(self, messages: Messages) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Convert a conversation to token ids and a loss mask.

        Returns:
            The token ids, and one byte for each token: 1 if the token belongs to an answer and therefore counts in the loss,
                otherwise 0.

        Raises:
            BadRecordError: the template refuses the conversation, or a message contains the text of a special token or half of a
                surrogate pair.
        """
        for message_index, message in enumerate(messages):
            self._check_message(message, message_index)
        text, answer_spans = self._render_with_answers(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        marks = np.zeros(len(encoding.ids), MARK_TYPE)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in answer_spans:
            marks[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = IN_LOSS
        return np.array(encoding.ids, np.uint32), marks

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Convert a conversation to the token ids after which a model writes the next answer.

        Answers in the conversation may contain special tokens, because the model has written them.

        Raises:
            BadRecordError: the template refuses the conversation, or a message of another role contains the text of a special
                token.
        """
        for message_index, message in enumerate(messages):
            if message["role"] != _ASSISTANT_ROLE:
                self._check_message(message, message_index)
        ids: list[int] = self._tokenizer.encode(self.render_prompt(messages), add_special_tokens=False).ids
        return ids

    def render_prompt(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Render a conversation as text, by default with the start of the next answer at its end."""
        rendered = self._render(messages, add_generation_prompt)
        return rendered.replace(_ANSWER_START, "").replace(_ANSWER_END, "")

    def _check_message(self, message: dict[str, Any], message_index: int) -> None:
        """Raise `BadRecordError` if a message contains a text that the tokenizer or this module reserves."""
        for text in _iter_strings(message):
            check_encodable(text, f"message {message_index}")
            if forbidden := next((token for token in self._forbidden_texts if token in text), None):
                raise BadRecordError(
                    f"message {message_index} contains {forbidden!r}, which is reserved: it is a special token of the "
                    "tokenizer, or a marker of this tool. Remove it from the message"
                )

    def _render_with_answers(self, messages: Messages) -> tuple[str, list[CharacterSpan]]:
        """Render a conversation as text, and find the answers in it.

        Returns:
            The text, and (first character, character after the last one) of each answer.
        """
        rendered = self._render(messages, False)
        if not self._marks_answers:
            return rendered, self._find_answer_spans(messages, rendered)
        text, spans = "", []
        for i, segment in enumerate(rendered.replace(_ANSWER_END, _ANSWER_START).split(_ANSWER_START)):
            if i % 2:
                spans.append((len(text), len(text) + len(segment)))
            text += segment
        return text, spans

    def _find_answer_spans(self, messages: Messages, full_text: str) -> list[CharacterSpan]:
        """Find the answers in the text of a conversation, for a template that does not mark them with `generation` blocks.

        For each assistant message, the template renders the previous messages, and these messages with the answer. The answer is
        the text by which the second rendering is longer.

        Args:
            full_text: rendered text of the complete conversation.

        Returns:
            (first character, character after the last one) of each answer.

        Raises:
            BadRecordError: a rendering is not the start of the longer one, so the answer cannot be located.
        """
        spans = []
        for message_index, message in enumerate(messages):
            if message["role"] != _ASSISTANT_ROLE:
                continue
            prompt_text, answered_text = (
                self._render(messages[:message_index], True),
                self._render(messages[: message_index + 1], False),
            )
            if not (answered_text.startswith(prompt_text) and full_text.startswith(answered_text)):
                raise BadRecordError(
                    f"message {message_index}: the chat template renders this answer differently if messages follow it, so "
                    "the tokens to train on are unknown. Mark the answers in the template with {% generation %} and "
                    "{% endgeneration %}"
                )
            spans.append((len(prompt_text), len(answered_text)))
        return spans


@functools.lru_cache(maxsize=1)
def get_encoder(template: ChatTemplate, tokenizer: Path) -> ChatEncoder:
    """Return the encoder of a chat template. Each process builds it once, and forked processes inherit it."""
    return ChatEncoder(template, tokenizer)


def check_messages(values: Sequence[object], keys: Sequence[str]) -> list[Messages]:
    """Check that the values of a record are conversations. Return the conversations without the null fields of their messages.

    Args:
        values: value of each key.
        keys: JSON keys of the values, for error messages.

    Raises:
        BadRecordError: a value is not a list of messages.
    """
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, list) or not value:
            raise BadRecordError(
                f"the value of key {key!r} is not a list of messages of the form "
                '[{{"role": "user", "content": "..."}}, ...]. Correct this record'
            )
        for message_index, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRecordError(
                    f"message {message_index} in the value of key {key!r} is not an object with a field 'role'. "
                    "Correct this message"
                )
    # A parquet column has all fields in all rows, so a null value means that the field is absent.
    return [[{name: field for name, field in message.items() if field is not None} for message in value] for value in values]  # type: ignore[attr-defined]


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


# ---- rendering of the template


class _GenerationBlock(jinja2.ext.Extension):
    """Extension of jinja for the `generation` block, with which a chat template marks an answer.

    It puts special characters before and after the text of the block, by which `ChatEncoder` finds the answer in the rendered text.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark_answer"), [], [], body).set_lineno(line)

    def _mark_answer(self, caller: Callable[[], str]) -> str:
        return f"{_ANSWER_START}{caller()}{_ANSWER_END}"


def _build_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return a jinja environment with the settings that transformers uses, but without a function that returns the current date."""
    extensions = [_GenerationBlock, "jinja2.ext.loopcontrols"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _find_block_names(text: str) -> set[str]:
    """Return the names of the jinja statements that a template contains, such as `for` and `generation`."""
    tokens = list(_build_environment().lex(text))
    typed_tokens = [(token_type, value) for _, token_type, value in tokens if token_type != "whitespace"]
    return {
        value
        for (previous_type, _), (token_type, value) in itertools.pairwise(typed_tokens)
        if previous_type == "block_begin" and token_type == "name"
    }


def _build_renderer(template: ChatTemplate) -> Callable[[Messages, bool], str]:
    environment = _build_environment()
    if template.date is not None:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(template.date).strftime
    try:
        compiled = environment.from_string(template.text)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"the chat template of {template.origin} is not valid: {error}.\n"
            "  Correct the template, or choose another one by --chat-template."
        ) from error
    variables = dict(template.special_tokens)

    def render(messages: Messages, add_generation_prompt: bool) -> str:
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **variables
            )
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            hint = " (the template writes the date: --chat-date YYYY-MM-DD)" if "strftime_now" in str(error) else ""
            raise BadRecordError(f"the chat template refuses these messages: {error}{hint}. Correct them") from error

    return render


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Convert a value to JSON, as the filter `tojson` of transformers does. The filter of jinja would escape < and > for web
    pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(reason: str) -> None:
    raise jinja2.TemplateError(reason)
