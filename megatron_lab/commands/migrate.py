"""Convert a launch script or a configuration of another framework to the command line of this project.

    python tools/migrate.py train_gpt3.sh                       # a bash script, or a file with one command line, of Megatron-LM
    python tools/migrate.py llama3_8b.toml --world-size 64      # torchtitan
    python tools/migrate.py config_tiny_llama.yaml              # nanotron
    python tools/migrate.py ds_config.json --with train.sh      # DeepSpeed, with a launch script of Megatron-DeepSpeed
    python tools/migrate.py train_gpt3.sh --set DATA_PATH=data/corpus_text_document -- --tensor-model-parallel-size 4
    python tools/migrate.py train_gpt3.sh -- --dry-run          # runs the plan of the converted command on this machine

The tool prints the command, the changes with their reasons, and everything that it could not convert. It only reads files, and runs
nothing in them. Flags after `--` are added to the command and override the file. If they ask pretrain_gpt.py to print something
(--dry-run, --plan, --print-config, --explain, --help), the tool runs it with the converted flags, and the exit status is its own.
Otherwise the exit status is 0 if the rules of this project accept the command, 1 if not, and 2 if the file contains no command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_lab.commands.parser import ToolParser
from megatron_lab.migration import deepspeed, megatron, nanotron, torchtitan
from megatron_lab.migration.launch_command import LaunchCommand, add_flags, format_report
from megatron_lab.migration.launcher import convert_launcher, set_default_launcher
from megatron_lab.migration.print_request import find_print_requests, run_print_request
from megatron_lab.migration.shell import Launch, Script, is_resolved, remove_marks

PROGRAM = "migrate.py"
_MAX_FILE_BYTES = 1 << 22
"""Maximum size of a file that is read."""
_ALWAYS_SET = ("PWD", "HOME", "USER")
"""Variables that every shell sets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the file that the command line names and print the result. Returns the exit status: 0 if the rules of this project
    accept the command, 1 if not, 2 if the file cannot be read or contains no command."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _build_parser()
    all_argv = list(argv)
    extra_flags = all_argv[all_argv.index("--") + 1 :] if "--" in all_argv else []
    args = parser.parse_args(all_argv[: all_argv.index("--")] if "--" in all_argv else all_argv)
    try:
        variables = dict(_parse_variable(text) for text in args.set)
        command = _convert(args, variables)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    if find_print_requests(extra_flags):
        return run_print_request(command, extra_flags)
    add_flags(command, extra_flags)
    problems = command.find_violations()
    sys.stdout.write(format_report(command, problems))
    return 1 if problems else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(PROGRAM, description=__doc__)
    parser.add_argument("file", help="Script, command line or configuration; - reads a command line from standard input.")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=("megatron", "torchtitan", "nanotron", "deepspeed"),
        help="Set the format of the file (default: guessed from its suffix).",
    )
    parser.add_argument(
        "--with", dest="beside", metavar="SCRIPT", help="Also read the launch script that uses the DeepSpeed configuration."
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="Set the number of ranks of the job, if the file does not contain it."
    )
    variable = "Set a variable of the script; a number as NAME sets a positional argument."
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=variable)
    parser.add_argument(
        "--pick", type=int, default=1, metavar="N", help="Convert the N-th launch command of a script with several (default 1)."
    )
    return parser


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set {text}: give the variable of the script and its value as NAME=VALUE.")
    return name, value


def _convert(args: argparse.Namespace, variables: Mapping[str, str]) -> LaunchCommand:
    """Read the file and convert it to a command line of this project.

    If the file is a DeepSpeed configuration, the launch script that --with names is read too. It has the flags that the
    configuration lacks, such as those of the model and the data.

    Args:
        variables: values that --set gives to variables of the script.
    """
    text = sys.stdin.read() if args.file == "-" else _read_text(args.file)
    source_format = args.kind or {".toml": "torchtitan", ".yaml": "nanotron", ".yml": "nanotron", ".json": "deepspeed"}.get(
        Path(args.file).suffix, "megatron"
    )
    command = LaunchCommand(world_size=args.world_size)
    try:
        _convert_text(command, text, source_format, args, variables)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{args.file}: {error}") from error
    if command.world_size is None:
        command.missing.append(
            f"--world-size N, the number of ranks: the rules were checked with {command.model_parallel_size}, "
            "for one copy of the model"
        )
    if not command.launcher:
        set_default_launcher(command)
    return command


def _convert_text(
    command: LaunchCommand, text: str, source_format: str, args: argparse.Namespace, variables: Mapping[str, str]
) -> None:
    """Convert the text of the file, and add its flags to a command line of this project."""
    if source_format == "deepspeed":
        if args.beside is not None:
            _convert_script(command, _read_text(args.beside), Path(args.beside), variables, args.pick, config=text)
        else:
            deepspeed.convert_config(command, text)
            command.missing.append(
                "the model, data and rates: --with SCRIPT reads them from a launch script, flags behind -- add them"
            )
    elif source_format == "megatron":
        _convert_script(command, text, Path(args.file), variables, args.pick)
    else:
        {"torchtitan": torchtitan, "nanotron": nanotron}[source_format].convert_config(command, text)


def _read_text(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name} is not a file. Check the path.")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(
            f"{name} is too large for a script or a configuration: more than {_MAX_FILE_BYTES:,} bytes. Choose the launch script "
            "or configuration itself."
        )
    return path.read_text(encoding="utf-8", errors="replace")


def _convert_script(
    command: LaunchCommand, text: str, path: Path, variables: Mapping[str, str], pick: int, config: str | None = None
) -> None:
    """Convert one launch command of a bash script, and add its flags to a command line of this project.

    Args:
        command: command line of this project to which the flags are added.
        text: the script.
        path: path of the script, to find files next to it.
        variables: values that --set gives to variables of the script.
        pick: number of the launch command to convert, in the order of the script, from 1 on.
        config: text of the DeepSpeed configuration; None to search for the file that the script names.
    """
    script = Script(overrides=variables).interpret(text)
    launch = _pick_launch(script, text, pick, command)
    convert_launcher(command, launch.launcher)
    values_by_flag = megatron.convert_flags(command, [*launch.argv])
    config_names = values_by_flag.get("deepspeed-config", ())
    if config is None and config_names:
        config = script.written_files.get(config_names[0])
        config_path = path.parent / Path(remove_marks(config_names[0])).name
        if config is None and is_resolved(config_names[0]) and config_path.is_file():
            config = _read_text(str(config_path))
        if config is None:
            command.missing.append(
                f"the DeepSpeed configuration {remove_marks(config_names[0])}: give it as FILE, and the script as "
                f"--with {path.name}"
            )
    deepspeed.convert_flags(command, values_by_flag)
    if config is not None:
        deepspeed.convert_config(command, remove_marks(config))
    if launch.program.rpartition("/")[2] not in ("pretrain_gpt.py", "pretrain_gpt_core.py"):
        command.changes.append(
            (remove_marks(launch.program), "pretrain_gpt.py, which trains decoders; another kind of model is not trained here")
        )
    for name, origin in script.unresolved.items():
        if name not in _ALWAYS_SET:
            command.variables[name] = f"it is {origin}; --set {name}=VALUE, or set it in the shell that runs the line"
    command.missing += [f"perhaps: {what}" for what in script.skipped]
    command.changes += [
        (_describe_variable(name), f"{value or repr(value)}, its default (--set {name}=VALUE)")
        for name, value in _list_defaults(script)
    ]
    command.flags = {flag: tuple(map(remove_marks, values)) for flag, values in command.flags.items()}
    for pairs in (command.changes, command.omitted, command.unconverted):
        pairs[:] = [(remove_marks(what), remove_marks(reason)) for what, reason in pairs]
    command.launcher = tuple(map(remove_marks, command.launcher))


def _list_defaults(script: Script) -> list[tuple[str, str]]:
    """Return name and value of each variable to which the script gives a default value, except for variables of the launcher such
    as MASTER_ADDR."""
    launch_variables = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "CUDA_DEVICE_MAX_CONNECTIONS")
    return [(name, value) for name, value in script.defaults.items() if name not in launch_variables]


def _describe_variable(name: str) -> str:
    return f"argument {name} of the script" if name.isdigit() else f"{name}, which the script leaves open"


def _pick_launch(script: Script, text: str, pick: int, command: LaunchCommand) -> Launch:
    """Return the launch (a command line that starts a training program) of a script that --pick selects. If the script has several,
    add a note that lists them to `command`, the result of the conversion.

    Args:
        text: the script, which may also consist of flags only.

    Raises:
        ValueError: the script has no launch command, or fewer launch commands than --pick.
    """
    launches = script.launches
    if not launches and text.lstrip().startswith("--"):  # only flags, without a program
        launches = Script(overrides=script.overrides).interpret(f"python pretrain_gpt.py {text}").launches
        launches = [Launch((), launch.program, launch.argv, launch.lineno) for launch in launches]
    if not launches:
        skipped = "".join(f"\n  {what}" for what in script.skipped)
        raise ValueError(
            f"No command was found that starts a Python program with flags. Choose the script that starts the training.{skipped}"
        )
    if not 1 <= pick <= len(launches):
        raise ValueError(
            f"--pick {pick}: the script has {len(launches)} launch commands, counted from 1. "
            f"Choose a number from 1 to {len(launches)}."
        )
    if len(launches) > 1:
        candidates = ", ".join(f"{i} at line {launch.lineno}" for i, launch in enumerate(launches, start=1))
        command.missing.append(f"which launch line is meant: {candidates}; {pick} was taken (--pick N)")
    return launches[pick - 1]
