"""Prove that a layout trains like a single process, for the flags of your launch command.

    python tools/verify_layout.py <the flags of pretrain_gpt.py> [--world-size N]

The tool shrinks the model but keeps everything that matters for the layout. It trains the model for a few steps in float64 on local
CPU processes, and with a plain reference implementation in one process. It compares loss, every gradient and every weight. It needs
no GPU, launcher or data. The exit status is 0 if all is equal, 1 if anything differs or the layout does not run, 2 if the settings
are wrong or the result "equal" cannot be written, and 130 after an interrupt.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron.config.checks.finding import MODEL_PARALLEL_SIZES
from megatron.config.checks.single_settings import MAX_WORLD_SIZE
from megatron.config.cli import LoadedConfig, load, parse
from megatron.config.errors import ConfigError, Violation
from megatron.config.parsed_flags import is_count, split_argv
from megatron.config.regular_file import check_output
from megatron_lab.planner.vocabulary import assume_vocab_size
from megatron_lab.terminal import fill_help, fit_output_to_terminal

PROGRAM = "verify_layout.py"
HELP = """\
usage: python tools/verify_layout.py FLAGS [--world-size N] [--steps N] [--max-ranks N] [--quick] [--json FILE]
                                             [--reference self]
       python tools/verify_layout.py FLAGS --trace FILE
       python tools/verify_layout.py --trace FILE --trace FILE [--json FILE]

Prove that a layout trains like a single process. FLAGS are those of your launch command for pretrain_gpt.py; see its --help. The
tool shrinks the model but keeps everything that matters for the layout. It trains the model for a few steps in float64 on CPU
processes of this machine, and with a plain reference implementation in one process. It needs no GPU, launcher, dataset or
tokenizer file.

  --world-size N    Set the number of ranks of the job (default: tensor x pipeline size, that is data-parallel size 1).
  --steps N         Train N steps (default 4).
  --max-ranks N     Start at most N processes; larger layouts are reduced axis by axis (default 8).
  --quick           After a difference, do not search for the settings that cause it.
  --reference self  Compare with a run of the same code in one process. The plain reference, which is the default, does not know
                    modules that --imports registers.
  --json FILE       Also write the result as JSON, after it is printed.
  --trace FILE      Compare the run of this tool with a trace that an earlier run of it saved (--save-trace FILE among FLAGS).
                    Given twice, compare the two traces and run nothing; the only other flag is then --json.
  --help            Print this text.

Exit status: 0 equal, 1 different or failing, 2 bad settings, 130 interrupted. If all is equal but the report or the --json FILE
could not be written (a full disk), it is 2. If something differs, it is 1 in any case.
"""


@dataclass
class ToolOptions:
    """Values of the tool's own flags, which are not flags of the training run."""

    world_size: int | None = None
    steps: int = 4
    max_ranks: int = 8
    quick: bool = False
    reference: Literal["plain", "self"] = "plain"
    json: str | None = None
    traces: list[str] = field(default_factory=list)


_MAX_VALUES = {"world-size": MAX_WORLD_SIZE, "steps": 1000, "max-ranks": 64}
_FILE_FLAGS = ("json", "trace")
_REFERENCES = ("plain", "self")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit status: 0 if all is equal, 1 for a difference or a layout that does not run, 2 for wrong
    settings, 130 after an interrupt.

    Modules that need torch are imported only after the settings have been checked.
    """
    argv = sys.argv[1:] if argv is None else argv
    fit_output_to_terminal()
    try:
        with _resending_interrupts():
            return _run(argv)
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except KeyboardInterrupt:
        _kill_ranks()
        sys.stderr.write(f"{PROGRAM}: interrupted before it was done\n")
        return 130


def _run(argv: Sequence[str]) -> int:
    run_argv, options = split_options(argv)
    if run_argv is None:
        sys.stdout.write(fill_help(HELP))
        return 0
    if options.json is not None:
        _check_writable(options.json)
    if len(options.traces) == 2:
        return compare_traces(options)
    return prove_layout(*load_run_config(run_argv, options), options)


def split_options(argv: Sequence[str]) -> tuple[list[str] | None, ToolOptions]:
    """Separate the tool's own flags from the flags of the training run.

    Returns:
        The command line of the run, or None if help is requested; and the values of the tool's flags.

    Raises:
        ConfigError: a flag of the tool is invalid.
    """
    stray, items = split_argv(argv)
    options, run_argv, problems = ToolOptions(), list(stray), []
    for item in items:
        if item.name in ("help", "h"):
            return None, options
        if item.name == "quick" and not item.values:
            options.quick = True
        elif item.name in _MAX_VALUES and len(item.values) == 1 and is_count(item.values[0], _MAX_VALUES[item.name]):
            setattr(options, item.name.replace("-", "_"), int(item.values[0]))
        elif item.name == "trace" and len(item.values) == 1:
            options.traces.append(item.values[0])
        elif item.name == "json" and len(item.values) == 1:
            options.json = item.values[0]
        elif item.name == "reference" and len(item.values) == 1 and item.values[0] in _REFERENCES:
            options.reference = "self" if item.values[0] == "self" else "plain"
        elif item.name in ("quick", "reference", *_MAX_VALUES, *_FILE_FLAGS):
            max_value = _MAX_VALUES.get(item.name)
            expected = (
                f"one whole number from 1 to {max_value:,}" if max_value else "no value" if item.name == "quick" else "one file"
            )
            expected = "plain or self" if item.name == "reference" else expected
            problems.append(Violation((f"--{item.name}",), f"{item}: --{item.name} takes {expected}."))
        else:
            run_argv += [item.spelling, *item.values]
    problems += _check_traces(options, run_argv, [item.name for item in items if item.name in ("quick", "reference", *_MAX_VALUES)])
    if problems:
        raise ConfigError(problems)
    return run_argv, options


def _check_traces(options: ToolOptions, run_argv: Sequence[str], run_options: Sequence[str]) -> Iterator[Violation]:
    """Check the values of --trace, and that no other flag contradicts them. Yield the problems.

    Args:
        run_argv: flags of the training run; empty if the tool only compares two traces.
        run_options: names of the tool's flags on the command line that only matter for a run, such as quick.
    """
    if len(options.traces) > 2 or (len(options.traces) == 2 and run_argv):
        message = "Two --trace files can only be used with --json. To compare a run with a trace, give its flags and one --trace."
        yield Violation(("--trace",), message)
    elif len(options.traces) == 2 and run_options:
        names = " and ".join(f"--{name}" for name in dict.fromkeys(run_options))
        message = f"Two --trace files are compared and nothing is run: leave out {names}."
        yield Violation(("--trace",), message)
    if len(options.traces) == 1 and not run_argv:
        message = "One --trace is compared with a run: add the flags of the run, or a second --trace to compare with."
        yield Violation(("--trace",), message)
    if options.json is not None and any(os.path.realpath(options.json) == os.path.realpath(trace) for trace in options.traces):
        yield Violation(("--json", "--trace"), f"--json {options.json} would be written over the --trace. Give another file.")


def load_run_config(run_argv: Sequence[str], options: ToolOptions) -> tuple[LoadedConfig, int]:
    """Return the settings of the training run and its number of ranks: that of --world-size, or else the number of ranks of one
    model replica.

    Raises:
        ConfigError: the settings are invalid. The message lists all problems.
    """
    world_size = options.world_size
    if world_size is None:
        try:
            parallel = parse(run_argv).parallel
            world_size = max(1, math.prod(getattr(parallel, field) for field in MODEL_PARALLEL_SIZES))
        except ConfigError:
            world_size = 1  # `load` reports this problem and all others
    loaded = load(run_argv, world_size)
    if loaded.dry_run is not None:
        raise ConfigError(
            [
                Violation(
                    ("--dry-run",),
                    "--dry-run works only with pretrain_gpt.py: this tool always runs the settings to prove. Remove --dry-run.",
                )
            ]
        )
    config, notes = assume_vocab_size(loaded.config)
    return replace(loaded, config=config, notes=tuple(notes)), world_size


def compare_traces(options: ToolOptions) -> int:
    """Compare the two trace files of --trace, print the report and return the exit status: 1 if they differ, otherwise 0.

    Raises:
        ValueError: the traces cannot be read or compared.
    """
    from megatron_lab.proofs.traces import build_traces_json, compare_files, format_traces

    comparison = compare_files(*options.traces)
    return _report_result(
        format_traces(comparison, *options.traces),
        options,
        build_traces_json(comparison, *options.traces),
        1 if comparison.differs else 0,
    )


def prove_layout(loaded: LoadedConfig, world_size: int, options: ToolOptions) -> int:
    """Run the layout and the reference implementation, compare their results, print the report and return the exit status.

    With --trace, also compare the results of the layout with those in the trace.

    Raises:
        ValueError: the layout cannot be run, or cannot be compared with the trace.
    """
    if (save_path := loaded.config.debug.save_trace) is not None:
        check_output("--save-trace", save_path)
    from megatron_lab.proofs.report import build_report_json, format_report
    from megatron_lab.proofs.verify import Effort, get_vocab_size, verify_layout

    start = time.monotonic()
    vocab_size = get_vocab_size(loaded.config.data)
    effort = Effort(steps=options.steps, max_ranks=options.max_ranks, finds_cause=not options.quick, reference=options.reference)
    proofs = verify_layout(loaded.config, world_size, vocab_size, effort, trace=options.traces[0] if options.traces else None)
    lines = [*format_report(proofs), *loaded.notes, f"all together {time.monotonic() - start:.1f} s"]
    status = 0 if all(proof.equal and not proof.differs_from_trace for proof in proofs) else 1
    return _report_result(lines, options, build_report_json(proofs), status)


def _report_result(lines: Sequence[str], options: ToolOptions, report: Mapping[str, Any], status: int) -> int:
    """Print the report, then write it to the file of --json. In this order the user sees the result even if the file cannot be
    written.

    Args:
        lines: the report as text.
        report: the report as a JSON object.
        status: exit status that the comparison gives: 0 if all is equal, 1 if not.

    Returns:
        The exit status: 2 if the status is 0 but the report could not be printed or written, otherwise `status`.
    """
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python flushes at exit and fails
        if not isinstance(error, BrokenPipeError):  # a closed pipe, as in `| head`, is no error
            sys.stderr.write(f"{PROGRAM}: the report could not be printed ({error.strerror}): {lines[0]}\n")
            status = status or 2
    if options.json is not None:
        try:
            Path(options.json).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            message = (
                f"--json {options.json} could not be written whole ({error.strerror}). The printed result is valid. Free disk space"
            )
            sys.stderr.write(f"{PROGRAM}: {message}, or give another file.\n")
            status = status or 2
    return status


@contextlib.contextmanager
def _resending_interrupts() -> Iterator[None]:
    """Return a context manager in which no interrupt (Ctrl-C) is lost: if Python ignores an interrupt, it is sent again a moment
    later.

    While Python forks a process, it runs hooks and ignores exceptions that are raised in them. An interrupt that arrives while a
    rank is forked may be raised there.
    """
    original_hook = sys.unraisablehook

    def resend_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return original_hook(unraisable)
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        timer = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = resend_interrupt
    try:
        yield
    finally:
        sys.unraisablehook = original_hook


def _kill_ranks() -> None:
    """Kill the processes of ranks that were being started when an interrupt arrived. All other ranks have ended already."""
    if children := multiprocessing.active_children():
        from megatron_lab.verification.local_ranks import kill_process_group

        for process in children:
            if process.pid is not None:
                kill_process_group(process.pid)


def _check_writable(path: str) -> None:
    """Check that the file of --json can be written, before the run starts.

    A missing file is created and removed again, because the run may not come to its end. A named pipe is not opened, because its
    reader would take the end of this check for the end of the report.

    Raises:
        ValueError: the file cannot be written.
    """
    existed = os.path.lexists(path)
    if Path(path).is_fifo():
        return
    try:
        Path(path).open("a").close()
        if not existed:
            Path(path).unlink()
    except OSError as error:
        raise ValueError(
            f"--json {path} cannot be written ({error.strerror}). Give a path of a file in a folder that you may write to."
        ) from error
