"""tokenizer.json and the files beside it: which token ends a document, and what is said of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.data import DataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support.vocabularies import BPE, TEXT, tokenizer_json, write_json


@pytest.mark.parametrize(
    ("files", "eod", "bos", "pad"),
    [
        ({}, "<|endoftext|>", None, None),
        ({"tokenizer_config.json": {"eos_token": "<end>", "bos_token": "<|endoftext|>"}}, "<end>", "<|endoftext|>", None),
        ({"tokenizer_config.json": {"eos_token": {"content": "<end>"}, "pad_token": None}}, "<end>", None, None),
        ({"special_tokens_map.json": {"eos_token": "<end>", "pad_token": "<pad>"}}, "<end>", None, "<pad>"),
        ({"tokenizer_config.json": {"bos_token": None}, "config.json": {"eos_token_id": 2000}}, "<end>", None, None),
        ({"tokenizer_config.json": {"eos_token": "<end>"}, "config.json": {"eos_token_id": 2001}}, "<end>", None, None),
        ({"generation_config.json": {"eos_token_id": [2000, 2001]}, "config.json": {"eos_token_id": 2001}}, "<end>", None, None),
    ],
)
def test_where_the_end_of_a_document_is_named(
    tmp_path: Path, files: dict[str, Any], eod: str, bos: str | None, pad: str | None
) -> None:
    document = tokenizer_json(BPE, "gpt2")
    for id, name in ((2000, "<end>"), (2001, "<pad>")):
        document["added_tokens"].append({**document["added_tokens"][0], "content": name, "id": id})
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    path = write_json(tmp_path, document)
    for name, content in files.items():
        write_json(tmp_path, content, name)
    tokenizer = HuggingFaceTokenizer(path)
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (ids[eod], ids.get(bos or ""), ids.get(pad or ""))
    assert tokenizer.vocab_size == 2002


def test_an_end_that_is_not_named_or_not_there(tmp_path: Path) -> None:
    document = tokenizer_json(BPE, "gpt2")
    document["added_tokens"].append({**document["added_tokens"][0], "content": "</s>", "id": 2000})
    path = write_json(tmp_path, document)
    with pytest.raises(ValueError, match=r"but contains <\|endoftext\|> and </s>\.\n.*eos_token"):
        HuggingFaceTokenizer(path)
    write_json(tmp_path, {"eos_token_id": 2001}, "config.json")
    with pytest.raises(ValueError, match="config.json says that 2001 ends a document, but .* no such token"):
        HuggingFaceTokenizer(path)
    document["added_tokens"] = []
    document["model"]["vocab"].pop("<|endoftext|>", None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="exactly one of .*, but contains none"):
        HuggingFaceTokenizer(write_json(tmp_path, document))


# ---- damage


def damaged(document: dict[str, Any], how: str) -> str:
    """The text of a file with a fault."""
    model = document["model"]
    if how == "no merges":
        del model["merges"]
    elif how == "foreign merge":
        model["merges"][3] = "q zz"
    elif how == "a number":
        model["merges"][3] = 7
    elif how == "three parts":
        model["merges"][3] = ["a", "b", "c"]
    elif how == "same id":
        model["vocab"]["a"] = model["vocab"]["b"]
    elif how == "added twice":
        document["added_tokens"][1]["id"] = 97
    elif how == "no vocabulary":
        del model["vocab"]
    elif how == "huge id":
        model["vocab"]["a"] = 2**40
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
        ("no merges", "without merges.\n.*copy it again"),
        ("foreign merge", "merge 3 .*'q zz'.* must be two tokens"),
        ("a number", "merge 3 .7. must be two tokens"),
        ("three parts", "merge 3 .* must be two tokens"),
        ("same id", r"gives the same id, \d+, to several tokens: '[ab]' and '[ab]'"),
        ("added twice", "added_tokens gives the same id, 97,"),
        ("huge id", r"model.vocab must .* \(below 2\*\*31\)"),
        ("no id", "added_tokens must be a JSON object that gives each token its id"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, how: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(damaged(tokenizer_json(BPE, "gpt2"), how))
    with pytest.raises(ValueError, match=message) as error:
        HuggingFaceTokenizer(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("value", ["x", {"normalizers": ["x"], "pretokenizers": ["x"]}])
def test_a_part_of_no_known_form_is_left_to_the_library_and_refused_by_it(tmp_path: Path, part: str, value: Any) -> None:
    pytest.importorskip("tokenizers")
    path = write_json(tmp_path, {**tokenizer_json(BPE, "gpt2"), part: value})
    with pytest.raises(ValueError, match="tokenizers library can read"):
        HuggingFaceTokenizer(path).encode("a")


def test_an_end_of_document_that_merges_use_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    document = {**tokenizer_json(BPE, "gpt2"), "normalizer": {"type": "NFKC"}}  # for the library
    path = write_json(tmp_path, document)
    write_json(tmp_path, {"eos_token": "e"}, "tokenizer_config.json")
    with pytest.raises(ValueError, match="must be a token that no merge uses"):
        HuggingFaceTokenizer(path).encode("a")


def test_the_flag_takes_the_file_or_its_folder(tmp_path: Path) -> None:
    path = write_json(tmp_path, tokenizer_json(BPE, "gpt2"))
    for name in (path, tmp_path):
        tokenizer = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(name)))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    with pytest.raises(ValueError, match="meta/model: there is no such file or folder, and nothing is downloaded"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="meta/model"))
    with pytest.raises(ValueError, match="x/tokenizer.json: there is no such file"):
        (tmp_path / "x").mkdir()
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "x")))
