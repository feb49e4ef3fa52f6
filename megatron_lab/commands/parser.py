"""Command-line parser of all tools."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NoReturn

from megatron.config.version import format_version
from megatron_lab.command_line import CommandLineParser
from megatron_lab.terminal import fill_help, fit_output_to_terminal

_MAX_CHOICES_WIDTH = 40
"""Maximum number of characters of the choices of an argument. Longer choices are listed in its description, not in the usage."""


class DescriptionFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of a tool's help. It fills the paragraphs of the description, and keeps indented lines, such as commands."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an argument. Long choices are added to its description."""
        if _has_long_choices(action):
            action = copy(action)
            description = f"{action.help.removesuffix('.')}. " if action.help else ""
            action.help = f"{description}One of: {', '.join(map(str, action.choices or ()))}."
        super().add_argument(action)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _has_long_choices(action):
            return lambda size: (default_metavar,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in fill_help(text, width - len(indent)).splitlines())


def _has_long_choices(action: argparse.Action) -> bool:
    return action.metavar is None and len(",".join(map(str, action.choices or ()))) > _MAX_CHOICES_WIDTH


class ToolParser(CommandLineParser):
    """Argument parser of all tools. It adds --version, and fits the description to the terminal.

    From the first use of the parser on, lines that the process prints on a terminal are wrapped between words.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {"formatter_class": DescriptionFormatter, **kwargs}
        super().__init__(*args, **kwargs)
        self.add_argument("--version", action=_VersionAction, nargs=0, help="Print the version and exit.")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments, as in `argparse`. Messages about them fit the terminal too."""
        fit_output_to_terminal()
        return super().parse_known_args(args, namespace)


class _VersionAction(argparse.Action):
    """Action of --version: prints the version and exits. The version is looked up only when the flag is used, because that is
    slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(format_version())
        parser.exit()
