"""Templates of published models: the ids of transformers, which answers are learned where, and what a template leaves out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lab.commands.generate_text import _parse_template_kwargs
from megatron_lab.data_tools.preprocess.chat import ChatEncoder, ChatTemplate, EncodedChat
from megatron_lab.data_tools.preprocess.chat_records import Chat
from megatron_lab.data_tools.preprocess.errors import BadRecordError
from megatron_lab.data_tools.preprocess.reports import format_chat_notes
from megatron_lab.inference.chat_format import ChatFormat
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support import chat_templates
from tests.support.chats import MARKED, write_tokenizer

transformers = pytest.importorskip("transformers")
DATE = "2026-01-31"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"t": 7}'}
TALK = [user("hi"), answer("hello there"), user("and?"), answer("more")]
THOUGHTS = [user("1+1?"), answer("<think>\neasy\n</think>\n\n2"), user("2+2?"), answer("<think>\nhm\n</think>\n\n4")]
CALLS = [user("weather?"), answer("", tool_calls=[CALL]), RESULT, answer("It is 7."), user("thanks"), answer("bye")]


def encoder(folder: Path, template: str) -> ChatEncoder:
    path = write_tokenizer(folder, template)
    return ChatEncoder(ChatTemplate.load(path, None, DATE), path)


@pytest.mark.parametrize("has_decoder", [False, True])
def test_names_of_special_tokens_come_from_the_files_that_transformers_prefers(tmp_path: Path, has_decoder: bool) -> None:
    """Without added_tokens_decoder, those of special_tokens_map.json."""
    path = write_tokenizer(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    tokens = {token["id"]: token["content"] for token in json.loads(path.read_text())["added_tokens"]}
    decoder = {str(id): {"content": content, **flags} for id, content in tokens.items()}
    config |= {"bos_token": "<|im_start|>", "pad_token": None, **({"added_tokens_decoder": decoder} if has_decoder else {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}))
    chat = [user("hi")]
    prompt = ChatEncoder(ChatTemplate.load(path, None, DATE), path).render_prompt(Chat(chat), add_generation_prompt=False)
    assert prompt.replace("None", "") == transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, tokenize=False
    )
    assert prompt.startswith("<|im_start|>" if has_decoder else "<|endoftext|>")


def learned(folder: Path, encoded: EncodedChat) -> list[list[str]]:
    """The texts that are learned in each document."""
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json")
    documents = []
    for ids, marks in encoded.documents:
        runs: list[list[int]] = []
        for i in marks.nonzero()[0]:
            if not i or not marks[i - 1]:
                runs.append([])
            runs[-1].append(int(ids[i]))
        documents.append([tokenizer.decode(run) for run in runs])
    return documents


def check(folder: Path, template: str, chat: Chat, lengths: list[int]) -> EncodedChat:
    """The documents are those of transformers for the first messages, so many of them for each document."""
    encoded = encoder(folder, template).encode(chat)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert len(encoded.documents) == len(lengths)
    for (ids, _), length in zip(encoded.documents, lengths, strict=True):
        told = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}
        assert ids.tolist() == theirs.apply_chat_template(chat.messages[:length], **told, return_dict=False)
    return encoded


EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "messages", "tools", "lengths", "expected"),
    [
        ("QWEN3", TALK, None, [2, 4], [[EMPTY_THOUGHT + "hello there\n"], [EMPTY_THOUGHT + "more\n"]]),
        ("QWEN3", THOUGHTS, None, [2, 4], [["<think>\neasy\n</think>\n\n2\n"], ["<think>\nhm\n</think>\n\n4\n"]]),
        (
            "QWEN3",
            [user("weather?"), answer("", reasoning_content="call", tool_calls=[CALL]), RESULT, answer("7", reasoning="done")],
            TOOLS,
            [4],
            [
                [
                    '<think>\ncall\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n',
                    "<think>\ndone\n</think>\n\n7\n",
                ]
            ],
        ),
        ("QWEN3", [*TALK[:2], user("bye")], None, [2], [[EMPTY_THOUGHT + "hello there\n"]]),
        ("DEEPSEEK_R1", TALK, None, [4], [["hello there<|end_of_sentence|>", "more<|end_of_sentence|>"]]),
        ("DEEPSEEK_R1", [user("a"), answer("<b>")], None, [2], [["<b><|end_of_sentence|>"]]),
        ("DEEPSEEK_R1", CALLS[:4], None, [4], [["It is 7.<|end_of_sentence|>"]]),
        ("LLAMA31", CALLS, TOOLS, [6], [['{"name": "weather", "parameters": {"city": "Paris"}}', "It is 7.", "bye"]]),
        ("GEMMA", TALK, None, [4], [["hello there<end_of_turn>\n", "more<end_of_turn>\n"]]),
        (
            "MISTRAL03",
            CALLS,
            TOOLS,
            [4, 6],
            [['[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]', " It is 7."], [" bye"]],
        ),
        ("MISTRAL03", [{"role": "system", "content": "Be brief."}, *TALK[:2]], None, [3], [["hello there"]]),
        ("PHI4", TALK, None, [4], [["hello there", "more"]]),
        ("PHI4_MINI", TALK, None, [4], [["hello there", "more"]]),
        ("GLM4", TALK, None, [4], [["\nhello there", "\nmore"]]),
        ("GLM4", [answer("welcome"), *TALK[:2]], None, [3], [["\nwelcome", "\nhello there"]]),
    ],
)
def test_answers_are_learned_as_a_model_writes_them(
    tmp_path: Path,
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    lengths: list[int],
    expected: list[list[str]],
) -> None:
    encoded = check(tmp_path, getattr(chat_templates, name), Chat(messages, tools), lengths)
    assert learned(tmp_path, encoded) == expected


def test_an_end_of_text_is_learned_where_it_stands(tmp_path: Path) -> None:
    encoded = check(tmp_path, chat_templates.PHI4_MINI, Chat(TALK), [4])
    ids, marks = encoded.documents[0]
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    ends = [id for id, mark in zip(ids.tolist(), marks, strict=True) if mark and id == tokenizer.eod]
    assert len(ends) == 1 and ids[-1] == tokenizer.eod, "the first answer ends with its own token alone"


@pytest.mark.parametrize("thinks", [True, False])
def test_variables_of_a_record_reach_the_template(tmp_path: Path, thinks: bool) -> None:
    kwargs = {"enable_thinking": thinks, "xml_tools": ["a tool"]}
    chat = Chat(TALK[:2], template_kwargs=kwargs)
    path = write_tokenizer(tmp_path, chat_templates.SMOLLM3.replace("strftime_now('%d %B %Y')", "'31 January 2026'"))
    encoded = ChatEncoder(ChatTemplate.load(path, None, None), path).encode(chat)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert encoded.documents[0][0].tolist() == theirs.apply_chat_template(chat.messages, **kwargs, return_dict=False)
    prompt = ChatFormat(HuggingFaceTokenizer(path)).encode(TALK[:1], template_kwargs=kwargs)
    assert prompt == theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, **kwargs, return_dict=False)
    assert not encoded.notes
    if not thinks:
        thought = encoder(tmp_path, chat_templates.QWEN3).encode(Chat(TALK[:2], template_kwargs={"enable_thinking": False}))
        assert learned(tmp_path, thought) == [["hello there\n"]], "the prompt has the empty thought"


def test_a_template_for_tools_is_used_with_tools_alone(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    path = write_tokenizer(tmp_path, templates)  # type: ignore[arg-type]
    ours, theirs = ChatEncoder(ChatTemplate.load(path, None, None), path), transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for tools in (None, TOOLS):
        ids, _ = ours.encode(Chat(TALK[:1], tools)).documents[0]
        assert ids.tolist() == theirs.apply_chat_template(TALK[:1], tools=tools, return_dict=False)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(templates[0]["template"])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(templates[1]["template"])
    again = ChatEncoder(ChatTemplate.load(path, None, None), path).encode(Chat(TALK[:1], TOOLS))
    assert again.documents[0][0].tolist() == ids.tolist()


def notes(folder: Path, template: str, chat: Chat) -> set[str]:
    return set(format_chat_notes(encoder(folder, template).encode(chat).notes))


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (
            chat_templates.GEMMA,
            Chat([user("a"), answer("b", reasoning_content="because of that")]),
            "reasoning_content of 1 message",
        ),
        (chat_templates.GEMMA, Chat([user("a"), answer("b", weight=0), user("a"), answer("b", weight=1)]), "weight of 2 messages"),
        (chat_templates.DEEPSEEK_R1, Chat(THOUGHTS), "thoughts (before </think>) in the content of 2 messages"),
        (chat_templates.DEEPSEEK_R1, Chat(CALLS[:4]), "tool_calls of 1 message"),
        (chat_templates.DEEPSEEK_R1, Chat(CALLS[:4]), "content of 1 message with the role tool"),
        (chat_templates.DEEPSEEK_R1, Chat(TALK, TOOLS), "tools of 1 conversation"),
        (
            chat_templates.LLAMA31,
            Chat([user("a"), answer("I look.", tool_calls=[CALL])]),
            "content of 1 message with the role assistant",
        ),
        (chat_templates.PHI4, Chat(TALK, documents=[{"title": "t", "text": "x"}]), "documents of 1 conversation"),
        (
            chat_templates.PHI4,
            Chat(TALK, template_kwargs={"enable_thinking": True}),
            "'enable_thinking' of chat_template_kwargs of 1",
        ),
        (chat_templates.PHI4, Chat([user("a"), answer(" "), user("a"), answer("")]), "2 answers without a text"),
        (chat_templates.PHI4, Chat([user("a")]), "1 conversation without an answer"),
        (chat_templates.QWEN3, Chat(TALK), "1 conversation written as several documents"),
        (chat_templates.QWEN3, Chat([*TALK, user("bye")]), "1 conversation cut after the last answer"),
        (
            chat_templates.LLAMA31,
            Chat([user("a"), answer("", tool_calls=[{"function": {"name": "w", "arguments": '{"city": "Paris"}'}}])]),
            "arguments of 1 tool call are JSON",
        ),
    ],
)
def test_what_is_left_out_is_counted(tmp_path: Path, template: str, chat: Chat, expected: str) -> None:
    found = notes(tmp_path, template, chat)
    assert [note for note in found if expected in note], found


def test_nothing_is_counted_that_is_written(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Paris"}'}}
    messages = [
        user("a"),
        answer("", reasoning_content="b", tool_calls=[call]),
        {"role": "tool", "content": "c"},
        answer("d", thinking="e"),
    ]
    assert notes(tmp_path, chat_templates.QWEN3, Chat(messages, TOOLS)) == set()
    assert notes(tmp_path, chat_templates.PHI4, Chat(TALK)) == notes(tmp_path, MARKED, Chat(TALK)) == set()


@pytest.mark.parametrize("template", [chat_templates.PHI4, MARKED], ids=["plain", "marked"])
def test_an_empty_answer_is_not_learned(tmp_path: Path, template: str) -> None:
    encoded = encoder(tmp_path, template).encode(Chat([user("a"), answer(""), user("b"), answer("c")]))
    assert learned(tmp_path, encoded) == [["c"]]


def test_special_tokens_in_tools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match=r"key 'tools' contains '<\|im_end\|>'"):
        encoder(tmp_path, chat_templates.QWEN3).encode(Chat(TALK, [{"name": "<|im_end|>"}]))


def test_variables_of_a_dialogue_reach_the_template(tmp_path: Path) -> None:
    """As in training, from the command line and from Python."""
    path = write_tokenizer(tmp_path, chat_templates.QWEN3)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    kwargs = _parse_template_kwargs('{"enable_thinking": false}')
    wanted = theirs.apply_chat_template(TALK[:1], tools=TOOLS, **kwargs, add_generation_prompt=True, return_dict=False)
    assert ChatFormat(HuggingFaceTokenizer(path), None, kwargs).encode(TALK[:1], TOOLS) == wanted
    for text in ("[1]", "{", '{"tools": []}'):
        with pytest.raises(argparse.ArgumentTypeError, match="chat_template_kwargs"):
            _parse_template_kwargs(text)
