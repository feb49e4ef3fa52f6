"""Conversations as token ids, the end of answers, and what is left out when the context is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.inference.chat_format import ChatFormat, StopText
from megatron_lab.inference.dialogue import AnswerStream, Completion, Conversation
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support.chats import CHATS, MARKED, PLAIN, SPECIAL, write_tokenizer

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
WORDS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n###\n' }}{% endfor %}assistant: "
"""A template without special tokens."""


def tokenizer_with(folder: Path, template: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_tokenizer(folder, template))


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_prompts_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    chat_format = ChatFormat(tokenizer_with(tmp_path, template))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert chat_format.encode(messages) == expected


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """The end of a document, what the template writes after an answer, and the ids of generation_config.json."""
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    document = json.loads(tokenizer.path.read_text())
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    assert ChatFormat(tokenizer).stop_ids == {tokenizer.eod, ids[SPECIAL[1]]}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, tokenizer.eod]}))
    assert ChatFormat(tokenizer).stop_ids == {tokenizer.eod, ids[SPECIAL[1]], 5} and ChatFormat(tokenizer).stop_text is None
    (tmp_path / "words.jinja").write_text(WORDS)
    chat_format = ChatFormat(tokenizer, str(tmp_path / "words.jinja"))
    assert (chat_format.stop_ids, chat_format.stop_text) == ({tokenizer.eod, 5}, "###")


def test_what_has_no_conversations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ByteTokenizer.*--tokenizer-type HuggingFaceTokenizer.*--interactive"):
        ChatFormat(ByteTokenizer())
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="base model.*--interactive.*--chat-template FILE, or --chat-template chatml"):
        ChatFormat(tokenizer)
    assert ChatFormat(tokenizer, "chatml").encode(CHATS[0])
    with pytest.raises(ValueError, match="cannot be read"):
        ChatFormat(tokenizer, str(tmp_path / "missing.jinja"))


def test_messages_that_do_not_fit_the_template(tmp_path: Path) -> None:
    chat_format = ChatFormat(tokenizer_with(tmp_path, NO_SYSTEM))
    chat_format.check_system(None)
    with pytest.raises(ValueError, match=r"--system does not fit.*no system role"):
        chat_format.check_system("be brief")
    with pytest.raises(ValueError, match="is reserved"):
        chat_format.encode([{"role": "user", "content": f"a {SPECIAL[0]} b"}])
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SPECIAL[0]}, {"role": "user", "content": "b"}]
    assert chat_format.encode(answered), "the model wrote it"


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["ab", "##", "#", "c"], ["ab", "", "", ""]),
        (["ab#", "c", "d##"], ["ab", "#c", "d"]),
        (["a###b"], ["a"]),
        (["####"], [""]),
    ],
)
def test_a_text_that_ends_an_answer_is_not_shown(parts: list[str], shown: list[str]) -> None:
    stop = StopText("###")
    assert [stop.add(part) for part in parts] == shown
    assert stop.has_ended == ("###" in "".join(parts))
    assert stop.finish() == ("##" if parts[-1] == "d##" else "")


def test_an_answer_ends_at_a_text() -> None:
    pieces: list[str] = []
    stream = AnswerStream(ByteTokenizer(), [], "###", pieces.append)
    for id in b"ja#\xc3\xbc##":
        stream.add(id)
    assert not stream.has_ended and pieces == ["j", "a", "#ü"]
    stream.add(ord("#"))
    answer = stream.finish()
    assert stream.has_ended and (answer.text, answer.num_tokens, answer.has_ended) == ("ja#ü", 8, True)


@pytest.mark.parametrize("has_ended", [False, True], ids=["stopped", "ended"])
def test_an_answer_that_is_stopped_within_a_character(has_ended: bool) -> None:
    """The next turn would read a replacement character as something that the model has said."""
    stream = AnswerStream(ByteTokenizer(), [], None, lambda _: None)
    for id in "jaü".encode()[:-1]:
        stream.add(id)
    if has_ended:
        stream.add(None)
    assert stream.finish().text == ("ja\ufffd" if has_ended else "ja")


def conversation(folder: Path, context_length: int, system: str | None = None) -> Conversation:
    return Conversation(ChatFormat(tokenizer_with(folder, PLAIN)), context_length, system)


def test_the_oldest_turns_are_left_out(tmp_path: Path) -> None:
    """Never the system message; the record keeps all of them."""
    chat, longer = (conversation(tmp_path, length, "be brief") for length in (160, 10**6))
    notes = []
    for turn in range(6):
        for each in (chat, longer):
            each.start_turn(f"question {turn}")
        prompt, note = chat.build_prompt(20)
        assert len(prompt) + 20 <= 160
        notes.append(note)
        first = next(i for i, message in enumerate(chat.messages) if i and chat._first_kept == i)
        assert chat.messages[first]["role"] == "user"
        full_prompt, _ = longer.build_prompt(20)
        assert (prompt == full_prompt) == (first == 1)
        for each in (chat, longer):
            each.finish_turn(f"answer {turn}")
    assert notes[0] is None and notes[-1] is not None and "is full" in notes[-1]
    assert chat.messages == longer.messages and chat.to_record() == {"messages": chat.messages}
    while chat.undo_turn():
        pass
    chat.start_turn("again")
    assert chat.build_prompt(20)[1] is None


def test_a_message_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    chat = conversation(tmp_path, 60)
    chat.start_turn("short")
    chat.finish_turn("answer")
    chat.start_turn("long " * 60)
    with pytest.raises(ValueError, match="the context has 60, of which 15 are for the answer"):
        chat.build_prompt(1000)
    assert chat.undo_turn() and [message["content"] for message in chat.messages] == ["short", "answer"]
    assert chat.build_prompt(10)[1] is None, "nothing was left out for it"


def test_turns_are_taken_back(tmp_path: Path) -> None:
    chat = conversation(tmp_path, 500, "be brief")
    assert not chat.undo_turn() and not chat.remove_answer() and chat.to_record() is None
    chat.start_turn("a")
    chat.finish_turn("b")
    assert chat.remove_answer() and not chat.remove_answer()
    chat.finish_turn("c")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be brief"}] and chat.num_turns == 1


def test_a_text_that_is_continued() -> None:
    text = Completion(ByteTokenizer(), 40, frozenset({256}))
    text.start_turn("once")
    assert bytes(text.build_prompt(10)[0]) == b"once"
    text.finish_turn(" upon")
    text.start_turn("")
    assert bytes(text.build_prompt(10)[0]) == b"once upon" and text.to_record() == {"text": "once upon"}
    text.finish_turn(" a time")
    assert text.remove_answer() and text.to_record() == {"text": "once upon"}
    assert text.undo_turn() and text.to_record() == {"text": "once upon"} and text._prompt == "once"
    text.start_turn("x" * 50 + "end")
    prompt, note = text.build_prompt(10)
    assert bytes(prompt) == (b"x" * 50 + b"end")[-30:] and note == "the model sees only the last 30 of 53 tokens"
    for before in ("once", None):
        assert text.undo_turn() and text._prompt == before
    assert not text.undo_turn(), "every entry can be removed, the last one first"
    text.start_turn("twice")
    text.reset()
    assert text.to_record() is None and not text.undo_turn()
