"""How a process of ours is started that runs a module of `megatron`, installed or not, in any working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `megatron`."""


def module_start(module: str, *args: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a module.

    -P keeps Python from taking a file of the working directory, or of another program there, for a module. It also hides a checkout
    that is not installed, so PYTHONPATH names it.
    """
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *map(str, args)], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
