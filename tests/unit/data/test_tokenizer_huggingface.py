"""tokenizer.json run by tiktoken: any text comes back, with the ids of the file's own rules and of the tokenizers library."""

from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings

from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer, LibraryTokenizer
from tests.support.bpe_trainer import Bpe, encode_plainly
from tests.support.vocabularies import BPE, LLAMA3_PATTERN, QWEN2_PATTERN, TEXT, Style, any_text, tokenizer_json, write_json

STYLES = get_args(Style)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceTokenizer]:
    """A tokenizer of each style."""
    folder = tmp_path_factory.mktemp("json")
    return {style: HuggingFaceTokenizer(write_json(folder / style, tokenizer_json(BPE, style))) for style in STYLES}


@pytest.mark.parametrize("style", STYLES)
@given(text=any_text)
def test_any_text_comes_back(trained: dict[str, HuggingFaceTokenizer], style: Style, text: str) -> None:
    tokenizer = trained[style]
    ids = tokenizer.encode(text)
    assert isinstance(tokenizer.backend, ByteBPETokenizer)
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.eod not in ids
    assert tokenizer.decode([*ids, tokenizer.eod]) == (unicodedata.normalize("NFC", text) if style == "qwen2" else text)


@given(text=any_text)
def test_gpt2_style_follows_the_merges(trained: dict[str, HuggingFaceTokenizer], text: str) -> None:
    expected: list[int] = []
    for number, part in enumerate(text.split("<think>")):
        expected += ([BPE.vocabulary["<|endoftext|>"] + 1] if number else []) + encode_plainly(part, BPE)
    assert trained["gpt2"].encode(text) == expected


def test_styles_split_numbers_and_contractions_each_in_their_way(trained: dict[str, HuggingFaceTokenizer]) -> None:
    assert {("Ġ12", "34"), ("e", "Ġ12")} & {*BPE.merges} == {("Ġ12", "34")}
    seen = {style: [trained[style].decode([id]) for id in trained[style].encode("e 1234")] for style in STYLES}
    assert seen == {"gpt2": ["e", " 1234"], "llama3": ["e", " ", "12", "3", "4"], "qwen2": ["e", " ", "1", "2", "3", "4"]}


def test_pairs_and_strings_of_merges_are_the_same(trained: dict[str, HuggingFaceTokenizer], tmp_path: Path) -> None:
    pairs = HuggingFaceTokenizer(write_json(tmp_path, tokenizer_json(BPE, "llama3", pairs=True)))
    assert pairs.encode(TEXT) == trained["llama3"].encode(TEXT)


def whole_pieces(tmp_path: Path, token: str) -> HuggingFaceTokenizer:
    """A vocabulary with a token that the merges do not make."""
    assert token not in BPE.vocabulary
    document = tokenizer_json(Bpe({**BPE.vocabulary, token: 1000}, BPE.merges), "llama3")
    return HuggingFaceTokenizer(write_json(tmp_path, document))


def test_a_token_that_no_merge_makes_stands_for_a_whole_piece(tmp_path: Path) -> None:
    tokenizer = whole_pieces(tmp_path, "zyxwv")
    assert isinstance(tokenizer.backend, ByteBPETokenizer)
    assert tokenizer.encode("zyxwv") == [1000]
    assert 1000 not in tokenizer.encode("zyxwvu")
    assert tokenizer.decode(tokenizer.encode("zyxwvu zyxwv.zyxwv")) == "zyxwvu zyxwv.zyxwv"


def test_a_whole_token_of_two_parts_is_left_to_the_library(tmp_path: Path) -> None:
    """tiktoken would join the parts inside longer pieces too."""
    pytest.importorskip("tokenizers")
    tokenizer = whole_pieces(tmp_path, "zq")
    assert isinstance(tokenizer.backend, LibraryTokenizer)
    assert tokenizer.encode("zq") == [1000]
    assert 1000 not in tokenizer.encode("zqb")


# ---- the ids of the library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, HuggingFaceTokenizer]]:
    """The library's tokenizer, trained by itself, and ours of the file that it saves."""
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    made = {}
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(logging.__file__).parent.glob("*.py"))] + [TEXT * 20]
    for style in STYLES:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=style == "llama3"))
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        if style != "gpt2":
            pattern = tokenizers.Regex(LLAMA3_PATTERN if style == "llama3" else QWEN2_PATTERN)
            parts = [pre.Split(pattern, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
            tokenizer.pre_tokenizer = pre.Sequence(parts)
        if style == "qwen2":
            tokenizer.normalizer = tokenizers.normalizers.NFC()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens(["<|begin|>", "<|endoftext|>"])
        added = [tokenizers.AddedToken(name, normalized=False) for name in ("<think>", "<think>er")]
        tokenizer.add_tokens(added)
        begin = tokenizer.token_to_id("<|begin|>")
        template = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
        tokenizer.post_processor = template
        path = tmp_path_factory.mktemp(style) / "tokenizer.json"
        tokenizer.save(str(path))
        tokenizer.encode_special_tokens = True
        made[style] = (tokenizer, HuggingFaceTokenizer(path))
    return made


@pytest.mark.parametrize("style", STYLES)
def test_documents_have_the_librarys_ids(library: dict[str, tuple[Any, HuggingFaceTokenizer]], style: Style) -> None:
    theirs, ours = library[style]
    documents = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    documents += [TEXT, TEXT.upper(), "a <think>er <think> <|endoftext|> <|begin|>", "", " ", "\n" * 50]
    for document in documents:
        assert ours.encode_segment(document).tolist() == theirs.encode(document, add_special_tokens=False).ids
        assert not document or ours.encode(document) == theirs.encode(document).ids
    assert isinstance(ours.backend, ByteBPETokenizer)
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.eod == theirs.token_to_id("<|endoftext|>")


def is_old(character: str) -> bool:
    """Whether the library, whose tables are those of Unicode 9, can know a combining mark."""
    return unicodedata.combining(character) == 0 or ord(character) < 0x370


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=max(60, settings().max_examples))
@given(text=any_text)
def test_any_text_has_the_librarys_ids(library: dict[str, tuple[Any, HuggingFaceTokenizer]], style: Style, text: str) -> None:
    theirs, ours = library[style]
    text = "".join(filter(is_old, text))
    assert ours.encode_segment(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
