"""What a tokenizer.json adds to each text, such as bos: in every place that makes ids of texts, and left out by a flag."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.api.runs import write_dataset
from megatron.config.data import DataConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import build_tokenizer
from megatron_lab.commands.preprocess_data import main
from megatron_lab.data_tools.huggingface_tokenizer import write_huggingface_tokenizer
from megatron_lab.data_tools.open_texts import hash_tokenizer
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob, get_job_settings
from megatron_lab.evaluation.perplexity import _prepare
from megatron_lab.evaluation.texts import get_document_prefix, read_documents
from megatron_lab.inference.continuation import encode_prompt
from tests.support.vocabularies import BPE, tokenizer_json, write_json

END = BPE.vocabulary["<|endoftext|>"]
BOS = END + 2
TEXT = "the cat"


def template(single: str) -> dict[str, Any]:
    """A post-processor in the library's own form."""
    processors = pytest.importorskip("tokenizers").processors
    special = [("<s>", BOS), ("<|endoftext|>", END)]
    made = processors.TemplateProcessing(single=single, special_tokens=special)
    content: dict[str, Any] = json.loads(made.__getstate__())
    return content


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
PROCESSORS = {
    "none": lambda: None,
    "byte level": lambda: BYTE_LEVEL,
    "bos": lambda: template("<s> $A"),
    "bos and eos": lambda: template("<s> $A <|endoftext|>"),
    "eos": lambda: template("$A <|endoftext|>"),
    "bos twice": lambda: template("<s> <s> $A"),
    "sequence": lambda: {"type": "Sequence", "processors": [BYTE_LEVEL, template("<s> $A")]},
    "roberta": lambda: {
        "type": "RobertaProcessing",
        "sep": ["<|endoftext|>", END],
        "cls": ["<s>", BOS],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
}


def write_tokenizer(folder: Path, processor: Any, **config: Any) -> DataConfig:
    """A tokenizer with this post-processor, and its settings."""
    document = tokenizer_json(BPE, "gpt2") | {"post_processor": processor}
    document["added_tokens"].append({**document["added_tokens"][0], "content": "<s>", "id": BOS})
    write_json(folder, document)
    write_json(folder, {"eos_token": "<|endoftext|>", "bos_token": "<s>", **config}, "tokenizer_config.json")
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_texts_have_the_ids_of_transformers(tmp_path: Path, name: str, add_bos_token: bool | None) -> None:
    """transformers 5 ignores add_bos_token if there is a tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    config = write_tokenizer(tmp_path, PROCESSORS[name](), **({} if add_bos_token is None else {"add_bos_token": add_bos_token}))
    tokenizer = build_tokenizer(config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [*tokenizer.encode(TEXT), *tokenizer.suffix_ids] == theirs(TEXT)["input_ids"]
    assert tokenizer.encode_segment(TEXT).tolist() == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode("") == []
    assert any("add_bos_token" in note for note in tokenizer.text_notes) == (add_bos_token is True and not tokenizer.prefix_ids)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"type": "Other"}, "type Other"),
        ({"type": "TemplateProcessing", "single": [], "special_tokens": {}}, "the text 0 times"),
        (
            {"type": "Sequence", "processors": 2 * [{"type": "RobertaProcessing", "sep": ["<e>", 1], "cls": ["<s>", 2]}]},
            "several steps",
        ),
        ("x", "post_processor is none that the tokenizers library writes"),
        ({"type": "RobertaProcessing", "sep": ["<e>", 5000], "cls": ["<s>", BOS]}, "adds the id 5000, which no token has"),
    ],
)
def test_a_damaged_post_processor_is_refused(tmp_path: Path, processor: Any, message: str) -> None:
    config = write_tokenizer(tmp_path, processor)
    with pytest.raises(ValueError, match=message):
        build_tokenizer(config)


def preprocess(folder: Path, config: DataConfig, *flags: str) -> tuple[int, list[list[int]]]:
    """The exit status of the tool, and the documents that it writes of three texts, one of them empty."""
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (TEXT, "", "a dog")))
    told = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(config.tokenizer_model)]
    code = main(["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out"), *told, *flags])
    dataset = IndexedDataset(f"{folder}/out_text_document") if code == 0 else None
    return code, [] if dataset is None else [dataset.get_document(i).tolist() for i in range(dataset.num_documents)]


@pytest.mark.parametrize(
    ("name", "flags", "before", "after"),
    [
        ("bos", (), [BOS], []),
        ("bos", ("--append-eod",), [BOS], [END]),
        ("bos", ("--append-eod", "--no-add-bos"), [], [END]),
        ("none", ("--append-eod",), [], [END]),
        ("none", ("--append-eod", "--add-bos"), [BOS], [END]),
        ("bos and eos", (), [BOS], [END]),
        ("bos and eos", ("--append-eod",), [BOS], [END]),
    ],
)
def test_documents_begin_and_end_as_the_file_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, flags: tuple[str, ...], before: list[int], after: list[int]
) -> None:
    config = write_tokenizer(tmp_path / "tokenizer", PROCESSORS[name]())
    code, documents = preprocess(tmp_path, config, *flags)
    plain = build_tokenizer(config)
    assert code == 0
    assert documents == [[*before, *plain.encode_segment(text).tolist(), *after] for text in (TEXT, "a dog")]
    log = capsys.readouterr().err
    assert (f"begins with <s> ({BOS})" in log) == bool(before)
    assert ("begin without" in log) == ("--no-add-bos" in flags)
    assert ("document ends with" in log) == ("eos" in name)


def test_an_interrupted_job_is_not_continued_with_another_beginning(tmp_path: Path) -> None:
    """The setting is part of the job's identity; without bos, the identity is that of earlier versions."""
    config = write_tokenizer(tmp_path, PROCESSORS["bos"]())

    def settings(config: DataConfig) -> dict[str, object]:
        return get_job_settings(PreprocessJob(config, ("text",), True))

    assert settings(config)["ids before a text"] == [BOS]
    left_out = settings(dataclasses.replace(config, add_bos=False))
    assert left_out.keys() == settings(config).keys() - {"ids before a text"} and "add bos" not in left_out


def test_a_streamed_dataset_is_another_one_with_another_beginning(tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path, PROCESSORS["bos"]())
    assert hash_tokenizer(config) != hash_tokenizer(dataclasses.replace(config, add_bos=False))


def test_prompts_evaluation_and_the_python_interface_follow_the_file(tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path / "tokenizer", PROCESSORS["bos"]())
    tokenizer = build_tokenizer(config)
    plain = tokenizer.encode_segment(TEXT).tolist()
    assert encode_prompt(tokenizer, TEXT) == [BOS, *plain]
    assert encode_prompt(tokenizer, "") == [BOS]
    prefix = write_dataset(tmp_path / "data", TEXT, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=config.tokenizer_model)
    assert IndexedDataset(prefix).get_document(0).tolist() == [BOS, *plain, END]
    (tmp_path / "text.txt").write_text(TEXT)
    (document,) = read_documents(str(tmp_path / "text.txt"), tokenizer)
    assert document.ids == [BOS, *plain]
    assert _prepare(document, get_document_prefix(tokenizer)) == ([BOS, *plain], 1)
    (stored,) = read_documents(str(prefix), tokenizer)
    assert _prepare(stored, get_document_prefix(tokenizer)) == ([BOS, *plain, END], 1)


def test_without_bos_a_document_starts_after_the_end_of_another(tmp_path: Path) -> None:
    """As in a dataset that was written with --no-add-bos --append-eod."""
    config = dataclasses.replace(write_tokenizer(tmp_path, PROCESSORS["bos"]()), add_bos=False)
    tokenizer = build_tokenizer(config)
    assert tokenizer.bos == BOS and encode_prompt(tokenizer, "") == [END]
    (tmp_path / "text.txt").write_text(TEXT)
    (document,) = read_documents(str(tmp_path / "text.txt"), tokenizer)
    assert _prepare(document, get_document_prefix(tokenizer)) == ([END, *tokenizer.encode_segment(TEXT).tolist()], 1)


@pytest.mark.parametrize(("name", "add_bos"), [("bos", False), ("none", True), ("bos and eos", False), ("bos", None)])
def test_an_export_gives_the_ids_of_the_run(tmp_path: Path, name: str, add_bos: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = write_tokenizer(tmp_path / "tokenizer", PROCESSORS[name]())
    config = dataclasses.replace(config, add_bos=add_bos)
    (tmp_path / "out").mkdir()
    write_huggingface_tokenizer(config, tmp_path / "out", max_length=8)
    tokenizer = build_tokenizer(config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == [*tokenizer.encode(TEXT), *tokenizer.suffix_ids]


def test_a_tokenizer_without_bos_refuses_the_flag(tmp_path: Path) -> None:
    write_json(tmp_path, tokenizer_json(BPE, "gpt2"))
    with pytest.raises(ValueError, match="--add-bos: this tokenizer has no bos token"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path), add_bos=True))


# ---- rows of the embedding


def test_only_special_tokens_may_have_no_row(tmp_path: Path) -> None:
    """bos and pad without a row are as if they were not named; the end of a document and what is put before texts need one."""
    config = write_tokenizer(tmp_path, None, pad_token="<pad>")

    def build(num_rows: int | None, **options: Any) -> Any:
        return build_tokenizer(dataclasses.replace(config, vocab_size=num_rows, **options))

    assert (build(None).vocab_size, build(None).pad, build(None).bos) == (BOS + 2, BOS + 1, BOS)
    limited = build(BOS)
    assert (limited.vocab_size, limited.pad, limited.bos) == (BOS, None, None)
    assert f"the tokenizer has {BOS + 2} ids, the word embedding {BOS} rows" in limited.notes[-1]
    assert f"no row for <s> ({BOS}), <pad> ({BOS + 1}), which ordinary text never yields" in limited.notes[-1]
    assert build(BOS + 9).vocab_size == BOS + 2
    assert build(BOS - 1).vocab_size == BOS + 2  # <think> is not special
    with pytest.raises(ValueError, match="no bos token"):
        build(BOS, add_bos=True)
    write_tokenizer(tmp_path, PROCESSORS["bos"](), pad_token="<pad>")
    assert build(BOS + 1).vocab_size == BOS + 1
    assert build(BOS).vocab_size == BOS + 2
    write_json(tmp_path, {"eos_token": "<s>"}, "tokenizer_config.json")
    assert build(BOS).vocab_size == BOS + 1
