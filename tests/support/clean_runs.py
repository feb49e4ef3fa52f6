"""Runs in which nothing goes wrong, under the watcher of hangs: it must not raise an alarm, and must cost next to nothing.

    python -m tests.support.clean_runs --minutes 60
    python -m tests.support.clean_runs --pairs 20

The first makes one run after the other, over layouts, with saves and evaluations. The second makes pairs of the same run, watched
and not, in turn, and compares the seconds of processor time of their ranks: they are less noisy than the clock's.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tests.support.kills import LAYOUTS, STAGES, TENSOR
from tests.support.runs import arguments, launch, report


def clean(minutes: float, warn_s: float) -> None:
    """Runs of some ten seconds each, until the time is over.

    Raises:
        AssertionError: the watcher spoke, or a run failed.
    """
    began, runs = time.monotonic(), 0
    while time.monotonic() - began < 60 * minutes:
        ranks, flags = LAYOUTS[runs % len(LAYOUTS)]
        with tempfile.TemporaryDirectory(prefix="clean-") as name:
            sometimes = {"save": Path(name) / "run", "save_interval": 40, "keep_last": 2, "eval_interval": 50, "eval_iters": 2}
            ended = launch(
                arguments(**flags, **sometimes, train_iters=300, log_interval=100, hang_warn_s=warn_s), ranks, timeout=3600
            )
        assert all(end.code == 0 and "hang: " not in end.stderr for end in ended), report(ended)
        runs += 1
        print(f"{runs} runs, {(time.monotonic() - began) / 60:.1f} minutes: no alarm (load {os.getloadavg()[0]:.0f})", flush=True)


def overhead(pairs: int) -> None:
    """Print the processor time of watched runs over that of the same runs unwatched."""

    def seconds(warn_s: float) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        size = {"hidden_size": 256, "seq_length": 128, "num_layers": 4, "vocab_size": 1000}
        ended = launch(arguments(**TENSOR, **STAGES, **size, train_iters=40, log_interval=20, hang_warn_s=warn_s), 4, timeout=600)
        assert all(end.code == 0 for end in ended), report(ended)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    found = []
    for number in range(pairs):
        first = seconds(30.0 * (number % 2))
        second = seconds(30.0 * (1 - number % 2))
        watched, plain = (first, second) if number % 2 else (second, first)
        found.append(watched / plain - 1)
        print(f"pair {number + 1}: {plain:.2f} s, watched {watched:.2f} s: {found[-1]:+.2%}", flush=True)
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"median {middle:+.2%} of {pairs} pairs; half of them between {low:+.2%} and {high:+.2%}")


def main() -> None:
    """As asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warn-s", type=float, default=30.0, help="--hang-warn-s of the runs")
    parser.add_argument("--pairs", type=int, help="only compare costs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.pairs:
        overhead(given.pairs)
    else:
        clean(given.minutes, given.warn_s)


if __name__ == "__main__":
    main()
