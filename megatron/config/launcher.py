"""The launcher's variables in the environment: which process this is, and how many there are."""

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
class Launched:
    """One process of a job; without a launcher, the only one."""

    rank: int
    local_rank: int
    world_size: int


def launched() -> Launched:
    """Read which process this is.

    Raises:
        ConfigError: a variable is no whole number.
    """
    problems: list[Violation] = []

    def number(name: str, default: int) -> int:
        text = os.environ.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d{1,30}", text):
            rule = "A launcher such as torchrun sets it; without a launcher leave it out of the environment."
            problems.append(Violation((), f"{name} in the environment is {text[:40]!r}, which is no whole number.", rule))
            return default
        return int(text)

    found = Launched(number("RANK", 0), number("LOCAL_RANK", 0), number("WORLD_SIZE", 1))
    if problems:
        raise ConfigError(problems)
    return found


def is_first_rank() -> bool:
    """Whether this process is the one that tells what all find."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdigit() or not int(rank)  # what is no number is a problem to be told


class Place(NamedTuple):
    """Where the ranks of a job meet; as the environment says, if both are empty."""

    host: str = ""
    port: int = 0
    file: str = ""


def read_place(init_method: str) -> Place | None:
    """What --init-method names; None if it names nothing."""
    if init_method == "env://":
        return Place()
    if match := re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", init_method):
        return Place(match[1].strip("[]"), int(match[2])) if 0 < int(match[2]) < 1 << 16 else None
    match = re.fullmatch(r"file://(/.*[^/])", init_method)
    return Place(file=match[1]) if match else None


_OTHER_LAUNCHERS = (
    {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"},
    {"RANK": "OMPI_COMM_WORLD_RANK", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"},
)
"""Where srun and mpirun say what torchrun says."""


def adopt_launcher(argv: Sequence[str], variables: MutableMapping[str, str] = os.environ) -> None:
    """Take rank and number of ranks from srun's or mpirun's variables, where a command line says by --init-method that no torchrun
    set RANK and WORLD_SIZE. (Without it they would be taken by programs that srun starts once a node, to start ranks there.)"""
    place = _place_in(argv)
    if place is None or place == Place():
        return
    if place.host:  # so that what asks for the first node finds it
        variables["MASTER_ADDR"], variables["MASTER_PORT"] = place.host, str(place.port)
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return
    for names in _OTHER_LAUNCHERS:
        if all(theirs in variables for theirs in names.values()):
            variables.update({ours: variables[theirs] for ours, theirs in names.items()})
            return


def _place_in(argv: Sequence[str]) -> Place | None:
    found = None
    for word, following in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--init-method":
            found = read_place(value if equals else following)
    return found


def missing_rank(init_method: str, variables: Mapping[str, str] = os.environ) -> str | None:
    """What to say where ranks are to meet and nothing says which this is."""
    absent = [name for name in ("RANK", "WORLD_SIZE") if name not in variables]
    if read_place(init_method) in (None, Place()) or not absent:
        return None
    names = f"{' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} not set in the environment"
    return (
        f"--init-method {init_method}: {names}. Set RANK (from 0 on), LOCAL_RANK and WORLD_SIZE for each process, or start it by "
        "torchrun, srun or mpirun, which do."
    )


# ---- Start of child processes that run a module of `megatron`, installed or not, from any working directory.

_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `megatron`."""


def module_start(module: str, *args: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a module.

    -P keeps Python from taking a file of the working directory, or of another program there, for a module. It also hides a checkout
    that is not installed, so PYTHONPATH names it. An installed package gets no entry: it would come before Python's own modules.
    """
    is_installed = str(_ROOT) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    paths = [*([] if is_installed else [str(_ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *map(str, args)], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
