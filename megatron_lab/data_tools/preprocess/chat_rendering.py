"""Rendering of conversations as text by a chat template.

A chat template is a jinja program from an untrusted source, so jinja runs it in its sandbox. There it can read only the messages
and the other variables of the conversation, the special tokens and a date that the user sets. The text equals that of
transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

from megatron_lab.data_tools.preprocess.chat_records import Chat, Messages
from megatron_lab.data_tools.preprocess.errors import BadRecordError

ANSWER_START, ANSWER_END = "\0\ue000(\ue000\0", "\0\ue000)\ue000\0"
"""Markers around the text of a `generation` block. No message may contain them."""

_OWN_VARIABLES = {"messages", "add_generation_prompt", "strftime_now"}
"""Variables that are never read from a record."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with the thoughts of an answer, in the order in which transformers looks for them."""


class ChatRenderer:
    """Renderer of conversations as text.

    Args:
        text: chat template.
        tools_text: template for conversations with tools, if the tokenizer has a separate one; None for `text`.
        origin: file or flag from which the template was read, for error messages.
        special_tokens: (name, text) of each special token, which the template reads as variables.
        date: date for templates that write the current date, such as 2026-01-31; None for no date.

    Raises:
        ValueError: a template is invalid.
    """

    def __init__(
        self, text: str, tools_text: str | None, origin: str, special_tokens: tuple[tuple[str, str], ...], date: str | None
    ) -> None:
        self.special_tokens = dict(special_tokens)
        self._program = _Program(text, origin, date)
        self._tools_program = self._program if tools_text is None else _Program(tools_text, origin, date)

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads, without those that are the same for all conversations."""
        return (self._program.variables | self._tools_program.variables) - self.special_tokens.keys()

    def marks_answers(self, chat: Chat) -> bool:
        """Return whether the template of this conversation marks answers with `generation` blocks."""
        return self._select_program(chat).marks_answers

    def render(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation. The text of a `generation` block has the markers `ANSWER_START` and `ANSWER_END` around it.

        Args:
            add_generation_prompt: whether to append the start of the next answer.

        Raises:
            BadRecordError: the template refuses the conversation.
        """
        variables = {**self.special_tokens, **chat.template_kwargs}
        try:
            return self._select_program(chat).template.render(
                messages=_alias_reasoning(chat.messages),
                add_generation_prompt=add_generation_prompt,
                tools=chat.tools,
                documents=chat.documents,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            hint = " (the template writes the date: --chat-date YYYY-MM-DD)" if "strftime_now" in str(error) else ""
            raise BadRecordError(f"the chat template refuses these messages: {error}{hint}. Correct them") from error

    def _select_program(self, chat: Chat) -> _Program:
        return self._program if chat.tools is None else self._tools_program


def _alias_reasoning(messages: Messages) -> Messages:
    """Copy the thoughts of each answer to the field names that templates read, as transformers does."""
    aliased = []
    for message in messages:
        thoughts = next((message[name] for name in REASONING_FIELDS if name in message), None)
        aliased.append(message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts})
    return aliased


class _Program:
    """Compiled chat template.

    Attributes:
        template: template of jinja.
        marks_answers: whether it has `generation` blocks.
        variables: names of the variables that it reads.
    """

    def __init__(self, text: str, origin: str, date: str | None) -> None:
        environment = _build_environment()
        if date is not None:
            environment.globals["strftime_now"] = datetime.date.fromisoformat(date).strftime
        try:
            self.template = environment.from_string(text)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template of {origin} is not valid: {error}.\n"
                "  Correct the template, or choose another one by --chat-template."
            ) from error
        self.variables = frozenset(variables) - environment.globals.keys() - _OWN_VARIABLES
        self.marks_answers = "generation" in _find_block_names(environment, text)


class _GenerationBlock(jinja2.ext.Extension):
    """Extension of jinja for the `generation` block, with which a chat template marks an answer.

    It puts special characters before and after the text of the block, by which the answer is found in the rendered text.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark_answer"), [], [], body).set_lineno(line)

    def _mark_answer(self, caller: Callable[[], str]) -> str:
        return f"{ANSWER_START}{caller()}{ANSWER_END}"


def _build_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return a jinja environment with the settings that transformers uses, but without a function that returns the current date."""
    extensions = [_GenerationBlock, "jinja2.ext.loopcontrols"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _find_block_names(environment: jinja2.Environment, text: str) -> set[str]:
    """Return the names of the jinja statements that a template contains, such as `for` and `generation`."""
    typed_tokens = [(token_type, value) for _, token_type, value in environment.lex(text) if token_type != "whitespace"]
    return {
        value
        for (previous_type, _), (token_type, value) in itertools.pairwise(typed_tokens)
        if previous_type == "block_begin" and token_type == "name"
    }


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Convert a value to JSON, as the filter `tojson` of transformers does. The filter of jinja would escape < and > for web
    pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(reason: str) -> None:
    raise jinja2.TemplateError(reason)
