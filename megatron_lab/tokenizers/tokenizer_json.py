"""Reader of Hugging Face's tokenizer.json and of the files next to it that define more tokens. It builds a byte-level BPE
vocabulary if tiktoken can reproduce the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.regular_file import read_text
from megatron_lab.tokenizers.bpe_rules import (
    GPT2_PATTERN,
    ByteVocabulary,
    MergeRules,
    NotExactError,
    Pair,
    build_byte_chars,
    check_ids,
    decode_byte_chars,
    read_json,
)
from megatron_lab.tokenizers.companion_tokens import (
    complete_added_tokens,
    get_token_content,
    list_name_files,
    read_companion_tokens,
)
from megatron_lab.tokenizers.file_names import SPECIAL_TOKENS_MAP, TOKEN_ID_FILES, TOKENIZER_CONFIG


@dataclass(frozen=True)
class TokenizerJson:
    """Content of a tokenizer.json, after checks of its form, with the ids of its tokens. It is completed with the tokens that only
    the files next to it have."""

    path: Path
    document: dict[str, Any]
    """Content of the file, with the completed list `added_tokens`."""
    model: dict[str, Any]
    """Object `model` in the file: type of the tokenizer, vocabulary and merges."""
    ids: dict[str, int]
    """Ids of all tokens, including added tokens."""
    added: tuple[dict[str, Any], ...]
    """Added tokens: id, content, whether the token is special, and options for matching the token in a text."""
    marked_ids: frozenset[int] = frozenset()
    """Ids of tokens that the model has, and that only a file next to tokenizer.json calls special."""
    notes: tuple[str, ...] = ()
    """Lines for the user: which tokens the files next to tokenizer.json add."""
    is_completed: bool = False
    """Whether `document` differs from the content of the file."""

    @property
    def is_bpe(self) -> bool:
        """Whether the tokenizer is BPE. Old files do not name the type; they are BPE if they contain merges."""
        return self.model.get("type", "BPE" if "merges" in self.model else None) == "BPE"


def read_tokenizer_json(path: Path) -> TokenizerJson:
    """Read a tokenizer.json, and complete it with the tokens of the files next to it.

    Raises:
        ValueError: a file is damaged or has a different format, or the files contradict each other.
    """
    expected = "a Hugging Face tokenizer.json"
    source = f"--tokenizer-model {path}"
    document = read_json(path, source, expected)
    model = document.get("model") if isinstance(document, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocab, dict | list):
        raise ValueError(
            f"{source} is not {expected}: it has no model with a vocabulary (model.vocab).\n"
            "  The file is damaged or has another format: copy it again."
        )
    if isinstance(vocab, list):  # a unigram model has pairs of token and score
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocab):
            raise ValueError(
                f"{source}: the list model.vocab must contain pairs of a token and its score.\n"
                "  The file is damaged: copy it again."
            )
        vocab = {entry[0]: id for id, entry in enumerate(vocab)}
    vocab = check_ids(f"{source}, model.vocab", vocab)
    if model.get("type") == "BPE" and not isinstance(model.get("merges"), list):
        raise ValueError(f"{source} has a BPE model without merges.\n  The file is incomplete: copy it again.")
    added = document.get("added_tokens") or []
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in added):
        raise ValueError(
            f"{source}: each entry of added_tokens must be an object with an id and a content.\n"
            "  The file is damaged: copy it again."
        )
    check_ids(f"{source}, added_tokens", vocab | {token["content"]: token.get("id") for token in added})
    completed = complete_added_tokens(path, added, vocab, read_companion_tokens(path))
    if completed.is_changed:
        document = {**document, "added_tokens": list(completed.entries)}
    ids = vocab | {token["content"]: token["id"] for token in completed.entries}
    return TokenizerJson(
        path, document, model, ids, completed.entries, completed.marked_ids, completed.notes, is_completed=completed.is_changed
    )


def read_completed_json(path: Path) -> str:
    """Return the text of a tokenizer.json, completed with the tokens of the files next to it, for the tokenizers library.

    Raises:
        ValueError: a file is damaged or has a different format, or the files contradict each other.
    """
    file = read_tokenizer_json(path)
    return json.dumps(file.document, ensure_ascii=False) if file.is_completed else read_text(path, encoding="utf-8-sig")


def split_merge(merge: Any) -> list[str]:
    """Return the two tokens of a BPE merge in tokenizer.json. Old files write a merge as one string with a blank between the
    tokens."""
    if isinstance(merge, str):
        return merge.split(" ")
    return [str(token) for token in merge] if isinstance(merge, list) else []


def splits_into_bytes(file: TokenizerJson) -> bool:
    """Return whether the tokenizer is byte-level: its pre-tokenizer ends with the step ByteLevel."""
    return _get_types(_list_steps(file.document.get("pre_tokenizer"), "pretokenizers"))[-1] == "ByteLevel"


def covers_all_bytes(file: TokenizerJson) -> bool:
    """Return whether the tokenizer splits texts into bytes and has a token for every byte, so that it can encode any text."""
    return splits_into_bytes(file) and build_byte_chars().keys() <= file.model["vocab"].keys()


def get_special_ids(file: TokenizerJson) -> set[int]:
    """Return the ids of the special added tokens, except those that are ordinary tokens in tokenizer.json itself."""
    return {token["id"] for token in file.added if token.get("special")} - file.marked_ids


def build_byte_vocabulary(file: TokenizerJson, special_tokens: SpecialIds) -> ByteVocabulary:
    """Build the byte-level BPE vocabulary of a tokenizer.json, as used by GPT-2, Llama 3 and Qwen.

    Args:
        file: content of the tokenizer.json.
        special_tokens: ids of the special tokens.

    Raises:
        ValueError: the entries of the file are inconsistent.
        NotExactError: the tokenizer is not byte-level BPE, or has options that tiktoken cannot reproduce.
    """
    model, source = file.model, f"--tokenizer-model {file.path}"
    if not file.is_bpe:
        raise NotExactError(
            f"the model in tokenizer.json has the type {model.get('type')}, but tiktoken supports only byte-level BPE, so the "
            "slower tokenizers library is used instead"
        )
    pattern = _get_pattern(file.document.get("pre_tokenizer"))
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            raise NotExactError(
                f"the model in tokenizer.json has the setting {setting} = {model[setting]!r}, which tiktoken does not support, so "
                "the slower tokenizers library is used instead"
            )
    uses_nfc = _check_uses_nfc(file.document.get("normalizer"))
    special_ids = {special_tokens.eod} | get_special_ids(file)

    byte_of_char = build_byte_chars()
    ordinary_ids = {token: id for token, id in model["vocab"].items() if id not in special_ids}
    bytes_of_token = {token: raw for token in ordinary_ids if (raw := decode_byte_chars(token, byte_of_char))}
    ids = {raw: ordinary_ids[token] for token, raw in bytes_of_token.items()}
    if not all(bytes([byte]) in ids for byte in range(256)):
        raise NotExactError(
            "the vocabulary in tokenizer.json lacks tokens for some of the 256 bytes, so it is not the vocabulary of a byte-level "
            "BPE, which tiktoken requires. The slower tokenizers library is used instead"
        )
    ranks: dict[Pair, int] = {}
    for i, merge in enumerate(model["merges"]):
        merge_tokens = split_merge(merge)
        pair = tuple(bytes_of_token.get(t, b"") for t in merge_tokens)
        if len(pair) != 2 or "".join(merge_tokens) not in model["vocab"]:
            raise ValueError(
                f"{source}: merge {i} ({merge!r}) must be two tokens that together form a third, all in the vocabulary.\n"
                "  The file is damaged: copy it again."
            )
        if not all(pair) or pair[0] + pair[1] not in ids:
            raise NotExactError(
                f"the merge {merge!r} in tokenizer.json contains or forms a special token, which tiktoken does not support, so the "
                "slower tokenizers library is used instead"
            )
        ranks.setdefault(pair, len(ranks))
    return ByteVocabulary(
        source=source,
        pattern=pattern,
        rules=MergeRules(ranks, frozenset(ids) if model.get("ignore_merges") else frozenset()),
        ids=ids,
        num_ids=max(file.ids.values()) + 1,
        eod=special_tokens.eod,
        bos=special_tokens.bos,
        pad=special_tokens.pad,
        added=_collect_added_tokens(file, special_ids | file.marked_ids, uses_nfc),
        uses_nfc=uses_nfc,
    )


def _list_steps(step: Any, list_key: str) -> list[Any]:
    """Return the steps of a pre-tokenizer or normalizer in tokenizer.json: those of its list if it is a sequence, otherwise the
    pre-tokenizer or normalizer as the only step.

    Args:
        step: entry of tokenizer.json.
        list_key: key under which a sequence has its list of steps.
    """
    steps = step.get(list_key) if isinstance(step, dict) else None
    return steps if isinstance(steps, list) and steps else [step]


def _get_types(steps: list[Any]) -> list[str | None]:
    """Return the type of each step of a pre-tokenizer, such as "ByteLevel" or "Split"; None for a step without a type."""
    return [step.get("type") if isinstance(step, dict) else None for step in steps]


def _get_pattern(pre_tokenizer: Any) -> str:
    """Return the regular expression with which a pre-tokenizer splits a text into pretokens (words, numbers and so on).

    Args:
        pre_tokenizer: entry `pre_tokenizer` of tokenizer.json.

    Raises:
        NotExactError: texts are not split by exactly one regular expression.
    """
    steps = _list_steps(pre_tokenizer, "pretokenizers")
    types = _get_types(steps)
    if types not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise NotExactError(
            f"the pre-tokenizer in tokenizer.json is {' followed by '.join(map(str, types))}, but tiktoken supports only "
            "ByteLevel, or Split followed by ByteLevel, so the slower tokenizers library is used instead"
        )
    if steps[-1].get("add_prefix_space", True):
        raise NotExactError(
            "the pre-tokenizer in tokenizer.json adds a space before each text, which tiktoken does not do, so the slower "
            "tokenizers library is used instead"
        )
    if len(steps) == 1:
        if not steps[0].get("use_regex", True):
            raise NotExactError(
                "the pre-tokenizer in tokenizer.json does not split texts (use_regex is false), but tiktoken needs a regular "
                "expression, so the slower tokenizers library is used instead"
            )
        return GPT2_PATTERN
    split = steps[0]
    pattern = split.get("pattern")
    pattern = pattern.get("Regex") if isinstance(pattern, dict) else None
    if steps[1].get("use_regex", True) or pattern is None or split.get("behavior") != "Isolated" or split.get("invert"):
        raise NotExactError(
            "the pre-tokenizer in tokenizer.json does not split texts exactly once, by a regular expression, or does not keep all "
            "parts, as tiktoken requires. The slower tokenizers library is used instead"
        )
    return str(pattern)


def _check_uses_nfc(normalizer: Any) -> bool:
    """Return whether a tokenizer's normalizer converts texts to Unicode NFC; False without a normalizer.

    Args:
        normalizer: entry `normalizer` of tokenizer.json.

    Raises:
        NotExactError: the normalizer does something other than NFC.
    """
    if not normalizer:
        return False
    sequence = normalizer.get("normalizers") if isinstance(normalizer, dict) else None
    steps = sequence if isinstance(sequence, list) else [normalizer]
    for step in steps:
        step_type = step.get("type") if isinstance(step, dict) else step
        if step_type != "NFC":
            raise NotExactError(
                f"the normalizer in tokenizer.json is {step_type}, but tiktoken is supported only with NFC, so the slower "
                "tokenizers library is used instead"
            )
    return bool(steps)


def _collect_added_tokens(file: TokenizerJson, special_ids: set[int], uses_nfc: bool) -> dict[str, int]:
    """Return the added tokens that are not special, such as ``<think>``, with their ids. They are matched in a text before BPE.

    Args:
        file: content of the tokenizer.json.
        special_ids: ids of the special tokens, which are left out.
        uses_nfc: whether texts are normalized to Unicode NFC.

    Raises:
        NotExactError: a token has matching options that are not supported.
    """
    added_tokens = {}
    for token in file.added:
        if token["id"] in special_ids:
            continue
        options = ("single_word", "lstrip", "rstrip", *(("normalized",) if uses_nfc else ()))
        if unsupported := [option for option in options if token.get(option)]:
            raise NotExactError(
                f"the added token {token['content']!r} in tokenizer.json has options that tiktoken does not support "
                f"({', '.join(unsupported)}), so the slower tokenizers library is used instead"
            )
        added_tokens[token["content"]] = token["id"]
    return added_tokens


_COMMON_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>")


class SpecialIds(NamedTuple):
    """Ids of the special tokens: eod (end of a document), bos (beginning of a text) and pad. bos and pad are None if no file
    defines them."""

    eod: int
    bos: int | None
    pad: int | None


def find_special_ids(path: Path, ids: Mapping[str, int]) -> SpecialIds:
    """Read the ids of the special tokens from the files next to tokenizer.json.

    The files are read in this order: special_tokens_map.json and tokenizer_config.json, which contain names (tokenizer_config.json
    first if it has `added_tokens_decoder`, as in transformers); generation_config.json and config.json, which contain ids (of a
    list of ids, the first counts). The end-of-document token is the eos token. If no file defines eos and the vocabulary contains
    exactly one of ``<|endoftext|>``, ``<|end_of_text|>`` and ``</s>``, this token is the end-of-document token.

    Args:
        path: path of tokenizer.json.
        ids: ids of all tokens.

    Raises:
        ValueError: there is no end-of-document token, or a file is damaged.
    """
    eod = _find_special_id("eos", path, ids)
    if eod is None:
        candidates = [name for name in _COMMON_EOD_TOKENS if name in ids]
        if len(candidates) != 1:
            files = ", ".join((TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, *TOKEN_ID_FILES))
            raise ValueError(
                f"--tokenizer-model {path}: no file defines the token that ends a document. None of {files} next to it has "
                f"eos_token or eos_token_id. Instead, the vocabulary must contain exactly one of {', '.join(_COMMON_EOD_TOKENS)}, "
                f"but contains {' and '.join(candidates) or 'none'}.\n"
                f'  Write {path.parent / TOKENIZER_CONFIG} with {{"eos_token": "..."}}.'
            )
        eod = ids[candidates[0]]
    return SpecialIds(eod, _find_special_id("bos", path, ids), _find_special_id("pad", path, ids))


def _find_special_id(role: str, path: Path, ids: Mapping[str, int]) -> int | None:
    """Return the id of the special token `role` ("eos", "bos" or "pad"); None if no file defines it.

    Raises:
        ValueError: a file names the token in another form than a text, or its id in another form than an id or a list of ids; or
            the tokenizer has no such end-of-document token.
    """
    name_files = list_name_files(path.parent)
    for name in name_files + TOKEN_ID_FILES:
        file = path.parent / name
        content = read_json(file, str(file), "a JSON object") if file.is_file() else None
        key = f"{role}_token" if name in name_files else f"{role}_token_id"
        stated = content.get(key) if isinstance(content, dict) else None
        value = get_token_content(stated)
        if isinstance(value, list) and name not in name_files:
            value = value[0] if value else None
        if value is None:
            continue
        if type(value) is not (str if name in name_files else int):
            form = "a text, or an object with content" if name in name_files else "an id or a list of ids"
            raise ValueError(f"{file}: {key} is {stated!r}, but must be {form}.\n  Correct the file.")
        id = ids.get(value) if isinstance(value, str) else value if value in ids.values() else None
        if id is not None:
            return id
        if role == "eos":
            raise ValueError(
                f"{file} says that {value!r} ends a document, but {path} has no such token.\n"
                "  Copy both files again from the same tokenizer."
            )
    return None
