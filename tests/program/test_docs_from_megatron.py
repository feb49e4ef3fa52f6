"""The commands of docs/from_megatron.md, run as they are written, and what the page says that they print."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_lab.commands import migrate
from tests.program.test_readme import commands, page_of_a_flag, shell, write_program
from tests.support.cli import ROOT
from tests.support.warm_python import warm_python

PAGE = (ROOT / "docs/from_megatron.md").read_text()
SCRIPT, PRINTED = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
FILES = {
    "llama3_8b.toml": "llama3_8b.toml",
    "config_tiny_llama.yaml": "tiny_llama.yaml",
    "pretrain_llama.sh": "llama2_deepspeed.sh",
}
"""Files that the page names, and those of the tests that stand for them."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.sh").write_text(SCRIPT)
    for name, found in FILES.items():
        shutil.copy(ROOT / "tests/support/foreign" / found, tmp_path / name)
    (tmp_path / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')
    write_program(tmp_path / "torchrun", f'#!/usr/bin/env bash\nexec {warm_python()} -m torch.distributed.run "$@"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in commands(PAGE):
        words = shlex.split(command)
        if words[:2] == ["python", "tools/migrate.py"]:
            into = words.index(">") if ">" in words else len(words)
            assert migrate.main(words[2:into]) == 0, command
            said = capfd.readouterr().out
            if "--dry-run" in words:
                assert "torchrun" not in said and "fullest rank (rank 0): needs" in said
            elif words[2] == "train.sh":
                assert said == PRINTED
                quick = said.replace(" rope\n", " rope --no-loss-picture --no-report\n", 1)
                assert quick != said
                (folder / "here.sh").write_text(quick.replace("checkpoints", str(folder / "checkpoints")))
        elif words == ["bash", "here.sh"]:
            said = shell(f"bash {folder}/here.sh", folder)
            losses = [float(found) for found in re.findall(r"lm loss: (\S+)", said)]
            assert losses[-1] < losses[0] and (folder / "checkpoints").is_dir()
        else:
            page_of_a_flag(command, folder, full=False)


def test_a_sentence_of_the_page_in_the_middle_of_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"`python tools/migrate\.py (train\.sh -- [^`]+)`", PAGE)
    assert migrate.main(["--set", "1=x", *command.split()]) == 0 and "--bf16" in capsys.readouterr().out
