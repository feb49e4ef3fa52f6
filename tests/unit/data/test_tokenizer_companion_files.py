"""Tokens that only the files next to a tokenizer.json have: the ids of AutoTokenizer, and files that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer, LibraryTokenizer
from megatron_lab.tokenizers.tokenizer_json import read_completed_json, read_tokenizer_json
from tests.support.vocabularies import BPE, Style, tokenizer_json, write_json

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
END, THINK = "<|endoftext|>", "<think>"
NEXT = max(token["id"] for token in tokenizer_json(BPE, "gpt2")["added_tokens"]) + 1
"""First id that tokenizer.json does not have."""
ENDING = {"eos_token": END}


def token(content: str, **options: Any) -> dict[str, Any]:
    """An added token with its options."""
    return {**FLAGS, "content": content, **options}


def decoder(*tokens: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """The entry that states ids."""
    return {"added_tokens_decoder": {str(id): value for id, value in tokens}}


FOLDERS: dict[str, dict[str, Any]] = {
    "special": {CONFIG: ENDING | decoder((NEXT, token("<tool>")))},
    "plain": {CONFIG: ENDING | decoder((NEXT, token("<tool>", special=False)))},
    "several": {CONFIG: ENDING | decoder((NEXT + 1, token("<b>")), (NEXT, token("<tool>", special=False)))},
    "no options": {CONFIG: ENDING | decoder((NEXT, {"content": "<tool>"}))},
    "additional": {CONFIG: ENDING | {"additional_special_tokens": ["<tool>", END, "<tool>"]}},
    "extra": {CONFIG: ENDING | {"extra_special_tokens": ["<tool>", "<b>"]}},
    "extra before additional": {CONFIG: ENDING | {"extra_special_tokens": ["<b>"], "additional_special_tokens": ["<tool>"]}},
    "extra with names": {CONFIG: ENDING | {"extra_special_tokens": {"tool_token": "<tool>"}, "additional_special_tokens": ["<b>"]}},
    "named": {
        CONFIG: {"pad_token": "<pad>", "image_token": "<tool>", "eos_token": "<e>", "bos_token": "<b>", "add_bos_token": True}
    },
    "named with options": {CONFIG: {"eos_token": {"__type": "AddedToken", **token("<e>", lstrip=True)}}},
    "named and stated": {CONFIG: {"eos_token": "<tool>"} | decoder((NEXT, token("<tool>", special=False)))},
    "map": {CONFIG: ENDING, MAP: {"additional_special_tokens": ["<tool>"], "pad_token": token("<pad>")}},
    "map before config": {CONFIG: {"eos_token": END, "pad_token": "<a>"}, MAP: {"eos_token": "<e>"}},
    "map after stated": {CONFIG: ENDING | decoder(), MAP: {"eos_token": "<e>", "pad_token": "<pad>"}},
    "map beside additional": {CONFIG: ENDING | {"additional_special_tokens": ["<a>"]}, MAP: {"additional_special_tokens": ["<b>"]}},
    "map beside extra": {CONFIG: ENDING | {"extra_special_tokens": ["<a>"]}, MAP: {"extra_special_tokens": ["<b>"]}},
    "map alone": {MAP: ENDING | {"pad_token": "<pad>"}},
    "added": {CONFIG: ENDING | {"pad_token": "<b>"}, ADDED: {"<b>": NEXT + 1, "<tool>": NEXT, END: BPE.vocabulary[END]}},
    "added and map": {CONFIG: {}, MAP: ENDING | {"additional_special_tokens": ["<tool>"]}, ADDED: {"<tool>": NEXT}},
    "added and extra": {CONFIG: ENDING | {"additional_special_tokens": ["<tool>"]}, ADDED: {"<tool>": NEXT}},
    "added not read": {CONFIG: ENDING | decoder((NEXT, token("<tool>"))), ADDED: {"<tool>": NEXT, "<b>": NEXT + 1}},
    "options replaced": {CONFIG: ENDING | decoder((NEXT - 1, token(THINK, special=True)))},
    "options taken": {CONFIG: ENDING | decoder((NEXT - 1, token(THINK, lstrip=True, special=False)))},
    "token of the model": {CONFIG: ENDING | decoder((BPE.vocabulary["e"], token("e", special=False)))},
    "special of the model": {CONFIG: ENDING | {"pad_token": "e", "unk_token": "th"}},
}


def write_folder(folder: Path, files: dict[str, Any], style: Style = "gpt2") -> Path:
    """A tokenizer.json with the files next to it."""
    path = write_json(folder, tokenizer_json(BPE, style))
    for name, content in files.items():
        write_json(folder, content, name)
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Of all tokens, of the special ones by name, and of texts with the tokens in them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    path = write_folder(tmp_path, FOLDERS[name])
    theirs, file = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), read_tokenizer_json(path)
    assert file.ids == theirs.get_vocab()
    ours = {entry["id"]: (entry["content"], *(bool(entry.get(option)) for option in FLAGS)) for entry in file.added}
    added = theirs.added_tokens_decoder.items()
    assert ours == {id: (value.content, *(getattr(value, option) for option in FLAGS)) for id, value in added}
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.vocab_size == len(theirs)
    assert (tokenizer.bos, tokenizer.pad) == (theirs.bos_token_id, theirs.pad_token_id) or name == "map after stated"
    assert tokenizer.eod == theirs.eos_token_id
    library = tokenizers.Tokenizer.from_str(read_completed_json(path))
    text = f"the cat {' '.join(token for token, *_ in ours.values())} e<tool>the <b>"
    assert library.encode(text, add_special_tokens=False).ids == theirs(text)["input_ids"]
    plain = "the " + "".join(f"{entry['content']} the" for entry in file.added if not entry["special"])
    if not any(entry["special"] and entry["content"] in plain for entry in file.added):
        assert tokenizer.encode(plain) == theirs(plain)["input_ids"]


@pytest.mark.parametrize("style", ["gpt2", "llama3", "qwen2"])
def test_a_plain_token_is_one_id_on_both_paths_and_a_special_one_stays_text(tmp_path: Path, style: Style) -> None:
    tokens = decoder((NEXT, token("<tool>", special=False)), (NEXT + 1, token("<b>")))
    pytest.importorskip("tokenizers")
    path = write_folder(tmp_path, {CONFIG: ENDING | tokens}, style)
    fast = HuggingFaceTokenizer(path)
    assert isinstance(fast.backend, ByteBPETokenizer)
    write_folder(tmp_path / "slow", {CONFIG: ENDING | tokens}, style)
    spaced = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    slow = HuggingFaceTokenizer(write_json(tmp_path / "slow", tokenizer_json(BPE, style) | {"pre_tokenizer": spaced}))
    assert isinstance(slow.backend, LibraryTokenizer)
    for tokenizer in (fast, slow):
        ids = tokenizer.encode("a<tool>b<b>c")
        assert ids.count(NEXT) == 1 and NEXT + 1 not in ids
        assert tokenizer.decode([*ids, NEXT + 1]).replace(" ", "") == "a<tool>b<b>c"


def test_the_end_of_a_document_may_be_such_a_token(tmp_path: Path) -> None:
    path = write_folder(tmp_path, {CONFIG: {"eos_token": "<e>"} | decoder((NEXT, token("<e>")))})
    tokenizer = HuggingFaceTokenizer(path)
    assert (tokenizer.eod, tokenizer.vocab_size) == (NEXT, NEXT + 1)
    assert NEXT not in tokenizer.encode("a<e>b")


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "id of another": (
        {CONFIG: ENDING | decoder((NEXT - 1, token("<tool>")))},
        rf"{CONFIG} gives the token '<tool>' the id {NEXT - 1}, which in .*/tokenizer.json belongs to '<think>'",
    ),
    "two ids": (
        {CONFIG: ENDING | decoder((NEXT, token(THINK)))},
        rf"{CONFIG} states the id {NEXT} for the token '<think>', but in .*/tokenizer.json its id is {NEXT - 1}",
    ),
    "another id than transformers gives": (
        {CONFIG: ENDING | decoder((NEXT + 9, token("<tool>")))},
        rf"{CONFIG} states the id {NEXT + 9} for .* tokens of .*/tokenizer.json is {NEXT}, which transformers gives it",
    ),
    "added tokens against the model": (
        {CONFIG: ENDING, ADDED: {"<tool>": 3}},
        rf"{ADDED} gives the token '<tool>' the id 3, which in .*/tokenizer.json belongs to",
    ),
    "added tokens against stated": (
        {CONFIG: ENDING | decoder((NEXT, token("<tool>"))), ADDED: {"<tool>": NEXT + 1}},
        rf"{ADDED} states the id {NEXT + 1} for the token '<tool>', but in .*/{CONFIG} its id is {NEXT}",
    ),
    "added tokens in the place of a stated one": (
        {CONFIG: ENDING | decoder((NEXT, token("<tool>"))), ADDED: {"<b>": NEXT}},
        rf"{ADDED} gives the token '<b>' the id {NEXT}, which in .*/{CONFIG} belongs to '<tool>'",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, name: str) -> None:
    files, message = CONFLICTS[name]
    path = write_folder(tmp_path, files)
    with pytest.raises(ValueError, match=message):
        HuggingFaceTokenizer(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, {"added_tokens_decoder": {"x": "<tool>"}}, "added_tokens_decoder must be an object that gives each id its token"),
        (CONFIG, {"added_tokens_decoder": {"7": 3}}, "added_tokens_decoder.7: 3 is not a token"),
        (CONFIG, {"additional_special_tokens": [3]}, "extra_special_tokens, entry 0: 3 is not a token"),
        (ADDED, {"<tool>": "291"}, "the id of '<tool>' must be a whole number, not '291'"),
    ],
)
def test_a_damaged_entry_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = write_folder(tmp_path, {name: content})
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        HuggingFaceTokenizer(path)


def test_the_notes_name_the_tokens(tmp_path: Path) -> None:
    files = {CONFIG: ENDING | decoder((NEXT, token("<tool>"))), ADDED: {"<b>": NEXT + 1}}
    assert read_tokenizer_json(write_folder(tmp_path, files)).notes == (
        f"{CONFIG} adds <tool> ({NEXT}) to tokenizer.json",
        f"<b> of {ADDED} left out, as in transformers: {CONFIG} has added_tokens_decoder",
    )
    path = write_folder(tmp_path / "none", {CONFIG: ENDING})
    assert not read_tokenizer_json(path).notes
    assert json.loads(read_completed_json(path)) == json.loads(path.read_text())
