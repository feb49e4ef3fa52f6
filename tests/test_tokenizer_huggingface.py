"""tokenizer.json: the ids of the files' own rules and of the tokenizers library, special tokens, and what is said of bad files."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings

from megatron.config.data import DataConfig
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.byte_bpe import ByteBPETokenizer
from megatron.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.data.tokenizers.tokenizers_library import LibraryTokenizer
from tests.bpe_trainer import Bpe, encode_plainly, train_bpe
from tests.vocabularies import LLAMA3_PATTERN, QWEN2_PATTERN, TEXT, Style, any_text, tokenizer_json, write_json

STYLES = get_args(Style)


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    return train_bpe(TEXT, 90)


@pytest.fixture(scope="module")
def trained(bpe: Bpe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceTokenizer]:
    """A tokenizer of each style."""
    folder = tmp_path_factory.mktemp("json")
    return {style: HuggingFaceTokenizer(write_json(folder / style, tokenizer_json(bpe, style))) for style in STYLES}


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None)
@given(text=any_text)
def test_any_text_comes_back(trained: dict[str, HuggingFaceTokenizer], style: Style, text: str) -> None:
    tokenizer = trained[style]
    ids = tokenizer.encode(text)
    assert isinstance(tokenizer.backend, ByteBPETokenizer)
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.eod not in ids
    assert tokenizer.decode([*ids, tokenizer.eod]) == (unicodedata.normalize("NFC", text) if style == "qwen2" else text)


@settings(max_examples=60, deadline=None)
@given(text=any_text)
def test_gpt2_style_follows_the_merges(trained: dict[str, HuggingFaceTokenizer], bpe: Bpe, text: str) -> None:
    expected: list[int] = []
    for number, part in enumerate(text.split("<think>")):
        expected += ([bpe.vocabulary["<|endoftext|>"] + 1] if number else []) + encode_plainly(part, bpe)
    assert trained["gpt2"].encode(text) == expected


def test_styles_split_numbers_and_contractions_each_in_their_way(trained: dict[str, HuggingFaceTokenizer], bpe: Bpe) -> None:
    assert {("Ġ12", "34"), ("e", "Ġ12")} & {*bpe.merges} == {("Ġ12", "34")}
    seen = {style: [trained[style].decode([id]) for id in trained[style].encode("e 1234")] for style in STYLES}
    assert seen == {"gpt2": ["e", " 1234"], "llama3": ["e", " ", "12", "3", "4"], "qwen2": ["e", " ", "1", "2", "3", "4"]}


def test_pairs_and_strings_of_merges_are_the_same(trained: dict[str, HuggingFaceTokenizer], bpe: Bpe, tmp_path: Path) -> None:
    pairs = HuggingFaceTokenizer(write_json(tmp_path, tokenizer_json(bpe, "llama3", pairs=True)))
    assert pairs.encode(TEXT) == trained["llama3"].encode(TEXT)


def whole_pieces(bpe: Bpe, tmp_path: Path, token: str) -> HuggingFaceTokenizer:
    """A vocabulary with a token that the merges do not make."""
    assert token not in bpe.vocabulary
    document = tokenizer_json(Bpe({**bpe.vocabulary, token: 1000}, bpe.merges), "llama3")
    return HuggingFaceTokenizer(write_json(tmp_path, document))


def test_a_token_that_no_merge_makes_stands_for_a_whole_piece(bpe: Bpe, tmp_path: Path) -> None:
    tokenizer = whole_pieces(bpe, tmp_path, "zyxwv")
    assert isinstance(tokenizer.backend, ByteBPETokenizer)
    assert tokenizer.encode("zyxwv") == [1000]
    assert 1000 not in tokenizer.encode("zyxwvu")
    assert tokenizer.decode(tokenizer.encode("zyxwvu zyxwv.zyxwv")) == "zyxwvu zyxwv.zyxwv"


def test_a_whole_token_of_two_parts_is_left_to_the_library(bpe: Bpe, tmp_path: Path) -> None:
    """tiktoken would join the parts inside longer pieces too."""
    pytest.importorskip("tokenizers")
    tokenizer = whole_pieces(bpe, tmp_path, "zq")
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
        assert ours.encode(document) == theirs.encode(document, add_special_tokens=False).ids
    assert isinstance(ours.backend, ByteBPETokenizer)
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.eod == theirs.token_to_id("<|endoftext|>")


def is_old(character: str) -> bool:
    """Whether the library, whose tables are those of Unicode 9, can know a combining mark."""
    return unicodedata.combining(character) == 0 or ord(character) < 0x370


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_any_text_has_the_librarys_ids(library: dict[str, tuple[Any, HuggingFaceTokenizer]], style: Style, text: str) -> None:
    theirs, ours = library[style]
    text = "".join(filter(is_old, text))
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


# ---- files that only the library can follow

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
    "blank before": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    "NFKC": {"normalizer": {"type": "NFKC"}},
}


@pytest.mark.parametrize("word", ODD)
def test_other_files_are_run_by_the_library(bpe: Bpe, tmp_path: Path, caplog: pytest.LogCaptureFixture, word: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = write_json(tmp_path, {**tokenizer_json(bpe, "gpt2"), **ODD[word]})
    tokenizer = HuggingFaceTokenizer(path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    for text in (TEXT, "a <think>er, a <|endoftext|> 1234"):
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode_array(text).tolist() == theirs.encode(text).ids
        assert tokenizer.eod not in ids
        assert tokenizer.decode([*ids, tokenizer.eod]) == theirs.decode(ids)
    assert isinstance(tokenizer.backend, LibraryTokenizer)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert word in messages[0]
    assert str(path) in messages[0]


def test_a_pattern_that_tiktoken_refuses_is_left_to_the_library(bpe: Bpe, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    document = tokenizer_json(bpe, "qwen2")
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\G\p{L}+|\s+|\h"
    tokenizer = HuggingFaceTokenizer(write_json(tmp_path, document))
    assert isinstance(tokenizer.backend, LibraryTokenizer)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_what_a_pattern_does_not_match_is_kept(bpe: Bpe, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    document = tokenizer_json(bpe, "qwen2")
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


def test_an_end_of_document_that_is_an_ordinary_token_is_refused(bpe: Bpe, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_json(tmp_path, tokenizer_json(bpe, "gpt2"))
    left, right = bpe.merges[0]
    write_json(tmp_path, {"eos_token": left + right}, "tokenizer_config.json")
    with pytest.raises(ValueError, match="ordinary text would give .*\n.*Name another token"):
        HuggingFaceTokenizer(path).encode("a")


def test_without_the_library(bpe: Bpe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert HuggingFaceTokenizer(write_json(tmp_path / "plain", tokenizer_json(bpe, "gpt2"))).encode("a")
    path = write_json(tmp_path, unigram())
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.vocab_size == 12  # a training run needs no more
    with pytest.raises(ValueError, match=f"{path}.*Unigram.*\n.*pip install .*tokenizers"):
        tokenizer.encode("a")


# ---- which token ends a document


@pytest.mark.parametrize(
    ("files", "eod", "bos", "pad"),
    [
        ({}, "<|endoftext|>", None, None),
        ({"tokenizer_config.json": {"eos_token": "<end>", "bos_token": "<|endoftext|>"}}, "<end>", "<|endoftext|>", None),
        ({"tokenizer_config.json": {"eos_token": {"content": "<end>"}, "pad_token": "no such token"}}, "<end>", None, None),
        ({"special_tokens_map.json": {"eos_token": "<end>", "pad_token": "<pad>"}}, "<end>", None, "<pad>"),
        ({"tokenizer_config.json": {"bos_token": None}, "config.json": {"eos_token_id": 2000}}, "<end>", None, None),
        ({"generation_config.json": {"eos_token_id": [2000, 2001]}, "config.json": {"eos_token_id": 2001}}, "<end>", None, None),
    ],
)
def test_where_the_end_of_a_document_is_named(
    bpe: Bpe, tmp_path: Path, files: dict[str, Any], eod: str, bos: str | None, pad: str | None
) -> None:
    document = tokenizer_json(bpe, "gpt2")
    for id, name in ((2000, "<end>"), (2001, "<pad>")):
        document["added_tokens"].append({**document["added_tokens"][0], "content": name, "id": id})
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    path = write_json(tmp_path, document)
    for name, content in files.items():
        write_json(tmp_path, content, name)
    tokenizer = HuggingFaceTokenizer(path)
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (ids[eod], ids.get(bos or ""), ids.get(pad or ""))
    assert tokenizer.vocab_size == 2002


def test_an_end_that_is_not_named_or_not_there(bpe: Bpe, tmp_path: Path) -> None:
    document = tokenizer_json(bpe, "gpt2")
    document["added_tokens"].append({**document["added_tokens"][0], "content": "</s>", "id": 2000})
    path = write_json(tmp_path, document)
    with pytest.raises(ValueError, match=r"<\|endoftext\|> and </s> of .* are in the vocabulary.\n.*eos_token"):
        HuggingFaceTokenizer(path)
    write_json(tmp_path, {"eos_token": "<other>"}, "tokenizer_config.json")
    with pytest.raises(ValueError, match="tokenizer_config.json says that '<other>' ends a document, but .* no such token"):
        HuggingFaceTokenizer(path)
    document["added_tokens"] = []
    document["model"]["vocab"].pop("<|endoftext|>", None)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="none of .* is in the vocabulary"):
        HuggingFaceTokenizer(write_json(tmp_path, document))


# ---- damage


def damaged(document: dict[str, Any], how: str) -> str:
    """The text of a file with a fault."""
    model = document["model"]
    if how == "no merges":
        del model["merges"]
    elif how == "foreign merge":
        model["merges"][3] = "q zz"
    elif how == "three parts":
        model["merges"][3] = ["a", "b", "c"]
    elif how == "same id":
        model["vocab"]["a"] = model["vocab"]["b"]
    elif how == "added twice":
        document["added_tokens"][1]["id"] = 97
    elif how == "no vocabulary":
        del model["vocab"]
    elif how == "no id":
        del document["added_tokens"][0]["id"]
    text = json.dumps(document)
    return {"cut": text[: len(text) // 2], "a list": "[1]"}.get(how, text)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "is not JSON.*\n.*copy it again"),
        ("a list", "is not a Hugging Face tokenizer.json"),
        ("no vocabulary", "no model with a vocabulary"),
        ("no merges", "has no merges.\n.*copy it again"),
        ("foreign merge", "merge 3 .*'q zz'.* must be two tokens"),
        ("three parts", "merge 3 .* must be two tokens"),
        ("same id", r"gives the same id, \d+, to several tokens: '[ab]' and '[ab]'"),
        ("added twice", "added_tokens gives the same id, 97,"),
        ("no id", "added_tokens must be a JSON object that gives each token its id"),
    ],
)
def test_a_damaged_file_is_named(bpe: Bpe, tmp_path: Path, how: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(damaged(tokenizer_json(bpe, "gpt2"), how))
    with pytest.raises(ValueError, match=message) as error:
        HuggingFaceTokenizer(path)
    assert str(path) in str(error.value)


def test_the_flag_takes_the_file_or_its_folder(bpe: Bpe, tmp_path: Path) -> None:
    path = write_json(tmp_path, tokenizer_json(bpe, "gpt2"))
    for name in (path, tmp_path):
        tokenizer = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(name)))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    with pytest.raises(ValueError, match="meta/model: there is no such file or folder, and nothing is downloaded"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="meta/model"))
    with pytest.raises(ValueError, match="x/tokenizer.json: there is no such file"):
        (tmp_path / "x").mkdir()
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "x")))
