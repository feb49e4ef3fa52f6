"""Conversations, and a folder of a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.vocabularies import BPE, tokenizer_json, write_json

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "  that hat, größer 東京 😀!"}],
    [
        {"role": "system", "content": "be a hatter"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "\n"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "more?\n\n"},
        {"role": "assistant", "content": "no\n\n\n"},
    ],
    [{"role": "user", "content": "nobody answers"}],
    [{"role": "assistant", "content": "unasked <think>"}, {"role": "user", "content": "why"}],
]

_MESSAGE = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
_CONTENT = "{{ message['content'] + '<|im_end|>' }}"
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n" + _MESSAGE + "{% if message['role'] == 'assistant' %}\n"
    "    {% generation %}\n" + _CONTENT + "{% endgeneration %}{% else %}" + _CONTENT + "{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""In the manner of ChatML, with its answers marked."""
PLAIN = MARKED.replace("    {% generation %}\n", "").replace("{% endgeneration %}", "")
"""The same without marks."""
SPECIAL = ("<|im_start|>", "<|im_end|>")


def write_tokenizer(folder: Path, template: str) -> Path:
    """Write a byte-level tokenizer with special tokens for conversations; returns tokenizer.json."""
    folder.mkdir(exist_ok=True)
    document = tokenizer_json(BPE, "qwen2")
    first = max(token["id"] for token in document["added_tokens"]) + 1
    for number, content in enumerate(SPECIAL):
        document["added_tokens"].append({**document["added_tokens"][0], "id": first + number, "content": content})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return write_json(folder, document)


def write_chats(path: Path, chats: list[list[dict[str, Any]]] = CHATS) -> str:
    """JSON lines with these conversations."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return str(path)
