"""Start of child processes that run a module of `megatron`, installed or not, from any working directory."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `megatron`."""


def module_start(module: str, *args: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a module.

    -P keeps Python from taking a file of the working directory, or of another program there, for a module. It also hides a checkout
    that is not installed, so PYTHONPATH names it. An installed package gets no entry: it would come before Python's own modules.
    """
    is_installed = str(_ROOT) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    paths = [*([] if is_installed else [str(_ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *map(str, args)], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
