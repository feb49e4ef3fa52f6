"""Ids of the tokens that end a generated text, as the files of a Hugging Face model name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.data.tokenizer import Tokenizer
from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.file_names import GENERATION_CONFIG, TOKEN_ID_FILES
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's generation_config.json; an empty dictionary if the folder has none."""
    return _read_object(folder / GENERATION_CONFIG)


def read_eos_ids(folder: Path) -> list[int]:
    """Return the ids in `eos_token_id` of a folder's generation_config.json and config.json: none, one or several, in the order of
    the files and without repetition.

    A single id in config.json counts only if generation_config.json has none, as in transformers, which writes the default of the
    model's class there if nobody has set it. Negative ids, with which some models say that they have no such token, do not count.

    Raises:
        ValueError: a value is not an id or a list of ids.
    """
    ids: list[int] = []
    for name in TOKEN_ID_FILES:
        value = _read_object(folder / name).get("eos_token_id")
        listed_ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(id) is not int for id in listed_ids):
            raise ValueError(
                f"{folder / name}: eos_token_id is {value!r}, but must be an id or a list of ids. Correct the file, since a text "
                "would not end at its last token"
            )
        if isinstance(value, list) or not ids:
            ids += [id for id in dict.fromkeys(listed_ids) if id >= 0 and id not in ids]
    return ids


def find_stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a generated text: the end-of-document token and, with the tokenizer of a Hugging Face folder, those
    of its generation_config.json and config.json."""
    others = read_eos_ids(tokenizer.path.parent) if isinstance(tokenizer, HuggingFaceTokenizer) else ()
    return frozenset({tokenizer.eod, *others})


def _read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dictionary if there is no file.

    Raises:
        ValueError: the file does not contain a JSON object.
    """
    content = read_json(path, str(path), "a JSON object") if path.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object. Correct the file, or remove it")
    return content
