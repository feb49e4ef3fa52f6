"""Runs in which nothing goes wrong, under the watcher of hangs: it must not raise an alarm, and must cost next to nothing.

    python -m tests.trials.clean_runs --minutes 60
    python -m tests.trials.clean_runs --pairs 20

The first makes one run after the other, over layouts, with saves and evaluations. The second makes pairs of the same run, watched
and not, in turn, and compares the processor time that their ranks take for a step: it is less noisy than the clock's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatron.training.loop import Loop
from tests.support.runs import arguments, launch, report
from tests.trials.kills import LAYOUTS, STAGES, TENSOR

_STEPS, _WARM_UP = 60, 10


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
                arguments(**flags, **sometimes, train_iters=300, log_interval=100, hang_warn_s=warn_s),
                ranks,
                gloo=True,
                timeout=3600,
            )
        assert all(end.code == 0 and "hang: " not in end.stderr for end in ended), report(ended)
        runs += 1
        print(f"{runs} runs, {(time.monotonic() - began) / 60:.1f} minutes: no alarm (load {os.getloadavg()[0]:.0f})", flush=True)


def overhead(pairs: int) -> None:
    """Print the processor time of a step of watched runs over that of the same runs unwatched, by the median step of each rank."""

    def seconds(warn_s: float) -> float:
        with tempfile.TemporaryDirectory(prefix="steps-") as name:

            def before(rank: int) -> None:
                advance, took = Loop.run_step, list[float]()

                def timed(loop: Loop, *args: Any) -> Any:
                    began = time.process_time()
                    result = advance(loop, *args)
                    took.append(time.process_time() - began)
                    if len(took) == _STEPS:
                        (Path(name) / str(rank)).write_text(str(statistics.median(took[_WARM_UP:])))
                    return result

                Loop.run_step = timed  # type: ignore[assignment, method-assign]

            size = {"hidden_size": 256, "seq_length": 128, "num_layers": 4, "vocab_size": 1000}
            argv = arguments(**TENSOR, **STAGES, **size, train_iters=_STEPS, log_interval=_STEPS, hang_warn_s=warn_s)
            ended = launch(argv, 4, before=before, gloo=True, timeout=600)
            assert all(end.code == 0 for end in ended), report(ended)
            return sum(float((Path(name) / str(rank)).read_text()) for rank in range(4))

    found = []
    for number in range(pairs):
        first = seconds(30.0 * (number % 2))
        second = seconds(30.0 * (1 - number % 2))
        watched, plain = (first, second) if number % 2 else (second, first)
        found.append(watched / plain - 1)
        print(f"pair {number + 1}: {1000 * plain:.2f} ms, watched {1000 * watched:.2f} ms: {found[-1]:+.2%}", flush=True)
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
