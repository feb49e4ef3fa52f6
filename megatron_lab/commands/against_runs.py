"""Compare predicted with measured step times on this machine: small runs at different layouts.

    python tools/planning/against_runs.py --cluster FILE.yaml [--rounds N]

`tools/check_cluster.py --measure` writes the cluster file. Its values are not fitted to these runs, only to models of two layers
that a single rank trains. Each round starts the ranks of all layouts one layout after another, in odd rounds in reverse order; each
layout makes a few steps.
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
from megatron.config.parsed_flags import DryRun
from megatron.data.tokenizer import predict_embedding_rows
from megatron_lab.commands.parser import ToolParser
from megatron_lab.memory_plots.measure import prepare_step
from megatron_lab.planner.cluster import Cluster, load_cluster
from megatron_lab.planner.step_time import StepTime, predict_step_time
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
_TIMED_STEPS, _WARMUP_STEPS = 5, 2


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured step times of one layout."""

    model: str
    ranks: int
    flags: str
    predicted: StepTime
    rounds: tuple[float, ...]
    """Median seconds of a step in each round of measurements. A round runs every layout once."""

    @property
    def measured_seconds(self) -> float:
        """Measured seconds of a step: the median of `rounds`."""
        return statistics.median(self.rounds)

    @property
    def relative_error(self) -> float:
        """Ratio of the predicted to the measured step time, minus 1."""
        return self.predicted.seconds / self.measured_seconds - 1


def count_ordered_pairs(times: Sequence[tuple[float, float]], min_difference: float = 0.1) -> tuple[int, int]:
    """Count the pairs of layouts for which the prediction and the measurement agree on which layout is faster.

    Args:
        times: (predicted, measured) time of each layout.
        min_difference: a pair counts only if the longer measured time exceeds the shorter by more than this fraction of it.

    Returns:
        The number of pairs for which they agree, and the number of pairs that count.
    """
    pairs = [(a, b) for a, b in itertools.combinations(times, 2) if max(a[1], b[1]) > (1 + min_difference) * min(a[1], b[1])]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)


def load_config(model: str, ranks: int, flags: str) -> Config:
    """Return the settings of a run of this model with the flags of a layout.

    Args:
        model: key of `MODELS`.
        ranks: number of ranks.
        flags: flags of the layout, as on the command line.
    """
    return load(shlex.split(f"{MODELS[model]} {flags}"), ranks).config


def predict(config: Config, ranks: int, cluster: Cluster) -> StepTime:
    """Predict the step time of a layout in a separate process, because a process can be a rank of only one job."""
    rows = predict_embedding_rows(config.data)
    (step_time,) = run_ranks(1, lambda _: predict_step_time(config, DryRun(ranks, max(ranks, 8), None), rows, cluster), init=False)
    return step_time  # type: ignore[no-any-return]


def measure(config: Config, ranks: int) -> float:
    """Run a layout on local processes. Return the median seconds of a step, without the warm-up steps.

    The time of a step is that of its slowest rank.
    """

    def time_steps(_: int) -> list[float]:
        step, batch = prepare_step(config)
        times = []
        for i in range(_WARMUP_STEPS + _TIMED_STEPS):
            start = time.perf_counter()
            step.run(batch, iteration=i + 1, learning_rate=1e-3, weight_decay=0.0)
            times.append(time.perf_counter() - start)
        return times[_WARMUP_STEPS:]

    times_by_rank = run_ranks(ranks, time_steps, init=False)
    return statistics.median(map(max, zip(*times_by_rank, strict=True)))


def compare(cluster: Cluster, num_rounds: int) -> list[Comparison]:
    """Predict and measure the step time of each layout in `CASES`.

    Each round measures every layout once, so that a slow phase of the machine affects all layouts.

    Args:
        num_rounds: number of measurements of each layout.
    """
    configs = [load_config(*case) for case in CASES]
    times: list[list[float]] = [[] for _ in CASES]
    for round_index in range(num_rounds):
        for i in range(len(CASES))[:: -1 if round_index % 2 else 1]:
            times[i].append(measure(configs[i], CASES[i][1]))
    predictions = [predict(config, case[1], cluster) for config, case in zip(configs, CASES, strict=True)]
    return [
        Comparison(*case, prediction, tuple(case_times))
        for case, prediction, case_times in zip(CASES, predictions, times, strict=True)
    ]


def format_table(rows: Sequence[Comparison]) -> list[str]:
    """Format a Markdown table of the layouts with their predicted and measured step times, and a summary of the errors."""
    lines = ["| model | ranks | flags | predicted ms | measured ms (rounds) | off |", "|---|---|---|---|---|---|"]
    for row in rows:
        measured_range = f"{1e3 * row.measured_seconds:.0f} ({1e3 * min(row.rounds):.0f} to {1e3 * max(row.rounds):.0f})"
        lines.append(
            f"| {row.model} | {row.ranks} | `{row.flags}` | {1e3 * row.predicted.seconds:.0f} | {measured_range} | "
            f"{row.relative_error:+.0%} |"
        )
    abs_errors = sorted(abs(row.relative_error) for row in rows)
    llama_ordered, llama_pairs = count_ordered_pairs(
        [(row.predicted.seconds, row.measured_seconds) for row in rows if row.model == "llama"]
    )
    gpt_ordered, gpt_pairs = count_ordered_pairs(
        [(row.predicted.seconds, row.measured_seconds) for row in rows if row.model == "gpt"]
    )
    num_in_range = sum(row.predicted.low <= row.measured_seconds <= row.predicted.high for row in rows)
    low = min(row.predicted.low / row.predicted.seconds for row in rows) - 1
    high = max(row.predicted.high / row.predicted.seconds for row in rows) - 1
    percentile_90 = abs_errors[math.ceil(0.9 * len(abs_errors)) - 1]
    lines += [
        "",
        f"median error {statistics.median(abs_errors):.1%}, 90th percentile {percentile_90:.1%}, largest {abs_errors[-1]:.1%}; "
        f"in the 90 % range ({low:+.0%} to {high:+.0%}) {num_in_range} of {len(rows)}; "
        f"of pairs of one model over 10 % apart {llama_ordered + gpt_ordered} of {llama_pairs + gpt_pairs} in order",
    ]
    return lines


def main() -> int:
    """Compare predictions with measurements on this machine and print the table. Returns the exit status."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--cluster", required=True, metavar="FILE", help="Read the cluster file of this machine.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Measure every layout in N rounds (default 5).")
    parser.add_argument("--json", metavar="FILE", help="Also write the predicted parts and the measured times as JSON.")
    args = parser.parse_args()
    rows = compare(load_cluster(args.cluster), args.rounds)
    print("\n".join(format_table(rows)))
    if args.json:
        report = [{**vars(row), "predicted": dict(row.predicted.breakdown)} for row in rows]
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0
