"""Tokenizers written for transformers give the ids that ours give, whatever the text."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from megatron.config.data import DataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron_lab.data_tools.huggingface_tokenizer import has_qwen2_pattern, write_huggingface_tokenizer
from megatron_lab.data_tools.sentencepiece_json import SentencePieceFile
from tests.support.vocabularies import (
    BPE,
    SOURCES,
    TEXT,
    any_text,
    rank_lines,
    rank_list,
    ranked_tokens,
    tokenizer_json,
    write_json,
)

KINDS = (
    *("gpt2", "huggingface-qwen2", "huggingface-llama3", "bytes", "tiktoken-list", "tiktoken-lines"),
    *("sentencepiece-bpe", "sentencepiece-unigram", "sentencepiece-stock-bpe", "sentencepiece-stock-unigram", "llama2"),
)


@functools.cache
def place() -> Path:
    """Where the files of this test lie."""
    return Path(tempfile.mkdtemp(prefix="tokenizers-"))


def sentencepiece(kind: str, *, stock: bool) -> str:
    """A model that keeps texts as they are, or one of sentencepiece's defaults: characters replaced, blanks joined, one before."""
    from sentencepiece import SentencePieceTrainer

    prefix = place() / f"{kind}-{stock}"
    corpus = place() / "corpus.txt"
    corpus.write_text("\n".join(SOURCES), encoding="utf-8")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    more: dict[str, Any] = {"byte_fallback": kind == "bpe"} if stock else plain | {"byte_fallback": True}
    SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(prefix),
        vocab_size=600,
        model_type=kind,
        user_defined_symbols="<sep>",
        minloglevel=2,
        **more,
    )
    return f"{prefix}.model"


def settings(kind: str) -> DataConfig:
    """The tokenizer, its files made."""
    folder = place() / kind
    folder.mkdir(exist_ok=True)
    if kind == "gpt2":
        vocab = write_json(folder, BPE.vocabulary, "vocab.json")
        merges = folder / "merges.txt"
        merges.write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in BPE.merges), encoding="utf-8")
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    if kind.startswith("huggingface"):
        file = write_json(folder, tokenizer_json(BPE, "qwen2" if kind.endswith("qwen2") else "llama3"))
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file))
    if kind == "tiktoken-list":
        file = write_json(folder, rank_list(ranked_tokens(BPE)), "ranks.json")
        return DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(file), tiktoken_num_special_tokens=20)
    if kind == "tiktoken-lines":
        (folder / "ranks.tiktoken").write_text(rank_lines(ranked_tokens(BPE)))
        special = {"tiktoken_pattern": "v1", "tiktoken_num_special_tokens": 4, "tiktoken_special_tokens": ("<s>", "</s>", "<pad>")}
        return DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(folder / "ranks.tiktoken"), **special)  # type: ignore[arg-type]
    if kind == "bytes":
        return DataConfig(tokenizer_type="ByteTokenizer")
    model = sentencepiece("unigram" if kind.endswith("unigram") else "bpe", stock="stock" in kind or kind == "llama2")
    return DataConfig(tokenizer_type="Llama2Tokenizer" if kind == "llama2" else "SentencePieceTokenizer", tokenizer_model=model)


@functools.cache
def written(kind: str) -> tuple[Any, Any, Path]:
    """Our tokenizer, the library's reading of what is written of it, and the folder."""
    tokenizers = pytest.importorskip("tokenizers")
    config = settings(kind)
    folder = place() / f"{kind}-written"
    folder.mkdir()
    write_huggingface_tokenizer(config, folder, max_length=64)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True  # names of special tokens are ordinary text here
    return build_tokenizer(config), theirs, folder


@pytest.mark.parametrize("kind", KINDS)
@given(any_text)
def test_any_text_has_the_same_ids(kind: str, text: str) -> None:
    ours, theirs, _ = written(kind)
    if kind.startswith(("sentencepiece", "llama2")) and any(name in text for name in ("\0", "<0x", "<s>", "</s>", "<unk>")):
        return  # sentencepiece ends texts at a zero byte, and its tokens of bytes and special ones have names that texts may hold
    mine = ours.encode(text)
    if kind == "llama2" and not mine:
        mine = [ours.bos]  # of an empty text, which ours leaves empty
    assert theirs.encode(text).ids == mine


@pytest.mark.parametrize("kind", KINDS)
def test_longer_texts_and_back(kind: str) -> None:
    ours, theirs, _ = written(kind)
    for text in (TEXT, *SOURCES):
        ids = ours.encode(text)
        assert theirs.encode(text).ids == ids
        if "unigram" not in kind or "stock" not in kind:  # what is unknown has no text
            assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_tokenizer_opens_it_with_its_special_tokens(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, _, folder = written(kind)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2" if kind == "gpt2" else "llama"}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eod, ours.bos)
    assert theirs.pad_token_id == ours.pad or ours.pad is None
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert theirs.decode([*theirs("a cat")["input_ids"], ours.eod], skip_special_tokens=True) == "a cat"


def test_a_piece_that_is_a_token_stays_whole_though_nothing_merges_to_it(tmp_path: Path) -> None:
    """As tiktoken does; what would make the token `wxyz`, two parts of it, are no tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "ranks").write_text(rank_lines([*ranked_tokens(BPE), b"wxyz"]))
    config = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "ranks"))
    write_huggingface_tokenizer(config, tmp_path, max_length=8)
    ours, theirs = build_tokenizer(config), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(ours.encode("wxyz")) == 1 and len(ours.encode("wxyzw")) == 5
    assert [theirs.encode(text).ids for text in ("wxyz", "wxyzw")] == [ours.encode(text) for text in ("wxyz", "wxyzw")]


def test_a_tokenizer_of_numbers_is_not_written(tmp_path: Path) -> None:
    told = write_huggingface_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=5), tmp_path, max_length=8)
    assert "no tokenizer is written" in told[0] and not list(tmp_path.iterdir())


def test_files_beside_are_carried_over(tmp_path: Path) -> None:
    file = write_json(tmp_path / "a", tokenizer_json(BPE, "qwen2"))
    beside = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    write_json(tmp_path / "a", beside, "tokenizer_config.json")
    write_json(tmp_path / "a", {"x": 1}, "special_tokens_map.json")
    write_json(tmp_path / "a", {"model_type": "other"}, "config.json")
    (tmp_path / "b").mkdir()
    config = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "a"))
    assert write_huggingface_tokenizer(config, tmp_path / "b", max_length=8) == []
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "b" / "special_tokens_map.json").read_text()) == {"x": 1}
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text()).items() > beside.items()
    assert not (tmp_path / "b" / "config.json").exists()


def test_whether_texts_are_split_as_qwen_does() -> None:
    assert has_qwen2_pattern(written("huggingface-qwen2")[2])
    assert not has_qwen2_pattern(written("huggingface-llama3")[2])
    assert not has_qwen2_pattern(written("gpt2")[2]) and not has_qwen2_pattern(written("sentencepiece-bpe")[2])


@pytest.mark.parametrize("data", [b"", b"\x0a\x05ab", b"not a model at all", b"\xff" * 20])
def test_another_file_is_no_sentencepiece_model(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        SentencePieceFile(data)
