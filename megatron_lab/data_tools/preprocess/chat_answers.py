"""Documents of a conversation, and the places of the answers in their texts.

The answers are the text in the template's ``{% generation %}`` ... ``{% endgeneration %}`` blocks. For a template without these
blocks, the conversation is rendered up to each answer. The answer is the text by which this rendering is longer than that of the
previous messages with the generation prompt: what the model writes when it is asked.

Some templates render an answer differently if messages follow it. For example, they leave out the thoughts of all answers but the
last. Such an answer is not learned in the text of the complete conversation, because a model never writes it in this form. The
conversation then gives several documents. Each is the text of the conversation up to an answer, as `apply_chat_template` renders
it, and contributes the answers that stand in it as the model would write them. Each answer is learned in exactly one document.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lab.data_tools.preprocess.chat_records import ASSISTANT_ROLE, Chat
from megatron_lab.data_tools.preprocess.chat_rendering import ANSWER_END, ANSWER_START, REASONING_FIELDS, ChatRenderer
from megatron_lab.data_tools.preprocess.errors import BadRecordError

CharacterSpan = tuple[int, int]
"""First character of a span, and the character after the last one."""

_PROBE = "\ue001"
"""Content of an answer that is rendered to find where the template writes the content. No other answer begins like this."""


@dataclass(frozen=True)
class ChatDocument:
    """Text of a conversation, or of its first messages, with the answers that are learned in it."""

    chat: Chat
    """Conversation that the text renders."""
    text: str
    answers: list[CharacterSpan]


def find_empty_answers(renderer: ChatRenderer, chat: Chat) -> frozenset[int]:
    """Return the indices of the answers without text and without tool calls that the template writes.

    A model must not learn to write such an answer.
    """
    return frozenset(i for i in range(len(chat.messages)) if _is_empty_answer(renderer, chat.take(i + 1)))


def _is_empty_answer(renderer: ChatRenderer, chat: Chat) -> bool:
    """Return whether the last message of a conversation is an empty answer."""
    *previous, message = chat.messages
    content = message.get("content", "")
    if message["role"] != ASSISTANT_ROLE or not isinstance(content, str) or content.strip():
        return False
    if not message.get("tool_calls"):
        return True
    without_calls = {**message, "content": content}
    del without_calls["tool_calls"]
    try:
        return renderer.render(chat.replace_messages([*previous, without_calls])) == renderer.render(chat)
    except BadRecordError:
        return False


def split_into_documents(renderer: ChatRenderer, chat: Chat) -> list[ChatDocument]:
    """Render a conversation as one document or several, so that each answer is learned as a model would write it.

    Raises:
        BadRecordError: the template refuses the conversation, or an answer cannot be found in its text.
    """
    empty_answers = find_empty_answers(renderer, chat)
    if renderer.marks_answers(chat):
        return [_read_marked(renderer, chat, empty_answers)]
    return _DocumentBuilder(renderer, chat, empty_answers).build()


def remove_marks(text: str) -> str:
    """Return a rendered text without the markers of `generation` blocks."""
    return text.replace(ANSWER_START, "").replace(ANSWER_END, "")


def _split_marked(text: str) -> list[str]:
    """Split a rendered text at the markers of `generation` blocks. The answers have odd indices."""
    return text.replace(ANSWER_END, ANSWER_START).split(ANSWER_START)


def _read_marked(renderer: ChatRenderer, chat: Chat, empty_answers: frozenset[int]) -> ChatDocument:
    """Render a conversation by a template that marks the answers."""
    segments = _split_marked(renderer.render(chat))
    left_out = _find_empty_segments(renderer, chat, empty_answers, len(segments)) if empty_answers else set()
    text, spans = "", []
    for i, segment in enumerate(segments):
        if i % 2 and i not in left_out:
            spans.append((len(text), len(text) + len(segment)))
        text += segment
    return ChatDocument(chat, text, spans)


def _find_empty_segments(renderer: ChatRenderer, chat: Chat, empty_answers: frozenset[int], num_segments: int) -> set[int]:
    """Return the indices of the marked segments that belong to empty answers.

    Args:
        empty_answers: indices of these answers among the messages.
        num_segments: number of segments into which the markers split the text of the conversation.

    Raises:
        BadRecordError: the template does not mark these answers if they have a content.
    """
    messages = [{**message, "content": _PROBE} if i in empty_answers else message for i, message in enumerate(chat.messages)]
    segments = _split_marked(renderer.render(chat.replace_messages(messages)))
    if len(segments) != num_segments:
        raise BadRecordError(
            f"message {min(empty_answers)} is an answer without text, and the chat template marks other answers because of it. "
            "Remove this message"
        )
    return {i for i, segment in enumerate(segments) if i % 2 and _PROBE in segment}


class _DocumentBuilder:
    """Builder of the documents of one conversation, by a template that does not mark the answers.

    Args:
        renderer: renderer of the template.
        chat: conversation.
        empty_answers: indices of the answers that are not learned.
    """

    def __init__(self, renderer: ChatRenderer, chat: Chat, empty_answers: frozenset[int]) -> None:
        self._renderer, self._chat, self._empty_answers = renderer, chat, empty_answers
        self._texts: dict[int, str] = {}
        # Some templates end a text that is no prompt with this token, which does not belong to the last message.
        self._end_of_text = renderer.special_tokens.get("eos_token")

    def build(self) -> list[ChatDocument]:
        """Return the documents, in the order of their last answers."""
        messages = self._chat.messages
        remaining = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT_ROLE and i not in self._empty_answers]
        starts = {i: self._find_start(i) for i in remaining}
        documents: list[ChatDocument] = []
        num_messages, has_answers = len(messages), bool(remaining)
        while remaining or not documents:
            text = self._render_first(num_messages)
            ends = {i: end for i in remaining if (end := self._find_end(i, text)) is not None}
            if ends or not has_answers:
                spans = [(starts[i], end) for i, end in ends.items()]
                documents.append(ChatDocument(self._chat.take(num_messages), text, spans))
            remaining = [i for i in remaining if i not in ends]
            num_messages = remaining[-1] + 1 if remaining else 0
        return documents[::-1]

    def _render_first(self, num_messages: int) -> str:
        """Return the text of the first messages of the conversation."""
        if num_messages not in self._texts:
            self._texts[num_messages] = self._renderer.render(self._chat.take(num_messages))
        return self._texts[num_messages]

    def _find_start(self, index: int) -> int:
        """Return the first character of an answer in the text of the conversation up to it.

        If the generation prompt is not the start of this text, the answer starts where they differ. For example, the generation
        prompt of a reasoning model begins a thought, which its template does not write. If they already differ in an earlier
        message, the answer starts where the text depends on its content.

        Args:
            index: index of the answer among the messages.

        Raises:
            BadRecordError: the text does not depend on the content of the answer.
        """
        text = self._render_first(index + 1)
        prompt, previous_text = self._render_prompt(index)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        answer = {
            name: value for name, value in self._chat.messages[index].items() if name not in ("tool_calls", *REASONING_FIELDS)
        }
        probed_chat = self._chat.replace_messages([*self._chat.messages[:index], {**answer, "content": _PROBE}])
        probed_text = self._renderer.render(probed_chat)
        if _PROBE not in probed_text:
            raise BadRecordError(
                f"message {index}: the text that the chat template writes does not begin with the prompt of this answer, and does "
                "not contain its content, so the tokens to train on are unknown. Mark the answers in the template with "
                "{% generation %} and {% endgeneration %}"
            )
        start = _count_common(text, probed_text)
        if prompt is not None and previous_text is not None and prompt.startswith(previous_text):
            given = _count_common(text, prompt)
            if given >= len(previous_text):
                return min(start, given)
        return start

    def _render_prompt(self, index: int) -> tuple[str | None, str | None]:
        """Return the text of the messages before an answer, with and without the generation prompt; None if it is refused."""
        before = self._chat.take(index)
        try:
            prompt = self._renderer.render(before, add_generation_prompt=True)
            return prompt, None if self._render_first(index + 1).startswith(prompt) else self._render_first(index)
        except BadRecordError:  # for example because there is no message
            return None, None

    def _find_end(self, index: int, text: str) -> int | None:
        """Return the character after the end of an answer in the text of a document, or None if the text contains the answer in
        another form than that in which a model writes it.

        Args:
            index: index of the answer among the messages.
            text: text of the document.
        """
        answered = self._render_first(index + 1)
        if text.startswith(answered):
            return len(answered)
        token = self._end_of_text
        if token and index and answered.endswith(token) and self._render_first(index).endswith(token):
            end = len(answered) - len(token)
            return end if text.startswith(answered[:end]) else None
        return None


def _count_common(first: str, second: str) -> int:
    """Return the number of characters at the start of two texts that are equal."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)
