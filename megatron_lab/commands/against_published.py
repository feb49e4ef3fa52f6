"""Compare predicted with published step times: errors by publication, device and software, and the ranking of each job's layouts.

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
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron.config.cli import load
from megatron.config.parsed_flags import DryRun
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import Stack
from megatron_lab.planner.step_time import predict_from_work
from megatron_lab.planner.step_work import StepWork

ROWS = Path(__file__).resolve().parents[2] / "tests" / "data" / "published"
COMMON = "--mock-data --tokenizer-type NullTokenizer --device cuda --lr 1e-4 --train-iters 10".split()
_QUANTIZATION_TRAFFIC_SHARES = {"torchtitan": 0.35, "torchtitan-compile": 0.35}
"""Fraction of the memory traffic of this project's quantization that the software has too; 0 for others."""


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


def compute_log_error(row: dict[str, Any], stacks: dict[str, Stack]) -> float:
    """Predict the step time of a published run. Return the logarithm of (predicted time / measured time).

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
    return math.log(predict_from_work(work, config, dry_run, vocab_size, cluster, stacks[row["stack"]]).seconds / row["seconds"])


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
    finds the fastest layout of each job that was measured at several layouts.

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
    times_by_group = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if not row["id"].startswith(id_prefix):
                continue
            log_error = compute_log_error(row, stacks)
            if row["group"]:
                times_by_group[path.stem, row["group"]].append((row["seconds"], row["seconds"] * math.exp(log_error)))
            if not is_calibrated(row):
                errors_by_case[path.stem, row["cluster"], "8 bits" if "--fp8" in row["flags"] else "16 bits", row["stack"]].append(
                    log_error
                )
    for names, errors in sorted(errors_by_case.items()):
        print(f"{', '.join(names):<70} {len(errors):4} rows {format_summary(errors)}")
    all_errors = [log_error for case_errors in errors_by_case.values() for log_error in case_errors]
    print(f"{'all that were not fitted':<70} {len(all_errors):4} rows {format_summary(all_errors)}")
    rankings = [
        (min(group_times), sorted(group_times, key=lambda pair: pair[1]))
        for group_times in times_by_group.values()
        if len(group_times) > 1
    ]
    num_best_in_top_3 = sum(best in order[:3] for best, order in rankings)
    num_near_best = sum(order[0][0] <= 1.03 * best[0] for best, order in rankings)
    print(
        f"{len(rankings)} groups: the measured best is among the first 3 in {num_best_in_top_3}; "
        f"the predicted best is within 3 % of it in {num_near_best}"
    )
    return 0


def format_summary(errors: list[float]) -> str:
    """Format the median of the errors, the median of their absolute values, and the 90th percentile of the absolute values.

    Args:
        errors: for each run log(predicted / measured), or predicted / measured - 1.
    """
    magnitudes = sorted(map(abs, errors)) or [math.nan]
    percentile_90 = magnitudes[min(len(magnitudes) - 1, int(0.9 * len(magnitudes)))]
    bias, median = statistics.median(errors or [math.nan]), statistics.median(magnitudes)
    return f"bias {bias:+6.1%}  median {median:6.1%}  90 % below {percentile_90:6.1%}"
