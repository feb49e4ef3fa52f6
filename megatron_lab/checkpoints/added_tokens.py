"""Extension of the vocabulary of a model at its import: new tokens for the tokenizer, and rows for them in the embedding and the
output layer.

The rows of new tokens are the mean of the existing rows (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
Models", https://nlp.stanford.edu/~johnhew/vocab-expansion.html). So the model is not surprised by a new token, and the logit of a
new token is the mean of all logits, where rows of small random numbers would often give the largest logit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import parse_json, read_text
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import OUTPUT_WEIGHT, WORD_EMBEDDING
from megatron_lab.foreign.source import DerivedSource, TensorInfo, WeightSource
from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.file_names import ADDED_TOKENS, TOKEN_OPTIONS, TOKENIZER_CONFIG
from megatron_lab.tokenizers.tokenizer_json import read_tokenizer_json


@dataclass(frozen=True)
class NewToken:
    """Token to be added to a tokenizer, with its options in tokenizer.json."""

    content: str
    options: dict[str, bool]

    @property
    def is_special(self) -> bool:
        return self.options["special"]


def read_new_tokens(path: Path) -> list[NewToken]:
    """Read the file of --add-tokens: a text with one token per line, or a JSON list of tokens.

    An item of the list is a text, or an object with `content` and options of a token in tokenizer.json, such as `special`. By
    default a token is not special. As in transformers, a token that is not special is matched in the normalized text.

    Raises:
        ValueError: the file cannot be read, is empty, or has an item that is not a token, or a token twice.
    """
    try:
        text = read_text(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--add-tokens {path} cannot be read: {error}. Check the path; the file must be UTF-8 text") from error
    if text.lstrip().startswith("["):
        try:
            items = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--add-tokens {path} is not a valid JSON list: {error}. Correct the file") from error
        places = [f"item {index}" for index in range(len(items))]
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        places, items = [f"line {number}" for number, _ in lines], [line for _, line in lines]
    tokens: dict[str, NewToken] = {}
    for place, item in zip(places, items, strict=True):
        token = _parse_token(f"--add-tokens {path}, {place}", item)
        if token.content in tokens:
            raise ValueError(
                f"--add-tokens {path}, {place}: the file has the token {token.content!r} twice. Remove one line or item"
            )
        tokens[token.content] = token
    if not tokens:
        raise ValueError(f"--add-tokens {path} contains no token. Write one token per line")
    return [*tokens.values()]


def _parse_token(place: str, item: Any) -> NewToken:
    fields = {"content": item} if isinstance(item, str) else item
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str) or not fields["content"]:
        raise ValueError(
            f'{place}: {item!r} is not a token. Write a text, or an object such as {{"content": "...", "special": true}}'
        )
    for name, value in fields.items():
        if name != "content" and (name not in TOKEN_OPTIONS or not isinstance(value, bool)):
            raise ValueError(
                f"{place}: {name} = {value!r} is not an option of a token. Choose {', '.join(TOKEN_OPTIONS)}: true or false"
            )
    special = fields.get("special", False)
    defaults = {**dict.fromkeys(TOKEN_OPTIONS, False), "special": special, "normalized": not special}
    options = {name: fields.get(name, default) for name, default in defaults.items()}
    return NewToken(fields["content"], options)


@dataclass(frozen=True)
class AddedTokens:
    """Result of adding tokens to a tokenizer: the ids of the new tokens, and the tokens that the tokenizer had already."""

    ids: dict[str, int]
    existing: dict[str, int]
    """Tokens of the list that the tokenizer already had, with their ids. They are unchanged."""
    num_ids: int
    """Number of ids of the tokenizer with the new tokens."""


def add_to_tokenizer(file: Path, tokens: Sequence[NewToken]) -> AddedTokens:
    """Add tokens to a tokenizer.json and to the files next to it. A new token gets the first id after the highest one, as from
    `add_tokens` of transformers.

    Args:
        file: path of the tokenizer.json, which is replaced.
        tokens: new tokens, in the order of their ids.

    Raises:
        ValueError: the tokenizers library is missing, or would give a token another id.
    """
    content = read_tokenizer_json(file)
    existing = {token.content: content.ids[token.content] for token in tokens if token.content in content.ids}
    new_tokens = [token for token in tokens if token.content not in existing]
    ids = {token.content: id for id, token in enumerate(new_tokens, max(content.ids.values()) + 1)}
    entries = [{"id": ids[token.content], "content": token.content, **token.options} for token in new_tokens]
    document = {**content.document, "added_tokens": [*(content.document.get("added_tokens") or []), *entries]}
    text = json.dumps(document, indent=2, ensure_ascii=False)
    library = import_optional("tokenizers", "--add-tokens needs the tokenizers library")
    try:
        library_tokenizer = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises `Exception` itself
        raise ValueError(f"--add-tokens: the tokenizers library cannot read {file} with the new tokens: {error}") from error
    for name, id in ids.items():
        if (library_id := library_tokenizer.token_to_id(name)) != id:
            raise ValueError(
                f"--add-tokens: the tokenizers library gives {name!r} the id {library_id}, not {id}, because the ids in {file} are "
                "not consecutive. This tokenizer cannot be extended"
            )
    file.write_text(text + "\n", encoding="utf-8")
    _update_companions(file.parent, entries)
    return AddedTokens(ids, existing, max((*content.ids.values(), *ids.values())) + 1)


def _update_companions(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Add new tokens to the lists of added tokens that older files next to a tokenizer.json contain."""
    config_file, list_file = folder / TOKENIZER_CONFIG, folder / ADDED_TOKENS
    if config_file.is_file():
        config = read_json(config_file, str(config_file), "a JSON object")
        if isinstance(config.get("added_tokens_decoder"), dict):
            config["added_tokens_decoder"] |= {
                str(entry["id"]): {name: value for name, value in entry.items() if name != "id"} for entry in entries
            }
            config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if list_file.is_file():
        listed = read_json(list_file, str(list_file), "a JSON object") | {entry["content"]: entry["id"] for entry in entries}
        list_file.write_text(json.dumps(listed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ExtendedSource(DerivedSource):
    """Weights of another source with more rows in the embedding and the output layer. Each new row is the mean of the existing
    rows, computed in float64.

    Args:
        source: source of the existing rows.
        vocab_size: number of rows of the extended embedding.
    """

    def __init__(self, source: WeightSource, vocab_size: int) -> None:
        super().__init__(source, source.model)
        self._vocab_size = vocab_size
        self.weights = {
            name: dataclasses.replace(info, shape=(vocab_size, *info.shape[1:]))
            if name in (WORD_EMBEDDING, OUTPUT_WEIGHT)
            else info
            for name, info in source.weights.items()
        }

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        info: TensorInfo = self.weights[name]
        if name not in (WORD_EMBEDDING, OUTPUT_WEIGHT):
            return super().read(name, tensor_slice)
        rows = super().read(name)
        mean = rows.double().mean(0, keepdim=True).to(rows.dtype)
        extended = torch.cat([rows, mean.expand(info.shape[0] - len(rows), *info.shape[1:])])
        return extended if tensor_slice is None else extended[tensor_slice.index].contiguous()
