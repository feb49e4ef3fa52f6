"""A name on the Hugging Face Hub instead of a folder, and a text instead of a dataset: the message has the commands to run."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megatron.checkpoint.errors import MismatchError
from megatron.config.cli import load
from megatron.config.data import DataConfig, TokenizerType, parse_blend
from megatron.config.errors import ConfigError
from megatron.config.outputs import CheckpointConfig
from megatron.data.datasets import open_split
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import ByteTokenizer, build_tokenizer
from megatron.training.resume import check_missing_checkpoint
from megatron_lab.commands import preprocess_data
from megatron_lab.data_tools.preprocess.input_shards import find_sources
from megatron_lab.foreign.open_source import open_source
from tests.support.corpora import TEXTS, documents, write_lines

HUB = "meta-llama/Llama-3.1-8B"
BYTES = DataConfig(tokenizer_type="ByteTokenizer")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a machine with the program hf."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda program: f"/bin/{program}")
    return tmp_path


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises((ValueError, ConfigError, MismatchError)) as caught:
        action()
    return str(caught.value)


def open_dataset(prefix: str, config: DataConfig = BYTES) -> object:
    config = replace(config, data_path=(prefix,))
    return open_split(0, parse_blend((prefix,)), config, seed=1, seq_length=8, tokenizer=ByteTokenizer(), datasets_by_prefix={})


def commands_of(message: str) -> list[str]:
    return [line.strip() for line in message.splitlines() if line.startswith("    ")]


DOWNLOAD = f"hf download {HUB} --local-dir Llama-3.1-8B"
IMPORT = "python tools/checkpoint.py import Llama-3.1-8B Llama-3.1-8B-imported"


def tokenizer_of(kind: TokenizerType, name: str) -> Callable[[], object]:
    flags = {"vocab_file": name, "merge_file": name} if kind == "GPT2BPETokenizer" else {"tokenizer_model": name}
    return lambda: build_tokenizer(replace(DataConfig(tokenizer_type=kind), **cast(Any, flags)))


@pytest.mark.parametrize(
    ("action", "commands", "then"),
    [
        (lambda: open_source(HUB), [DOWNLOAD], "Then give Llama-3.1-8B."),
        (
            lambda: check_missing_checkpoint(CheckpointConfig(load=HUB, finetune=True)),
            [DOWNLOAD, IMPORT],
            "--pretrained-checkpoint Llama-3.1-8B-imported.",
        ),
        (
            lambda: load(["--use-checkpoint-args", "--pretrained-checkpoint", HUB], 1),
            [DOWNLOAD, IMPORT],
            "--pretrained-checkpoint Llama-3.1-8B-imported.",
        ),
        (
            tokenizer_of("HuggingFaceTokenizer", HUB),
            [f"hf download {HUB} --include 'tokenizer*' --local-dir Llama-3.1-8B"],
            "Then give --tokenizer-model Llama-3.1-8B.",
        ),
        (
            tokenizer_of("Llama2Tokenizer", HUB),
            [f"hf download {HUB} tokenizer.model --local-dir Llama-3.1-8B"],
            "Then give --tokenizer-model Llama-3.1-8B/tokenizer.model.",
        ),
        (
            tokenizer_of("TikTokenizer", HUB),
            [f"hf download {HUB} --include '*tokenizer.model' --local-dir Llama-3.1-8B"],
            "Then give --tokenizer-model Llama-3.1-8B/original/tokenizer.model.",
        ),
        (
            tokenizer_of("GPT2BPETokenizer", "gpt2"),
            ["hf download gpt2 vocab.json merges.txt --local-dir gpt2"],
            "Then give --vocab-file gpt2/vocab.json --merge-file gpt2/merges.txt.",
        ),
        (
            lambda: open_dataset("org/web"),
            [
                "hf download org/web --repo-type dataset --local-dir web",
                "python tools/preprocess_data.py --input web --output-prefix web --append-eod --tokenizer-type ByteTokenizer",
            ],
            "Then give web_text_document.",
        ),
        (
            lambda: find_sources(["org/web"]),
            ["hf download org/web --repo-type dataset --local-dir web"],
            "Then give --input web.",
        ),
    ],
)
def test_a_name_on_the_hub_gives_the_commands(action: Callable[[], object], commands: list[str], then: str) -> None:
    message = refusal(action)
    assert commands_of(message) == commands
    assert then in message and "is a name on the Hugging Face Hub" in message


@pytest.mark.parametrize(
    "name", ["data/corpus", "data", "tok/tokenizer.json", "/abs/path", "a/b/c", "-x/y", "s3://a", "text.jsonl"]
)
def test_a_path_that_is_no_name_on_the_hub(folder: Path, name: str) -> None:
    """A path in a folder that exists is misspelled, not a name."""
    (folder / "data").mkdir(exist_ok=True)
    for action in (tokenizer_of("HuggingFaceTokenizer", name), lambda: open_dataset(name)):
        assert "Hub" not in refusal(action)


def test_the_program_of_the_hub_is_installed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert commands_of(refusal(lambda: open_source(HUB))) == ["pip install huggingface_hub", DOWNLOAD]


@pytest.mark.parametrize("name", ["a.jsonl", "a b.json.gz", "sub/a.txt", "a.csv", "a.parquet", "a.jsonl.zst", "texts"])
def test_a_text_as_dataset_gives_the_command(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if name == "texts":
        path.mkdir()
        path = path / "a.md"
    path.write_text("text\nx\n")
    config = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model="my tok.model", tiktoken_special_tokens=("<a>", "<b>"))
    message = refusal(lambda: open_dataset(name, config))
    (command,) = commands_of(message)
    output = re.sub(r"\.(jsonl|json\.gz|jsonl\.zst|txt|csv|parquet)$", "", name)
    assert shlex.split(command) == [
        *("python", "tools/preprocess_data.py", "--input", name, "--output-prefix", output, "--append-eod"),
        *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", "my tok.model", "--tiktoken-special-tokens", "<a>", "<b>"),
    ]
    assert f"Then give {output}_text_document instead of {name}." in message


def test_the_command_for_a_text_does_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(folder / "a.jsonl")
    message = refusal(lambda: open_dataset("a.jsonl"))
    assert preprocess_data.main(shlex.split(commands_of(message)[0])[2:]) == 0
    assert len(documents(folder / "a_text_document")) == len(TEXTS)
    prefix = re.findall(r"give (\S+) instead", message)[0]
    assert IndexedDataset(prefix).num_documents == len(TEXTS)
    (folder / "datasets").mkdir()
    for suffix in ("bin", "idx"):
        (folder / f"a_text_document.{suffix}").rename(folder / f"datasets/a.{suffix}")
    assert refusal(lambda: open_dataset("datasets")).endswith("without .bin and .idx: datasets/a")
