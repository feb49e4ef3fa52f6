"""Conversations to tokens and marks: a chat template of Hugging Face writes the text, and its answers are what a model learns.

A template is a program of another's. jinja runs it in its sandbox, which lets it read the messages and nothing else.

The tokens are those of transformers' `apply_chat_template` for the same folder. The answers are what stands between
``{% generation %}`` and ``{% endgeneration %}``; where a template has no such block, what each answer adds to the text before it
and the prompt for it.
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

from megatron.config.extras import optional
from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import LEARNED
from megatron_lab.data_tools.preprocess.errors import BadRecordError
from megatron_lab.data_tools.preprocess.text_records import check_encodable
from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.tokenizer_json import read_tokenizer_json

Messages = list[dict[str, Any]]
Span = tuple[int, int]
"""First character, and the one behind the last."""

NAMED = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
}
"""Templates that --chat-template knows by name, for tokenizers that have none; with their answers marked."""
_FILE = "chat_template.jinja"
_ANSWER = "assistant"
_IM = ("<|im_start|>", "<|im_end|>")
_OPEN, _CLOSE = "\0\ue000(\ue000\0", "\0\ue000)\ue000\0"
"""Around what a template generates. No message may have them."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with what it may read beside the messages."""

    text: str
    place: str
    """Where it stands, for messages."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Such as ("bos_token", "<s>"), which templates read as variables."""
    date: str | None = None
    """Day that templates may write, as 2026-01-31. Without it they have no clock, so that a dataset can be made again."""

    @classmethod
    def read(cls, tokenizer: Path, file: str | None, date: str | None) -> ChatTemplate:
        """The template of a tokenizer.

        Args:
            tokenizer: tokenizer.json; the template and the special tokens are in the files beside it.
            file: of another template, in jinja; or the name of one in `NAMED`.

        Raises:
            ValueError: there is none, or a file is not what it should be.
        """
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            path = tokenizer.parent / name
            if path.is_file():
                found = read_json(path, f"--chat-template: {path}", "a file of a Hugging Face tokenizer")
                settings |= found if isinstance(found, dict) else {}
        given = ((name, _content(settings[name])) for name in sorted(settings) if name.endswith("_token"))
        tokens = tuple((name, value) for name, value in given if value is not None)
        if file in NAMED and not Path(file).is_file():
            return cls(NAMED[file], f"--chat-template {file}", tokens, date)
        path = Path(file) if file is not None else tokenizer.parent / _FILE
        if file is not None or path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), str(path), tokens, date)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--chat-template {path} cannot be read: {error}.\n  Check the path.") from error
        template = settings.get("chat_template")
        if isinstance(template, list):  # several with names
            template = next((each.get("template") for each in template if each.get("name") == "default"), None)
        if not isinstance(template, str):
            raise ValueError(
                f"--chat-template: {tokenizer.parent} has none: neither {_FILE} nor chat_template in tokenizer_config.json.\n"
                f"  Give the file of one: --chat-template FILE; or take one by name: --chat-template {next(iter(NAMED))}."
            )
        return cls(template, str(tokenizer.parent / "tokenizer_config.json"), tokens, date)


def told_of_named(template: ChatTemplate, tokenizer: Path) -> Iterator[str]:
    """Notes on a template taken by name: what the tokenizer lacks for it, and how the two stay together."""
    if template.text not in NAMED.values():
        return
    known = {token["content"] for token in read_tokenizer_json(tokenizer).added}
    if lacking := [token for token in _IM if token not in known]:
        yield f"the tokenizer has no token {' and '.join(lacking)}: they are read as text, several tokens each"
    yield f"for those who use the model: this template is not in {tokenizer.parent}; write it there as {_FILE}"


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


class ChatEncoder:
    """Encodes conversations.

    Args:
        tokenizer: tokenizer.json.

    Raises:
        ValueError: the template is not valid, or the `tokenizers` library is missing or refuses the file.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Path) -> None:
        self._render = _renderer(template)
        self._generates = "generation" in _tags(template.text)
        library = optional("tokenizers", "--chat-template needs the tokenizers library")
        try:
            self._tokenizer = library.Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the library raises this very class
            raise ValueError(f"--tokenizer-model {tokenizer}: the tokenizers library cannot read it: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = read_tokenizer_json(tokenizer).added
        special = [token["content"] for token in added if token.get("special")]
        self._special = [*special, *(token for token in _IM if template.text == NAMED["chatml"]), _OPEN, _CLOSE]

    def encode(self, messages: Messages) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Ids and marks of a conversation.

        Raises:
            BadRecordError: the template refuses it, or a message holds the text of a special token or none that has a UTF-8 form.
        """
        for number, message in enumerate(messages):
            for text in _texts(message):
                check_encodable(text, f"message {number}")
                if found := next((token for token in self._special if token in text), None):
                    raise BadRecordError(
                        f"message {number} holds {found!r}, which would be read as the special token that separates messages"
                    )
        text, answers = self._rendered(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        marks = np.zeros(len(encoding.ids), MARK_TYPE)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in answers:
            marks[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = LEARNED
        return np.array(encoding.ids, np.uint32), marks

    def _rendered(self, messages: Messages) -> tuple[str, list[Span]]:
        """The text, and the characters of it that are answers."""
        marked = self._render(messages, False)
        if not self._generates:
            return marked, self._answers(messages, marked)
        text, spans = "", []
        for number, piece in enumerate(marked.replace(_CLOSE, _OPEN).split(_OPEN)):
            if number % 2:
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        return text, spans

    def _answers(self, messages: Messages, whole: str) -> list[Span]:
        """The answers by what each adds."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] != _ANSWER:
                continue
            before, after = self._render(messages[:number], True), self._render(messages[: number + 1], False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise BadRecordError(
                    f"the template writes answer {number} otherwise where the conversation goes on, so its place is unknown: mark "
                    "answers in the template by {% generation %} and {% endgeneration %}"
                )
            found.append((len(before), len(after)))
        return found


@functools.lru_cache(maxsize=1)
def encoder_of(template: ChatTemplate, tokenizer: Path) -> ChatEncoder:
    """The encoder, made once in a process, and inherited by forked ones."""
    return ChatEncoder(template, tokenizer)


def check_messages(values: Sequence[object], keys: Sequence[str]) -> list[Messages]:
    """The conversations of a record, one for each key.

    Raises:
        BadRecordError: one is no list of messages.
    """
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, list) or not value:
            raise BadRecordError(f'the value of key {key!r} is not a list of messages, [{{"role": "user", "content": "..."}}, ...]')
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRecordError(f"key {key!r}: message {number} is not an object with a role")
    # Columns of parquet have all fields in all rows: what is null there is absent.
    return [[{name: part for name, part in message.items() if part is not None} for message in value] for value in values]  # type: ignore[attr-defined]


def _texts(value: object) -> Iterator[str]:
    """All strings in a message, names too: a template may write those of a tool's arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_texts, itertools.chain(value, value.values())))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_texts, value))


# ---- the template


class _Generation(jinja2.ext.Extension):
    """The block whose text is an answer: marks its beginning and its end."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As transformers sets jinja up, but for the clock."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _tags(text: str) -> set[str]:
    """The names that stand at the beginning of blocks."""
    tokens = list(_environment().lex(text))
    kinds = [(kind, value) for _, kind, value in tokens if kind != "whitespace"]
    return {value for (before, _), (kind, value) in itertools.pairwise(kinds) if before == "block_begin" and kind == "name"}


def _renderer(template: ChatTemplate) -> Callable[[Messages, bool], str]:
    environment = _environment()
    if template.date is not None:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(template.date).strftime
    try:
        compiled = environment.from_string(template.text)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {template.place} is not valid: {error}") from error
    variables = dict(template.special_tokens)

    def render(messages: Messages, prompts: bool) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **variables)
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            cure = " (the template writes the date: --chat-date YYYY-MM-DD)" if "strftime_now" in str(error) else ""
            raise BadRecordError(f"the chat template refuses it: {error}{cure}") from error

    return render


def _as_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """jinja's own filter writes < and > in another way, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)
