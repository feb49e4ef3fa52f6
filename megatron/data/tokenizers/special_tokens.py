"""Where a Hugging Face tokenizer says which tokens end a document, begin one and fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.tokenizers.json_file import read_json

_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_NUMBERING = ("generation_config.json", "config.json")
_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role."""

    eod: int
    bos: int | None
    pad: int | None


def find_special_ids(path: Path, ids: Mapping[str, int]) -> SpecialIds:
    """Read the roles from the files beside tokenizer.json.

    They are asked in this order: tokenizer_config.json and special_tokens_map.json (names), generation_config.json and config.json
    (ids; of several the first). A document ends with eos; where no file says which that is, with ``<|endoftext|>``,
    ``<|end_of_text|>`` or ``</s>`` if exactly one of them is there.

    Args:
        path: tokenizer.json.
        ids: Id of each token.

    Raises:
        ValueError: no end of document is found, or a file beside is broken.
    """
    eod = _find("eos", path, ids)
    if eod is None:
        known = [name for name in _KNOWN_ENDS if name in ids]
        if len(known) != 1:
            raise ValueError(
                f"--tokenizer-model {path}: nothing says which token ends a document: eos_token or eos_token_id stands in none of "
                f"{', '.join(_NAMING + _NUMBERING)} beside it, and {' and '.join(known) or 'none'} of {', '.join(_KNOWN_ENDS)} "
                f"{'are' if known else 'is'} in the vocabulary.\n"
                f'  Write {path.parent / _NAMING[0]} with {{"eos_token": "..."}}.'
            )
        eod = ids[known[0]]
    return SpecialIds(eod, _find("bos", path, ids), _find("pad", path, ids))


def _find(role: str, path: Path, ids: Mapping[str, int]) -> int | None:
    for file, value in _sayings(role, path.parent):
        id = ids.get(value) if isinstance(value, str) else value if value in ids.values() else None
        if id is not None:
            return id
        if role == "eos":
            raise ValueError(
                f"{file} says that {value!r} ends a document, but {path} has no such token.\n"
                "  The two files must be of the same tokenizer."
            )
    return None


def _sayings(role: str, folder: Path) -> Iterator[tuple[Path, Any]]:
    """What the files say of a role: a name or an id."""
    for name in _NAMING + _NUMBERING:
        file = folder / name
        if not file.is_file():
            continue
        content = read_json(file, str(file), "a JSON object")
        value = content.get(f"{role}_token" if name in _NAMING else f"{role}_token_id") if isinstance(content, dict) else None
        if isinstance(value, dict):  # an added token written out
            value = value.get("content")
        elif isinstance(value, list):
            value = value[0] if value else None
        if value is not None:
            yield file, value
