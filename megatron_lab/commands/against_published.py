"""Predictions against published step times: errors by publication, device and software, and of choices within groups.

    python tools/planning/against_published.py [--only megatron_2021]

Peers quantise to 8 bits within other kernels; so for their runs in 8 bits the products are those of 8 bits, all else that of 16.
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
from megatron.config.given import DryRun
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import Stack
from megatron_lab.planner.step_time import time_of
from megatron_lab.planner.step_work import StepWork

ROWS = Path(__file__).resolve().parents[2] / "tests" / "data" / "published"
COMMON = "--mock-data --tokenizer-type NullTokenizer --device cuda --lr 1e-4 --train-iters 10".split()
_QUANTISING = {"torchtitan": 0.35, "torchtitan-compile": 0.35}
"""The share of the bytes that our quantisation moves which a software moves too."""


def published_files() -> list[Path]:
    """The files with published rows.

    Raises:
        SystemExit: this is no checkout, which alone has them.
    """
    if not ROWS.is_dir():
        sys.exit(f"error: the published rows are only in a checkout of the repository: there is no folder {ROWS}")
    return sorted(ROWS.glob("*.json"))


def calibrated(row: dict[str, Any]) -> bool:
    """Whether constants were fitted to a row."""
    return int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % 3 == 0


def error(row: dict[str, Any], stacks: dict[str, Stack]) -> float:
    """Logarithm of predicted over measured seconds."""
    words = row["flags"].split()
    vocab_size, dry_run = int(words[words.index("--vocab-size") + 1]), DryRun(row["gpus"], row["gpus_per_node"], None)
    config = load([*words, *COMMON], row["gpus"]).config
    work = Planner(config, dry_run, vocab_size, few=True).work()
    if "--fp8-format" in words:
        plain = [word for place, word in enumerate(words) if not ({word, words[place - 1]} & {"--fp8-format", "--fp8-recipe"})]
        wide = Planner(load([*plain, *COMMON], row["gpus"]).config, dry_run, vocab_size, few=True).work()
        work = _mixed(work, wide, _QUANTISING.get(row["stack"], 0.0))
    cluster = load_cluster(row["cluster"])
    if row["network_gb_s"]:
        cluster = replace(cluster, network_gb_s=row["network_gb_s"])
    if row.get("tensor_overlap"):
        config = replace(config, parallel=replace(config.parallel, tp_comm_overlap=True))
    return math.log(time_of(work, config, dry_run, vocab_size, cluster, stacks[row["stack"]]).seconds / row["seconds"])


def _mixed(eight: StepWork, wide: StepWork, share: float) -> StepWork:
    ops = []
    for mine, its in zip(eight.ops, wide.ops, strict=True):
        each = {}
        for kind, span in its.items():
            moved = span.work.moved + round(share * (mine[kind].work.moved - span.work.moved))
            each[kind] = replace(span, work=replace(span.work, products=mine[kind].work.products, moved=moved))
        ops.append(each)
    return replace(eight, ops=tuple(ops), share=wide.share)


def main() -> int:
    """Print the tables."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose id begins so")
    only, files = parser.parse_args().only, published_files()
    given = yaml.safe_load((ROWS / "stacks.yaml").read_text())
    stacks = {name: Stack(name, **{key: value for key, value in one.items() if key != "memory"}) for name, one in given.items()}
    by = defaultdict[tuple[str, ...], list[float]](list)
    groups = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    for path in files:
        for row in json.loads(path.read_text())["rows"]:
            if not row["id"].startswith(only):
                continue
            off = error(row, stacks)
            if row["group"]:
                groups[path.stem, row["group"]].append((row["seconds"], row["seconds"] * math.exp(off)))
            if not calibrated(row):
                by[path.stem, row["cluster"], "8 bits" if "--fp8" in row["flags"] else "16 bits", row["stack"]].append(off)
    for names, found in sorted(by.items()):
        print(f"{', '.join(names):<70} {len(found):4} rows {summary(found)}")
    everything = [off for some in by.values() for off in some]
    print(f"{'all that were not fitted':<70} {len(everything):4} rows {summary(everything)}")
    chosen = [(min(some), sorted(some, key=lambda one: one[1])) for some in groups.values() if len(some) > 1]
    third = sum(best in order[:3] for best, order in chosen)
    near = sum(order[0][0] <= 1.03 * best[0] for best, order in chosen)
    print(
        f"{len(chosen)} groups: the measured best is among the first 3 in {third}; the predicted best is within 3 % of it in {near}"
    )
    return 0


def summary(found: list[float]) -> str:
    """Median, size of the median and 90th percentile of errors."""
    sizes = sorted(map(abs, found)) or [math.nan]
    most = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return f"bias {statistics.median(found or [math.nan]):+6.1%}  median {statistics.median(sizes):6.1%}  90 % below {most:6.1%}"
