"""The wheel has all that a user needs: installed in an environment of its own, everything runs in a folder without the repository.

The environment has the project from the wheel, and the other libraries from the environment of the tests.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_lab.__main__ import list_programs
from tests.support.cli import ROOT

PACKAGES = ("megatron", "megatron_lab")
TINY = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 1 --hidden-size 16 --num-attention-heads 2 "
    "--seq-length 16 --micro-batch-size 2 --lr 1e-3 --eval-iters 0 --device cpu"
).split()


class Installed(NamedTuple):
    """An environment with the wheel."""

    wheel: Path
    python: Path
    packages: Path
    """Its site-packages."""
    elsewhere: Path
    """A folder to work in."""

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Start a program of the environment, with nothing of the repository in sight."""
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        return subprocess.run(
            [self.python.with_name(program), *words],
            cwd=self.elsewhere,
            env={**variables, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source, packages = folder / "source", folder / f"env/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "pretrain_gpt.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    python = folder / "env/bin/python"
    steps: list[tuple[Path, list[str]]] = [
        (source, [sys.executable, "-c", build, str(folder)]),
        (folder, [sys.executable, "-m", "venv", "--without-pip", "env"]),
    ]
    for place, command in steps:
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--no-compile", str(wheel)], cwd=folder, check=True)
    # Names of folders: an editable installation that is in one of them stays unknown, since only Python's own start reads its file.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    (folder / "elsewhere").mkdir()
    return Installed(wheel, python, packages, folder / "elsewhere")


class Answer(NamedTuple):
    """How a program ended."""

    status: int
    said: str


_ALL = """
import importlib, json, os, pathlib, runpy, sys, traceback
import torch, megatron.config.cli, megatron.training.trainer, megatron_lab
import yaml, matplotlib.figure

lines = json.loads(sys.argv[1])
answers = {"files": [megatron.config.cli.__file__, megatron_lab.__file__]}
for name, words in lines.items():
    with open("said", "w+") as said:
        child = os.fork()
        if child == 0:
            status = 1
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            try:
                sys.argv = words
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        answers[name] = [status, said.read()]
print(json.dumps(answers))
"""
"""Runs modules as `python -m` does, each in a fork of one process: an interpreter that imports torch takes seconds."""


def answers(installed: Installed, lines: Mapping[str, Sequence[str]]) -> dict[str, Answer]:
    """What modules of the installed packages answer to words."""
    done = installed.run("python", "-c", _ALL, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for file in found.pop("files"):
        assert Path(file).is_relative_to(installed.packages)
    return {name: Answer(*answer) for name, answer in found.items()}


@pytest.fixture(scope="module")
def answered(installed: Installed) -> dict[str, Answer]:
    """To all command lines of the tests below, whose names are those of the lines."""
    lines: dict[str, Sequence[str]] = {
        "dry run": ["pretrain_gpt", *TINY, "--train-iters", "2", "--dry-run", "--world-size", "2", "--dry-run-html", "plan.html"],
        "plan": ["pretrain_gpt", *TINY, "--train-iters", "2", "--plan", "--cluster", "h100", "--rows", "1"],
        "models": ["pretrain_gpt", "--model", "list"],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "pretrain_gpt", "--version"],
        "supervisor": ["megatron_lab.resilience.supervisor", "pretrain_gpt.py", "--dry-run"],
        "former name": ["megatron.resilience.supervisor", "--help"],
        "rows": ["megatron_lab", "published_memory"],
        "script": ["megatron_lab", "plan", *TINY, "--write-script", "launch.sh"],
        **{f"version of {name}": ["megatron_lab", name, "--version"] for name in list_programs()},
        **{f"help of {name}": ["megatron_lab", name, "--help"] for name in list_programs()},
    }
    return answers(installed, lines)


def test_the_wheel_holds_the_packages_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        entry_points = next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
        scripts = configparser.ConfigParser()
        scripts.read_string(wheel.read(entry_points).decode())
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == files | {"pretrain_gpt.py"}
    assert dict(scripts["console_scripts"]) == {
        "megatron-train": "pretrain_gpt:run",
        "megatron-pretrain": "pretrain_gpt:run",
        "megatron-tool": "megatron_lab.__main__:main",
    }


def test_a_run_leaves_its_checkpoint_picture_and_report(installed: Installed) -> None:
    """By the console command and its launcher, which is a fresh interpreter with all imports of a user's start."""
    run = installed.elsewhere / "run"
    done = installed.run("megatron-train", "--nproc", "2", *TINY, "--train-iters", "2", "--save", str(run))
    assert done.returncode == 0, done.stderr
    assert "done after 2 iterations" in done.stdout and "cannot be created" not in done.stderr
    assert (run / "latest_checkpointed_iteration.txt").read_text().strip() == "2" and (run / "iter_0000002").is_dir()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (run / "report.html").read_text()


def test_a_plan_and_its_page(installed: Installed, answered: dict[str, Answer]) -> None:
    status, said = answered["dry run"]
    assert status == 0 and "2 ranks" in said, said
    assert "</html>" in (installed.elsewhere / "plan.html").read_text()


def test_layouts_are_searched(answered: dict[str, Answer]) -> None:
    status, said = answered["plan"]
    assert status == 0 and "layouts estimated" in said, said


def test_models_have_names(answered: dict[str, Answer]) -> None:
    status, said = answered["models"]
    shipped = {path.stem for path in (ROOT / "megatron/config/models").glob("*.yaml")}
    assert status == 0 and shipped <= set(said.split()) and len(shipped) > 20, said


def test_launchers_find_the_program(installed: Installed, answered: dict[str, Answer]) -> None:
    status, said = answered["torchrun"]
    assert status == 0 and said.rstrip().endswith(f" in {installed.packages}"), said
    status, said = answered["supervisor"]
    assert status == 2 and f"python {installed.packages}/pretrain_gpt.py --dry-run" in said, said
    status, said = answered["former name"]
    assert status == 0 and "DeprecationWarning: megatron.resilience.supervisor has moved" in said, said


def test_every_tool_starts(installed: Installed, answered: dict[str, Answer]) -> None:
    assert len(list_programs()) > 25
    versions = {name: answered[f"version of {name}"] for name in list_programs()}
    wrong = {name: one for name, one in versions.items() if one.status or f" in {installed.packages}" not in one.said}
    assert not wrong
    helps = {name: answered[f"help of {name}"] for name in list_programs()}
    assert not {name: one for name, one in helps.items() if one.status or "usage:" not in one.said}


def test_commands_of_the_tools(installed: Installed) -> None:
    """In fresh interpreters: the list of all, and one by its name, which may be written with dashes."""
    listed = installed.run("python", "-m", "megatron_lab", "--help")
    assert listed.returncode == 0 and all(f"  {name} " in listed.stdout for name in list_programs())
    drawn = installed.run("megatron-tool", "plot-schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    assert drawn.returncode == 0 and "1f1b" in drawn.stdout, drawn


def test_what_only_a_checkout_has_is_refused_by_name(installed: Installed, answered: dict[str, Answer]) -> None:
    for name, what in (("rows", "tests/data/published"), ("script", "examples/launch.sh")):
        status, said = answered[name]
        assert status and "checkout" in said and f"{installed.packages}/{what}" in said and "Traceback" not in said, said
