"""Every command of docs/checkpoints.md, run in the order of the page on a small run; and the reader that the page shows."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.make_corpus import write_corpus
from megatron.checkpoint.save_folder import find_checkpoint
from megatron_lab.commands import checkpoint, evaluate, generate_text
from megatron_lab.foreign.source import StoredCheckpoint
from tests.program.test_readme import commands
from tests.support.cli import ROOT
from tests.support.dist_checkpoints import write_dist_example
from tests.support.megatron_states import write_legacy_example
from tests.support.runs import arguments, run
from tests.support.vocabularies import sentencepiece

TOOLS: dict[str, Callable[[list[str]], int]] = {
    "tools/checkpoint.py": checkpoint.main,
    "tools/generate_text.py": generate_text.main,
    "tools/evaluate.py": evaluate.main,
}
PLACES = {"run/iter_0000100": "run/iter_0000002", "run/iter_0000200": "run/iter_0000004", "100": "2"}
"""What a page says for a large run, and this test for a small one."""
MODEL = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "disable_bias_linear": True,
}
TOKENIZER = {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": "tokenizer.model", "vocab_size": None}
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
PAGE = (ROOT / "docs/checkpoints.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))  # a dialogue ends after its first entry
    write_corpus(ROOT / "megatron/config", tmp_path / "corpus.jsonl")
    (tmp_path / "book.txt").write_text("def load(path):\n    return path\n")
    sentencepiece(tmp_path / "corpus.jsonl", tmp_path / "tokenizer.model", 500)
    run(arguments(**MODEL, **TOKENIZER, train_iters=1, save="base"))
    write_legacy_example(tmp_path / "legacy", vocab_size=60)
    write_dist_example(tmp_path / "torch-dist", vocab_size=60)
    return tmp_path


def settings_of(words: list[str]) -> list[str]:
    """What `...` stands for on the page: all other settings, but for those that are taken from a checkpoint."""
    taken = "--use-checkpoint-args" in words
    shape = dict.fromkeys((*MODEL, *TOKENIZER, *SHAPE)) if taken else {**MODEL, **TOKENIZER}
    return arguments(**{**shape, "train_iters": 4})


def test_the_page_as_it_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    ran = 0
    for command in commands(PAGE):
        if not command.startswith("python ") or "tools/bench.py" in command:  # which has a test of its own
            continue
        program, *words = [PLACES.get(word, word) for word in shlex.split(command)[1:]]
        if program == "pretrain_gpt.py":
            run([word for each in words for word in (settings_of(words) if each == "..." else [each])])
        else:
            assert TOOLS[program](words) in (0, 1 if "diff" in words else 0), f"{command}\n{capsys.readouterr().err}"
        ran += 1
    assert ran >= 10
    assert (folder / "exported/config.json").exists() and (folder / "imported/iter_0000000").exists()


def test_the_reader_of_the_page(tmp_path: Path) -> None:
    """It reads what four ranks wrote as the project itself does."""
    run(arguments(**MODEL, train_iters=2, save=tmp_path, use_distributed_optimizer=True, tensor_model_parallel_size=2), 4)
    path = find_checkpoint(tmp_path)
    assert path is not None
    (code,) = re.findall(r"```python\n(import json.*?)```", PAGE, re.DOTALL)
    scope: dict[str, Callable[[str], dict]] = {}
    exec(code, scope)
    found, stored = scope["read_checkpoint"](str(path)), StoredCheckpoint(path)
    assert set(found) == set(stored.tensors)
    assert all(torch.equal(torch.from_numpy(found[name]), stored.read_stored(name)) for name in found)
