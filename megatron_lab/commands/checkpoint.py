"""Look at checkpoints, check, compare, cut anew, and carry them to other programs and back. Tensors are read one at a time.

    python tools/checkpoint.py inspect runs/a                     what is in the newest checkpoint, and which run wrote it
    python tools/checkpoint.py verify runs/a                      every checksum of every checkpoint
    python tools/checkpoint.py diff runs/a runs/b                 whether two are the same, and where they differ
    python tools/checkpoint.py reshard runs/a cut --tp 8 --pp 4   files as the ranks of a layout hold them (no run needs it)
    python tools/checkpoint.py export runs/a model                a Hugging Face folder
    python tools/checkpoint.py import model runs/b                a Hugging Face folder, or a run of Megatron-LM

A source is a --save folder, of which the newest complete checkpoint is taken, or one checkpoint in it (runs/a/iter_0000100), both
also by URL (s3://...). inspect, diff, export and import read Hugging Face folders and checkpoints of Megatron-LM too.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from megatron_lab.commands.parser import ToolParser

SUBCOMMANDS = {
    "inspect": "inspect",
    "verify": "verify",
    "diff": "diff",
    "reshard": "reshard",
    "export": "export",
    "import": "importing",
}
"""Each with its module in tools/checkpoints."""

FAILED = {"diff": 2}
"""Exit status of a subcommand that could not do its work, where it is not 1."""


def parser() -> argparse.ArgumentParser:
    """The subcommands and their flags."""
    main_parser = ToolParser(description=__doc__)
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module_name in SUBCOMMANDS.items():
        module = importlib.import_module(f"megatron_lab.checkpoints.{module_name}")
        text = module.__doc__ or ""
        one = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return main_parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code of the subcommand."""
    given = parser().parse_args(arguments)
    try:
        status: int = given.run(given)
    except BrokenPipeError:  # as of `| head`
        sys.stderr.close()
        return 0
    except (ValueError, OSError) as error:
        print(f"checkpoint.py {given.command}: error: {error}", file=sys.stderr)
        return FAILED.get(given.command, 1)
    return status
