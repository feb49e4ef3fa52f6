"""Processes of ours that run a module of `megatron`: they start from a checkout that is not installed, in any working directory.
test_forks.py has a run that starts them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron.config.launcher import build_module_command

ROOT = Path(__file__).resolve().parents[2]


def without_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def test_all_are_started_in_the_one_way() -> None:
    starts = [path.name for path in (ROOT / "megatron").rglob("*.py") if '"-m"' in path.read_text()]
    assert starts == ["launcher.py"]


def test_the_command_finds_the_checkout_and_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """A file of the same name there would be taken without -P; what the user's PYTHONPATH names is found too."""
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    command, environment = build_module_command("megatron.config.launcher")
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    program = (
        f"import json, sys; sys.path[:0] = {[str(ROOT)]}; from megatron.config.launcher import build_module_command as start; "
    )
    program += "command, environment = start('megatron.config.launcher'); import subprocess; "
    program += "sys.exit(subprocess.run(command, env=environment).returncode)"
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=without_pythonpath(), check=False)
    assert done.returncode == 0
    assert command[1:] == ["-P", "-m", "megatron.config.launcher"]
