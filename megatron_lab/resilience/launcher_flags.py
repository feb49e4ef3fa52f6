"""Flags of the launcher for one node: --nproc, the number of ranks, and --log-dir, the folder for their log files. Does not import
torch when it is imported."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.config.cli import parse
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.launcher import PROGRAM, describe_current_launcher, end_with_message
from megatron.config.outputs import get_run_folder
from megatron.config.parsed_flags import LAUNCHER_FLAGS
from megatron.training.signals import EXIT_REFUSED
from megatron_lab.resilience.rank_output import get_log_file

_AUTO, _GPU, _CPU = "auto", "gpu", "cpu"
_MAX_RANKS = 9_999
_NPROC_VALUES = (
    "It takes the number of ranks of this node, such as 8; or gpu (one rank for each CUDA device), cpu (one for each CPU core), or "
    "auto (one for each CUDA device, and a single rank without CUDA devices)."
)


@dataclass(frozen=True)
class LauncherFlags:
    """Command line of the launcher: the values of its own flags, and the flags of the ranks."""

    nproc: str
    """Number of ranks as text, or "auto", "gpu" or "cpu"."""
    log_dir: str | None
    flags: list[str]


def parse_launcher_flags(argv: Sequence[str]) -> LauncherFlags:
    """Separate the flags of the launcher from those of the ranks.

    Raises:
        SystemExit: with code 2, if a flag of the launcher has no valid value, or another launcher has started this process.
    """
    values: dict[str, str] = {}
    flags: list[str] = []
    remaining = list(argv)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith("--") or name[2:] not in LAUNCHER_FLAGS:
            flags.append(word)
        elif equals:
            values[name] = value
        else:
            values[name] = remaining.pop(0) if remaining and not remaining[0].startswith("--") else ""
    nproc, log_dir = values.get("--nproc"), values.get("--log-dir")
    if nproc is None:
        refuse(
            "--log-dir needs --nproc N: it sets the folder for the log files of the ranks that --nproc starts. For the log of "
            "TensorBoard, use --tensorboard-dir."
        )
    launcher = describe_current_launcher()
    if launcher is not None:
        refuse(f"--nproc starts the ranks itself, but {launcher} has already started this process as a rank. Remove --nproc.")
    is_number = nproc.isascii() and nproc.isdigit() and 0 < int(nproc[:6]) <= _MAX_RANKS
    if nproc not in (_AUTO, _GPU, _CPU) and not is_number:
        refuse(f"--nproc {nproc} is not valid. {_NPROC_VALUES}" if nproc else f"--nproc has no value. {_NPROC_VALUES}")
    if log_dir == "":
        refuse("--log-dir has no value. It takes the folder for the log files of the ranks.")
    return LauncherFlags(nproc, log_dir, flags)


def count_ranks(args: LauncherFlags) -> int:
    """Return the number of ranks that --nproc stands for.

    Raises:
        SystemExit: with code 2, if the flags cannot be parsed, or "gpu" is requested but the ranks cannot use a CUDA device.
    """
    if args.nproc not in (_AUTO, _GPU, _CPU):
        return int(args.nproc)
    if args.nproc == _CPU:
        from megatron_lab.cluster.node_info import count_cores

        return count_cores()
    try:
        uses_cpu = parse(args.flags).parallel.device == "cpu"
    except ConfigError as error:
        refuse(str(error))
    num_devices = 0 if uses_cpu else count_devices()
    if num_devices:
        return num_devices
    reason = "--device is cpu" if uses_cpu else "torch sees no CUDA device on this machine"
    if args.nproc == _GPU:
        refuse(f"--nproc gpu: {reason}. Use --nproc cpu, or a number of ranks.")
    sys.stderr.write(f"{PROGRAM}: --nproc auto starts 1 rank, because {reason}\n")
    return 1


def check_devices(num_ranks: int, config: Config) -> None:
    """Check that each rank gets its own device, and that the node has enough CPU cores to start the ranks in reasonable time.

    Raises:
        SystemExit: with code 2, if there are CUDA devices, but fewer than ranks, or far more ranks than CPU cores.
    """
    from megatron_lab.cluster.node_info import RANKS_PER_CORE, count_cores

    max_ranks = RANKS_PER_CORE * count_cores()
    if num_ranks > max_ranks:
        refuse(f"--nproc {num_ranks}: this machine starts at most {max_ranks} ranks ({RANKS_PER_CORE} per CPU core). Use fewer.")
    num_devices = 0 if config.parallel.device == "cpu" else count_devices()
    if 0 < num_devices < num_ranks:
        refuse(
            f"{num_ranks} ranks need {num_ranks} devices, but torch sees {num_devices} CUDA "
            f"{'device' if num_devices == 1 else 'devices'} on this machine. Use --nproc {num_devices}, or --device cpu."
        )


def count_devices() -> int:
    """Return the number of CUDA devices that torch sees. A forked process counts them, because CUDA must not be initialized in the
    process from which the ranks are forked."""
    import torch

    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.write(write_fd, str(torch.cuda.device_count()).encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return int(text or 0)


def create_log_folder(log_dir: str | None, config: Config) -> Path:
    """Create the folder for the log files of the ranks.

    The folder is that of --log-dir, or else a new folder `logs/TIME` in the run's folder (--save, or --tensorboard-dir). Without a
    folder to which this user can write, it is a new temporary folder.

    Raises:
        SystemExit: with code 2, if the folder of --log-dir cannot be written.
    """
    if log_dir is not None:
        folder = Path(log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            get_log_file(folder, 0).touch()
        except OSError as error:
            refuse(
                f"--log-dir {log_dir}: cannot write there ({error.strerror}). Give a folder that this user can create and write."
            )
        return folder
    run_folder = get_run_folder(config.checkpoint, config.logging)
    with suppress(OSError):
        if run_folder is not None:
            name = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
            for suffix in ("", *(f"-{i}" for i in range(2, 100))):  # another start may have taken the name in the same second
                folder = Path(run_folder) / "logs" / f"{name}{suffix}"
                with suppress(FileExistsError):
                    folder.mkdir(parents=True)
                    return folder
    return Path(tempfile.mkdtemp(prefix="megatron-logs-"))


def refuse(message: str) -> NoReturn:
    """Report wrong flags, and exit with the code for refused settings."""
    end_with_message(message)
    sys.exit(EXIT_REFUSED)
