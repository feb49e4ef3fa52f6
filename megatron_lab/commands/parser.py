"""Command-line parser of all tools."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megatron.config.version import format_version


class ToolParser(argparse.ArgumentParser):
    """Argument parser of all tools. It adds --version, keeps the line breaks of the description, and accepts no abbreviations of
    flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **kwargs}
        super().__init__(*args, **kwargs)
        self.add_argument("--version", action=_VersionAction, nargs=0, help="Print the version and exit.")


class _VersionAction(argparse.Action):
    """Action of --version: prints the version and exits. The version is looked up only when the flag is used, because that is
    slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(format_version())
        parser.exit()
