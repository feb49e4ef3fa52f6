"""Compare predicted with published step times: errors by publication, device and software, and the choice among each job's layouts.

    python tools/planning/against_published.py [--only megatron_2021]

Other frameworks quantize to 8 bits within other kernels. The prediction for their 8-bit runs therefore takes the matrix products
from an 8-bit plan and the memory traffic of all other work from a 16-bit plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron.config.cli import load
from megatron.config.parsed_flags import DryRun
from megatron_lab.commands.against_runs import count_ordered_pairs
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import Stack
from megatron_lab.planner.step_time import StepTime, predict_from_work
from megatron_lab.planner.step_work import StepWork

ROWS = Path(__file__).resolve().parents[2] / "tests" / "data" / "published"
COMMON = "--mock-data --tokenizer-type NullTokenizer --device cuda --lr 1e-4 --train-iters 10".split()
_QUANTIZATION_TRAFFIC_SHARES = {"torchtitan": 0.35, "torchtitan-compile": 0.35}
"""Fraction of the memory traffic of this project's quantization that the software has too; 0 for others."""
_NEAR_BEST = 0.03
"""Largest relative difference from the fastest layout of a group at which a layout counts as near the best."""


def list_published_files() -> list[Path]:
    """Return the paths of the JSON files with published step times, one file for each publication.

    Raises:
        SystemExit: the folder does not exist. Only a checkout of the repository has it.
    """
    if not ROWS.is_dir():
        sys.exit(f"error: the published rows are only in a checkout of the repository: there is no folder {ROWS}")
    return sorted(ROWS.glob("*.json"))


def is_calibrated(row: dict[str, Any]) -> bool:
    """Return whether a published run was used to fit the constants of the planner. A hash of its id selects a third of the runs.

    Args:
        row: one published run.
    """
    return int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % 3 == 0


def predict_published(row: dict[str, Any], stacks: dict[str, Stack]) -> StepTime:
    """Predict the step time of a published run, with its 90 % range.

    Args:
        row: the published run: flags, hardware, software and step time.
        stacks: speed of each training software relative to this framework, by the name that `row` gives it.
    """
    argv = row["flags"].split()
    vocab_size, dry_run = int(argv[argv.index("--vocab-size") + 1]), DryRun(row["gpus"], row["gpus_per_node"], None)
    config = load([*argv, *COMMON], row["gpus"]).config
    work = Planner(config, dry_run, vocab_size, shortened=True).compute_step_work()
    if "--fp8-format" in argv:
        argv_16_bit = [word for i, word in enumerate(argv) if not ({word, argv[i - 1]} & {"--fp8-format", "--fp8-recipe"})]
        work_16_bit = Planner(
            load([*argv_16_bit, *COMMON], row["gpus"]).config, dry_run, vocab_size, shortened=True
        ).compute_step_work()
        work = _mix_precisions(work, work_16_bit, _QUANTIZATION_TRAFFIC_SHARES.get(row["stack"], 0.0))
    cluster = load_cluster(row["cluster"])
    if row["network_gb_s"]:
        cluster = replace(cluster, network_gb_s=row["network_gb_s"])
    if row.get("tensor_overlap"):
        config = replace(config, parallel=replace(config.parallel, tp_comm_overlap=True))
    return predict_from_work(work, config, dry_run, vocab_size, cluster, stacks[row["stack"]])


def _mix_precisions(work_8_bit: StepWork, work_16_bit: StepWork, quantized_share: float) -> StepWork:
    """Combine two plans of a run, one with 8 bits and one with 16 bits. The result has the matrix products of the 8-bit plan. Its
    memory traffic is that of the 16-bit plan, plus the fraction `quantized_share` of the traffic that the 8-bit plan adds for
    quantization.

    Other frameworks quantize within other kernels, so quantization adds less memory traffic there than in an 8-bit plan of this
    framework.

    Args:
        quantized_share: fraction of quantization's memory traffic (8-bit plan minus 16-bit plan) that the run's software has too.
    """
    ops = []
    for spans_8_bit, spans_16_bit in zip(work_8_bit.ops, work_16_bit.ops, strict=True):
        mixed_spans = {}
        for op_type, span in spans_16_bit.items():
            memory_bytes = span.work.memory_bytes + round(
                quantized_share * (spans_8_bit[op_type].work.memory_bytes - span.work.memory_bytes)
            )
            mixed_spans[op_type] = replace(
                span, work=replace(span.work, gemms=spans_8_bit[op_type].work.gemms, memory_bytes=memory_bytes)
            )
        ops.append(mixed_spans)
    return replace(work_8_bit, ops=tuple(ops), scheduled_share=work_16_bit.scheduled_share)


def main() -> int:
    """Print the errors of predicted step times by publication, device, precision and software. Then print how well the prediction
    chooses among the layouts of each job that was measured at several layouts.

    Return the exit status.
    """
    parser = ToolParser(description=__doc__)
    parser.add_argument("--only", default="", help="Compare only rows whose id starts with this text.")
    id_prefix, paths = parser.parse_args().only, list_published_files()
    stack_configs = yaml.safe_load((ROWS / "stacks.yaml").read_text())
    stacks = {
        name: Stack(name, **{key: value for key, value in config.items() if key != "memory"})
        for name, config in stack_configs.items()
    }
    errors_by_case = defaultdict[tuple[str, ...], list[float]](list)
    times_by_group, num_in_range = defaultdict[tuple[str, str], list[tuple[float, float]]](list), 0
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if not row["id"].startswith(id_prefix):
                continue
            prediction = predict_published(row, stacks)
            log_error = math.log(prediction.seconds / row["seconds"])
            if row["group"]:
                times_by_group[path.stem, row["group"]].append((row["seconds"], prediction.seconds))
            if not is_calibrated(row):
                num_in_range += prediction.low <= row["seconds"] <= prediction.high
                errors_by_case[path.stem, row["cluster"], "8 bits" if "--fp8" in row["flags"] else "16 bits", row["stack"]].append(
                    log_error
                )
    for names, errors in sorted(errors_by_case.items()):
        print(f"{', '.join(names):<70} {len(errors):4} rows {format_summary(errors)}")
    all_errors = [log_error for case_errors in errors_by_case.values() for log_error in case_errors]
    print(f"{'all that were not fitted':<70} {len(all_errors):4} rows {format_summary(all_errors)}")
    print(f"in the predicted 90 % range: {num_in_range} of {len(all_errors)}")
    print("\n".join(format_choices(times_by_group.values())))
    return 0


def format_choices(groups: Iterable[Sequence[tuple[float, float]]]) -> list[str]:
    """Format how well predicted times choose the fastest layout of each job, next to the expected result of a random choice.

    The groups are small, so a random choice is often good. Only a difference from the random choice says something about the
    prediction. A group in which every choice is good does not count: it has one layout, or all its layouts are near the best.

    Args:
        groups: (measured, predicted) times of the layouts of each job.
    """
    groups = [group for group in groups if len(group) > 1]
    counted = [group for group in groups if max(group)[0] > (1 + _NEAR_BEST) * min(group)[0]]
    num_trivial = len(groups) - len(counted)
    near_best = f"within {100 * _NEAR_BEST:g} % of the best"
    trivial_text = f"  groups that do not count, because all their layouts are {near_best}: {num_trivial}"
    if not counted:
        return ["choice of the layout: no group in which a choice can be wrong", trivial_text]
    sizes = Counter(len(group) for group in counted)
    size_text = ", ".join(f"{count} of {size} layouts" for size, count in sorted(sizes.items()))
    ordered_pairs = [count_ordered_pairs([(predicted, measured) for measured, predicted in group]) for group in counted]
    num_ordered, num_pairs = (sum(counts) for counts in zip(*ordered_pairs, strict=True))
    slowdowns = [
        [measured / min(group)[0] - 1 for measured, _ in sorted(group, key=lambda times: times[1])] for group in counted
    ]  # of the layouts of a group, in the order of their predicted times
    chosen_slowdowns = [group_slowdowns[0] for group_slowdowns in slowdowns]
    num_near_best = sum(slowdown <= _NEAR_BEST for slowdown in chosen_slowdowns)
    random_near_best = sum(statistics.mean(slowdown <= _NEAR_BEST for slowdown in group) for group in slowdowns)
    random_slowdown = statistics.mean(statistics.mean(group) for group in slowdowns)
    return [
        f"choice of the layout: {len(counted)} groups ({size_text}); in parentheses: a random choice",
        trivial_text,
        f"  pairs over 10 % apart that are in order: {num_ordered} of {num_pairs} ({num_pairs / 2:g})",
        f"  groups whose predicted best is {near_best}: {num_near_best} of {len(counted)} ({random_near_best:.3g})",
        f"  slowdown of the predicted best: mean {100 * statistics.mean(chosen_slowdowns):.1f} % ({100 * random_slowdown:.1f} %), "
        f"largest {100 * max(chosen_slowdowns):.1f} %",
    ]


def format_summary(errors: list[float]) -> str:
    """Format the median of the errors, the median of their absolute values, and the 90th percentile of the absolute values.

    Args:
        errors: for each run log(predicted / measured), or predicted / measured - 1.
    """
    magnitudes = sorted(map(abs, errors)) or [math.nan]
    percentile_90 = magnitudes[min(len(magnitudes) - 1, int(0.9 * len(magnitudes)))]
    bias, median = statistics.median(errors or [math.nan]), statistics.median(magnitudes)
    return f"bias {bias:+6.1%}  median {median:6.1%}  90 % below {percentile_90:6.1%}"
