"""What must be importable in no time: neither torch nor numpy comes along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULES = (
    "megatron.metrics.measures",
    "megatron.spec.counts",
    "megatron.metrics.history",
    "megatron.metrics.log_line",
    "megatron_lab.monitoring.loggers",
    "megatron.metrics.measures",
    "megatron.training.progress",
)


def test_pure_modules_import_no_torch() -> None:
    program = f"import sys, {', '.join(MODULES)}; print({{'torch', 'numpy'}} & set(sys.modules))"
    root = Path(__file__).parents[2]
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert finished.stdout.strip() == "set()"
