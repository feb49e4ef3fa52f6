"""JSON files that belong to a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, source: str, what: str) -> Any:
    """What the file holds.

    Args:
        path: The file.
        source: Its flag and name, for the message.
        what: What it should be.

    Raises:
        ValueError: not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(
            f"{source} is not JSON: {error}\n  It should be {what}; perhaps it was cut short: copy it again."
        ) from error


def check_ids(source: str, vocabulary: object) -> dict[str, int]:
    """A vocabulary that gives each token an id of its own.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(vocabulary, dict) or not all(type(id) is int and 0 <= id < 2**31 for id in vocabulary.values()):
        raise ValueError(f"{source} must be a JSON object that gives each token its id (below 2**31), like GPT-2's vocab.json.")
    if len(set(vocabulary.values())) != len(vocabulary):
        taken: dict[int, str] = {}
        for token, id in vocabulary.items():
            if taken.setdefault(id, token) != token:
                raise ValueError(f"{source} gives the same id, {id}, to several tokens: {taken[id]!r} and {token!r}.")
    return vocabulary
