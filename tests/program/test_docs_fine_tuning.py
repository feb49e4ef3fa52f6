"""Every command of docs/fine_tuning.md, run in the order of the page for a small model of transformers."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_lab.commands import checkpoint as checkpoint_tool
from megatron_lab.commands import generate_text, preprocess_data, verify_layout
from megatron_lab.foreign.open_source import open_source
from megatron_lab.foreign.source import StoredCheckpoint
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from tests.program.test_readme import commands
from tests.support.chats import CHATS, MARKED, write_chats, write_tokenizer
from tests.support.cli import ROOT
from tests.support.runs import checkpoint, run

TOOLS: dict[str, Callable[[list[str]], int]] = {
    "tools/checkpoint.py": checkpoint_tool.main,
    "tools/preprocess_data.py": preprocess_data.main,
    "tools/generate_text.py": generate_text.main,
    "tools/verify_layout.py": verify_layout.main,
}
SMALLER = {
    "4096": "96",
    "300": "2",
    "100": "1",
    "32": "2",
    "50": "4",
    "95,5,0": "90,10,0",
    "4": "1",
    "32000": "126",
    "2048": "64",
    "3": "0.2",
}
"""What a page says for a large run, and this test for a small one."""


def small(command: str) -> list[str]:
    words = shlex.split(command)
    if "tools/verify_layout.py" in words:
        return [*words, "--quick", "--steps", "1", "--max-ranks", "2"]
    return [
        word if before == "--lora-alpha" else SMALLER.get(word, word) for before, word in zip(["", *words], words, strict=False)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama as transformers writes it, and conversations."""
    transformers = pytest.importorskip("transformers")
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "model", MARKED))
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    ids = dict(vocab_size=tokenizer.vocab_size, bos_token_id=tokenizer.eod, eos_token_id=tokenizer.eod)
    settings = transformers.LlamaConfig(**sizes, **ids, max_position_embeddings=128, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(settings).save_pretrained(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", CHATS * 20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))  # a conversation ends after its first entry
    return tmp_path


def test_the_page_as_it_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = 0
    for command in commands((ROOT / "docs/fine_tuning.md").read_text()):
        if command.startswith("#"):
            continue
        program, *words = small(command)
        ranks = 1
        if program == "torchrun":
            ranks, words = int(words[1]), words[2:]
        script, *words = words
        if script == "pretrain_gpt.py":
            run([*words, "--device", "cpu", "--no-loss-picture", "--no-report"], ranks)
        else:
            assert TOOLS[script](words) == 0, f"{command}\n{capsys.readouterr().err}"
        ran += 1
    assert ran == 10
    base, lora = (StoredCheckpoint(checkpoint(Path(name), step)) for name, step in (("base", 0), ("lora", 2)))
    tuned = open_source("tuned", "best")
    moved = {name: not torch.equal(tuned.read(name), base.read(name)) for name in base.weights}
    assert all(moved.values()), "all weights are trained"
    assert all(torch.equal(lora.read(name), base.read(name)) for name in base.weights), "beside adapters none is"
    assert lora.read("layers.0.mlp.up.lora_b.weight").any()
    settings = json.loads((folder / "adapters/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (16, 32.0, "model")
    assert (folder / "answers/tokenizer_config.json").exists(), "with its chat template"
    assert "chat_template" in json.loads((folder / "answers/tokenizer_config.json").read_text())
