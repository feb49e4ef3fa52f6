"""Environment variables of the launcher: rank and world size of this process, rendezvous of the ranks, the file for the message of
a rank that fails, and commands for child processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.config.errors import ConfigError, Violation

PROGRAM = "pretrain_gpt.py"
"""Name of the program at the start of its messages."""
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that end every run early: schedulers, launchers, closed terminals and Ctrl-C send them."""


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


def describe_current_launcher(env: Mapping[str, str] = os.environ) -> str | None:
    """Return a text that names the launcher which has started this process as one of several ranks, or None without a launcher."""
    if "RANK" in env:
        return f"another launcher (such as torchrun; RANK is {env['RANK'][:40]} in the environment)"
    for names in _LAUNCHER_VARIABLES:
        num_processes = env.get(names["WORLD_SIZE"], "1")
        if num_processes != "1":
            return f"another launcher ({names['WORLD_SIZE']} is {num_processes[:40]} in the environment)"
    return None


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


# ---- Messages of ranks that fail.
#
# torchrun names a file for each rank in the environment. Its report ends with the text in the file of the rank that failed first.

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file into which a failing rank writes its message. The files of the ranks of a node are
`FOLDER/LOCAL_RANK/error.json`, as torch.distributed.elastic creates them."""
_ERROR_FILE = "error.json"
_CONSEQUENCE_KEY = "is_consequence"
"""Key in an error file, besides torchrun's keys `message` and `timestamp`."""
_MAX_ROWS, _COLUMNS = 14, 80
"""Size of a terminal, in rows and columns, that the message in an error file may fill: 24 rows without the lines of torchrun."""
_REPORT_PREFIX = "  traceback : "
"""Text that precedes the message in the report of torchrun."""
_SPEAKER_PATIENCE_S = 5.0
"""Seconds to wait for the rank that reports an error for all ranks of its node."""
_CAUSE_PATIENCE_S = 1.0
"""Seconds to wait for the message of the rank that failed first."""
_CONSEQUENCE_DELAY_S = 10
"""Seconds added to the time of a message about a consequence, because torchrun reports the message with the earliest time, in whole
seconds."""


def end_with_message(message: str) -> None:
    """Report an error that all ranks of the job raise with the same message: rank 0 prints the message, and the first rank of each
    node writes the message to the error file of this rank. The caller then ends the process.

    The other ranks of a node wait until the error file of the first rank exists. A launcher would otherwise report another rank as
    the rank that failed first.
    """
    if is_first_rank():
        write_message(message)
    folder = _find_error_folder()
    first_file = None if folder is None else folder / "0" / _ERROR_FILE
    if first_file is None or _read_local_rank() == "0":
        write_error_file(message)
    elif _wait_until(first_file.exists, _SPEAKER_PATIENCE_S):
        write_error_file("the message is that of the first rank of this node", is_consequence=True)
    else:
        write_error_file(message)


def end_with_consequence(message: str) -> None:
    """Report an error that is a consequence of another rank's failure, such as lost contact with that rank. The caller then ends
    the process.

    Nothing is printed if a rank of this node reports the cause, or has already printed a consequence. Without error files, this
    rank cannot know, and prints.
    """
    has_cause = _find_error_folder() is not None and _wait_until(has_failed_neighbor, _CAUSE_PATIENCE_S)
    if not has_cause and _claim_consequence():
        write_message(message)
    write_error_file(message, is_consequence=True)


def has_failed_neighbor() -> bool:
    """Return whether another rank of this node has written an error file, and its error is not the consequence of a failure of
    another rank. The launcher then ends this rank too."""
    folder = _find_error_folder()
    if folder is None:
        return False
    neighbors = (file for file in folder.glob(f"*/{_ERROR_FILE}") if file.parent.name != _read_local_rank())
    return any(error is not None and not error.is_consequence for error in map(read_error_file, neighbors))


@dataclass(frozen=True)
class ErrorReport:
    """Content of a rank's error file."""

    message: str
    is_consequence: bool
    """Whether the cause is outside of the rank: the failure of another rank, or a signal."""


def read_error_file(file: Path) -> ErrorReport | None:
    """Read the error file of a rank. Return None if the rank has not written one."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        return ErrorReport(str(content["message"]), bool(content.get(_CONSEQUENCE_KEY)))
    return None


def _claim_consequence() -> bool:
    """Return whether this rank is the first of its node that prints a consequence of another rank's failure."""
    folder = _find_error_folder()
    if folder is None:
        return True
    try:
        os.close(os.open(folder / "consequence", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def write_message(message: str) -> None:
    """Print a message of the program to stderr."""
    with suppress(OSError, ValueError):  # the pipe may be closed or the disk full
        sys.stderr.write(f"{PROGRAM}: {message}\n")
        sys.stderr.flush()


def write_error_file(message: str, *, is_consequence: bool = False) -> None:
    """Write the message with which this rank ends to its error file, if the launcher has named one. A message about a consequence
    does not replace one about its cause.

    Args:
        message: the message; it is shortened to a part of a terminal of 24 rows and 80 columns.
        is_consequence: whether the cause is outside of this rank: the failure of another rank, or a signal.
    """
    file = _find_error_file()
    if file is not None and not (is_consequence and read_error_file(file) is not None):
        with suppress(OSError):
            temporary_file = file.with_suffix(".new")
            content = {
                "message": _shorten(message),
                "timestamp": str(int(time.time()) + is_consequence * _CONSEQUENCE_DELAY_S),
                _CONSEQUENCE_KEY: is_consequence,
            }
            temporary_file.write_text(json.dumps(content))
            temporary_file.replace(file)


def is_under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def write_message_after_torchrun(message: str) -> None:
    """Print a message to stderr when the torchrun of this node has ended. After a signal, torchrun ends with a long traceback that
    would hide any earlier message.

    A shell waits for torchrun for at most a minute, in the background. Only the first rank of a node prints, and only under
    torchrun.
    """
    torchrun_pid = os.getppid()
    if not is_under_torchrun() or _read_local_rank() != "0" or torchrun_pid == 1:  # 1: torchrun has already been killed
        return
    script = 'n=0; while kill -0 "$1" 2>/dev/null && [ "$n" -lt 600 ]; do sleep 0.1; n=$((n + 1)); done; printf "%s\\n" "$2" >&2'
    with suppress(OSError):
        subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(torchrun_pid), f"{PROGRAM}: {message}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def _shorten(message: str) -> str:
    """Break the lines of a message at 80 columns, and remove its last lines if there are too many."""
    rows: list[str] = []
    lines = (_REPORT_PREFIX + message).splitlines()
    for index, line in enumerate(lines):
        indent = " " * (0 if not rows else len(line) - len(line.lstrip()))
        line_rows = textwrap.wrap(line, _COLUMNS, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [""]
        if len(rows) + len(line_rows) > _MAX_ROWS - (index + 1 < len(lines)):
            rows += line_rows[: _MAX_ROWS - 1] if not rows else []
            rows.append(f"  ... (the complete message is in the log: {len(lines) - index} more lines)")
            break
        rows += line_rows
    return "\n".join(rows).removeprefix(_REPORT_PREFIX)


def _find_error_file() -> Path | None:
    """Return the path of the error file of this rank. None if the launcher does not name one."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    return Path(path) if path else None


def _find_error_folder() -> Path | None:
    """Return the folder that contains the error files of all ranks of this node. None if the launcher does not name an error file,
    or has arranged the files in another way than torchrun."""
    file = _find_error_file()
    if file is None or file.parts[-2:] != (_read_local_rank(), _ERROR_FILE):
        return None
    return file.parents[1]


def _read_local_rank() -> str:
    return os.environ.get("LOCAL_RANK", "0")


def _wait_until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition is true, for a maximum time in seconds. Returns whether it is true."""
    deadline = time.monotonic() + timeout_s
    while not (result := is_true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


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
