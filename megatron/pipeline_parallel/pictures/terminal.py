"""What the text goes to: how wide it is, and whether it shows colours."""

from __future__ import annotations

import os
import shutil
from typing import NamedTuple, TextIO


class Terminal(NamedTuple):
    """What a stream can show."""

    width: int
    """Columns: the variable COLUMNS if set, else the terminal's, else 120."""
    colour: bool
    """Only on a terminal, and not if the variable NO_COLOR is set (no-color.org) or TERM is dumb."""
    ascii_only: bool
    """The encoding has no line-drawing characters."""

    @classmethod
    def of(cls, stream: TextIO) -> Terminal:
        """What this stream can show."""
        colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        try:
            "─·".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            ascii_only = True
        else:
            ascii_only = False
        return cls(shutil.get_terminal_size((120, 24)).columns, colour, ascii_only)
