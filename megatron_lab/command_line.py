"""Base of the command-line parsers of all programs except the training program."""

from __future__ import annotations

import argparse
import io
import sys
from typing import Any, NoReturn

from megatron_lab.terminal import get_terminal_width, wrap_text


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser that prints an error without the usage, which is long. Flags cannot be abbreviated."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line. From then on, bytes of the command line that are not UTF-8, as in the name of an old file, are
        printed as escapes such as `\\udce9` instead of raising an error."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print an error about the command line, wrapped between words on a terminal, and exit with status 2."""
        text = f"{self.prog}: error: {message}\n  {self.prog} --help lists the flags.\n"
        self.exit(2, wrap_text(text, get_terminal_width(sys.stderr)))
