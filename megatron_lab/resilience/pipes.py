"""Pipes with settings, as in `--config <(command)`, for processes that read the settings more than once. Does not import torch."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.config.regular_file import read_regular_or_pipe

_FLAGS = ("--config", "--param-groups")
"""Flags that name files with settings."""
_OPEN_FILE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def copy_pipes(argv: Sequence[str]) -> list[str]:
    """Replace pipes that a command line names as files with settings by files with the same content. A pipe can be read only once,
    but this process and its forks then read the settings as often as necessary.

    The file of an open pipe of this process (`/dev/fd/63`) gets the descriptor of the pipe, so its path stays. It has no other
    name, so it disappears with the last process that has it open. A pipe in a folder is copied to a file with the same name in a
    temporary folder, which is removed at the exit of this process.

    Args:
        argv: command line; pipes that cannot be read stay in it, so that parsing reports them.

    Returns:
        the command line with the paths of these files.
    """
    new_argv: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name.replace("_", "-") in _FLAGS:
            new_argv.append(f"{name}={_copy_pipe(value)}")
        elif new_argv and new_argv[-1].replace("_", "-") in _FLAGS:
            new_argv.append(_copy_pipe(word))
        else:
            new_argv.append(word)
    return new_argv


def _copy_pipe(path: str) -> str:
    """Return the path of a file with the content of a pipe; for anything but a pipe, `path`."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return path
        data = read_regular_or_pipe(path)
    except (OSError, ValueError):
        return path
    open_file = _OPEN_FILE.fullmatch("/dev/fd/0" if path == "/dev/stdin" else path)
    if open_file is None:
        folder = Path(tempfile.mkdtemp(prefix="megatron-config-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        copy = folder / Path(path).name
        copy.write_bytes(data)
        return str(copy)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        os.dup2(file.fileno(), int(open_file[1]))
    return path
