"""A sentencepiece model as Hugging Face's tokenizer.json.

The model file is a protocol buffer (sentencepiece_model.proto of sentencepiece); the few fields that matter are read here, since
its library gives out neither the normaliser nor the kind of model.
"""

from __future__ import annotations

import base64
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Text = TypeVar("Text", str, bytes)

_BLANK = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


@dataclass(frozen=True)
class SentencePiece:
    """A token: how good it is, and its kind."""

    text: str
    score: float
    kind: int


class SentencePieceFile:
    """What a model file says.

    Raises:
        ValueError: it is cut or of another kind.
    """

    def __init__(self, data: bytes) -> None:
        try:
            model = _fields(data)
            self.pieces = [_piece(_fields(piece)) for piece in model[1]]
            trainer, normalizer = (_fields(model[number][-1]) if model[number] else {} for number in (2, 3))
        except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
            raise ValueError(f"this is not a sentencepiece model ({error})") from error
        if not self.pieces:
            raise ValueError("this is not a sentencepiece model (it has no tokens)")
        self.kind: int = _last(trainer, 3, _UNIGRAM)
        self.byte_fallback = bool(_last(trainer, 35, 0))
        self.characters: bytes = _last(normalizer, 2, b"")
        """How characters are replaced, in sentencepiece's own form; empty if they are not."""
        self.blank_before = bool(_last(normalizer, 3, 1))
        self.joins_blanks = bool(_last(normalizer, 4, 1))
        self.marks_blanks = bool(_last(normalizer, 5, 1)) and not _last(trainer, 24, 0)


def sentencepiece_json(file: SentencePieceFile, *, bos: int | None) -> dict[str, Any]:
    """The content of a tokenizer.json that gives the same ids.

    Args:
        bos: put before each text.

    Raises:
        ValueError: the model does what tokenizer.json cannot say.
    """
    if file.kind not in (_UNIGRAM, _BPE) or not file.marks_blanks:
        raise ValueError("only unigram and BPE models that mark blanks before words can be written as tokenizer.json")
    normalizers: list[dict[str, Any]] = []
    if file.characters:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(file.characters).decode()})
    if file.joins_blanks:
        normalizers.append({"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if file.blank_before:
        normalizers.append({"type": "Prepend", "prepend": _BLANK})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _BLANK})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if file.blank_before:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    added = [
        added_token(id, piece.text, special=piece.kind != _USER_DEFINED)
        for id, piece in enumerate(file.pieces)
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return whole_json(
        added,
        _unigram(file) if file.kind == _UNIGRAM else _bpe(file),
        normalizer={"type": "Sequence", "normalizers": normalizers},
        post_processor=None if bos is None else _with_first(file.pieces[bos].text, bos),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def whole_json(added: list[dict[str, Any]], model: dict[str, Any], **steps: dict[str, Any] | None) -> dict[str, Any]:
    """A tokenizer.json of added tokens, a model, and the steps around it; a step that is not given is none."""
    kinds = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**head, **{kind: steps.get(kind) for kind in kinds}, "model": model}


def added_token(id: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of added_tokens, found as it is written."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, **plain, "special": special}


def bpe_model(vocabulary: dict[str, int], merges: Iterable[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    """The model's part of a tokenizer.json of kind BPE."""
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
    usual |= {"byte_fallback": False, "ignore_merges": False}
    pairs = [f"{left} {right}" for left, right in merges]
    return {"type": "BPE", **usual, **settings, "vocab": vocabulary, "merges": pairs}


def _unigram(file: SentencePieceFile) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": _unknown(file),
        "vocab": [[piece.text, piece.score] for piece in file.pieces],
        "byte_fallback": file.byte_fallback,
    }


def _bpe(file: SentencePieceFile) -> dict[str, Any]:
    """Joined first are the two that make the piece of the highest score."""
    ids = {piece.text: id for id, piece in enumerate(file.pieces)}
    made = sorted((piece for piece in file.pieces if piece.kind == _NORMAL), key=lambda piece: -piece.score)
    merges = merges_by_rank([piece.text for piece in made], ids)
    unknown = file.pieces[_unknown(file)].text
    return bpe_model(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=file.byte_fallback)


def merges_by_rank(tokens: Sequence[Text], ids: Mapping[Text, int]) -> list[tuple[Text, Text]]:
    """The pairs that make a token, the first to be joined first, for rules under which any two such neighbours are joined.

    All pairs that make the same token follow each other.

    Args:
        tokens: the tokens that pairs make, the first to be made first.
        ids: ids of all tokens; they order the pairs that make the same token.
    """
    found = []
    for token in tokens:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        found += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return found


def _unknown(file: SentencePieceFile) -> int:
    return next(id for id, piece in enumerate(file.pieces) if piece.kind == _UNKNOWN)


def _with_first(name: str, id: int) -> dict[str, Any]:
    """A post-processor that puts one token before each text."""
    first = {"SpecialToken": {"id": name, "type_id": 0}}
    text, second = ({"Sequence": {"id": which, "type_id": number}} for number, which in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"SpecialToken": {"id": name, "type_id": 1}}, second],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}},
    }


def _piece(fields: dict[int, list[Any]]) -> SentencePiece:
    return SentencePiece(_last(fields, 1, b"").decode("utf-8"), _last(fields, 2, 0.0), _last(fields, 3, _NORMAL))


def _last(fields: dict[int, list[Any]], number: int, default: Any) -> Any:
    return fields[number][-1] if fields.get(number) else default


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Values of a message by the number of their field: integers, bytes, and floats of 4 or 8 bytes."""
    found: dict[int, list[Any]] = defaultdict(list)
    for number, value in _values(data):
        found[number].append(value)
    return found


def _values(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        tag, at = _integer(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _integer(data, at)
            yield number, value
        elif kind == 2:
            length, at = _integer(data, at)
            if at + length > len(data):
                raise IndexError("it is cut")
            yield number, data[at : at + length]
            at += length
        elif kind in (1, 5):
            size, code = (8, "<d") if kind == 1 else (4, "<f")
            yield number, struct.unpack_from(code, data, at)[0]
            at += size
        else:
            raise IndexError(f"a field of kind {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
