"""Conversion of a sentencepiece model to Hugging Face's tokenizer.json.

The model file is a protocol buffer message (sentencepiece_model.proto of sentencepiece). This module parses the few fields that it
needs, because the sentencepiece library exposes neither the normalizer nor the model type.
"""

from __future__ import annotations

import base64
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_lab.tokenizers.text_frame import TextFrame, build_template_processor

Text = TypeVar("Text", str, bytes)

_BLANK = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


@dataclass(frozen=True)
class SentencePieceToken:
    """Token of a sentencepiece model: its text, its score (log-probability or merge priority) and its type (normal, control and so
    on)."""

    text: str
    score: float
    token_type: int


class SentencePieceFile:
    """Content of a sentencepiece model file: tokens, model type and normalizer settings.

    Args:
        data: bytes of the file.

    Raises:
        ValueError: the file is truncated or has another format.
    """

    def __init__(self, data: bytes) -> None:
        try:
            model = _parse_message(data)
            self.tokens = [_parse_token(_parse_message(field)) for field in model[1]]
            trainer, normalizer = (
                _parse_message(model[field_number][-1]) if model[field_number] else {} for field_number in (2, 3)
            )
        except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
            raise ValueError(
                f"the file of --tokenizer-model is damaged or not a sentencepiece model ({error}). If a new copy "
                "does not help, choose another file"
            ) from error
        if not self.tokens:
            raise ValueError(
                "the file of --tokenizer-model is not a sentencepiece model, because it contains no tokens. Choose another file"
            )
        self.model_type: int = _get_last_value(trainer, 3, _UNIGRAM)
        self.has_byte_fallback = bool(_get_last_value(trainer, 35, 0))
        self.charsmap: bytes = _get_last_value(normalizer, 2, b"")
        """Replacements of characters (`precompiled_charsmap`) in sentencepiece's binary format; empty if there are none."""
        self.adds_dummy_prefix = bool(_get_last_value(normalizer, 3, 1))
        self.removes_extra_whitespaces = bool(_get_last_value(normalizer, 4, 1))
        self.marks_word_starts = bool(_get_last_value(normalizer, 5, 1)) and not _get_last_value(trainer, 24, 0)


def convert_sentencepiece(file: SentencePieceFile, *, bos: int | None) -> dict[str, Any]:
    """Convert a sentencepiece model to the content of a tokenizer.json that encodes texts to the same ids.

    Args:
        bos: id of the token to put before each text; None for none.

    Raises:
        ValueError: the model has a feature that tokenizer.json does not support.
    """
    if file.model_type not in (_UNIGRAM, _BPE) or not file.marks_word_starts:
        algorithms = {_UNIGRAM: "unigram", _BPE: "BPE", 3: "word", 4: "char"}
        algorithm = algorithms.get(file.model_type, f"number {file.model_type}")
        marks = "marks" if file.marks_word_starts else "does not mark"
        raise ValueError(
            f"the sentencepiece model has the algorithm {algorithm} and {marks} the "
            "start of each word by a preceding space. Only unigram and BPE models with such marks can be converted to "
            "tokenizer.json. Set --no-tokenizer to write only the weights"
        )
    normalizers: list[dict[str, Any]] = []
    if file.charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(file.charsmap).decode()})
    if file.removes_extra_whitespaces:
        normalizers.append({"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if file.adds_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": _BLANK})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _BLANK})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if file.adds_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    added_tokens = [
        build_added_token(id, token.text, special=token.token_type != _USER_DEFINED)
        for id, token in enumerate(file.tokens)
        if token.token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return build_tokenizer_json(
        added_tokens,
        _build_unigram_model(file) if file.model_type == _UNIGRAM else _convert_bpe_model(file),
        normalizer={"type": "Sequence", "normalizers": normalizers},
        post_processor=None if bos is None else build_template_processor(TextFrame((bos,)), {bos: file.tokens[bos].text}),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def build_tokenizer_json(
    added_tokens: list[dict[str, Any]], model: dict[str, Any], **steps: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    Args:
        added_tokens: entries of the special and user-defined tokens, as `build_added_token` returns them.
        model: vocabulary and rules of the tokenizer's algorithm, such as BPE.
        steps: any of the steps `normalizer`, `pre_tokenizer`, `post_processor` and `decoder`. A step that is left out is null in
            the file.
    """
    step_names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens}
    return {**head, **{step_name: steps.get(step_name) for step_name in step_names}, "model": model}


def build_added_token(id: int, content: str, *, special: bool) -> dict[str, Any]:
    """Return an entry of the list `added_tokens` in tokenizer.json: a token that is found in a text only by its exact text."""
    match_options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, **match_options, "special": special}


def build_bpe_model(vocab: dict[str, int], merges: Iterable[tuple[str, str]], **options: Any) -> dict[str, Any]:
    """Return the section `model` of a tokenizer.json, for BPE with this vocabulary and these merges.

    Args:
        vocab: id of each token, by its text.
        merges: pairs of tokens, in order of priority.
        options: other fields of the section, such as `unk_token`, that replace the defaults.
    """
    default_options = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
    }
    default_options |= {"byte_fallback": False, "ignore_merges": False}
    pairs = [f"{left} {right}" for left, right in merges]
    return {"type": "BPE", **default_options, **options, "vocab": vocab, "merges": pairs}


def _build_unigram_model(file: SentencePieceFile) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": _find_unknown_id(file),
        "vocab": [[token.text, token.score] for token in file.tokens],
        "byte_fallback": file.has_byte_fallback,
    }


def _convert_bpe_model(file: SentencePieceFile) -> dict[str, Any]:
    """Return the section `model` of a tokenizer.json for a sentencepiece BPE model.

    In the list of merges, those that produce the token with the highest score come first.
    """
    ids = {token.text: id for id, token in enumerate(file.tokens)}
    merged_tokens = sorted((token for token in file.tokens if token.token_type == _NORMAL), key=lambda token: -token.score)
    merges = derive_merges([token.text for token in merged_tokens], ids)
    unknown_text = file.tokens[_find_unknown_id(file)].text
    return build_bpe_model(ids, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=file.has_byte_fallback)


def derive_merges(tokens: Sequence[Text], ids: Mapping[Text, int]) -> list[tuple[Text, Text]]:
    """Return the list of merges for a BPE model that is defined only by its tokens.

    Such a model merges any two neighbouring tokens whose concatenation is a token. All merges that produce the same token are
    consecutive in the list.

    Args:
        tokens: tokens that merges produce, in order of priority.
        ids: id of each token of the model. The ids of the two merged tokens order the merges that produce the same token.

    Returns:
        (left token, right token) of each merge, in order of priority.
    """
    merges = []
    for token in tokens:
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _find_unknown_id(file: SentencePieceFile) -> int:
    return next(id for id, token in enumerate(file.tokens) if token.token_type == _UNKNOWN)


def _parse_token(fields: dict[int, list[Any]]) -> SentencePieceToken:
    return SentencePieceToken(
        _get_last_value(fields, 1, b"").decode("utf-8"), _get_last_value(fields, 2, 0.0), _get_last_value(fields, 3, _NORMAL)
    )


def _get_last_value(fields: dict[int, list[Any]], field_number: int, default: Any) -> Any:
    return fields[field_number][-1] if fields.get(field_number) else default


def _parse_message(data: bytes) -> dict[int, list[Any]]:
    """Parse a protocol buffer message. Return the list of values of each field, by field number.

    A value is an integer, bytes, or a float of 4 or 8 bytes.
    """
    fields: dict[int, list[Any]] = defaultdict(list)
    for field_number, value in _iter_fields(data):
        fields[field_number].append(value)
    return fields


def _iter_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    offset = 0
    while offset < len(data):
        tag, offset = _parse_varint(data, offset)
        field_number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, offset = _parse_varint(data, offset)
            yield field_number, value
        elif wire_type == 2:
            length, offset = _parse_varint(data, offset)
            if offset + length > len(data):
                raise IndexError(
                    f"the sentencepiece model is truncated: a field of {length:,} bytes extends beyond its end. Copy the file again"
                )
            yield field_number, data[offset : offset + length]
            offset += length
        elif wire_type in (1, 5):
            size, format_code = (8, "<d") if wire_type == 1 else (4, "<f")
            yield field_number, struct.unpack_from(format_code, data, offset)[0]
            offset += size
        else:
            raise IndexError(
                f"the sentencepiece model has a field of unknown type {wire_type}, so it is damaged. Copy the file again"
            )


def _parse_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Parse the variable-length integer (seven bits per byte, lowest bits first) at an offset. Return its value and the offset
    after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, offset
