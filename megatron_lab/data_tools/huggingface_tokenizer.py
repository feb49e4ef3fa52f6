"""Writer of tokenizer files from which AutoTokenizer of transformers builds a tokenizer with the same token ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.data import DataConfig
from megatron.config.regular_file import read_regular
from megatron.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, require_tokenizer_json
from megatron_lab.data_tools.sentencepiece_json import (
    SentencePieceFile,
    build_added_token,
    build_bpe_model,
    build_tokenizer_json,
    convert_sentencepiece,
    derive_merges,
)
from megatron_lab.tokenizers.bpe_rules import (
    GPT2_PATTERN,
    ByteVocabulary,
    MergeRules,
    RankRules,
    build_byte_chars,
    read_json,
)
from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.file_names import COMPANION_FILES, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from megatron_lab.tokenizers.template_files import DEFAULT_TEMPLATE, TEMPLATE_FILE, read_chat_templates, write_chat_templates
from megatron_lab.tokenizers.text_frame import TextFrame, build_template_processor, read_text_frame
from megatron_lab.tokenizers.tokenizer_json import TokenizerJson, read_tokenizer_json, splits_into_bytes
from megatron_lab.tokenizers.vocabulary_files import PUBLISHED_FILES

_PROCESSOR_TEMPLATE = "chat_template.json"
"""File with the chat template of older multimodal models."""
EXTRA_FILES = (
    *COMPANION_FILES,
    *("vocab.json", "merges.txt", "tokenizer.model"),
    *(TEMPLATE_FILE, _PROCESSOR_TEMPLATE),
)
"""Files that belong to a tokenizer.json in the same folder."""
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class of transformers that follows tokenizer.json exactly. Without an explicit class, transformers takes that of the model's
architecture, which since version 5 replaces parts of the file by its own."""
_SENTENCEPIECE_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
"""Classes of transformers 5 that replace the pre-tokenizer of tokenizer.json by that of a sentencepiece tokenizer."""
_QWEN2_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Regular expression with which the tokenizers of Qwen2 and Qwen3 split a text."""
_DEFAULT_SPECIAL_NAMES = {"eod": "<|endoftext|>", "bos": "<|startoftext|>", "pad": "<|padding|>"}
"""Names of special tokens, for tokenizers whose files do not name them."""
_LLAMA3_SPECIAL_NAMES = {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>"}


def write_huggingface_tokenizer(
    config: DataConfig, folder: Path, *, max_length: int, chat_template: str | None = None
) -> list[str]:
    """Write the tokenizer that the settings select to a folder, as files that transformers can load.

    Args:
        config: settings that select the tokenizer (--tokenizer-type and its files).
        max_length: maximum number of tokens of the model's input; stored as `model_max_length`.
        chat_template: text of a chat template that replaces the templates of a HuggingFaceTokenizer; None to keep them.

    Returns:
        Notes for the user, for example that no file was written because the tokenizer has no vocabulary.

    Raises:
        ValueError: a file of the tokenizer is missing or broken.
    """
    tokenizer, tokenizer_type = build_tokenizer(config), config.tokenizer_type
    if tokenizer_type == "NullTokenizer":
        return ["NullTokenizer has no vocabulary: no tokenizer is written. Pass token ids to the model"]
    tokenizer_config: dict[str, Any] = {"model_max_length": max_length, "clean_up_tokenization_spaces": False}
    if tokenizer_type == "HuggingFaceTokenizer":
        file = require_tokenizer_json(config.tokenizer_model, tokenizer_type)
        templates = read_chat_templates(file.parent) if chat_template is None else {DEFAULT_TEMPLATE: chat_template}
        return _copy_tokenizer_files(file, tokenizer, folder, tokenizer_config, templates)
    if isinstance(tokenizer, ByteBPETokenizer | ByteTokenizer):
        vocab = tokenizer.vocab if isinstance(tokenizer, ByteBPETokenizer) else _build_byte_vocab()
        special_names = _get_special_names(config, vocab)
        document = _build_byte_level_json(vocab, special_names)
        if tokenizer.prefix_ids:
            document["post_processor"] = build_template_processor(TextFrame(tokenizer.prefix_ids), special_names)
        _write_json(folder / "tokenizer.json", document)
        tokenizer_config |= {"tokenizer_class": _TOKENIZER_CLASS} | _get_role_names(tokenizer, special_names)
    else:
        assert config.tokenizer_model is not None
        file = Path(config.tokenizer_model)
        model, bos = SentencePieceFile(read_regular(file)), next(iter(tokenizer.prefix_ids), None)
        _write_json(folder / "tokenizer.json", convert_sentencepiece(model, bos=bos))
        shutil.copyfile(file, folder / "tokenizer.model")
        tokenizer_config |= {"tokenizer_class": _TOKENIZER_CLASS, "add_bos_token": bos is not None, "add_eos_token": False}
        tokenizer_config |= _get_role_names(tokenizer, {id: token.text for id, token in enumerate(model.tokens)})
    _write_json(folder / TOKENIZER_CONFIG, tokenizer_config)
    _write_json(folder / SPECIAL_TOKENS_MAP, {role: name for role, name in tokenizer_config.items() if role.endswith("_token")})
    return []


def has_qwen2_pattern(folder: Path) -> bool:
    """Return whether the tokenizer in a folder normalizes texts and splits them before BPE like the tokenizers of Qwen2 and Qwen3.

    The function compares the normalizer and the regular expression of the split in tokenizer.json. A folder without this file gives
    True.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return True
    content = read_json(file, str(file), "tokenizer.json")
    pre_tokenizers = (content.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    pattern = (pre_tokenizers[0].get("pattern") or {}).get("Regex")
    return (content.get("normalizer") or {}).get("type") == "NFC" and pattern == _QWEN2_PATTERN


def _copy_tokenizer_files(
    file: Path, tokenizer: Tokenizer, folder: Path, tokenizer_config: dict[str, Any], templates: Mapping[str, str]
) -> list[str]:
    """Copy a tokenizer.json and the files that belong to it, and write its chat templates. Return notes for the user.

    Args:
        tokenizer_config: content of the new tokenizer_config.json. If the source folder has this file, only `model_max_length` is
            used, and only if that of the source is smaller.
        templates: chat templates by name. Newer versions of transformers read the written jinja files, older versions the field of
            tokenizer_config.json; some programs read only one of the two.
    """
    shutil.copyfile(file, folder / "tokenizer.json")
    replaced_files = () if templates == read_chat_templates(file.parent) else (TEMPLATE_FILE, _PROCESSOR_TEMPLATE)
    extra_files = [name for name in EXTRA_FILES if name not in replaced_files and (file.parent / name).is_file()]
    for name in extra_files:
        shutil.copyfile(file.parent / name, folder / name)
    content = read_tokenizer_json(file)
    _write_text_frame(folder / "tokenizer.json", content, tokenizer)
    role_names = _get_role_names(tokenizer, {token["id"]: token["content"] for token in content.added})
    template_field = write_chat_templates(folder, templates)
    if TOKENIZER_CONFIG not in extra_files:
        written = tokenizer_config | {"tokenizer_class": _TOKENIZER_CLASS} | role_names
        _write_json(folder / TOKENIZER_CONFIG, written | template_field)
        return [f"{file.parent} has no {TOKENIZER_CONFIG}: one is written with the known special tokens"]
    source_config = read_json(file.parent / TOKENIZER_CONFIG, str(file.parent / TOKENIZER_CONFIG), "a JSON object")
    source_config, notes = _correct_class(source_config, content)
    written = {"tokenizer_class": _TOKENIZER_CLASS} | _convert_for_older_versions(source_config)
    if "eos_token" in role_names and written.get("eos_token") is None:
        written["eos_token"] = role_names["eos_token"]
        notes.append(f"{TOKENIZER_CONFIG} gets eos_token {role_names['eos_token']!r}, which other files of the tokenizer name")
    max_length, source_length = tokenizer_config["model_max_length"], written.get("model_max_length")
    if isinstance(source_length, int | float) and source_length < max_length:
        written["model_max_length"] = max_length
        notes.append(
            f"model_max_length in {TOKENIZER_CONFIG} becomes {max_length:,}, the length of the model, instead of {source_length:,}"
        )
    _write_json(folder / TOKENIZER_CONFIG, written | template_field)
    return notes


def _convert_for_older_versions(tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json with the names that transformers reads both before and since version 5: of the
    class that follows tokenizer.json, and of the list of special tokens without a role."""
    converted = dict(tokenizer_config)
    if converted.get("tokenizer_class") == "TokenizersBackend":
        converted["tokenizer_class"] = _TOKENIZER_CLASS
    if isinstance(converted.get("extra_special_tokens"), list) and "additional_special_tokens" not in converted:
        converted["additional_special_tokens"] = converted.pop("extra_special_tokens")
    return converted


def _write_text_frame(path: Path, content: TokenizerJson, tokenizer: Tokenizer) -> None:
    """Change the post-processor of a copied tokenizer.json if the tokenizer puts other ids before texts than the file asks for
    (--add-bos, --no-add-bos).

    Args:
        content: content of the original file.
    """
    frame = TextFrame(tokenizer.prefix_ids, tokenizer.suffix_ids)
    if frame == read_text_frame(content):
        return
    names = {id: token for token, id in content.ids.items()}
    document = read_json(path, str(path), "tokenizer.json")
    _write_json(path, document | {"post_processor": build_template_processor(frame, names)})


def _correct_class(tokenizer_config: dict[str, Any], content: TokenizerJson) -> tuple[dict[str, Any], list[str]]:
    """Replace the class in a tokenizer_config.json if that class of transformers 5 would not follow tokenizer.json: classes of
    sentencepiece tokenizers, with a byte-level tokenizer. Return the new content, and notes for the user."""
    name = tokenizer_config.get("tokenizer_class")
    if not isinstance(name, str) or name.removesuffix("Fast") not in _SENTENCEPIECE_CLASSES or not splits_into_bytes(content):
        return tokenizer_config, []
    note = f"{TOKENIZER_CONFIG} names {_TOKENIZER_CLASS} instead of {name}, which in transformers 5 does not split texts into bytes"
    return tokenizer_config | {"tokenizer_class": _TOKENIZER_CLASS}, [note]


def _get_role_names(tokenizer: Tokenizer, names: dict[int, str]) -> dict[str, str]:
    """Return the text of each special token, by the name that transformers gives to the token's role (`eos_token` and so on).

    Args:
        names: texts of tokens, by token id. A special token that is missing here is left out.
    """
    ids = {"eos_token": tokenizer.eod, "bos_token": tokenizer.bos, "pad_token": tokenizer.pad}
    return {role: names[id] for role, id in ids.items() if id is not None and id in names}


def _get_special_names(config: DataConfig, vocab: ByteVocabulary) -> dict[int, str]:
    """Return the texts of the special tokens of a byte-level vocabulary, by token id."""
    names = {id: _DEFAULT_SPECIAL_NAMES[role] for role in _DEFAULT_SPECIAL_NAMES if (id := getattr(vocab, role)) is not None}
    if config.tokenizer_type != "TikTokenizer":
        return names
    published_vocab = PUBLISHED_FILES.get(len(vocab.ids))
    if published_vocab is not None and published_vocab.eod == vocab.eod:
        return {id: _LLAMA3_SPECIAL_NAMES.get(id, name) for id, name in names.items()}
    first_id = vocab.eod - config.tiktoken_special_tokens.index("</s>")
    return {first_id + i: name for i, name in enumerate(config.tiktoken_special_tokens)}


def _build_byte_vocab() -> ByteVocabulary:
    """Return the vocabulary of ByteTokenizer (one token per byte) as a byte-level BPE vocabulary without merges."""
    return ByteVocabulary(
        source="ByteTokenizer",
        pattern=GPT2_PATTERN,
        rules=MergeRules({}),
        ids={bytes([byte]): byte for byte in range(256)},
        num_ids=ByteTokenizer.vocab_size,
        eod=ByteTokenizer.eod,
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _build_byte_level_json(vocab: ByteVocabulary, special_names: Mapping[int, str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json that encodes texts to the ids of a byte-level vocabulary.

    Args:
        special_names: texts of the special tokens, by token id. BPE never produces these ids.
    """
    byte_to_character = {byte: symbol for symbol, byte in build_byte_chars().items()}

    def to_characters(token: bytes) -> str:
        return "".join(byte_to_character[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level
    if vocab.pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": vocab.pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    rules = vocab.rules
    if isinstance(rules, MergeRules):
        merges = sorted(rules.ranks, key=rules.ranks.__getitem__)
    else:
        merges = derive_merges(sorted(rules.ranks, key=rules.ranks.__getitem__), rules.ranks)
    model = build_bpe_model(
        {to_characters(token): id for token, id in vocab.ids.items()} | {name: id for id, name in special_names.items()},
        ((to_characters(left), to_characters(right)) for left, right in merges),
        ignore_merges=isinstance(rules, RankRules) or bool(rules.direct_pretokens),
    )
    added_tokens = [build_added_token(id, name, special=True) for id, name in sorted(special_names.items())]
    return build_tokenizer_json(added_tokens, model, pre_tokenizer=pre_tokenizer, decoder=byte_level)
