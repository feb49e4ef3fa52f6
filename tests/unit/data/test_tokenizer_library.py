"""tokenizer.json that only the tokenizers library can follow; and in no way does ordinary text end a document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer, LibraryTokenizer
from tests.support.vocabularies import BPE, TEXT, tokenizer_json, write_json

ODD: dict[str, dict[str, Any]] = {
    "Digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        }
    },
    "space before": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    "does not split": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    },
    "NFKC": {"normalizer": {"type": "NFKC"}},
}


@pytest.mark.parametrize("word", ODD)
def test_other_files_are_run_by_the_library(tmp_path: Path, caplog: pytest.LogCaptureFixture, word: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    document = {**tokenizer_json(BPE, "gpt2"), **ODD[word]}
    document["added_tokens"].append({**document["added_tokens"][0], "content": "<s>", "id": 2000})
    path = write_json(tmp_path, document)
    tokenizer = HuggingFaceTokenizer(path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    for text in (TEXT, "a <think>er, a <|endoftext|> <s> 1234"):
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode_array(text).tolist() == theirs.encode(text).ids
        assert not {tokenizer.eod, 2000} & {*ids}
        assert tokenizer.decode([*ids, tokenizer.eod]) == theirs.decode(ids)
    assert isinstance(tokenizer.backend, LibraryTokenizer)
    assert not caplog.records, "for short texts its speed does not matter"
    for _ in range(3):
        tokenizer.encode_array(" a" * 200_000)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert word in messages[0]
    assert str(path) in messages[0]


@pytest.mark.parametrize("pattern", [r"\G\p{L}+|\s+|\h", r"(\p{L})\1+|[\s\S]", r"(?<sign>[^\p{L}])\k<sign>*|\p{L}+"])
def test_a_pattern_that_tiktoken_cannot_follow_is_left_to_the_library(tmp_path: Path, pattern: str) -> None:
    pytest.importorskip("tokenizers")
    document = tokenizer_json(BPE, "qwen2")
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    tokenizer = HuggingFaceTokenizer(write_json(tmp_path, document))
    assert isinstance(tokenizer.backend, LibraryTokenizer)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_what_a_pattern_does_not_match_is_kept(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    document = tokenizer_json(BPE, "qwen2")
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+"
    path = write_json(tmp_path, document)
    tokenizer = HuggingFaceTokenizer(path)
    assert isinstance(tokenizer.backend, ByteBPETokenizer)
    assert tokenizer.encode(TEXT) == tokenizers.Tokenizer.from_file(str(path)).encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def unigram(**changes: Any) -> dict[str, Any]:
    """A unigram model in which the end of a document is a piece like others, and the likeliest one."""
    pieces = [["<unk>", 0.0], ["</s>", 0.0], *([letter, -5.0] for letter in "▁abc</s>"), ["▁ab", -3.0]]
    level = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 1, "content": "</s>", **flags, "special": False},
            {"id": len(pieces), "content": "<x>", **flags, "special": False},
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        **changes,
    }


def test_ordinary_text_never_gives_the_end_of_a_document(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = HuggingFaceTokenizer(write_json(tmp_path, unigram()))
    for text in ("a</s>", "</s>", " ab</s></s>c<x>"):
        ids = tokenizer.encode(text)
        assert tokenizer.eod == 1 not in ids
        assert tokenizer.decode([*ids, 1]) == text
    assert tokenizer.encode("<x>") == [tokenizer.vocab_size - 1]


def test_an_end_of_document_that_is_an_ordinary_token_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_json(tmp_path, tokenizer_json(BPE, "gpt2"))
    left, right = BPE.merges[0]
    write_json(tmp_path, {"eos_token": left + right}, "tokenizer_config.json")
    with pytest.raises(ValueError, match="ordinary text could be encoded to .*\n.*Name another token"):
        HuggingFaceTokenizer(path).encode("a")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert HuggingFaceTokenizer(write_json(tmp_path / "plain", tokenizer_json(BPE, "gpt2"))).encode("a")
    path = write_json(tmp_path, unigram())
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.vocab_size == 12  # a training run needs no more
    with pytest.raises(ValueError, match=f"{path}.*Unigram.*pip install .*tokenizers"):
        tokenizer.encode("a")


def test_a_file_that_the_library_refuses_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_json(tmp_path, {**tokenizer_json(BPE, "gpt2"), "pre_tokenizer": {"type": "Unheard of"}})
    with pytest.raises(ValueError, match=f"{path} is not a tokenizer.json that the tokenizers library can read"):
        HuggingFaceTokenizer(path).encode("a")
