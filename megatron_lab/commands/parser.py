"""The command line that all tools have in common."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megatron.config.version import version_line


class ToolParser(argparse.ArgumentParser):
    """A parser with --version. Its description stays as it is written, and flags are spelled out."""

    def __init__(self, *words: Any, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(*words, **settings)
        self.add_argument("--version", action=_TellVersion, nargs=0, help="say which version this is")


class _TellVersion(argparse.Action):
    """Prints the version, which is looked up only now, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(version_line())
        parser.exit()
