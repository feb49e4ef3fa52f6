"""Forks and CUDA: a process that has called CUDA's runtime leaves its forks without it. And the other processes of a run start
wherever it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.optional_packages import PACKAGES
from tests.support.cli import ROOT, spawn_cli
from tests.support.runs import Ended, arguments, launch, report
from tests.support.warm_python import warm_python

FORKS = {
    "megatron_lab/data_tools/preprocess/engines.py": "workers on text; no torch",
    "megatron_lab/resilience/envoy.py": "from the supervisor, before it has ranks; it forks nothing that uses CUDA",
    "megatron_lab/resilience/store_server.py": "serves a store",
    "megatron_lab/resilience/ranks.py": "from the supervisor, which never calls CUDA",
    "megatron_lab/resilience/launcher_flags.py": "counts the GPUs for the launcher of a node, and ends",
    "megatron_lab/resilience/supervisor.py": "looks at a checkpoint and ends",
    "megatron_lab/monitoring/rehearsal.py": "before the run uses CUDA, else as a fresh process",
    "megatron_lab/verification/local_ranks.py": "ranks of a check, from a process that has not used CUDA",
}
"""Files that fork, and why CUDA is safe there. A new fork needs such a reason."""
RUNTIME = (
    "is_available device_count is_initialized init _lazy_init current_device get_device_properties get_device_name "
    "get_device_capability mem_get_info is_bf16_supported"
).split()


def test_every_fork_is_known() -> None:
    forks = re.compile(r"os\.fork\(|get_context\(\"fork|ForkProcess\(|set_start_method\(|ProcessPoolExecutor\(|DataLoader\(")
    files = [path for folder in ("megatron", "megatron_lab", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if forks.search(path.read_text())}
    assert found == set(FORKS)


def has_asked_cuda() -> bool:
    """Whether this process has, as torch tells a fork of it."""
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_what_a_run_imports_calls_no_cuda_and_needs_only_torch_and_numpy(full: bool) -> None:
    """The supervisor imports it before it forks ranks. In CUDA builds torch itself tells a fork.

    In a fresh interpreter with --full, or where a test before has asked CUDA in this one; else in a fork of this one, which imports
    its modules anew.
    """
    program = f"""
import os, sys
sys.modules.update(dict.fromkeys({list(PACKAGES)}))
import torch
def fails(*_): raise AssertionError("CUDA before the fork")
for name in {RUNTIME}: setattr(torch.cuda, name, fails)
bad = torch.cuda._is_in_bad_fork
import megatron.training.trainer, megatron_lab.resilience.supervisor, megatron_lab.node_memory.keeper, megatron_lab.flight.watcher
import megatron.checkpoint.writer_main, megatron.data.tokenizer
from megatron_lab.resilience.ranks import import_run_modules
import megatron_lab.resilience.envoy
import_run_modules()
pid = os.fork()
if pid == 0: os._exit(bad())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

    def anew(_: int) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        exec(program, {})
        sys.exit()

    if full or has_asked_cuda():
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
    else:
        (ended,) = launch([], before=anew)
        assert (ended.stdout, ended.code) == ("0\n", 0), report([ended])


@pytest.fixture(scope="module")
def run_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """Run with every feature that starts processes, in a folder from which no module of the checkout is found.

    What is asked in a fork is an error, and so is a fork after CUDA was asked.
    """
    folder, python = tmp_path_factory.mktemp("elsewhere"), warm_python()

    def before(rank: int) -> None:
        os.chdir(folder)
        os.environ.pop("PYTHONPATH", None)
        sys.executable = python  # for the picture and the report; modules of `megatron` have an interpreter of their own
        owner, fork, asked = os.getpid(), os.fork, list[str]()

        def is_available(*_: Any) -> bool:
            assert os.getpid() == owner, "CUDA in a fork"
            asked.append("is_available")
            return False

        def forks() -> int:
            assert not asked, "a fork after CUDA was asked"
            return fork()

        torch.cuda.is_available, os.fork = is_available, forks

    features: dict[str, Any] = {
        "log_memory": True,
        "plan_report": "plan.json",
        "save": "saved",
        "async_save": True,
        "memory_save_interval": 1,
        "save_interval": 2,
        "num_workers": 2,
        "hang_warn_s": None,
        "no_loss_picture": None,
        "no_report": None,
        "tensorboard_dir": "tensorboard",
        "device": "auto",
    }
    (ended,) = launch(arguments(train_iters=3, eval_iters=1, eval_interval=2, **features), before=before)
    return ended, folder


def test_a_run_forks_nothing_after_it_has_asked_cuda(run_elsewhere: tuple[Ended, Path]) -> None:
    ended, _ = run_elsewhere
    assert ended.code == 0, report([ended])
    assert "planned: the fullest rank takes" in ended.stdout, ended.stdout
    assert "without a plan" not in ended.stdout and "not predicted: R" not in ended.stdout, ended.stdout


def test_a_run_of_a_checkout_starts_all_its_processes_from_anywhere(run_elsewhere: tuple[Ended, Path]) -> None:
    """The watcher of hangs, the writer of checkpoints, the keeper of the state in memory, the plan and the report."""
    ended, folder = run_elsewhere
    assert ended.code == 0 and "No module named" not in ended.stderr, report([ended])
    assert "cannot be created" not in ended.stderr, ended.stderr
    assert (folder / "saved" / "iter_0000003").is_dir() and (folder / "saved" / "report.html").is_file()


@pytest.mark.parametrize(("gpus", "device", "is_refused"), [(1, "auto", True), (1, "cpu", False), (0, "auto", False)])
def test_the_supervisor_refuses_a_module_that_uses_cuda_when_it_is_imported(
    gpus: int, device: str, is_refused: bool, tmp_path: Path
) -> None:
    """Its ranks would be forks without CUDA. On a CPU they need none."""
    module = tmp_path / "mine.py"
    module.write_text(f"import torch\n\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.cuda.device_count = lambda: {gpus}\n")
    words = ["-m", "megatron_lab.resilience.supervisor", "--nproc-per-node", "1", str(ROOT / "pretrain_gpt.py")]
    done = spawn_cli([*words, *arguments(train_iters=1, imports=module, load=tmp_path / "none", device=device)], nproc=None)
    assert done.returncode == (2 if is_refused else 0), done.stderr
    assert ("pretrain_gpt.py: a module of --imports calls CUDA while it is imported" in done.stderr) == is_refused
