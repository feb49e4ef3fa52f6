"""Prove that a layout trains as one process does, for the flags that you launch with.

    python tools/verify_layout.py <the flags of pretrain_gpt.py> [--world-size N]

The model is made small, keeping what matters of the layout, and trained for a few steps in float64 on local CPU processes, and in
one process by a plain reference. Loss, every gradient and every weight are compared. No GPU, no launcher and no data are needed.
The exit status is 0 if all is equal, 1 if anything differs or the layout does not run, 2 if the settings are wrong or what is equal
cannot be written, 130 if it is interrupted.
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

from megatron.config.checks.each import LARGEST_WORLD
from megatron.config.checks.finding import RANKS
from megatron.config.cli import LoadedConfig, load, parse
from megatron.config.errors import ConfigError, Violation
from megatron.config.given import check_output, is_count, split
from megatron.config.settle import with_vocabulary

PROGRAM = "verify_layout.py"
HELP = """\
usage: python tools/verify_layout.py FLAGS [--world-size N] [--steps N] [--max-ranks N] [--quick] [--json FILE]
                                             [--reference self]
       python tools/verify_layout.py FLAGS --trace FILE
       python tools/verify_layout.py --trace FILE --trace FILE [--json FILE]

Prove that a layout trains as one process does. FLAGS are those of pretrain_gpt.py, as you launch it; see its --help. The model is
made small, keeping what matters of the layout, and trained for a few steps in float64 on CPU processes of this machine, and by a
plain reference in one process. No GPU, launcher, dataset or tokenizer file is needed.

  --world-size N   ranks of the job; by default tensor x pipeline size, that is data size 1
  --steps N        steps to train; by default 4
  --max-ranks N    processes to run at most; larger layouts are reduced axis by axis; by default 8
  --quick          when something differs, do not look for the settings with which it comes and goes
  --reference self compare with a run of the same code in one process, not with the plain reference, which does not know what
                   modules of --imports register
  --json FILE      write what is found as JSON too, after it is printed
  --trace FILE     compare with a trace that --save-trace wrote; given twice, compare the two and run nothing: then no flag goes
                   with it but --json.
                   With FLAGS, what this tool runs is compared with a trace that it saved before (--save-trace FILE among FLAGS)
  --help           print this

exit status: 0 equal, 1 different or failing, 2 bad settings, 130 interrupted. Where all is equal but the report or the --json
FILE could not be written (a full disk), it is 2; what is different stays 1.
"""


@dataclass
class Own:
    """The tool's own flags."""

    world_size: int | None = None
    steps: int = 4
    max_ranks: int = 8
    quick: bool = False
    reference: Literal["plain", "self"] = "plain"
    json: str | None = None
    traces: list[str] = field(default_factory=list)


_NUMBERS = {"world-size": LARGEST_WORLD, "steps": 1000, "max-ranks": 64}
_FILES = ("json", "trace")
_REFERENCES = ("plain", "self")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status. Nothing that needs torch is imported before the settings are known to be right."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with _interrupts_kept():
            return _run(argv)
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except KeyboardInterrupt:
        _end_ranks()
        sys.stderr.write(f"{PROGRAM}: interrupted before it was done\n")
        return 130


def _run(argv: Sequence[str]) -> int:
    rest, own = take(argv)
    if rest is None:
        sys.stdout.write(HELP)
        return 0
    if own.json is not None:
        _try_to_write(own.json)
    if len(own.traces) == 2:
        return compare(own)
    return verify(*settings(rest, own), own)


def take(argv: Sequence[str]) -> tuple[list[str] | None, Own]:
    """Part the tool's own flags from those of the run.

    Returns:
        the flags of the run, None where help is asked for; and the tool's own.

    Raises:
        ConfigError: the tool's own are wrong.
    """
    stray, given = split(argv)
    own, rest, problems = Own(), list(stray), []
    for item in given:
        if item.name in ("help", "h"):
            return None, own
        if item.name == "quick" and not item.values:
            own.quick = True
        elif item.name in _NUMBERS and len(item.values) == 1 and is_count(item.values[0], _NUMBERS[item.name]):
            setattr(own, item.name.replace("-", "_"), int(item.values[0]))
        elif item.name == "trace" and len(item.values) == 1:
            own.traces.append(item.values[0])
        elif item.name == "json" and len(item.values) == 1:
            own.json = item.values[0]
        elif item.name == "reference" and len(item.values) == 1 and item.values[0] in _REFERENCES:
            own.reference = "self" if item.values[0] == "self" else "plain"
        elif item.name in ("quick", "reference", *_NUMBERS, *_FILES):
            most = _NUMBERS.get(item.name)
            takes = f"one whole number from 1 to {most:,}" if most else "no value" if item.name == "quick" else "one file"
            takes = "plain or self" if item.name == "reference" else takes
            problems.append(Violation((f"--{item.name}",), f"{item}: --{item.name} takes {takes}."))
        else:
            rest += [item.spelled, *item.values]
    problems += _trace_problems(own, rest, [item.name for item in given if item.name in ("quick", "reference", *_NUMBERS)])
    if problems:
        raise ConfigError(problems)
    return rest, own


def _trace_problems(own: Own, rest: Sequence[str], of_a_run: Sequence[str]) -> Iterator[Violation]:
    """What does not go with the traces that are given.

    Args:
        of_a_run: which of the tool's own flags say how to run.
    """
    if len(own.traces) > 2 or (len(own.traces) == 2 and rest):
        told = "Two --trace files are compared without any other flags but --json, one with what the flags of a run give."
        yield Violation(("--trace",), told)
    elif len(own.traces) == 2 and of_a_run:
        names = " and ".join(f"--{name}" for name in dict.fromkeys(of_a_run))
        told = f"Two --trace files are compared and nothing is run, so there is nothing that {names} could say. Leave that out."
        yield Violation(("--trace",), told)
    if len(own.traces) == 1 and not rest:
        told = "One --trace is compared with a run, whose flags are missing here; two are compared with each other."
        yield Violation(("--trace",), told)
    if own.json is not None and any(os.path.realpath(own.json) == os.path.realpath(trace) for trace in own.traces):
        yield Violation(("--json", "--trace"), f"--json {own.json} would be written over the --trace. Give another file.")


def settings(rest: Sequence[str], own: Own) -> tuple[LoadedConfig, int]:
    """The settings of the run, and its number of ranks.

    Raises:
        ConfigError: with all that is wrong with them.
    """
    world_size = own.world_size
    if world_size is None:
        try:
            parallel = parse(rest).parallel
            world_size = max(1, math.prod(getattr(parallel, field) for field in RANKS))
        except ConfigError:
            world_size = 1  # `load` tells of this and of all else
    loaded = load(rest, world_size)
    if loaded.dry_run is not None:
        raise ConfigError([Violation(("--dry-run",), "--dry-run is for pretrain_gpt.py: this tool runs what it proves.")])
    config, assumed = with_vocabulary(loaded.config)
    return replace(loaded, config=config, notes=tuple(assumed)), world_size


def compare(own: Own) -> int:
    """Compare the two traces, tell.

    Raises:
        ValueError: they cannot be read or compared.
    """
    from megatron_lab.proofs.traces import compare_files, format_traces, traces_json

    found = compare_files(*own.traces)
    return _tell(format_traces(found, *own.traces), own, traces_json(found, *own.traces), 1 if found.parts else 0)


def verify(loaded: LoadedConfig, world_size: int, own: Own) -> int:
    """Run, compare, tell.

    Raises:
        ValueError: it cannot be run, or not be compared with the trace.
    """
    if (saved := loaded.config.debug.save_trace) is not None:
        check_output("--save-trace", saved)
    from megatron_lab.proofs.report import format_report, report_json
    from megatron_lab.proofs.verify import Effort, verify_layout, vocabulary_of

    started = time.monotonic()
    vocab_size = vocabulary_of(loaded.config.data)
    effort = Effort(steps=own.steps, max_ranks=own.max_ranks, isolates=not own.quick, reference=own.reference)
    proofs = verify_layout(loaded.config, world_size, vocab_size, effort, trace=own.traces[0] if own.traces else None)
    lines = [*format_report(proofs), *loaded.notes, f"all together {time.monotonic() - started:.1f} s"]
    status = 0 if all(proof.equal and not proof.parts_from_trace for proof in proofs) else 1
    return _tell(lines, own, report_json(proofs), status)


def _tell(lines: Sequence[str], own: Own, found: Mapping[str, Any], status: int) -> int:
    """Print the report, then write the JSON, so that the verdict is seen whatever becomes of the file.

    Args:
        status: the exit status of the verdict.

    Returns:
        the exit status: of an equal verdict that could not be written, 2.
    """
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not try to flush at exit
        if not isinstance(error, BrokenPipeError):  # with `| head` nobody reads on, and that is well
            sys.stderr.write(f"{PROGRAM}: the report could not be printed ({error.strerror}): {lines[0]}\n")
            status = status or 2
    if own.json is not None:
        try:
            Path(own.json).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            told = f"--json {own.json} could not be written whole ({error.strerror}). The verdict is what is printed; make room"
            sys.stderr.write(f"{PROGRAM}: {told}, or give another file.\n")
            status = status or 2
    return status


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """An interrupt that Python drops comes again a moment later. It drops what is raised in the hooks of a fork, which is where one
    comes out that arrives while a rank is forked."""
    tell = sys.unraisablehook

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            return tell(what)
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        again = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = tell


def _end_ranks() -> None:
    """Those that a run had begun to start when it was interrupted: it has ended all others itself."""
    if started := multiprocessing.active_children():
        from megatron_lab.verification.local_ranks import kill_group

        for process in started:
            if process.pid is not None:
                kill_group(process.pid)


def _try_to_write(path: str) -> None:
    """Before anything is run. A file that is not there yet is not there afterwards either: the run may not come to its end.

    Raises:
        ValueError: it cannot be written.
    """
    there = os.path.lexists(path)
    if Path(path).is_fifo():  # whoever reads it would take the end of this try for that of the report
        return
    try:
        Path(path).open("a").close()
        if not there:
            Path(path).unlink()
    except OSError as error:
        raise ValueError(
            f"--json {path} cannot be written ({error.strerror}). Give a path of a file in a folder that you may write to."
        ) from error
