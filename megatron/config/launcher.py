"""Environment variables of the launcher: rank and world size of this process, rendezvous of the ranks, and commands for child
processes."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.config.errors import ConfigError, Violation


@dataclass(frozen=True)
class ProcessInfo:
    """Rank of a process and size of its job. Without a launcher, a job has one process."""

    rank: int
    local_rank: int
    world_size: int


def read_process_info() -> ProcessInfo:
    """Read rank, local rank and world size from the environment variables RANK, LOCAL_RANK and WORLD_SIZE. Without them, the
    process is the only one.

    Raises:
        ConfigError: the value of a variable is not an integer.
    """
    problems: list[Violation] = []

    def read_int(name: str, default: int) -> int:
        text = os.environ.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d{1,30}", text):
            reason = "A launcher such as torchrun sets it; without a launcher, remove it from the environment."
            problems.append(Violation((), f"{name} in the environment is {text[:40]!r}, which is not an integer.", reason))
            return default
        return int(text)

    info = ProcessInfo(read_int("RANK", 0), read_int("LOCAL_RANK", 0), read_int("WORLD_SIZE", 1))
    if problems:
        raise ConfigError(problems)
    return info


def is_first_rank() -> bool:
    """Return whether this process is rank 0, which prints messages that are the same on all ranks."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdigit() or not int(rank)  # with an invalid value, every process reports the problem


class Rendezvous(NamedTuple):
    """Address at which the ranks of a job meet: a host and a port, or a file. If all fields are empty, the address is read from
    MASTER_ADDR and MASTER_PORT in the environment."""

    host: str = ""
    port: int = 0
    file: str = ""


def parse_init_method(init_method: str) -> Rendezvous | None:
    """Parse the value of --init-method: env://, tcp://HOST:PORT or file:///PATH. Returns None if the value is invalid."""
    if init_method == "env://":
        return Rendezvous()
    if match := re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", init_method):
        return Rendezvous(match[1].strip("[]"), int(match[2])) if 0 < int(match[2]) < 1 << 16 else None
    match = re.fullmatch(r"file://(/.*[^/])", init_method)
    return Rendezvous(file=match[1]) if match else None


_LAUNCHER_VARIABLES = (
    {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"},
    {"RANK": "OMPI_COMM_WORLD_RANK", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"},
)
"""Variables of srun and mpirun that correspond to those of torchrun."""


def adopt_launcher(argv: Sequence[str], env: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE from the variables of srun or mpirun, unless the launcher has set them. Set MASTER_ADDR
    and MASTER_PORT from a tcp:// address.

    With --init-method env:// (the default), nothing is set, because srun may then have started one launcher per node. This launcher
    would take the node's variables for those of a rank.

    Args:
        argv: command line, from which --init-method is read.
        env: environment variables to read and change.
    """
    rendezvous = _find_rendezvous(argv)
    if rendezvous is None or rendezvous == Rendezvous():
        return
    if rendezvous.host:  # for code that reads the address of the first node
        env["MASTER_ADDR"], env["MASTER_PORT"] = rendezvous.host, str(rendezvous.port)
    if "RANK" in env or "WORLD_SIZE" in env:
        return
    for names in _LAUNCHER_VARIABLES:
        if all(launcher_name in env for launcher_name in names.values()):
            env.update({standard_name: env[launcher_name] for standard_name, launcher_name in names.items()})
            return


def _find_rendezvous(argv: Sequence[str]) -> Rendezvous | None:
    rendezvous = None
    for word, next_word in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--init-method":
            rendezvous = parse_init_method(value if equals else next_word)
    return rendezvous


def describe_missing_rank(init_method: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the error message if --init-method names a rendezvous but the environment does not define the rank; otherwise None."""
    absent = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if parse_init_method(init_method) in (None, Rendezvous()) or not absent:
        return None
    names = f"{' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} not set in the environment"
    return (
        f"--init-method {init_method}: {names}. Set RANK (from 0 on), LOCAL_RANK and WORLD_SIZE for each process, or start "
        "the processes by torchrun, srun or mpirun, which set them."
    )


# ---- Commands for child processes that run a module of `megatron`, installed or not, from any working directory.

_ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains `megatron`."""


def build_module_command(module: str, *args: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables that run a module of this project in a child process.

    Python's option -P keeps files of the working directory from being imported as modules. With -P, Python does not find a source
    tree that is not installed either, so its folder is put into PYTHONPATH. The folder of an installed package is not: all packages
    in it would precede Python's own modules.

    Args:
        module: dotted name of the module.
        args: arguments of the command, converted to text.
    """
    is_installed = str(_ROOT) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    paths = [*([] if is_installed else [str(_ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *map(str, args)], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
