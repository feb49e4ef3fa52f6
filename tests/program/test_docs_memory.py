"""The commands of docs/memory.md do what the page says, and its numbers are those of the plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config.cli import load
from megatron.config.parsed_flags import DryRun
from megatron_lab.benchmarks import memory
from megatron_lab.commands import plot_memory
from megatron_lab.planner.dry_run import Planner
from tests.program.test_plot_schedule import words_of
from tests.program.test_readme import commands
from tests.support.cli import ROOT
from tests.support.runs import arguments

PAGE = (ROOT / "docs/memory.md").read_text()
GPT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": True, "device": "cpu", "dry_run": True}
LLAMA = {
    **GPT,
    "swiglu": True,
    "ffn_hidden_size": 11008,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048, "micro_batch_size": 1, "global_batch_size": 1}


SMALLER = {"6": "2", "256": "32", "8191": "255", "16": "8"}
"""Sizes of the page's model, and of one that takes a tenth of the time."""


@pytest.mark.usefixtures("float32_products")
def test_the_picture_and_the_table_of_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, full: bool) -> None:
    """As planned and as measured now.

    In the normal run the command is that of a smaller model, whose table has the same rows.
    """
    pytest.importorskip("matplotlib")
    (command,) = [command for command in commands(PAGE) if "plot_memory" in command]
    words = shlex.split(command)[2:]
    at = words.index("--output") + 1
    kept, words[at] = ROOT / words[at], str(tmp_path / "memory.svg")
    assert plot_memory.main(words if full else [SMALLER.get(word, word) for word in words]) == 0
    said, page = capsys.readouterr().out.strip(), PAGE.split("```text\n")[1].split("```")[0].strip()
    if not full:
        names, listed = (re.findall(r"^\S+", table, re.MULTILINE) for table in (said, page))
        assert names == listed and [*map(float, re.findall(r"([+-][\d.]+)%", said))] == pytest.approx([0.0] * 2, abs=0.1)
        assert "<svg" in (tmp_path / "memory.svg").read_text()
    else:
        assert said == page
        assert words_of(kept) == words_of(tmp_path / "memory.svg"), f"{kept} is old: {command}"
    assert kept.relative_to(ROOT / "docs").as_posix() in re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE)


def test_the_bench_of_the_page_has_every_way() -> None:
    """Its times are of one run; what it plans is the same on every machine, and the sentences below it are about these numbers."""
    rows = re.findall(r"^(\S.*?)  +([\d.]+) +([\d.]+) +[+-][\d.]+%", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == list(memory.MEMORY_OPTIONS)
    assert all(planned == measured for _, planned, measured in rows)
    planned = {name: float(number) for name, number, _ in rows}
    assert f"holds {planned['full, chunked'] / planned['none']:.0%} of what".replace("%", " %") in PAGE


def kept_by_a_layer(words: Sequence[str]) -> float:
    """What is left after the forward, in tensors of s b h numbers of 16 bits."""
    after = []
    for layers in ("1", "2"):
        config = load([*words, "--num-layers", layers], 1).config
        after.append(Planner(config, DryRun(1, 1, None), 60).plan_stage(0).op_memory[0].remaining_bytes)
    whole = config.model.seq_length * config.training.micro_batch_size * config.model.hidden_size * 2
    return (after[1] - after[0]) / whole


def test_what_a_layer_keeps(full: bool) -> None:
    """Each row of the table that gives numbers; for Llama in the normal run where it has a number of its own."""
    rows = re.findall(r"^\| (none|`--recompute[^`]*`) \| (\d+)(?: \(Llama: ([\d.]+)\))? \|", PAGE, re.MULTILINE)
    told = {flags.strip("`").replace("none", ""): (gpt, llama or gpt) for flags, gpt, llama in rows}
    assert len(told) == 4
    gpt_like, llama_like = (arguments(**{**SIZES, **settings, "train_iters": 1, "num_layers": None}) for settings in (GPT, LLAMA))
    (command,) = [command for command in commands(PAGE) if "plot_memory" in command]
    example = shlex.split(re.sub("--num-layers 6|--pipeline-model-parallel-size 2|--measure.*", "", command))[2:]
    (by_hand,) = re.findall(r"2 x 3 x (\S+) x 0.131 MB", PAGE)
    assert kept_by_a_layer([*example, "--device", "cpu"]) == pytest.approx(float(by_hand), abs=0.005)
    for flags, (gpt, llama) in told.items():
        for style, number in [(gpt_like, gpt), *([(llama_like, llama)] if full or gpt != llama else [])]:
            assert kept_by_a_layer([*style, *shlex.split(flags)]) == pytest.approx(float(number), abs=0.1), (flags, style)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--stage", "--stage has no value"),
        ("--stage 2 --pipeline-model-parallel-size 2", "--stage 2: there are 2 stages, counted from 0"),
        ("--stage x", "--stage x: the value must be a whole number of at least 0"),
        ("--world-size 0", "--world-size 0: the value must be a whole number of at least 1"),
        ("--output a.pdf", "--output a.pdf: the name of a picture must end in .svg or .png"),
        ("--with --sequence-paralel", "--sequence-paralel"),
        ("--hidden-sise 3", "--hidden-sise"),
    ],
)
def test_what_is_wrong_is_said(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_memory.main([*arguments(train_iters=1), *words.split()]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("plot_memory.py: ") and told in captured.err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_memory.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name} " in out for name in ("world-size", "stage", "with", "measure", "output"))
