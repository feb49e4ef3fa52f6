"""Conversations in the records of a dataset: the forms in which they are published, and their conversion to messages.

A record contains its conversation as a list of messages under one key, in OpenAI's form (`role`, `content`) or in ShareGPT's
(`from`, `value`), or as a prompt and an answer under two keys, such as Alpaca's `instruction` and `output`. Other keys of the
record contain what a chat template can also read, such as `tools`. docs/fine_tuning.md has a table of all forms.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lab.data_tools.preprocess.errors import BadRecordError

Messages = list[dict[str, Any]]
"""Conversation: a list of messages with the fields `role`, `content` and others."""

ASSISTANT_ROLE = "assistant"
MESSAGES_KEY = "messages"
"""Key of OpenAI's form. The dataset of conversations that are stored under two keys has this name too."""
_LIST_KEYS = (MESSAGES_KEY, "conversations", "conversation", "dialogue", "dialog")
"""Keys of lists of messages, in order of preference."""
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT_ROLE,
    "assistant": ASSISTANT_ROLE,
    "chatgpt": ASSISTANT_ROLE,
    "bing": ASSISTANT_ROLE,
    "bard": ASSISTANT_ROLE,
    "function_call": ASSISTANT_ROLE,
    "observation": "tool",
    "tool": "tool",
}
"""Role of each speaker in ShareGPT's form."""
_FUNCTION_CALL = "function_call"
_SYSTEM_KEYS = ("system", "system_prompt")
_TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")
_RESERVED_VARIABLES = (MESSAGES_KEY, "tools", "documents", "add_generation_prompt")
_UNUSED_KEYS = (
    *("functions", "tool_choice", "enable_thinking", "reasoning_effort", "reasoning", "reasoning_content", "thinking"),
    *("input", "context", "history"),
)
"""Keys of a record that belong to a conversation. Those that its form does not use are reported."""


@dataclass(frozen=True)
class Chat:
    """Conversation, with the other variables that a chat template can read."""

    messages: Messages
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the record, in the form that `format_note` expects."""

    def take(self, num_messages: int) -> Chat:
        """Return the conversation with only its first messages."""
        return self.replace_messages(self.messages[:num_messages])

    def replace_messages(self, messages: Messages) -> Chat:
        """Return a conversation with other messages."""
        return Chat(messages, self.tools, self.documents, self.template_kwargs, self.notes)


@dataclass(frozen=True)
class PairForm:
    """Form of records that contain a prompt and an answer under two keys."""

    prompt: str
    answer: str
    inputs: tuple[str, ...] = ()
    """Keys of texts that are appended to the prompt, each after a blank line, if they are not empty."""
    history: str | None = None
    """Key of the earlier rounds, a list of [prompt, answer]."""

    @property
    def keys(self) -> tuple[str, str]:
        """Keys that every record must have."""
        return self.prompt, self.answer


PAIR_FORMS: dict[tuple[str, ...], PairForm] = {
    form.keys: form
    for form in (
        PairForm("instruction", "output", ("input", "context"), "history"),
        PairForm("instruction", "response", ("input", "context"), "history"),
        PairForm("prompt", "completion"),
        PairForm("prompt", "response"),
        PairForm("query", "response", history="history"),
        PairForm("question", "response"),
        PairForm("question", "answer"),
    )
}
"""Forms with a prompt and an answer, by their keys."""
FORM_KEYS = tuple(dict.fromkeys((*_LIST_KEYS, *(key for keys in PAIR_FORMS for key in keys))))
"""Keys by which the form of a record is found."""
KNOWN_FORMS = f"{', '.join(_LIST_KEYS)} (a list of messages); {', '.join(' and '.join(keys) for keys in PAIR_FORMS)}"
"""Description of the keys by which the form of a record is found, for messages."""


def find_form(record: Mapping[str, object], location: str) -> tuple[str, ...] | None:
    """Return the keys that contain the conversation of a record: one key of a list of messages, or a key of `PAIR_FORMS`.

    Args:
        location: location of the record, for the error message.

    Returns:
        The keys; None if the record has no conversation under a known key.

    Raises:
        ValueError: the record has several conversations.
    """
    names = [name for name, value in record.items() if value is not None]
    if list_key := next((name for name in _LIST_KEYS if name in names), None):
        return (list_key,)
    forms = [keys for keys in PAIR_FORMS if all(key in names for key in keys)]
    if len(forms) > 1:
        options = " or ".join(f"--json-keys {' '.join(keys)}" for keys in forms)
        raise ValueError(
            f"{location}: the prompt and the answer may be under several keys of this record.\n  Choose them: {options}"
        )
    return forms[0] if forms else None


def describe_form(keys: tuple[str, ...]) -> str:
    """Return a description of the records that contain conversations under these keys, for the log."""
    if keys in PAIR_FORMS:
        return f"prompts and answers under the keys {' and '.join(map(repr, keys))}"
    return f"lists of messages under the key {', '.join(map(repr, keys))}"


def split_parent(keys: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the path of the object that contains nested keys, and the names of the keys in it: ("data.", ("messages",)) for
    data.messages. The path is empty for keys of the record itself, and for keys of different objects."""
    parents = {key.rpartition(".")[0] for key in keys}
    parent = parents.pop() if len(parents) == 1 else ""
    return (f"{parent}.", tuple(key.removeprefix(f"{parent}.") for key in keys)) if parent else ("", tuple(keys))


def get_pair_form(keys: Sequence[str]) -> PairForm | None:
    """Return the form of records with a prompt and an answer under these keys, which may be nested; None for other
    keys."""
    return PAIR_FORMS.get(split_parent(keys)[1])


@dataclass(frozen=True)
class ChatReader:
    """Reader of the conversations of a record."""

    keys: tuple[str, ...]
    """Keys of the record that contain conversations: lists of messages, or the two keys of a form of `PAIR_FORMS`. Keys such as
    data.messages are nested."""
    variables: frozenset[str] = frozenset()
    """Names of the variables that the chat template reads. Keys of a record with these names are reported if they do not reach the
    template."""

    @property
    def form(self) -> PairForm | None:
        """Form of the records, or None if each key contains a list of messages."""
        return get_pair_form(self.keys)

    @property
    def optional_keys(self) -> tuple[str, ...]:
        """Keys that a record may have besides `keys`. Their values are read too.

        For nested keys, they are those of the same object, followed by those of the record.
        """
        parent, _ = split_parent(self.keys)
        names = (*_TEMPLATE_KEYS, *_SYSTEM_KEYS, *_UNUSED_KEYS, *sorted(self.variables))
        outer_names = (*_TEMPLATE_KEYS, *_SYSTEM_KEYS) if parent else ()
        return tuple(
            name for name in dict.fromkeys((*(f"{parent}{name}" for name in names), *outer_names)) if name not in self.keys
        )

    def read(self, values: Sequence[object], keys: Sequence[str]) -> list[Chat]:
        """Convert a record to conversations: one for each key, or one if the keys contain a prompt and an answer.

        Args:
            values: value of each key; None for a key that the record does not have.
            keys: keys of the record.

        Raises:
            BadRecordError: the record is not a conversation.
        """
        parent, own_keys = split_parent(self.keys)
        record: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            name = key.removeprefix(parent)
            if _is_absent(record.get(name)):
                record[name] = value
        form = self.form
        if form is None:
            chats = [_read_list(record[name], f"the value of key {parent + name!r}") for name in own_keys]
        else:
            chats = [_read_pair(record, form)]
        used = {*own_keys, *_TEMPLATE_KEYS, *_SYSTEM_KEYS, *((*form.inputs, form.history) if form else ())}
        notes = [
            f"the key {name!r} of {{record}} is not passed to the template (its variables are tools, documents and those in "
            "chat_template_kwargs)"
            for name, value in record.items()
            if name not in used and not _is_absent(value)
        ]
        tools, documents = (_read_objects(record.get(key), key) for key in ("tools", "documents"))
        kwargs = read_template_kwargs(record.get("chat_template_kwargs"))
        return [self._add_system(Chat(messages, tools, documents, kwargs, tuple(notes)), record) for messages in chats]

    def _add_system(self, chat: Chat, record: Mapping[str, object]) -> Chat:
        """Put the system text of a record, if it has one, before the messages."""
        for key in _SYSTEM_KEYS:
            text = record.get(key)
            if _is_absent(text):
                continue
            if not isinstance(text, str):
                raise BadRecordError(f"the value of key {key!r} is not a string. Correct this record")
            first = chat.messages[0]
            if first["role"] != "system":
                chat = dataclasses.replace(chat, messages=[{"role": "system", "content": text}, *chat.messages])
            elif first.get("content") != text:
                note = f"the key {key!r} of {{record}} is not used: the conversation has another system message"
                chat = dataclasses.replace(chat, notes=(*chat.notes, note))
        return chat


def _is_absent(value: object) -> bool:
    return value is None or value == "" or value == [] or value == {}


def _parse_json(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRecordError(f"{label} is a string but not JSON: {error}. Correct this record") from error


def _read_objects(value: object, key: str) -> list[Any] | None:
    """Return the tools or documents of a record as a list of objects; None for a record without tools or documents."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _parse_json(value, f"the value of key {key!r}")
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise BadRecordError(f"the value of key {key!r} is not a list of objects. Correct this record")
    return value  # type: ignore[return-value]


def read_template_kwargs(value: object) -> dict[str, Any]:
    """Return the variables of the template in the value of the key `chat_template_kwargs`: an object, or its JSON.

    Raises:
        BadRecordError: the value is not an object, or sets a variable that is a key of its own, such as `tools`.
    """
    if isinstance(value, str) and value:
        value = _parse_json(value, "the value of key 'chat_template_kwargs'")
    if _is_absent(value):
        return {}
    if not isinstance(value, dict):
        raise BadRecordError("the value of key 'chat_template_kwargs' is not an object. Correct this record")
    if reserved := next((name for name in _RESERVED_VARIABLES if name in value), None):
        raise BadRecordError(f"chat_template_kwargs sets {reserved!r}, which is a key of its own. Remove it there")
    return value


# ---- lists of messages


def _read_list(value: object, label: str) -> Messages:
    """Return the messages of a list, which may be given as JSON.

    Raises:
        BadRecordError: the value is not a list of messages, or a speaker of ShareGPT's form is unknown.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            value = None  # a text
    if not isinstance(value, list) or not value:
        raise BadRecordError(
            f'{label} is not a list of messages of the form [{{"role": "user", "content": "..."}}, ...] or '
            '[{"from": "human", "value": "..."}, ...]. Correct this record'
        )
    return [read_message(message, f"message {i} in {label}") for i, message in enumerate(value)]


def read_message(message: object, label: str) -> dict[str, Any]:
    """Return a message of OpenAI's or ShareGPT's form in OpenAI's form, without null fields and with a text as its content.

    Args:
        label: description of the message for error messages.

    Raises:
        BadRecordError: the message has none of these forms.
    """
    fields = {name: item for name, item in message.items() if item is not None} if isinstance(message, dict) else {}
    if isinstance(fields.get("role"), str):
        role, speaker = fields["role"], None
    elif isinstance(fields.get("from"), str):
        speaker = fields.pop("from")
        role = _ROLES.get(speaker.strip().lower())
        if role is None:
            raise BadRecordError(
                f"{label} is of the speaker {speaker!r}, who is unknown. The speakers are: {', '.join(_ROLES)}. Rename the speaker"
            )
    else:
        raise BadRecordError(f"{label} is not an object with a field 'role' (or 'from'). Correct this message")
    if "value" in fields and "content" not in fields:
        fields["content"] = fields.pop("value")
    if speaker is not None and not isinstance(fields.get("content"), str | list):
        raise BadRecordError(f"{label} has no text in the field 'value'. Correct this message")
    fields = {"role": role, **{name: item for name, item in fields.items() if name != "role"}}
    if isinstance(fields.get("content"), list):
        fields["content"] = "".join(_iter_part_texts(fields["content"], label))
    if isinstance(fields.get("tool_calls"), str):
        fields["tool_calls"] = _parse_json(fields["tool_calls"], f"the field 'tool_calls' of {label}") or []
    if speaker is not None and speaker.strip().lower() == _FUNCTION_CALL:
        fields |= {"content": "", "tool_calls": _read_function_calls(fields["content"], label)}
    if role == ASSISTANT_ROLE and "content" not in fields and not fields.get("tool_calls"):
        fields["content"] = ""
    return fields


def _iter_part_texts(parts: list[object], label: str) -> Iterator[str]:
    """Yield the text of each part of a content.

    Raises:
        BadRecordError: a part is not a text.
    """
    for part in parts:
        part_type = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if part_type not in ("text", None) or not isinstance(text, str):
            raise BadRecordError(
                f"{label} has a part of type {part_type!r} in its content, but only parts of type 'text' with a text are "
                "supported. Remove this part or the record"
            )
        yield text


def _read_function_calls(text: str, label: str) -> list[dict[str, Any]]:
    """Return the tool calls in the text of a `function_call` message of ShareGPT's form: a JSON object, or a list of them."""
    calls = _parse_json(text, f"the function call of {label}")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRecordError(f"{label} has no function call of the form {{'name': ..., 'arguments': ...}}. Correct this message")
    return [{"type": "function", "function": call} for call in calls]


# ---- pairs of a prompt and an answer


def _read_pair(record: Mapping[str, Any], form: PairForm) -> Messages:
    """Return the messages of a record with a prompt and an answer. Each of them is a text or a list of messages."""
    prompt = record[form.prompt]
    for key in form.inputs:
        if not _is_absent(record.get(key)):
            if not (isinstance(prompt, str) and isinstance(record[key], str)):
                raise BadRecordError(
                    f"the values of the keys {form.prompt!r} and {key!r} are not both strings. Correct this record"
                )
            prompt = f"{prompt}\n\n{record[key]}"
    messages = _read_history(record.get(form.history), form.history) if form.history else []
    for key, value, role in ((form.prompt, prompt, "user"), (form.answer, record[form.answer], ASSISTANT_ROLE)):
        if isinstance(value, str):
            messages.append({"role": role, "content": value})
        elif isinstance(value, list):
            messages += _read_list(value, f"the value of key {key!r}")
        else:
            raise BadRecordError(f"the value of key {key!r} is neither a string nor a list of messages. Correct this record")
    return messages


def _read_history(value: object, key: str) -> Messages:
    """Return the messages of the earlier rounds of a record, a list of [prompt, answer]."""
    rounds = _parse_json(value, f"the value of key {key!r}") if isinstance(value, str) and value else value or []
    if not isinstance(rounds, list):
        raise BadRecordError(f"the value of key {key!r} is not a list of [prompt, answer]. Correct this record")
    messages: Messages = []
    for texts in rounds:
        if not (isinstance(texts, list) and len(texts) == 2 and all(isinstance(text, str) for text in texts)):
            raise BadRecordError(f"the value of key {key!r} is not a list of [prompt, answer]. Correct this record")
        messages += [{"role": "user", "content": texts[0]}, {"role": ASSISTANT_ROLE, "content": texts[1]}]
    return messages
