"""Prompts of the samples during training (--sample-prompts), and the file from which they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.config import Config
from megatron.config.regular_file import find_path_problem, parse_json, read_text, shorten_path
from megatron.data.tokenizer import Tokenizer

DEFAULT_PROMPTS = ("", "The capital of France is", "Once upon a time, there was", "To make bread, first", "1, 2, 3, 4, 5,")
"""Prompts without --sample-prompts. The empty prompt shows how the model starts a document."""
MAX_PROMPTS = 100
"""Maximum number of prompts of a file. More are a mistake, such as the path of a dataset."""
_MAX_BYTES = 16 << 20
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
_FLAG = "--sample-prompts"


@dataclass(frozen=True)
class SamplePrompt:
    """Prompt that the model continues."""

    text: str
    ids: list[int]
    """Token ids. An empty text has the token that starts a document."""


def load_prompts(config: Config, tokenizer: Tokenizer) -> list[SamplePrompt]:
    """Return the prompts of a run: those of --sample-prompts, or the default prompts that fit the sequence length.

    Raises:
        ValueError: the file cannot be read or has no prompts, or a prompt cannot be encoded or is too long.
    """
    path, max_length = config.logging.sample_prompts, config.model.seq_length - 1
    if path is None:
        texts = ("",) if config.data.tokenizer_type == "NullTokenizer" else DEFAULT_PROMPTS
        prompts = [SamplePrompt(text, _encode(tokenizer, text)) for text in texts]
        return [prompt for prompt in prompts if len(prompt.ids) <= max_length] or prompts[:1]
    prompts = []
    for location, text in _read_texts(path):
        try:
            ids = _encode(tokenizer, text)
        except ValueError as error:
            raise ValueError(f"{location}: the tokenizer cannot encode this prompt: {error}") from error
        if len(ids) > max_length:
            raise ValueError(
                f"{location}: the prompt has {len(ids):,} tokens, but the model reads --seq-length {config.model.seq_length:,} "
                f"tokens, of which at least one is new. Shorten the prompt to {max_length:,} tokens, or remove it."
            )
        prompts.append(SamplePrompt(text, ids))
    return prompts


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text) or tokenizer.document_start


def _read_texts(path: str) -> Iterator[tuple[str, str]]:
    """Yield the place (flag, file and line, for messages) and the text of each prompt of a file.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, or has no prompt, too many prompts or an invalid line.
    """
    name = f"{_FLAG} {shorten_path(path)}"
    if problem := find_path_problem(path):
        raise ValueError(f"{name} cannot be read: {problem}. Give the path of a file with one prompt per line.")
    try:
        lines = read_text(Path(path), _MAX_BYTES).removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"{name} cannot be read: {reason[:1].lower()}{reason[1:]}. Give the path of a file with prompts."
        ) from error
    numbered_lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered_lines:
        raise ValueError(f"{name} has no prompts. Write one prompt per line, or leave {_FLAG} out for the default prompts.")
    if len(numbered_lines) > MAX_PROMPTS:
        raise ValueError(
            f"{name} has {len(numbered_lines):,} prompts, but at most {MAX_PROMPTS} are allowed, because each is continued at "
            "every --sample-interval. Choose some of them."
        )
    is_jsonl = path.endswith((".jsonl", ".json"))
    for number, line in numbered_lines:
        location = f"{name}, line {number}"
        yield location, _parse_json_prompt(line, location) if is_jsonl else _unescape(line)


def _unescape(line: str) -> str:
    """Replace the escapes of a line: \\n (newline), \\t (tab), \\r and \\\\ (backslash)."""
    return re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], line)


def _parse_json_prompt(line: str, location: str) -> str:
    try:
        record = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{location}: not valid JSON ({error}). Write an object such as {{"prompt": "Hello"}}.') from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f'{location}: {_shorten(record)} has no text "prompt". Write an object such as {{"prompt": "Hello"}}.')
    return prompt


def _shorten(record: object) -> str:
    text = json.dumps(record)
    return text if len(text) <= 60 else f"{text[:57]}..."
