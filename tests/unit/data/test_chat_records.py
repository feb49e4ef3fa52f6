"""Forms of conversations in records: the same messages from each, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_lab.data_tools.preprocess.chat_records import Chat, ChatReader, find_form
from megatron_lab.data_tools.preprocess.errors import BadRecordError

QUESTION, ANSWER = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "w", "arguments": {"city": "Paris"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
TOOLS = [{"type": "function", "function": {"name": "w"}}]


def read(record: dict[str, Any], *keys: str, variables: frozenset[str] = frozenset()) -> Chat:
    reader = ChatReader(keys or find_form(record, "here") or ("messages",), variables)
    names = [*reader.keys, *reader.optional_keys]
    (chat,) = reader.read([record.get(name) for name in names], names)
    return chat


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [QUESTION, ANSWER], "prompt": "x"}, [QUESTION, ANSWER]),
        ({"messages": json.dumps([QUESTION, ANSWER])}, [QUESTION, ANSWER]),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": None}]}, [QUESTION, ANSWER]),
        ({"messages": [QUESTION, {"role": "assistant", "content": None}]}, [QUESTION, {**ANSWER, "content": ""}]),
        ({"messages": [QUESTION, {**CALLING, "tool_calls": json.dumps(CALLING["tool_calls"])}]}, [QUESTION, CALLING]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]}]}, [QUESTION]),
        ({"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}]}, [QUESTION, ANSWER]),
        ({"conversations": [{"from": "user", "value": "why?"}, {"from": "chatgpt", "value": "so"}]}, [QUESTION, ANSWER]),
        ({"conversations": [QUESTION, ANSWER], "system": "Be brief."}, [SYSTEM, QUESTION, ANSWER]),
        ({"conversations": [{"from": "system", "value": "Be brief."}, QUESTION], "system": "Be brief."}, [SYSTEM, QUESTION]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "why?"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "7"},
                    {"from": "bing", "value": "so"},
                ]
            },
            [QUESTION, CALLING, {"role": "tool", "content": "7"}, ANSWER],
        ),
        ({"instruction": "why?", "input": "", "output": "so", "text": "x"}, [QUESTION, ANSWER]),
        ({"instruction": "wh", "input": "y?", "output": "so"}, [{**QUESTION, "content": "wh\n\ny?"}, ANSWER]),
        ({"instruction": "wh", "context": "y?", "response": "so"}, [{**QUESTION, "content": "wh\n\ny?"}, ANSWER]),
        (
            {"instruction": "why?", "output": "so", "history": [["a", "b"]], "system": "Be brief."},
            [SYSTEM, {**QUESTION, "content": "a"}, {**ANSWER, "content": "b"}, QUESTION, ANSWER],
        ),
        ({"prompt": "why?", "completion": "so"}, [QUESTION, ANSWER]),
        ({"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]}, [SYSTEM, QUESTION, ANSWER]),
        ({"prompt": [QUESTION], "completion": "so"}, [QUESTION, ANSWER]),
        ({"prompt": "why?", "response": "so"}, [QUESTION, ANSWER]),
        ({"question": "why?", "answer": "so"}, [QUESTION, ANSWER]),
        ({"system_prompt": "Be brief.", "question": "why?", "response": "so"}, [SYSTEM, QUESTION, ANSWER]),
        ({"query": "why?", "response": "so", "history": []}, [QUESTION, ANSWER]),
    ],
)
def test_every_form_gives_the_same_messages(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    chat = read(record)
    assert chat.messages == messages and not chat.notes


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_variables_come_from_the_record(tools: object) -> None:
    record = {
        "messages": [QUESTION],
        "tools": tools,
        "documents": [{"text": "x"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    chat = read(record)
    assert (chat.tools, chat.documents, chat.template_kwargs) == (TOOLS, [{"text": "x"}], {"enable_thinking": False})
    for absent in (None, ""):
        assert read({"messages": [QUESTION], "tools": absent}).tools is None
    assert read({"dialog": [QUESTION]}, "dialog").messages == [QUESTION]


def test_only_null_fields_of_messages_are_absent() -> None:
    """As in transformers: a null may be an argument."""
    arguments = {"city": "Paris", "day": None}
    message = {"role": "assistant", "name": None, "tool_calls": [{"function": {"name": "w", "arguments": arguments}}]}
    (found,) = read({"messages": [message]}).messages
    assert "name" not in found and found["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [QUESTION], "enable_thinking": True}, "key 'enable_thinking' of"),
        ({"messages": [QUESTION], "custom": "x"}, "key 'custom' of"),
        ({"question": "why?", "answer": "so", "context": "that"}, "key 'context' of"),
        ({"messages": [SYSTEM, QUESTION], "system": "other"}, "key 'system' of {record} is not used"),
    ],
)
def test_what_does_not_reach_the_template_is_noted(record: dict[str, Any], expected: str) -> None:
    (note,) = read(record, variables=frozenset({"custom", "tools"})).notes
    assert expected in note


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "speaker 'narrator'"),
        ({"conversations": [{"from": "human"}]}, "no text in the field 'value'"),
        ({"conversations": [{"from": "function_call", "value": "w(x)"}]}, "not JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "type 'image_url'"),
        ({"messages": "why?"}, "not a list of messages"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [QUESTION], "tools": "{"}, "key 'tools' is a string but not JSON"),
        ({"messages": [QUESTION], "tools": ["w"]}, "not a list of objects"),
        ({"messages": [QUESTION], "chat_template_kwargs": {"tools": []}}, "sets 'tools'"),
        ({"messages": [QUESTION], "chat_template_kwargs": [1]}, "not an object"),
        ({"prompt": "why?", "completion": 7}, "neither a string nor a list"),
        ({"instruction": "why?", "output": "so", "history": ["a"]}, r"list of \[prompt, answer\]"),
        ({"instruction": "why?", "output": "so", "input": 1}, "not both strings"),
    ],
)
def test_other_records_are_refused(record: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadRecordError, match=expected):
        read(record)


def test_the_form_of_a_record_is_unambiguous() -> None:
    assert find_form({"question": "a", "answer": None}, "here") is None
    assert find_form({"messages": [QUESTION], "instruction": "a", "output": "b"}, "here") == ("messages",)
    with pytest.raises(ValueError, match="--json-keys prompt completion or --json-keys prompt response"):
        find_form({"prompt": "a", "response": "b", "completion": "c"}, "here")
