"""Requests after `--` of tools/migrate.py that print something, such as --dry-run: they are run with the converted flags."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from megatron.config.flags import find_flag
from megatron.config.launcher import build_module_command
from megatron.config.parsed_flags import LIST_NAME, REQUESTS, GivenFlag, split_argv
from megatron_lab.migration.launch_command import LaunchCommand, add_flags, format_conversion

_SETTING_REQUESTS = ("model", "recipe", "config")
"""Requests that set flags of the run, and print nothing unless their value is `list`."""
_HELP = ("help", "h")
_SIGNAL_EXIT_CODE = 128
"""Exit status of a shell for a program that a signal ended, without the number of the signal."""


def find_print_requests(argv: Sequence[str]) -> list[str]:
    """Return the flags of a command line with which pretrain_gpt.py prints something instead of training, such as --dry-run."""
    return [item.spelling for item in split_argv(argv)[1] if _is_print_request(item)]


def _is_print_request(item: GivenFlag) -> bool:
    if item.name in _SETTING_REQUESTS:
        return item.values[:1] == (LIST_NAME,)
    return item.name in _HELP or item.name in ("dry-run", "plan", "print-config", "version", "explain")


def run_print_request(command: LaunchCommand, argv: Sequence[str]) -> int:
    """Run pretrain_gpt.py with the flags of a converted command and a request, in one process on this machine.

    Messages about the conversion are printed to stderr before. Variables of the shell are replaced by their values, as a shell
    would do. A plan has the number of ranks of the converted launcher.

    Args:
        command: converted command. The flags after `--` are added to it.
        argv: words after `--`.

    Returns:
        the exit status of pretrain_gpt.py.
    """
    request_argv: list[str] = []
    names = set()
    for item in split_argv(argv)[1]:
        words = [item.spelling, *item.values]
        names.add(item.name)
        if (item.name in _SETTING_REQUESTS and not _is_print_request(item)) or (
            find_flag(item.name) is not None and item.name not in REQUESTS
        ):
            add_flags(command, words)
        else:
            request_argv += words
    if "dry-run" in names and "world-size" not in names:
        request_argv += ["--world-size", str(command.world_size or command.model_parallel_size)]
    if "plan" in names and "gpus" not in names and command.world_size is not None:
        request_argv += ["--gpus", str(command.world_size)]
    if names & {"dry-run", "plan", "print-config"}:
        command.find_violations()  # removes flags without an effect; pretrain_gpt.py reports the violations
        sys.stderr.write(format_conversion(command))
    sys.stdout.flush()
    run_argv = [os.path.expandvars(word) for word in command.build_argv()]
    program, environment = build_module_command("pretrain_gpt", *run_argv, *request_argv)
    code = subprocess.run(program, env=environment, check=False).returncode
    return code if code >= 0 else _SIGNAL_EXIT_CODE - code
