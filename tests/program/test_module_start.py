"""Processes of ours that run a module of `megatron`: they start from a checkout that is not installed, in any working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron.config.module_start import module_start
from tests.support.runs import arguments

ROOT = Path(__file__).resolve().parents[2]


def without_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def test_all_are_started_in_the_one_way() -> None:
    starts = [path.name for path in (ROOT / "megatron").rglob("*.py") if '"-m"' in path.read_text()]
    assert starts == ["module_start.py"]


def test_the_command_finds_the_checkout_and_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """A file of the same name there would be taken without -P; what the user's PYTHONPATH names is found too."""
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    command, environment = module_start("megatron.config.module_start")
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    program = f"import json, sys; sys.path[:0] = {[str(ROOT)]}; from megatron.config.module_start import module_start as start; "
    program += "command, environment = start('megatron.config.module_start'); import subprocess; "
    program += "sys.exit(subprocess.run(command, env=environment).returncode)"
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=without_pythonpath(), check=False)
    assert done.returncode == 0
    assert command[1:] == ["-P", "-m", "megatron.config.module_start"]


def test_a_run_of_a_checkout_starts_all_its_processes_from_anywhere(tmp_path: Path) -> None:
    """The watcher of hangs, the writer of checkpoints, the keeper of the state in memory, and the plan."""
    flags = arguments(
        train_iters=4,
        save_interval=2,
        async_save=True,
        memory_save_interval=1,
        log_memory=True,
        device="cpu",
        save="saved",
        hang_warn_s=None,
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags],
        cwd=tmp_path,
        env=without_pythonpath(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No module named" not in done.stderr and "planned: the fullest rank takes" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "saved" / "iter_0000004").is_dir()
