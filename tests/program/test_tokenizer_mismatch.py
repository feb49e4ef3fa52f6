"""Runs and tools on datasets and weights of another tokenizer: refused, accepted on purpose, or noted once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.manifest import Checksum
from megatron.config.data import DataConfig
from megatron_lab.commands import evaluate, inspect_data, merge_data
from megatron_lab.commands.checkpoint import main as checkpoint_tool
from megatron_lab.commands.preprocess_data import main as preprocess
from megatron_lab.tokenizers.fingerprint import CONFIG_ENTRY, get_fingerprint, read_dataset_fingerprint
from tests.support.cli import command_words
from tests.support.corpora import write_lines
from tests.support.runs import arguments, checkpoint, launch, report, run
from tests.support.vocabularies import BPE, tokenizer_json, write_json

Texts = pytest.CaptureFixture[str]
BYTES: dict[str, Any] = {"tokenizer_type": "ByteTokenizer"}
NULL: dict[str, Any] = {"tokenizer_type": "NullTokenizer"}
END = BPE.vocabulary["<|endoftext|>"]
ROWS = END + 3
"""Rows of the embedding: those of the largest tokenizer below, so that only the ids differ."""
ALLOW = {"allow_tokenizer_mismatch": True}


def hugging_face(folder: Path, change: str = "") -> dict[str, Any]:
    """Flags of a tokenizer with 90 merges; "order": with other ids, "chat": with one more token, which ends a document."""
    content = tokenizer_json(BPE, "gpt2")
    eos = "<|endoftext|>"
    if change == "order":
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    if change == "chat":
        eos = "<|im_end|>"
        content["added_tokens"].append({**content["added_tokens"][0], "id": END + 2, "content": eos})
    write_json(folder, {"eos_token": eos}, "tokenizer_config.json")
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(write_json(folder, content))}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: hugging_face(folder / (name or "plain"), name) for name in ("", "order", "chat")}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, dict[str, Any]]) -> Path:
    """The datasets plain, order and chat of one text, each of the tokenizer of that name; and bare, without a fingerprint."""
    folder = tmp_path_factory.mktemp("datasets")
    source = write_lines(folder / "in.jsonl")
    for name, flags in tokenizers.items():
        words = ["--input", source, "--output-prefix", f"{folder}/{name or 'plain'}", "--append-eod", *command_words(flags)]
        assert preprocess(words) == 0
    for suffix in ("bin", "idx"):
        shutil.copy(folder / f"plain_text_document.{suffix}", folder / f"bare_text_document.{suffix}")
    return folder


def flags_of(tokenizer: dict[str, Any], *prefixes: object, **settings: Any) -> list[str]:
    data = {"mock_data": None, "data_path": tuple(map(str, prefixes)), "split": "100,0,0"} if prefixes else {}
    return arguments(**{**data, **tokenizer, "vocab_size": ROWS, "train_iters": 1, **settings})


def refused(argv: list[str], world_size: int = 1) -> str:
    """What a run says that refuses to begin. All ranks end by themselves, as after any wrong setting."""
    ended = launch(argv, world_size)
    assert {end.code for end in ended} == {1}, report(ended)
    return "".join(end.stdout + end.stderr for end in ended)


def test_a_run_takes_only_datasets_of_its_tokenizer(datasets: Path, tokenizers: dict[str, dict[str, Any]]) -> None:
    plain, order, bare = (datasets / f"{name}_text_document" for name in ("plain", "order", "bare"))
    assert "WARNING: " not in run(flags_of(tokenizers[""], plain), 1)
    message = refused(flags_of(tokenizers[""], plain, order, pipeline_model_parallel_size=2), 2)
    assert f"a dataset was written with another tokenizer than HuggingFaceTokenizer plain/tokenizer.json ({END + 2} ids" in message
    assert f"{order}: HuggingFaceTokenizer order/tokenizer.json" in message and "probe texts (English" in message
    assert f"{plain}: " not in message and "--allow-tokenizer-mismatch reads their ids as they are" in message

    both = flags_of(tokenizers["order"], plain, plain.with_name("chat_text_document"))
    assert "2 datasets were written with another tokenizer" in refused(both), "one message"
    accepted = run(flags_of(tokenizers["order"], plain, **ALLOW))
    assert "WARNING: a dataset was written with another tokenizer" in accepted and "(--allow-tokenizer-mismatch)" in accepted

    told = run(flags_of(tokenizers["order"], bare))
    assert told.count("no fingerprint of a tokenizer") == 1 and "--write-fingerprint" in told
    assert "no fingerprint" not in run(flags_of(NULL, bare)), "its ids come from elsewhere"
    assert "is not compared with NullTokenizer" in run(flags_of(NULL, order))


def test_another_end_of_document(datasets: Path, tokenizers: dict[str, dict[str, Any]]) -> None:
    """A warning, or refused where the run looks for it; the tokens of the text are the same."""
    plain = datasets / "plain_text_document"
    chat = flags_of(tokenizers["chat"], plain)
    assert f"but documents end with the id {END + 2} here" in run(chat)
    for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        assert f"but documents end with the id {END + 2} here" in refused([*chat, *command_words({flag: True})])
    by_index = {"reset_attention_mask": True, "whole_documents": True}
    assert "WARNING: " in run([*chat, *command_words(by_index)]), "the index knows where documents end"
    assert "(--allow-tokenizer-mismatch)" in run([*chat, *command_words({**ALLOW, "eod_mask_loss": True})])


def test_a_run_takes_only_weights_of_its_tokenizer(tmp_path: Path, tokenizers: dict[str, dict[str, Any]], capsys: Texts) -> None:
    plain, order, chat = tokenizers[""], tokenizers["order"], tokenizers["chat"]
    run(flags_of(plain, save=tmp_path))
    record = json.loads((checkpoint(tmp_path, 1) / "config.json").read_text())
    assert record[CONFIG_ENTRY] == json.loads(json.dumps(get_fingerprint(DataConfig(**plain)).to_json()))
    assert checkpoint_tool(["inspect", str(tmp_path)]) == 0
    assert f"HuggingFaceTokenizer plain/tokenizer.json ({END + 2} ids, end of document {END})" in capsys.readouterr().out

    expected = "was trained with the tokenizer HuggingFaceTokenizer plain/tokenizer.json"
    starts: list[dict[str, Any]] = [
        {"load": tmp_path, "train_iters": 2, "resume_schedule": "new"},
        {"load": tmp_path, "finetune": True},
        {"pretrained_checkpoint": tmp_path},
    ]
    for start in starts:
        message = refused(flags_of(order, **start), 2 if "finetune" in start else 1)
        assert expected in message and "--allow-tokenizer-mismatch trains these weights with other ids" in message
        assert "WARNING: " not in run(flags_of(plain, **start))
        assert f"documents end with the id {END + 2} in this run" in run(flags_of(chat, **start))
        told = run(flags_of(order, **start, **ALLOW))
        assert expected in told and "(--allow-tokenizer-mismatch)" in told
    assert "which is not compared with NullTokenizer" in run(flags_of(NULL, **starts[2], vocab_size=ROWS - 1))


def remove_fingerprint(folder: Path) -> None:
    """Make a checkpoint one of an earlier version."""
    record, manifest = (json.loads((folder / name).read_text()) for name in ("config.json", "manifest.json"))
    del record[CONFIG_ENTRY]
    data = json.dumps(record).encode()
    manifest["files"]["config.json"] = {"bytes": len(data), "checksum": Checksum(data).text}
    (folder / "config.json").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_of_an_earlier_version(tmp_path: Path, tokenizers: dict[str, dict[str, Any]]) -> None:
    run(flags_of(tokenizers[""], save=tmp_path))
    remove_fingerprint(checkpoint(tmp_path, 1))
    told = run(flags_of(tokenizers["order"], pretrained_checkpoint=tmp_path))
    assert told.count("has no fingerprint of a tokenizer, so it is not compared") == 1


@pytest.fixture
def merged(tmp_path: Path, datasets: Path) -> Iterator[Path]:
    for name in ("plain", "order", "chat", "bare"):
        for suffix in ("bin", "idx", "tokenizer"):
            if (source := datasets / f"{name}_text_document.{suffix}").exists():
                shutil.copy(source, tmp_path / f"{name}.{suffix}")
    yield tmp_path


def test_merged_datasets_keep_the_fingerprint(merged: Path, capsys: Texts) -> None:
    def merge(*names: str) -> int:
        return merge_data.main(["--input", *(str(merged / name) for name in names), "--output-prefix", str(merged / "all")])

    shutil.copy(merged / "order.tokenizer", merged / "all.tokenizer")  # of an earlier dataset
    for suffix in ("bin", "idx", "tokenizer"):
        shutil.copy(merged / f"plain.{suffix}", merged / f"again.{suffix}")
    assert merge("plain", "again") == 0
    assert read_dataset_fingerprint(str(merged / "all")) == read_dataset_fingerprint(str(merged / "plain"))
    for other, reason in (("order", "probe texts"), ("chat", f"documents end with the id {END + 2}, not {END}")):
        assert merge("plain", other) == 1
        error = capsys.readouterr().err
        assert f"{merged / other} was written with another tokenizer than {merged / 'plain'}: " in error and reason in error
    assert merge("plain", "bare") == 0
    assert f"note: {merged / 'bare'} has no fingerprint" in capsys.readouterr().err
    assert not (merged / "all.tokenizer").exists(), "neither its own nor that of the earlier dataset"


def test_the_fingerprint_of_a_dataset_of_another_program(
    merged: Path, tokenizers: dict[str, dict[str, Any]], capsys: Texts
) -> None:
    bare, words = str(merged / "bare"), command_words(tokenizers[""])
    assert inspect_data.main([bare]) == 0 and "tokenizer: unknown" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        inspect_data.main([bare, "--write-fingerprint"])
    assert inspect_data.main([bare, "--write-fingerprint", *command_words(BYTES)]) == 1, "it has ids above 256"
    assert "written with another tokenizer: no fingerprint is written" in capsys.readouterr().err
    assert inspect_data.main([bare, "--write-fingerprint", *words]) == 0
    assert "Document 0: the größte 東京" in capsys.readouterr().out
    assert read_dataset_fingerprint(bare) == read_dataset_fingerprint(str(merged / "plain"))
    assert inspect_data.main([bare, "--write-fingerprint", *command_words(tokenizers["order"])]) == 1
    assert "remove this file first" in capsys.readouterr().err
    assert inspect_data.main([bare]) == 0
    assert "tokenizer: HuggingFaceTokenizer plain/tokenizer.json" in capsys.readouterr().out


def test_an_evaluation_takes_only_datasets_of_the_model(
    merged: Path, tokenizers: dict[str, dict[str, Any]], tmp_path: Path, capsys: Texts
) -> None:
    run(flags_of(tokenizers[""], save=tmp_path / "run"))

    def told(*words: str) -> tuple[int, str]:
        model = ["--load", str(tmp_path / "run"), "--device", "cpu", "--max-documents", "1", "--files"]
        code = evaluate.main([*model, *words])
        return code, capsys.readouterr().err

    plain, order, bare = (str(merged / name) for name in ("plain", "order", "bare"))
    assert told(plain)[0] == 0
    code, error = told(plain, order)
    assert code == 1 and f"{order}: HuggingFaceTokenizer order/tokenizer.json" in error
    code, error = told(order, "--allow-tokenizer-mismatch")
    assert code == 0 and "warning: a dataset was written with another tokenizer" in error
    code, error = told(bare)
    assert code == 0 and error.count("no fingerprint of a tokenizer") == 1
