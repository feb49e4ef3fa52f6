"""Random command lines for as long as one likes: each is refused in words, or trains as one plain process does.

    bash tests/run.sh --fuzz MINUTES [--fuzz-seed N]
    bash tests/run.sh --fuzz-repeat WORLD_SIZE ARGUMENTS...

Every line has a number: the seed and those after it. So `--fuzz-seed` with the number of a failure begins with it. One line in
four is also run as a user runs it, in its own number format. Exit status: 0 if nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, as in conftest.py
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch

from tests.support.random_configs import CommandLine, line_of, simpler
from tests.support.random_runs import Outcome, WrongError, judge

_TIMEOUT_S = 120.0
"""After which a run hangs."""
_STARTED = 4
"""One line in so many is run as a user runs it too."""
_TRIES, _SIMPLER_S = 100, 120.0
"""Lines tried to make a failing one simpler, and for how long."""
_MOST_FAILURES = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=float, metavar="MINUTES", help="how long")
    parser.add_argument("--fuzz-seed", type=int, metavar="N", help="number of the first line; by default a random one")
    parser.add_argument("--fuzz-repeat", nargs=argparse.REMAINDER, metavar="WORLD_SIZE ARGUMENTS", help="judge this line alone")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.fuzz_repeat:
        return repeat(CommandLine(tuple(options.fuzz_repeat[1:]), int(options.fuzz_repeat[0])))
    if options.fuzz is None:
        parser.error("--fuzz MINUTES says how long")
    seed = random.SystemRandom().randrange(10**6) * 10**4 if options.fuzz_seed is None else options.fuzz_seed
    return fuzz(options.fuzz, seed)


def repeat(line: CommandLine) -> int:
    """Judge one line, in every way. Returns the exit status."""
    try:
        print(f"{judge(line, _TIMEOUT_S, started=True)}: {line}")
    except WrongError as error:
        print(error)
        return 1
    return 0


def fuzz(minutes: float, seed: int) -> int:
    """Judge line after line until the time is over. Returns the exit status."""
    print(f"--fuzz-seed {seed}", flush=True)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    kinds: set[str] = set()
    began = told = time.monotonic()
    number = seed
    while time.monotonic() - began < 60 * minutes and len(failures) < _MOST_FAILURES:
        line, started = line_of(number), number % _STARTED == 0
        wrong = _wrong(line, started, counts)
        if wrong is not None:
            failures.append(f"number {number}: {line}")
            print(f"number {number} failed:\n{wrong}\n", flush=True)
            if wrong.kind not in kinds:
                kinds.add(wrong.kind)
                print(f"made simpler:\n{_simpler(line, started, wrong)}\n", flush=True)
        number += 1
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(_summary(counts, failures, number - seed, began), flush=True)
    print(_summary(counts, failures, number - seed, began))
    print("\n".join(failures))
    return 1 if failures else 0


def _wrong(line: CommandLine, started: bool, counts: Counter[str]) -> WrongError | None:
    """Judge a line and count it. Returns what is wrong."""
    try:
        outcome = judge(line, _TIMEOUT_S, started=started)
    except WrongError as error:
        return error
    counts[outcome] += 1
    counts["started"] += started and outcome is Outcome.EQUAL
    return None


def _simpler(line: CommandLine, started: bool, wrong: WrongError) -> WrongError:
    """How the simplest line found fails that fails in the same way."""

    deadline = time.monotonic() + _SIMPLER_S

    def fails(other: CommandLine) -> bool:
        nonlocal wrong
        if time.monotonic() > deadline:
            return False
        try:
            judge(other, _TIMEOUT_S / 4, started=started)
        except WrongError as error:
            if error.kind == wrong.kind:
                wrong = error
                return True
        return False

    simpler(line, fails, _TRIES)
    return wrong


def _summary(counts: Counter[str], failures: Sequence[str], lines: int, began: float) -> str:
    return (
        f"{(time.monotonic() - began) / 60:.1f} minutes, {lines} lines: {counts[Outcome.EQUAL]} ran and equal the reference "
        f"({counts['started']} of them run by pretrain_gpt.py too), {counts[Outcome.REFUSED]} refused, "
        f"{counts[Outcome.IDLE]} without a step, {len(failures)} failed"
    )


if __name__ == "__main__":
    sys.exit(main())
