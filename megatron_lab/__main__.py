"""Run a program by its name: `python -m megatron_lab plan --gpus 64 ...` corresponds to `python tools/plan.py ...` in a
checkout."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from megatron_lab.terminal import fit_output_to_terminal

COMMANDS = Path(__file__).with_name("commands")
_NO_PROGRAMS = ("__init__", "parser")


def list_programs() -> list[str]:
    """Return the names of the programs that `python -m megatron_lab NAME` can run, in alphabetical order."""
    return sorted(path.stem for path in COMMANDS.glob("*.py") if path.stem not in _NO_PROGRAMS)


def format_overview() -> str:
    """Return the help text of `python -m megatron_lab`: the usage, and one line for each program with the first paragraph of its
    module docstring."""
    lines = ["usage: python -m megatron_lab NAME [flags]    (NAME --help lists the flags of a program)", ""]
    for name in list_programs():
        docstring = ast.get_docstring(ast.parse((COMMANDS / f"{name}.py").read_text(encoding="utf-8"))) or ""
        first_paragraph = " ".join(docstring.partition("\n\n")[0].split())
        lines.append(f"  {name:<18} {first_paragraph}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the program that the first argument of the command line names, with the remaining arguments, and return its exit status.

    Without arguments or with --help, print an overview of all programs instead.
    """
    fit_output_to_terminal()
    name = sys.argv[1].removesuffix(".py").replace("-", "_") if len(sys.argv) > 1 else "--help"
    if name in ("--help", "__help", "_h"):
        sys.stdout.write(format_overview())
        return 0
    if name not in list_programs():
        sys.stderr.write(f"python -m megatron_lab: there is no program {sys.argv[1]}. Programs:\n\n{format_overview()}")
        return 2
    sys.argv = [f"{name}.py", *sys.argv[2:]]
    return importlib.import_module(f"megatron_lab.commands.{name}").main() or 0


if __name__ == "__main__":
    sys.exit(main())
