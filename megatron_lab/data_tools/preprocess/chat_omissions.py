"""Search for the parts of a conversation that its chat template does not write, such as thoughts or tool calls.

A text is written if it occurs in the rendered text. A short text may occur there by chance, and a template may change a text, for
example to JSON. In these cases, a marker is put into the text and the conversation is rendered again. If the marker does not occur,
the template does not write the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lab.data_tools.preprocess.chat_answers import ChatDocument, find_empty_answers, remove_marks
from megatron_lab.data_tools.preprocess.chat_records import ASSISTANT_ROLE, Chat
from megatron_lab.data_tools.preprocess.chat_rendering import ChatRenderer
from megatron_lab.data_tools.preprocess.errors import BadRecordError

_MIN_UNIQUE_CHARACTERS = 16
"""Minimum length of a text that occurs in another text only if it was written there."""
_THOUGHT_TAG = re.compile("(</?think>)")
_MARKER = "Q7zx{}xz7Q"
"""Marker of letters and digits, which no template changes. It contains the index of the text that is marked."""


def find_omissions(renderer: ChatRenderer, chat: Chat, documents: Sequence[ChatDocument]) -> Iterator[str]:
    """Yield a note for each part of a conversation that reaches no document, or that is not learned.

    Args:
        chat: conversation.
        documents: its documents.
    """
    yield from chat.notes
    num_empty = len(find_empty_answers(renderer, chat))
    yield from [
        "{answer} without a text or a tool call that the template renders: not learned, also not the token that ends it"
    ] * num_empty
    if not any(document.answers for document in documents):
        yield "{conversation} without an answer to learn: its tokens do not count in the loss"
    if len(documents) > 1:
        yield "{conversation} written as several documents: the template changes earlier answers if messages follow them"
    if documents[-1].chat.messages != chat.messages:
        yield "{conversation} cut after the last answer: the template changes this answer if messages follow it"
    yield from _OmissionFinder(renderer, documents).iter_notes()


@dataclass
class _MarkedTexts:
    """Texts of one field of a message, or of one key of the record."""

    note: str
    """Note if the texts are not written."""
    place: tuple[int, str] | str
    """(index of the message, field), or the key of the record."""
    needs_all: bool = True
    """Whether the note is given if any of the texts is not written; otherwise only if none is."""
    markers: list[str] = field(default_factory=list)
    """Markers of the texts of which it is not known yet whether they are written."""
    is_written: bool = False
    """Whether one of the texts is written."""

    def find_in(self, text: str) -> None:
        """Remove the markers that occur in a rendered text."""
        missing = [marker for marker in self.markers if marker not in text]
        self.is_written |= len(missing) < len(self.markers)
        self.markers = missing

    @property
    def is_omitted(self) -> bool:
        """Whether the note must be given, as far as it is known."""
        return bool(self.markers) and (self.needs_all or not self.is_written)


class _OmissionFinder:
    """Searcher for the fields of messages, and the other variables of a conversation, that reach none of its documents.

    Args:
        renderer: renderer of the template.
        documents: documents of the conversation. The last one is the longest.
    """

    def __init__(self, renderer: ChatRenderer, documents: Sequence[ChatDocument]) -> None:
        self._renderer, self._chat, self._documents = renderer, documents[-1].chat, documents
        self._texts = [document.text for document in reversed(documents)]
        self._num_markers = 0

    def iter_notes(self) -> Iterator[str]:
        """Yield a note for each field of a message, and each key of the record, that the template does not write."""
        values: dict[tuple[int, str] | str, Any] = {}
        marked: list[_MarkedTexts] = []
        plain_fields: dict[str, list[int]] = {}
        for i, message in enumerate(self._chat.messages):
            for name, value in message.items():
                if name == "role" or value in ("", [], {}):
                    continue
                if name == "content" and isinstance(value, str):
                    values[i, name] = self._mark_content(i, value, marked)
                elif isinstance(value, str | list | dict):
                    group = _MarkedTexts(f"{name} of {{message}} is not rendered by the template", (i, name))
                    marker_fields = ("function",) if name == "tool_calls" else None
                    values[i, name] = self._mark_values(value, group, marker_fields)
                    marked.append(group)
                else:
                    plain_fields.setdefault(name, []).append(i)
        for key, objects in (("tools", self._chat.tools), ("documents", self._chat.documents)):
            if objects:
                group = _MarkedTexts(f"{key} of {{conversation}} are not rendered by the template", key, needs_all=False)
                values[key] = self._mark_values(objects, group, None)
                marked.append(group)
        yield from self._find_unwritten([group for group in marked if group.is_omitted], values)
        for name, indices in plain_fields.items():
            unused = indices if self._is_unused(name, indices) else [i for i in indices if self._is_unused(name, [i])]
            yield from [f"{name} of {{message}} is not rendered by the template"] * len(unused)
        for name in self._chat.template_kwargs:
            if name not in self._renderer.variables:
                yield f"the variable {name!r} of chat_template_kwargs of {{conversation}} is not read by the template"
        yield from self._find_escaped_arguments()

    def _mark_content(self, index: int, content: str, marked: list[_MarkedTexts]) -> str:
        """Return the content of a message with markers in the texts that may not be written. Add these texts to `marked`.

        In the content of an answer, the thoughts and the text after them are separate texts.
        """
        message = self._chat.messages[index]
        note = f"content of {{message}} with the role {message['role']} is not rendered by the template"
        segments = _THOUGHT_TAG.split(content) if message["role"] == ASSISTANT_ROLE else [content]
        for i, segment in enumerate(segments):
            if i % 2 or not segment.strip():
                continue
            is_thought = i + 1 < len(segments) and segments[i + 1] == "</think>"
            segment_note = "thoughts (before </think>) in the content of {message} are not rendered by the template"
            group = _MarkedTexts(segment_note if is_thought else note, (index, "content"))
            segments[i] = self._mark_text(segment, group)
            marked.append(group)
        return "".join(segments)

    def _mark_values(self, value: Any, group: _MarkedTexts, only: tuple[str, ...] | None) -> Any:
        """Return a value with markers in the texts that may not be written. Add the markers to `group`.

        Args:
            only: names of the fields of objects in a list that are marked; None for all fields.
        """
        if isinstance(value, str):
            return self._mark_text(value, group) if value.strip() else value
        if isinstance(value, list):
            return [self._mark_values(item, group, only) for item in value]
        if isinstance(value, dict):
            return {
                name: item if only is not None and name not in only else self._mark_values(item, group, None)
                for name, item in value.items()
            }
        return value

    def _mark_text(self, text: str, group: _MarkedTexts) -> str:
        stripped = text.strip()
        if len(stripped) >= _MIN_UNIQUE_CHARACTERS and any(stripped in document_text for document_text in self._texts):
            group.is_written = True
            return text
        marker = _MARKER.format(self._num_markers)
        self._num_markers += 1
        group.markers.append(marker)
        middle = text.index(stripped) + (len(stripped) + 1) // 2
        return text[:middle] + marker + text[middle:]

    def _find_unwritten(self, groups: list[_MarkedTexts], values: dict[tuple[int, str] | str, Any]) -> Iterator[str]:
        """Yield the note of each group of texts of which a text is not written.

        All texts are rendered with their markers at once. If the template refuses them, the groups are rendered one by one; a text
        that the template refuses to change is not reported, because the template reads it.
        """
        if not groups:
            return
        try:
            yield from self._find_missing_markers(groups, values)
        except BadRecordError:
            if len(groups) > 1:
                for group in groups:
                    yield from self._find_unwritten([group], values)

    def _find_missing_markers(self, groups: list[_MarkedTexts], values: dict[tuple[int, str] | str, Any]) -> list[str]:
        places = {group.place for group in groups}

        def change(chat: Chat) -> Chat:
            messages = [
                {name: values[i, name] if (i, name) in places else value for name, value in message.items()}
                for i, message in enumerate(chat.messages)
            ]
            tools, documents = (
                values[key] if key in places else value for key, value in (("tools", chat.tools), ("documents", chat.documents))
            )
            return Chat(messages, tools, documents, chat.template_kwargs)

        missing = list(groups)
        for text in self._iter_changed_texts(change):
            for group in missing:
                group.find_in(text)
            missing = [group for group in missing if group.is_omitted]
            if not missing:
                break
        return [group.note for group in missing]

    def _iter_changed_texts(self, change: Callable[[Chat], Chat]) -> Iterator[str]:
        for document in reversed(self._documents):
            yield remove_marks(self._renderer.render(change(document.chat)))

    def _is_unused(self, name: str, indices: Sequence[int]) -> bool:
        """Return whether the template ignores a field of some messages that is a number or a truth value.

        Args:
            name: name of the field.
            indices: indices of the messages.
        """

        def remove(chat: Chat) -> Chat:
            messages = [
                {key: value for key, value in message.items() if key != name or i not in indices}
                for i, message in enumerate(chat.messages)
            ]
            return chat.replace_messages(messages)

        try:
            changed_texts = self._iter_changed_texts(remove)
            return all(text == changed for text, changed in zip(self._texts, changed_texts, strict=True))
        except BadRecordError:
            return False

    def _find_escaped_arguments(self) -> Iterator[str]:
        """Yield a note for each tool call whose arguments are JSON that the template writes as a JSON string."""
        for message in self._chat.messages:
            for call in message.get("tool_calls") or []:
                function = call.get("function") if isinstance(call, dict) else None
                arguments = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(arguments, str) and '"' in arguments and not any(arguments.strip() in text for text in self._texts):
                    yield (
                        "arguments of {tool call} are JSON, and the template writes them as a string within JSON: give them as an "
                        "object"
                    )
