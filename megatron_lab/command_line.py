"""Base of the command-line parsers of all programs except the training program."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from megatron_lab.terminal import get_terminal_width, wrap_text


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser that prints an error without the usage, which is long. Accepts no abbreviations of flags."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print an error about the command line, wrapped between words on a terminal, and exit with status 2."""
        text = f"{self.prog}: error: {message}\n  {self.prog} --help lists the flags.\n"
        self.exit(2, wrap_text(text, get_terminal_width(sys.stderr)))
