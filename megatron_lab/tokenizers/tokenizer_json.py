"""Reads Hugging Face's tokenizer.json as far as tiktoken can follow it, and the files beside it that name special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lab.tokenizers.bpe_rules import (
    GPT2_PATTERN,
    ByteVocabulary,
    MergeRules,
    NotExactError,
    Pair,
    byte_characters,
    check_ids,
    read_json,
    token_bytes,
)


@dataclass(frozen=True)
class TokenizerJson:
    """A tokenizer.json and the ids in it."""

    path: Path
    document: dict[str, Any]
    model: dict[str, Any]
    """The entry `model` of the document."""
    ids: dict[str, int]
    """Ids of all tokens, added ones included."""
    added: tuple[dict[str, Any], ...]
    """Added tokens: id, content, special and how they are matched."""

    @property
    def is_bpe(self) -> bool:
        """Whether the model is BPE; old files do not name the type."""
        return self.model.get("type", "BPE" if "merges" in self.model else None) == "BPE"


def read_tokenizer_json(path: Path) -> TokenizerJson:
    """Read a tokenizer.json.

    Raises:
        ValueError: it is broken or something else.
    """
    what = "a Hugging Face tokenizer.json"
    source = f"--tokenizer-model {path}"
    document = read_json(path, source, what)
    model = document.get("model") if isinstance(document, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocabulary, dict | list):
        raise ValueError(f"{source} is not {what}: it has no model with a vocabulary.")
    if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocabulary):
            raise ValueError(f"{source}, model.vocab must be pairs of a token and its score.")
        vocabulary = {entry[0]: id for id, entry in enumerate(vocabulary)}
    vocabulary = check_ids(f"{source}, model.vocab", vocabulary)
    if model.get("type") == "BPE" and not isinstance(model.get("merges"), list):
        raise ValueError(f"{source} is of a BPE model but has no merges.\n  The file is not whole: copy it again.")
    added = document.get("added_tokens") or []
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in added):
        raise ValueError(f"{source}: each of added_tokens must be an object with an id and a content.")
    ids = check_ids(f"{source}, added_tokens", vocabulary | {token["content"]: token.get("id") for token in added})
    return TokenizerJson(path, document, model, ids, tuple(added))


def merge_parts(merge: Any) -> list[str]:
    """The tokens of a merge, which old files write as one string."""
    if isinstance(merge, str):
        return merge.split(" ")
    return [str(part) for part in merge] if isinstance(merge, list) else []


def spells_all_bytes(file: TokenizerJson) -> bool:
    """Whether texts are split to bytes, each of which has a token."""
    kinds = _kinds(_parts(file.document.get("pre_tokenizer"), "pretokenizers"))
    return kinds[-1] == "ByteLevel" and byte_characters().keys() <= file.model["vocab"].keys()


def byte_vocabulary(file: TokenizerJson, special: SpecialIds) -> ByteVocabulary:
    """The byte-level BPE vocabulary in the file, in the style of GPT-2, Llama 3 or Qwen.

    Raises:
        ValueError: the parts of the file do not belong together.
        NotExactError: the file asks for something that `ByteVocabulary` cannot express.
    """
    model, source = file.model, f"--tokenizer-model {file.path}"
    if not file.is_bpe:
        raise NotExactError(f"its model is of type {model.get('type')}, not byte-level BPE")
    pattern = _pattern(file.document.get("pre_tokenizer"))
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            raise NotExactError(f"its model has {setting} = {model[setting]!r}")
    normalise = _normalises(file.document.get("normalizer"))
    special_ids = {special.eod} | {token["id"] for token in file.added if token.get("special")}

    to_byte = byte_characters()
    ordinary = {token: id for token, id in model["vocab"].items() if id not in special_ids}
    tokens = {token: raw for token in ordinary if (raw := token_bytes(token, to_byte))}
    ids = {raw: ordinary[token] for token, raw in tokens.items()}
    if not all(bytes([byte]) in ids for byte in range(256)):
        raise NotExactError("its vocabulary lacks some of the 256 bytes")
    ranks: dict[Pair, int] = {}
    for number, merge in enumerate(model["merges"]):
        parts = merge_parts(merge)
        pair = tuple(tokens.get(part, b"") for part in parts)
        if len(pair) != 2 or "".join(parts) not in model["vocab"]:
            raise ValueError(
                f"{source}: merge {number} ({merge!r}) must be two tokens and together make a third, all in the vocabulary.\n"
                "  The file is damaged: copy it again."
            )
        if not all(pair) or pair[0] + pair[1] not in ids:
            raise NotExactError(f"its merge {merge!r} is of special tokens")
        ranks.setdefault(pair, len(ranks))
    return ByteVocabulary(
        source=source,
        pattern=pattern,
        rules=MergeRules(ranks, frozenset(ids) if model.get("ignore_merges") else frozenset()),
        ids=ids,
        num_ids=max(file.ids.values()) + 1,
        eod=special.eod,
        bos=special.bos,
        pad=special.pad,
        added=_found_in_texts(file, special_ids, normalise),
        normalise=normalise,
    )


def _parts(step: Any, several: str) -> list[Any]:
    """The steps of a sequence, which an entry of this name holds, or the only one."""
    held = step.get(several) if isinstance(step, dict) else None
    return held if isinstance(held, list) and held else [step]


def _kinds(parts: list[Any]) -> list[str | None]:
    return [part.get("type") if isinstance(part, dict) else None for part in parts]


def _pattern(pre_tokenizer: Any) -> str:
    """The pattern by which the file splits a text into pieces."""
    parts = _parts(pre_tokenizer, "pretokenizers")
    kinds = _kinds(parts)
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise NotExactError(f"its pre-tokenizer is {' and '.join(map(str, kinds))}, not ByteLevel or Split and ByteLevel")
    if parts[-1].get("add_prefix_space", True):
        raise NotExactError("its pre-tokenizer puts a blank before each text")
    if len(parts) == 1:
        if not parts[0].get("use_regex", True):
            raise NotExactError("its pre-tokenizer does not split texts")
        return GPT2_PATTERN
    split = parts[0]
    pattern = split.get("pattern")
    pattern = pattern.get("Regex") if isinstance(pattern, dict) else None
    if parts[1].get("use_regex", True) or pattern is None or split.get("behavior") != "Isolated" or split.get("invert"):
        raise NotExactError("its pre-tokenizer splits otherwise than once, by a regular expression, and keeping all parts")
    return str(pattern)


def _normalises(normalizer: Any) -> bool:
    """Whether texts are first brought to Unicode's form NFC."""
    if not normalizer:
        return False
    several = normalizer.get("normalizers") if isinstance(normalizer, dict) else None
    parts = several if isinstance(several, list) else [normalizer]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "NFC":
            raise NotExactError(f"it normalises texts by {kind}")
    return bool(parts)


def _found_in_texts(file: TokenizerJson, special_ids: set[int], normalise: bool) -> dict[str, int]:
    """Added tokens that are not special, so that they are found in a text."""
    found = {}
    for token in file.added:
        if token["id"] in special_ids:
            continue
        if any(token.get(way) for way in ("single_word", "lstrip", "rstrip")) or (normalise and token.get("normalized")):
            raise NotExactError(f"its added token {token['content']!r} is matched in a way of its own")
        found[token["content"]] = token["id"]
    return found


_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_NUMBERING = ("generation_config.json", "config.json")
_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")


class SpecialIds(NamedTuple):
    """Ids of tokens with a role."""

    eod: int
    bos: int | None
    pad: int | None


def find_special_ids(path: Path, ids: Mapping[str, int]) -> SpecialIds:
    """Read the roles from the files beside tokenizer.json.

    The order of the files: tokenizer_config.json and special_tokens_map.json (names), generation_config.json and config.json (ids;
    if several, the first). A document ends with eos. Where no file names it, it ends with ``<|endoftext|>``, ``<|end_of_text|>``
    or ``</s>`` if exactly one of them is a token.

    Raises:
        ValueError: no end of document is found, or one of these files is broken.
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
    for name in _NAMING + _NUMBERING:
        file = path.parent / name
        content = read_json(file, str(file), "a JSON object") if file.is_file() else None
        value = content.get(f"{role}_token" if name in _NAMING else f"{role}_token_id") if isinstance(content, dict) else None
        if isinstance(value, dict):  # an added token written out in full
            value = value.get("content")
        elif isinstance(value, list):
            value = value[0] if value else None
        if value is None:
            continue
        id = ids.get(value) if isinstance(value, str) else value if value in ids.values() else None
        if id is not None:
            return id
        if role == "eos":
            raise ValueError(
                f"{file} says that {value!r} ends a document, but {path} has no such token.\n"
                "  The two files must be of the same tokenizer."
            )
    return None
