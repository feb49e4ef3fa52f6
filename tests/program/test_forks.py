"""Forks and CUDA: a process that has called CUDA's runtime leaves its forks without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import arguments, run

ROOT = Path(__file__).resolve().parents[2]
FORKS = {
    "megatron/data/preprocess/engines.py": "workers on text; no torch",
    "megatron/resilience/envoy.py": "from the supervisor, before it has ranks; it forks nothing that uses CUDA",
    "megatron/resilience/point.py": "serves a store",
    "megatron/resilience/ranks.py": "from the supervisor, which never calls CUDA",
    "megatron/resilience/supervisor.py": "looks at a checkpoint and ends",
    "megatron/training/rehearsal.py": "before the run uses CUDA, else as a fresh process",
    "megatron/verification/local_ranks.py": "ranks of a check, from a process that has not used CUDA",
}
"""Files that fork, and why CUDA is safe there. A new fork needs such a reason."""
RUNTIME = (
    "is_available device_count is_initialized init _lazy_init current_device get_device_properties get_device_name "
    "get_device_capability mem_get_info is_bf16_supported"
).split()


def test_every_fork_is_known() -> None:
    forks = re.compile(r"os\.fork\(|get_context\(\"fork|ForkProcess\(|set_start_method\(|ProcessPoolExecutor\(|DataLoader\(")
    files = [path for folder in ("megatron", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if forks.search(path.read_text())}
    assert found == set(FORKS)


def test_the_supervisor_calls_no_cuda_before_it_forks_ranks() -> None:
    """Nor does anything that it imports for them; in CUDA builds torch itself tells a fork."""
    program = f"""
import os, torch
def fails(*_): raise AssertionError("CUDA before the fork")
for name in {RUNTIME}: setattr(torch.cuda, name, fails)
bad = torch.cuda._is_in_bad_fork
from megatron.resilience.ranks import import_what_runs_need
import megatron.resilience.supervisor, megatron.resilience.envoy
import_what_runs_need()
pid = os.fork()
if pid == 0: os._exit(bad())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_a_run_forks_nothing_after_it_has_asked_cuda(tmp_path: Path) -> None:
    """With every feature that starts processes. What is asked in a fork is an error too."""

    def before(rank: int) -> None:
        import torch

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
        "plan_report": tmp_path / "plan.json",
        "save": tmp_path / "save",
        "async_save": True,
        "memory_save_interval": 1,
        "save_interval": 2,
        "num_workers": 2,
        "hang_warn_s": None,
        "no_loss_picture": None,
        "no_report": None,
        "tensorboard_dir": tmp_path / "tensorboard",
        "device": "auto",
    }
    said = run(arguments(train_iters=3, eval_iters=1, eval_interval=2, **features), before=before)
    assert "planned: the fullest rank takes" in said and "without a plan" not in said and "not foretold: R" not in said, said


@pytest.mark.parametrize(("gpus", "device", "is_refused"), [(1, "auto", True), (1, "cpu", False), (0, "auto", False)])
def test_the_supervisor_refuses_a_module_that_uses_cuda_when_it_is_imported(
    gpus: int, device: str, is_refused: bool, tmp_path: Path
) -> None:
    """Its ranks would be forks without CUDA. On a CPU they need none."""
    module = tmp_path / "mine.py"
    module.write_text(f"import torch\n\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.cuda.device_count = lambda: {gpus}\n")
    words = ["-m", "megatron.resilience.supervisor", "--nproc-per-node", "1", str(ROOT / "pretrain_gpt.py")]
    argv = arguments(train_iters=1, imports=module, load=tmp_path / "none", device=device)
    done = subprocess.run([sys.executable, *words, *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if is_refused else 0), done.stderr
    assert ("pretrain_gpt.py: a module of --imports uses CUDA while it is imported" in done.stderr) == is_refused
