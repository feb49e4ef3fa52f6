"""Inspect, verify, compare and reshard checkpoints, and convert them to and from other formats. Tensors are read one at a time.

    python tools/checkpoint.py inspect runs/a                     content of the newest checkpoint, and the run that wrote it
    python tools/checkpoint.py verify runs/a                      check every checksum of every checkpoint
    python tools/checkpoint.py diff runs/a runs/b                 report whether two checkpoints are equal, and where they differ
    python tools/checkpoint.py reshard runs/a cut --tp 8 --pp 4   write files as the ranks of a layout hold them (no run needs it)
    python tools/checkpoint.py export runs/a model                write a Hugging Face folder
    python tools/checkpoint.py import model runs/b                read a Hugging Face folder, or a checkpoint of Megatron-LM

A source is a --save folder, whose newest complete checkpoint is used, or one checkpoint in it (runs/a/iter_0000100). Both can be
URLs (s3://...). inspect, diff, export and import also read Hugging Face folders and checkpoints of Megatron-LM.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

from megatron_lab.commands.parser import DescriptionFormatter, ToolParser

SUBCOMMANDS = {
    "inspect": "inspect",
    "verify": "verify",
    "diff": "diff",
    "reshard": "reshard",
    "export": "export",
    "import": "importing",
}
"""Module in megatron_lab/checkpoints of each subcommand."""

FAILURE_STATUS = {"diff": 2}
"""Exit status of the subcommands for which an error does not give 1."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line with all subcommands."""
    main_parser = ToolParser(description=__doc__)
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in SUBCOMMANDS:
        module = _import_module(name)
        subparser = commands.add_parser(
            name,
            help=_get_summary(module),
            description=module.__doc__,
            formatter_class=DescriptionFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return main_parser


def _import_module(command: str) -> ModuleType:
    return importlib.import_module(f"megatron_lab.checkpoints.{SUBCOMMANDS[command]}")


def _get_summary(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that the command line names and return its exit status."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        commands = (f"\n  {name:<9}{_get_summary(_import_module(name))}" for name in SUBCOMMANDS)
        parser.error(f"give a command, one of:{''.join(commands)}")
    try:
        status: int = args.run(args)
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        sys.stderr.close()
        return 0
    except (ValueError, OSError) as error:
        print(f"checkpoint.py {args.command}: error: {error}", file=sys.stderr)
        return FAILURE_STATUS.get(args.command, 1)
    return status
