"""A checkout where only torch and numpy are installed: what runs, what is refused at its start, and what is said.
test_forks.py imports all modules of a run so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.flags import get_flags
from megatron.config.optional_packages import PACKAGES, import_optional
from tests.support.runs import Ended, arguments, launch, report

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("matplotlib", "tokenizers", "transformers", "wandb", "fsspec", "pyarrow", "ray", "zstandard", "datasets")
"""Packages of extras, which a run never needs."""


def hide(_: int) -> None:
    """For `before`: as if none of these modules were installed."""
    for module in (*PACKAGES, *OTHERS):
        sys.modules[module] = None  # type: ignore[assignment]


def bare(folder: Path, argv: list[str]) -> Ended:
    """Run pretrain_gpt.py without all of them in a fresh interpreter; its child processes lack them too."""
    hidden = [*PACKAGES, *OTHERS]
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_the_table_holds_what_is_installed_beside_torch_and_numpy() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        required = tomllib.load(file)["project"]["dependencies"]
    names = {re.split(r"[<>=]", text)[0] for text in required} - {"torch", "numpy"}
    assert {package.distribution for package in PACKAGES.values()} == names
    assert {field for package in PACKAGES.values() for field in package.fields} <= {flag.field for flag in get_flags().values()}


def test_a_run_with_made_up_data_needs_none_of_them(tmp_path: Path, full: bool) -> None:
    """It trains, plans its memory, evaluates, writes metrics and watches for hangs; one line says what is missing. In a fresh
    interpreter with --full; else test_forks.py imports all modules so."""
    argv = arguments(
        train_iters=3,
        eval_iters=1,
        eval_interval=2,
        log_memory=True,
        metrics_file=tmp_path / "metrics",
        hang_warn_s=None,
        report=None,
    )
    (done,) = [bare(tmp_path, argv)] if full else launch(argv, before=hide)
    assert done.code == 0, done.stdout + done.stderr
    assert "iteration 3" in re.sub(r"iteration +(\d)", r"iteration \1", done.stdout), done.stdout
    assert "planned: the fullest rank takes" in done.stdout, done.stdout
    (note,) = [line for line in done.stdout.splitlines() if "packages that are not installed" in line]
    assert all(f"{package.distribution} ({package.purpose})" in note for package in PACKAGES.values())
    assert not done.stderr, done.stderr


def test_nothing_is_said_where_all_are_there() -> None:
    assert not [note for note in load(arguments(train_iters=1), 1).notes if "not installed" in note]


def test_the_dry_run_and_help_need_none_of_them() -> None:
    """For a GPU too, whose times are in a file of YAML."""

    def said(*argv: str) -> str:
        (ended,) = launch(argv, before=hide)
        assert ended.code == 0, report([ended])
        return ended.stdout

    plan = said(*arguments(train_iters=1, device="cuda", device_memory_gb=0.0004), "--dry-run")
    assert "What to change is not known without PyYAML" in plan, plan
    assert "--tensor-model-parallel-size" in said("--help")
    page = said("--help", "all")
    assert all(f"\n--{flag.name}" in page for flag in get_flags().values())
    assert said("--explain", "lr").startswith("--lr")


@pytest.mark.parametrize(
    ("module", "flag", "value", "hint"),
    [
        ("xxhash", "--save", "saved", "pip install xxhash"),
        ("xxhash", "--load", "saved", "pip install xxhash"),
        ("xxhash", "--data-path", "dataset", "pip install xxhash"),
        ("tensorboard", "--tensorboard-dir", "curves", "pip install tensorboard"),
        ("yaml", "--config", "settings.yaml", "pip install PyYAML"),
        ("yaml", "--model", "llama3-8b", "pip install PyYAML"),
        ("yaml", "--recipe", "llama2-7b", "pip install PyYAML"),
        ("yaml", "--model", "list", "pip install PyYAML"),
        ("yaml", "--param-groups", "groups.yaml", "pip install PyYAML"),
    ],
)
def test_a_run_that_needs_one_is_refused_by_the_name_of_the_flag(
    monkeypatch: pytest.MonkeyPatch, module: str, flag: str, value: str, hint: str
) -> None:
    """Before anything is imported that takes long, let alone after hours of training."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as refused:
        load([*arguments(train_iters=1, mock_data=flag != "--data-path"), flag, value], 1)
    assert flag in str(refused.value) and hint in str(refused.value)


def test_a_refusal_ends_the_program_with_one_message(tmp_path: Path) -> None:
    done = bare(tmp_path, arguments(train_iters=1, save=tmp_path / "saved"))
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == "pretrain_gpt.py: --save needs xxhash, which is not installed.\n  pip install xxhash.\n"


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, package in PACKAGES.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=f"it needs that, which is not installed: pip install {package.distribution}$"):
            import_optional(module, "it needs that")
