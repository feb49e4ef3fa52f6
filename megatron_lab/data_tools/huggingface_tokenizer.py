"""Writes a tokenizer as the files from which transformers' AutoTokenizer makes the same one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.data import DataConfig
from megatron.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, required_tokenizer_json
from megatron_lab.data_tools.sentencepiece_json import (
    SentencePieceFile,
    added_token,
    bpe_model,
    merges_by_rank,
    sentencepiece_json,
    whole_json,
)
from megatron_lab.tokenizers.bpe_rules import (
    GPT2_PATTERN,
    ByteVocabulary,
    MergeRules,
    RankRules,
    byte_characters,
    read_json,
)
from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.vocabulary_files import KNOWN_FILES

_SETTINGS = "tokenizer_config.json"
_BESIDE = (
    *(_SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files that may lie beside a tokenizer.json and belong to it."""
_FROM_FILE = "PreTrainedTokenizerFast"
"""The class that does what tokenizer.json says. Without a class, transformers takes that of the model's architecture, which since
version 5 replaces parts of the file by its own."""
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen's tokenizers split a text."""
_NAMES = {"eod": "<|endoftext|>", "bos": "<|startoftext|>", "pad": "<|padding|>"}
"""Names of special tokens whose files give them none."""
_LLAMA3_NAMES = {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>"}


def write_huggingface_tokenizer(config: DataConfig, folder: Path, *, max_length: int) -> list[str]:
    """Write the files of the tokenizer that the settings describe.

    Args:
        max_length: tokens that the model takes.

    Returns:
        what a user should know.

    Raises:
        ValueError: the tokenizer's own files are missing or broken.
    """
    tokenizer, kind = build_tokenizer(config), config.tokenizer_type
    if kind == "NullTokenizer":
        return ["NullTokenizer's texts are numbers: no tokenizer is written, and the ids are to be given to the model"]
    settings: dict[str, Any] = {"model_max_length": max_length, "clean_up_tokenization_spaces": False}
    if kind == "HuggingFaceTokenizer":
        return _copy(required_tokenizer_json(config.tokenizer_model, kind), tokenizer, folder, settings)
    if isinstance(tokenizer, ByteBPETokenizer | ByteTokenizer):
        vocabulary = tokenizer.vocabulary if isinstance(tokenizer, ByteBPETokenizer) else _raw_bytes()
        special = _special_names(config, vocabulary)
        _write(folder / "tokenizer.json", _byte_level_json(vocabulary, special))
        settings |= {"tokenizer_class": _FROM_FILE} | _roles(tokenizer, special)
    else:
        assert config.tokenizer_model is not None
        file = Path(config.tokenizer_model)
        model, first = SentencePieceFile(file.read_bytes()), tokenizer.bos if kind == "Llama2Tokenizer" else None
        _write(folder / "tokenizer.json", sentencepiece_json(model, bos=first))
        shutil.copyfile(file, folder / "tokenizer.model")
        settings |= {"tokenizer_class": _FROM_FILE, "add_bos_token": first is not None, "add_eos_token": False}
        settings |= _roles(tokenizer, {id: piece.text for id, piece in enumerate(model.pieces)})
    _write(folder / _SETTINGS, settings)
    _write(folder / "special_tokens_map.json", {role: name for role, name in settings.items() if role.endswith("_token")})
    return []


def splits_as_qwen2(folder: Path) -> bool:
    """Whether the tokenizer in a folder, if there is one, normalises and splits texts as that of Qwen2 and Qwen3."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return True
    content = read_json(file, str(file), "tokenizer.json")
    parts = (content.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    pattern = (parts[0].get("pattern") or {}).get("Regex")
    return (content.get("normalizer") or {}).get("type") == "NFC" and pattern == _QWEN2


def _copy(file: Path, tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> list[str]:
    """A tokenizer.json and what lies beside it."""
    shutil.copyfile(file, folder / "tokenizer.json")
    beside = [name for name in _BESIDE if (file.parent / name).is_file()]
    for name in beside:
        shutil.copyfile(file.parent / name, folder / name)
    if _SETTINGS in beside:
        own = read_json(file.parent / _SETTINGS, str(file.parent / _SETTINGS), "a JSON object")
        _write(folder / _SETTINGS, {"tokenizer_class": _FROM_FILE} | own)
        return []
    names = {token["id"]: token["content"] for token in read_json(file, str(file), "tokenizer.json").get("added_tokens") or []}
    _write(folder / _SETTINGS, settings | {"tokenizer_class": _FROM_FILE} | _roles(tokenizer, names))
    return [f"there was no {_SETTINGS} beside {file.name}: one is written with the special tokens that are known"]


def _roles(tokenizer: Tokenizer, names: dict[int, str]) -> dict[str, str]:
    """Names of the special tokens under transformers' names of their roles."""
    ids = {"eos_token": tokenizer.eod, "bos_token": tokenizer.bos, "pad_token": tokenizer.pad}
    return {role: names[id] for role, id in ids.items() if id is not None and id in names}


def _special_names(config: DataConfig, vocabulary: ByteVocabulary) -> dict[int, str]:
    """Names of the special ids of a byte-level vocabulary."""
    found = {id: _NAMES[role] for role in _NAMES if (id := getattr(vocabulary, role)) is not None}
    if config.tokenizer_type != "TikTokenizer":
        return found
    known = KNOWN_FILES.get(len(vocabulary.ids))
    if known is not None and known.eod == vocabulary.eod:
        return {id: _LLAMA3_NAMES.get(id, name) for id, name in found.items()}
    first = vocabulary.eod - config.tiktoken_special_tokens.index("</s>")
    return {first + number: name for number, name in enumerate(config.tiktoken_special_tokens)}


def _raw_bytes() -> ByteVocabulary:
    """ByteTokenizer as a vocabulary: the bytes, and nothing is merged."""
    return ByteVocabulary(
        source="ByteTokenizer",
        pattern=GPT2_PATTERN,
        rules=MergeRules({}),
        ids={bytes([byte]): byte for byte in range(256)},
        num_ids=ByteTokenizer.vocab_size,
        eod=ByteTokenizer.eod,
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_level_json(vocabulary: ByteVocabulary, special: Mapping[int, str]) -> dict[str, Any]:
    """The content of a tokenizer.json that gives the same ids.

    Args:
        special: names of special ids, which no text gives.
    """
    character = {byte: sign for sign, byte in byte_characters().items()}

    def written(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level
    if vocabulary.pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": vocabulary.pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    rules = vocabulary.rules
    if isinstance(rules, MergeRules):
        merges = sorted(rules.ranks, key=rules.ranks.__getitem__)
    else:
        merges = merges_by_rank(sorted(rules.ranks, key=rules.ranks.__getitem__), rules.ranks)
    model = bpe_model(
        {written(token): id for token, id in vocabulary.ids.items()} | {name: id for id, name in special.items()},
        ((written(left), written(right)) for left, right in merges),
        ignore_merges=isinstance(rules, RankRules) or bool(rules.whole),
    )
    added = [added_token(id, name, special=True) for id, name in sorted(special.items())]
    return whole_json(added, model, pre_tokenizer=pre_tokenizer, decoder=byte_level)
