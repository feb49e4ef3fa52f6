"""Fingerprints of tokenizers: the same for the same ids in any format, and what is said of ids that differ."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from megatron_lab.data_tools.huggingface_tokenizer import write_huggingface_tokenizer
from megatron_lab.data_tools.tokenizer_checks import compare_dataset
from megatron_lab.tokenizers import fingerprint as module
from megatron_lab.tokenizers.fingerprint import (
    PROBE_TEXTS,
    TokenizerFingerprint,
    build_config_entry,
    compute_fingerprint,
    format_dataset_fingerprint,
    get_fingerprint,
    merge_fingerprints,
    read_dataset_fingerprint,
    write_dataset_fingerprint,
)
from megatron_lab.tokenizers.text_frame import TextFrame, build_template_processor
from tests.support.bpe_trainer import train_bpe, write_bpe
from tests.support.vocabularies import BPE, SOURCES, TEXT, sentencepiece, tokenizer_json, write_json

BYTES = DataConfig(tokenizer_type="ByteTokenizer")
END = BPE.vocabulary["<|endoftext|>"]
FRAME = TextFrame((END,))


def gpt2(folder: Path, text: str = TEXT) -> DataConfig:
    """GPT-2's two files of a vocabulary of a text."""
    folder.mkdir(exist_ok=True)
    vocab, merges = write_bpe(train_bpe(text, 90), folder)
    return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))


def hugging_face(
    folder: Path, change: Callable[[dict[str, Any]], None] = lambda content: None, eos: str = "<|endoftext|>"
) -> DataConfig:
    """The same vocabulary as a tokenizer.json."""
    content = copy.deepcopy(tokenizer_json(BPE, "gpt2"))
    change(content)
    write_json(folder, {"eos_token": eos}, "tokenizer_config.json")
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(write_json(folder, content)))


def add_tokens(*names: str) -> Callable[[dict[str, Any]], None]:
    """Add special tokens after the others."""

    def change(content: dict[str, Any]) -> None:
        first = max(token["id"] for token in content["added_tokens"]) + 1
        flags = {**content["added_tokens"][0]}
        content["added_tokens"] += [{**flags, "id": first + i, "content": name} for i, name in enumerate(names)]

    return change


def test_the_same_ids_have_the_same_fingerprint_in_every_format(tmp_path: Path) -> None:
    files = get_fingerprint(gpt2(tmp_path / "gpt2"))
    converted = get_fingerprint(hugging_face(tmp_path / "json"))
    assert files.probes == converted.probes and files.probes is not None and len(set(files.probes.values())) == len(PROBE_TEXTS)
    assert files.is_comparable(converted) and files.find_difference(converted) is None
    assert (files.name, files.eod, files.num_ids) == ("GPT2BPETokenizer gpt2/vocab.json", END, END + 1)
    assert converted.name == "HuggingFaceTokenizer json/tokenizer.json"


def test_a_sentencepiece_model_and_what_is_exported_of_it(tmp_path: Path) -> None:
    """Also the type that puts an id before each text: the ids of the text are the same."""
    (tmp_path / "corpus.txt").write_text("".join(SOURCES))
    sentencepiece(tmp_path / "corpus.txt", tmp_path / "tokenizer.model", 400)
    config = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.model"))
    (tmp_path / "exported").mkdir()
    write_huggingface_tokenizer(config, tmp_path / "exported", max_length=64)
    exported = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "exported"))
    first, second, third = map(get_fingerprint, (config, exported, dataclasses.replace(config, tokenizer_type="Llama2Tokenizer")))
    assert first.probes == second.probes == third.probes
    assert first.find_difference(compute_fingerprint(ByteTokenizer(), BYTES)) is not None


def test_another_vocabulary_pattern_or_normalization_is_another_fingerprint(tmp_path: Path) -> None:
    same = get_fingerprint(hugging_face(tmp_path / "same"))
    other = get_fingerprint(gpt2(tmp_path / "other", "".join(SOURCES)))
    expected = f"other ids for 12 of {len(PROBE_TEXTS)} probe texts (English, capital letters, numbers, whitespace, ...)"
    assert same.find_difference(other) == expected, "both have single bytes for other alphabets"
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}|[^\p{N}]+"}, "behavior": "Isolated", "invert": False}
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda content: content["model"]["merges"].pop(0),
        lambda content: content.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {**content["pre_tokenizer"], "use_regex": False}]}
        ),
        lambda content: content.update(normalizer={"type": "Lowercase"}),
    ]
    for number, change in enumerate(changes):
        changed = get_fingerprint(hugging_face(tmp_path / f"{number}", lambda content, change=change: change(content)))  # type: ignore[misc]
        assert same.find_difference(changed) is not None, number


def test_added_tokens_keep_old_datasets_readable(tmp_path: Path) -> None:
    old = get_fingerprint(hugging_face(tmp_path / "old"))
    new = get_fingerprint(hugging_face(tmp_path / "new", add_tokens("<|im_start|>", "<|im_end|>")))
    assert new.num_ids == old.num_ids + 2
    assert compare_dataset(old, new, uses_eod=True) == (None, None)
    problem, warning = compare_dataset(new, old, uses_eod=True)
    assert problem is None and warning is not None and f"the {old.num_ids} ids here lack tokens" in warning


def test_special_tokens_without_a_row_in_a_model_are_no_difference(tmp_path: Path) -> None:
    """Of a model with fewer rows than ids, such as Gemma 3, and the datasets that were written with its tokenizer."""
    config = hugging_face(tmp_path, add_tokens("<image>"))
    dataset = get_fingerprint(config)
    model = dataclasses.replace(config, vocab_size=dataset.num_ids - 1)
    assert build_tokenizer(model).vocab_size == dataset.num_ids - 1
    assert get_fingerprint(model) == dataset
    assert compare_dataset(dataset, get_fingerprint(model), uses_eod=True) == (None, None)


def test_another_token_with_the_same_id_is_a_warning(tmp_path: Path) -> None:
    """Placeholders get another name when a token takes their id, and are no difference."""
    first = get_fingerprint(hugging_face(tmp_path / "first", add_tokens("<|user|>", "<unused1>", "<|tool|>")))
    second = get_fingerprint(hugging_face(tmp_path / "second", add_tokens("<|user|>", "<|im_start|>", "<|im_end|>")))
    assert first.added_tokens == {
        f"{END}": "<|endoftext|>",
        f"{END + 1}": "<think>",
        f"{END + 2}": "<|user|>",
        f"{END + 4}": "<|tool|>",
    }
    assert compare_dataset(first, second, uses_eod=True) == (
        None,
        f"{first}, in which the id {END + 4} is '<|tool|>', not '<|im_end|>' as here",
    )
    for prefix, fingerprint in (("a", first), ("b", second)):
        write_dataset_fingerprint(str(tmp_path / prefix), fingerprint)
    merged, message = merge_fingerprints([str(tmp_path / "a"), str(tmp_path / "b")])
    assert merged == first and message is not None and message.endswith(f": the id {END + 4} is '<|im_end|>', not '<|tool|>'")
    older = {name: value for name, value in second.to_json().items() if name != "added_tokens"}
    assert compare_dataset(TokenizerFingerprint.from_json(older, "older"), first, uses_eod=True) == (None, None)


def test_other_ids_before_texts_are_a_warning(tmp_path: Path) -> None:
    """As of a dataset that was written with --no-add-bos, in a run whose tokenizer puts bos before texts."""
    config = hugging_face(
        tmp_path, lambda content: content.update(post_processor=build_template_processor(FRAME, {END: "<|endoftext|>"}))
    )
    with_bos, without = get_fingerprint(config), get_fingerprint(dataclasses.replace(config, add_bos=False))
    assert (with_bos.prefix_ids, without.prefix_ids) == ([END], [])
    assert compare_dataset(without, with_bos, uses_eod=True) == (
        None,
        f"{without}, in which texts begin without bos, not with [{END}] as here",
    )
    assert compare_dataset(with_bos, with_bos, uses_eod=True) == (None, None)
    assert compare_dataset(dataclasses.replace(without, prefix_ids=None), with_bos, uses_eod=True) == (None, None)


def test_another_end_of_document_is_a_problem_only_where_it_is_used(tmp_path: Path) -> None:
    base = get_fingerprint(hugging_face(tmp_path / "base"))
    chat = get_fingerprint(hugging_face(tmp_path / "chat", add_tokens("<|im_end|>"), eos="<|im_end|>"))
    expected = f"{base}, but documents end with the id {chat.eod} here"
    assert compare_dataset(base, chat, uses_eod=True) == (expected, None)
    assert compare_dataset(base, chat, uses_eod=False) == (None, expected)


def test_ids_without_texts_are_never_a_problem(tmp_path: Path) -> None:
    real = get_fingerprint(hugging_face(tmp_path))
    null, same, other = (
        get_fingerprint(DataConfig(tokenizer_type="NullTokenizer", vocab_size=size)) for size in (END, END, END + 5)
    )
    assert null.probes is None and compare_dataset(null, same, uses_eod=True) == (None, None)
    for stored, current in ((real, null), (null, real), (null, other)):
        problem, warning = compare_dataset(stored, current, uses_eod=True)
        assert problem is None and warning is not None and "is not compared with" in warning
    later = dataclasses.replace(real, version=real.version + 1, probes={})
    problem, warning = compare_dataset(later, real, uses_eod=True)
    assert problem is None and warning is not None and warning.endswith("of another version")


def test_the_hash_is_that_of_the_ids_without_what_is_put_around_a_text() -> None:
    class Around(ByteTokenizer):
        bos = 300

        def encode(self, text: str) -> list[int]:
            return [300, *super().encode(text), self.eod]

    plain, around = (compute_fingerprint(tokenizer, BYTES) for tokenizer in (ByteTokenizer(), Around()))
    assert plain == around
    expected = hashlib.sha256(b"".join(struct.pack("<q", byte) for byte in PROBE_TEXTS["emoji"].encode())).hexdigest()[:16]
    assert plain.probes is not None and plain.probes["emoji"] == expected


def test_a_text_that_cannot_be_encoded_is_not_an_error() -> None:
    class Ascii(ByteTokenizer):
        def encode_segment(self, text: str) -> NDArray[np.integer]:
            return np.frombuffer(text.encode("ascii"), np.uint8)

    probes = compute_fingerprint(Ascii(), BYTES).probes
    assert probes is not None and probes["Greek"] == probes["emoji"] != probes["English"]


def test_the_encoder_is_built_once_and_again_for_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[DataConfig] = []

    def build(config: DataConfig) -> Tokenizer:
        built.append(config)
        return build_tokenizer(config)

    monkeypatch.setattr(module, "build_tokenizer", build)
    config = gpt2(tmp_path)
    first = get_fingerprint(config)
    assert get_fingerprint(dataclasses.replace(config, data_path=("x",))) is first
    assert build_config_entry(config, is_writer=False) == {} and build_config_entry(DataConfig()) == {}
    assert len(built) == 1
    gpt2(tmp_path, "".join(SOURCES))
    os.utime(tmp_path / "merges.txt", ns=(1, 1))
    assert get_fingerprint(config).find_difference(first) is not None and len(built) == 2
    assert build_config_entry(dataclasses.replace(config, vocab_file=str(tmp_path / "none"))) == {}


def test_the_file_of_a_dataset(tmp_path: Path) -> None:
    prefix, fingerprint = str(tmp_path / "corpus"), compute_fingerprint(ByteTokenizer(), BYTES)
    assert read_dataset_fingerprint(prefix) is None
    write_dataset_fingerprint(prefix, fingerprint)
    assert read_dataset_fingerprint(prefix) == fingerprint
    path = tmp_path / "corpus.tokenizer"
    assert path.read_text() == format_dataset_fingerprint(fingerprint)
    content = fingerprint.to_json()
    path.write_text(json.dumps({**content, "of a later version": 1}))
    assert read_dataset_fingerprint(prefix) == fingerprint
    wrong: Sequence[tuple[object, str]] = (
        ([], "the content is \\[\\], but must be an object"),
        ({**content, "eod": "2"}, 'eod is "2", but must be an integer'),
        ({key: value for key, value in content.items() if key != "probes"}, "the entry probes is missing"),
    )
    for value, message in wrong:
        path.write_text(json.dumps(value))
        with pytest.raises(ValueError, match=f"corpus.tokenizer is not the fingerprint of a tokenizer: {message}"):
            read_dataset_fingerprint(prefix)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"corpus.tokenizer is not JSON: .*Copy the file again, or remove it"):
        read_dataset_fingerprint(prefix)
    with pytest.raises(ValueError, match="tokenizer_type is 3"):
        TokenizerFingerprint.from_json({**content, "tokenizer_type": 3}, "x")
