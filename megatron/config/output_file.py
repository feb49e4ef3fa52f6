"""A file that a program is to write, looked at before time is spent on what goes into it."""

from __future__ import annotations

import os


def check_output(flag: str, path: str) -> None:
    """See to it that a file can be written, without touching anything. Folders that are not there yet will be made.

    Args:
        flag: that the path was given with.

    Raises:
        ValueError: there cannot be such a file.
    """
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder. It takes the name of a file.")
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path} cannot be written: {folder} is no folder.")
    # To enter a name into a folder takes the right to write there and the right to go there.
    allowed = os.access(path, os.W_OK) if os.path.exists(path) else os.access(folder, os.W_OK | os.X_OK)
    if not allowed:
        raise ValueError(f"{flag} {path} cannot be written: permission denied. Give a path in a folder that you may write to.")
