"""The line for this project, from a launch script or a configuration of another framework.

    python tools/migrate.py train_gpt3.sh                       # a bash script, or a file with one line, of Megatron-LM
    python tools/migrate.py llama3_8b.toml --world-size 64      # torchtitan
    python tools/migrate.py config_tiny_llama.yaml              # nanotron
    python tools/migrate.py ds_config.json --with train.sh      # DeepSpeed, beside a launch line of Megatron-DeepSpeed
    python tools/migrate.py train_gpt3.sh --set DATA_PATH=data/corpus_text_document -- --tensor-model-parallel-size 4

It prints the command, what changed and why, and what could not be carried over. It reads files and runs nothing. Flags behind `--`
go into the line and count. The exit status is 0 if this project's rules accept the line, 1 if not, 2 if no line was found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_lab.commands.parser import ToolParser
from megatron_lab.migration import deepspeed, megatron, nanotron, torchtitan
from megatron_lab.migration.launcher import put_launcher, put_torchrun
from megatron_lab.migration.line import Line, report, with_own_flags
from megatron_lab.migration.shell import Launch, Script, is_known, shown

PROGRAM = "migrate.py"
_LARGEST = 1 << 22
"""Bytes of a file that is read."""
_ALWAYS_SET = ("PWD", "HOME", "USER")
"""Variables that every shell has."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    words = list(argv)
    own = words[words.index("--") + 1 :] if "--" in words else []
    asked = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    try:
        known = dict(_pair(text) for text in asked.set)
        line = _migrated(asked, known)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    with_own_flags(line, own)
    problems = line.settle()
    sys.stdout.write(report(line, problems))
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(PROGRAM, description=__doc__)
    parser.add_argument("file", help="script, line or configuration; - reads a line from the standard input")
    parser.add_argument("--from", dest="kind", choices=("megatron", "torchtitan", "nanotron", "deepspeed"), help="what the file is")
    parser.add_argument("--with", dest="beside", metavar="SCRIPT", help="the launch script beside a DeepSpeed configuration")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the job, where the file does not say it")
    variable = "value of a variable of the script; NAME is a number for an argument"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=variable)
    parser.add_argument("--pick", type=int, default=1, metavar="N", help="which launch line of a script that has several")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set {text}: it takes NAME=VALUE.")
    return name, value


def _migrated(asked: argparse.Namespace, known: Mapping[str, str]) -> Line:
    text = sys.stdin.read() if asked.file == "-" else _read(asked.file)
    kind = asked.kind or {".toml": "torchtitan", ".yaml": "nanotron", ".yml": "nanotron", ".json": "deepspeed"}.get(
        Path(asked.file).suffix, "megatron"
    )
    line = Line(world_size=asked.world_size)
    if kind == "deepspeed":
        if asked.beside is not None:
            _put_script(line, _read(asked.beside), Path(asked.beside), known, asked.pick, config=text)
        else:
            deepspeed.put_config(line, text)
            line.missing.append(
                "the model, data and rates: --with SCRIPT reads them from a launch script, flags behind -- add them"
            )
    elif kind == "megatron":
        _put_script(line, text, Path(asked.file), known, asked.pick)
    else:
        {"torchtitan": torchtitan, "nanotron": nanotron}[kind].put_config(line, text)
    if line.world_size is None:
        line.missing.append(
            f"--world-size N, the number of ranks: the rules were asked with {line.model_ranks}, one copy of the model"
        )
    if not line.launcher:
        put_torchrun(line)
    return line


def _read(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name} is no file.")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{name} is larger than a script or a configuration.")
    return path.read_text(encoding="utf-8", errors="replace")


def _put_script(line: Line, text: str, path: Path, known: Mapping[str, str], pick: int, config: str | None = None) -> None:
    script = Script(known=known).read(text)
    launch = _chosen(script, text, pick, line)
    put_launcher(line, launch.before)
    settings = megatron.put_flags(line, [*launch.argv])
    named = settings.get("deepspeed-config", ())
    if config is None and named:
        config = script.files.get(named[0])
        beside = path.parent / Path(shown(named[0])).name
        if config is None and is_known(named[0]) and beside.is_file():
            config = _read(str(beside))
        if config is None:
            line.missing.append(f"the DeepSpeed configuration {shown(named[0])}: give it as the file, with --with {path.name}")
    deepspeed.put_flags(line, settings)
    if config is not None:
        deepspeed.put_config(line, shown(config))
    if launch.program.rpartition("/")[2] not in ("pretrain_gpt.py", "pretrain_gpt_core.py"):
        line.changed.append(
            (shown(launch.program), "pretrain_gpt.py, which trains decoders; another kind of model is not trained here")
        )
    for name, made in script.unknown.items():
        if name not in _ALWAYS_SET:
            line.variables[name] = f"it is {made}; --set {name}=VALUE, or set it in the shell that runs the line"
    line.missing += [f"perhaps: {what}" for what in script.passed]
    line.changed += [(_called(name), f"{value or repr(value)}, its default (--set {name}=VALUE)") for name, value in _open(script)]
    line.words = {flag: tuple(map(shown, values)) for flag, values in line.words.items()}
    for pairs in (line.changed, line.left_out, line.lost):
        pairs[:] = [(shown(what), shown(why)) for what, why in pairs]
    line.launcher = tuple(map(shown, line.launcher))


def _open(script: Script) -> list[tuple[str, str]]:
    places = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "CUDA_DEVICE_MAX_CONNECTIONS")
    return [(name, value) for name, value in script.defaults.items() if name not in places]


def _called(name: str) -> str:
    return f"argument {name} of the script" if name.isdigit() else f"{name}, which the script leaves open"


def _chosen(script: Script, text: str, pick: int, line: Line) -> Launch:
    launches = script.launches
    if not launches and text.lstrip().startswith("--"):  # flags alone
        launches = Script(known=script.known).read(f"python pretrain_gpt.py {text}").launches
        launches = [Launch((), each.program, each.argv, each.line) for each in launches]
    if not launches:
        passed = "".join(f"\n  {what}" for what in script.passed)
        raise ValueError(f"No command was found that starts a Python program with flags.{passed}")
    if not 1 <= pick <= len(launches):
        raise ValueError(f"--pick {pick}: there are {len(launches)} launch lines.")
    if len(launches) > 1:
        places = ", ".join(f"{number} at line {each.line}" for number, each in enumerate(launches, start=1))
        line.missing.append(f"which launch line is meant: {places}; {pick} was taken (--pick N)")
    return launches[pick - 1]
