"""How well step times are foretold on this machine: small runs at different layouts, measured in turns, against the time model.

    python tools/planning/against_runs.py --cluster FILE.yaml [--rounds N]

The file comes from `tools/check_cluster.py --measure`. No figure of it is fitted to these runs, only to models of two layers that
a rank trains by itself. Every round starts the ranks of all layouts in turn, odd ones backwards; each makes a few steps.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.data.tokenizer import planned_rows
from megatron_lab.commands.parser import ToolParser
from megatron_lab.memory_plots.measure import prepare
from megatron_lab.planner.cluster import Cluster, load_cluster
from megatron_lab.planner.step_time import StepTime, predict
from megatron_lab.verification.local_ranks import run_ranks

_COMMON = """--device cpu --mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-3 --eval-iters 0 --attention-dropout 0
    --hidden-dropout 0"""
_LLAMA = f"""{_COMMON} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""
MODELS = {
    "gpt": f"{_COMMON} --num-layers 4 --hidden-size 384 --num-attention-heads 6 --seq-length 192 --max-position-embeddings 192 "
    "--vocab-size 3071 --global-batch-size 8",
    "llama": f"{_LLAMA} --num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 2047 "
    "--global-batch-size 8",
}
TENSOR, PIPELINE, SHARDING = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--data-parallel-sharding-strategy"
CASES = (
    ("llama", 1, "--micro-batch-size 1"),
    ("llama", 1, "--micro-batch-size 4 --recompute-granularity full"),
    ("gpt", 1, "--micro-batch-size 8"),
    ("llama", 2, "--micro-batch-size 2"),
    ("llama", 2, f"--micro-batch-size 1 {SHARDING} optim"),
    ("gpt", 2, f"--micro-batch-size 2 {SHARDING} optim_grads"),
    ("llama", 2, f"--micro-batch-size 2 {TENSOR} 2 --sequence-parallel"),
    ("gpt", 2, f"--micro-batch-size 4 {TENSOR} 2"),
    ("llama", 2, f"--micro-batch-size 1 {PIPELINE} 2"),
    ("gpt", 2, f"--micro-batch-size 4 {PIPELINE} 2"),
    ("llama", 4, f"--micro-batch-size 1 {PIPELINE} 2 {TENSOR} 2 --sequence-parallel"),
    ("gpt", 4, f"--micro-batch-size 1 {PIPELINE} 2 {SHARDING} optim"),
)
_STEPS, _UNTIMED = 5, 2


@dataclass(frozen=True)
class Compared:
    """A layout, its prediction and its measured steps."""

    model: str
    ranks: int
    flags: str
    predicted: StepTime
    rounds: tuple[float, ...]
    """Median seconds of a step in each round."""

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.rounds)

    @property
    def off(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted.seconds / self.measured - 1


def order_right(times: Sequence[tuple[float, float]], apart: float = 0.1) -> tuple[int, int]:
    """Pairs whose measured times are apart by more than that, and those of them that the predicted ones order alike.

    Args:
        times: predicted and measured.
    """
    pairs = [(a, b) for a, b in itertools.combinations(times, 2) if max(a[1], b[1]) > (1 + apart) * min(a[1], b[1])]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)


def config_of(model: str, ranks: int, flags: str) -> Config:
    """The settings of a layout."""
    return load(shlex.split(f"{MODELS[model]} {flags}"), ranks).config


def predicted(config: Config, ranks: int, cluster: Cluster) -> StepTime:
    """In a process of its own, which may take the place of any rank."""
    rows = planned_rows(config.data)
    (found,) = run_ranks(1, lambda _: predict(config, DryRun(ranks, max(ranks, 8), None), rows, cluster), init=False)
    return found  # type: ignore[no-any-return]


def measured(config: Config, ranks: int) -> float:
    """Median seconds of a step, without the first ones."""

    def live(_: int) -> list[float]:
        step, batch = prepare(config)
        times = []
        for number in range(_UNTIMED + _STEPS):
            began = time.perf_counter()
            step.run(batch, iteration=number + 1, learning_rate=1e-3, weight_decay=0.0)
            times.append(time.perf_counter() - began)
        return times[_UNTIMED:]

    every = run_ranks(ranks, live, init=False)
    return statistics.median(map(max, zip(*every, strict=True)))


def compare(cluster: Cluster, rounds: int) -> list[Compared]:
    """All layouts, in turns."""
    configs = [config_of(*case) for case in CASES]
    times: list[list[float]] = [[] for _ in CASES]
    for number in range(rounds):
        for i in range(len(CASES))[:: -1 if number % 2 else 1]:
            times[i].append(measured(configs[i], CASES[i][1]))
    plans = [predicted(config, case[1], cluster) for config, case in zip(configs, CASES, strict=True)]
    return [Compared(*case, plan, tuple(took)) for case, plan, took in zip(CASES, plans, times, strict=True)]


def table(rows: Sequence[Compared]) -> list[str]:
    """Of Markdown, and what it comes to."""
    lines = ["| model | ranks | flags | predicted ms | measured ms (rounds) | off |", "|---|---|---|---|---|---|"]
    for row in rows:
        span = f"{1e3 * row.measured:.0f} ({1e3 * min(row.rounds):.0f} to {1e3 * max(row.rounds):.0f})"
        lines.append(f"| {row.model} | {row.ranks} | `{row.flags}` | {1e3 * row.predicted.seconds:.0f} | {span} | {row.off:+.0%} |")
    off = sorted(abs(row.off) for row in rows)
    right, pairs = order_right([(row.predicted.seconds, row.measured) for row in rows if row.model == "llama"])
    more, others = order_right([(row.predicted.seconds, row.measured) for row in rows if row.model == "gpt"])
    sure = sum(row.predicted.low <= row.measured <= row.predicted.high for row in rows)
    ninety = off[math.ceil(0.9 * len(off)) - 1]
    lines += [
        "",
        f"median error {statistics.median(off):.1%}, 90th percentile {ninety:.1%}, largest {off[-1]:.1%}; "
        f"in the 90 % range {sure} of {len(rows)}; "
        f"of pairs of one model over 10 % apart {right + more} of {pairs + others} in order",
    ]
    return lines


def main() -> int:
    """Compare; returns the exit status."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("--cluster", required=True, metavar="FILE", help="cluster file of this machine")
    flags.add_argument("--rounds", type=int, default=5, metavar="N", help="turns in which every layout is started (5)")
    flags.add_argument("--json", metavar="FILE", help="write parts and times too")
    given = flags.parse_args()
    rows = compare(load_cluster(given.cluster), given.rounds)
    print("\n".join(table(rows)))
    if given.json:
        found = [{**vars(row), "predicted": dict(row.predicted.parts)} for row in rows]
        Path(given.json).write_text(json.dumps(found, indent=1))
    return 0
