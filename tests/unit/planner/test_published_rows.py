"""Published step times: every row is a job that the program takes, and takes a time that its devices can."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.spec.counts import count_flops_per_step
from megatron_lab.commands.against_published import format_choices
from megatron_lab.planner.cluster import list_cluster_names, load_cluster

FOLDER = Path(__file__).parents[2] / "data" / "published"
COMMON = "--mock-data --tokenizer-type NullTokenizer --device cuda --lr 1e-4 --train-iters 10".split()
FILES = sorted(FOLDER.glob("*.json"))
FIELDS = ["id", "group", "cluster", "gpus_per_node", "network_gb_s", "stack", "gpus", "flags", "seconds", "memory_gb"]
BUSY = (0.03, 0.75)
"""Bounds of MFU, of the time that a pipeline is not idle: far off the published ones (8 to 66 %), near enough for a lost digit."""

Row = dict[str, Any]


@cache
def _file(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


@cache
def _config(flags: str, gpus: int) -> Config:
    return load([*flags.split(), *COMMON], gpus).config


def _vocabulary(flags: str) -> int:
    words = flags.split()
    return int(words[words.index("--vocab-size") + 1])


def _model_flops_share(row: Row) -> float:
    """Model FLOPs over the peak of the devices, for the share of the step in which a pipeline without other delays is busy."""
    config = _config(row["flags"], row["gpus"])
    parallel, training = config.parallel, config.training
    assert training.global_batch_size is not None
    stages = parallel.pipeline_model_parallel_size
    data_ranks = row["gpus"] // (stages * parallel.tensor_model_parallel_size * parallel.context_parallel_size)
    passes = (
        training.global_batch_size / (training.micro_batch_size * data_ranks) * (parallel.num_virtual_stages_per_pipeline_rank or 1)
    )
    busy = passes / (passes + stages - 1)
    dtype = "float8" if config.precision.fp8_format else "float16" if config.precision.fp16 else "bfloat16"
    flops = count_flops_per_step(config.model, _vocabulary(row["flags"]), training.global_batch_size)
    return flops / (row["seconds"] * busy * row["gpus"] * load_cluster(row["cluster"]).get_peak_flops(dtype))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_are_jobs_that_the_program_takes_in_a_time_that_their_devices_can(path: Path) -> None:
    file, clusters = _file(path), list_cluster_names()
    assert file["source"] and file["derived"], "a file says where its rows are from, and how times follow"
    assert all(isinstance(count, int) and count > 0 for count in file["left_out"].values())
    rows: list[Row] = file["rows"]
    assert rows and [row["id"] for row in rows] == sorted({row["id"] for row in rows}), "ids are sorted and unique"
    for row in rows:
        assert list(row)[: len(FIELDS)] == FIELDS, row["id"]
        assert set(row) - set(FIELDS) <= {"tensor_overlap", "note"}, row["id"]
        assert row["id"].startswith(f"{path.stem}/") and row["cluster"] in clusters, row["id"]
        low, high = BUSY
        share = _model_flops_share(row)
        assert low < share < high, f"{row['id']}: {share:.1%} of the peak while busy"
        if row["memory_gb"] is not None:
            assert 0 < row["memory_gb"] <= 1.1 * load_cluster(row["cluster"]).memory_gb, row["id"]


def test_rows_of_a_group_are_one_job_at_several_layouts() -> None:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in (row for path in FILES for row in _file(path)["rows"] if row["group"]):
        groups[row["group"]].append(row)
    assert groups
    for name, rows in groups.items():
        configs = [_config(row["flags"], row["gpus"]) for row in rows]
        jobs = {
            (row["cluster"], row["gpus"], config.training.global_batch_size, repr(config.model), bool(config.precision.fp8_format))
            for row, config in zip(rows, configs, strict=True)
        }
        assert len(jobs) == 1, name
        layouts = {(row["flags"], row.get("tensor_overlap", False)) for row in rows}
        assert len(layouts) == len(rows) > 1, f"{name}: rows of a group differ in their layout"


def test_choices_are_scored_only_where_they_can_be_wrong() -> None:
    """Next to a random choice. A choice of one layout, or of layouts that are equally fast, is right anyway and says nothing."""
    right, wrong = [(1.0, 2.0), (2.0, 3.0), (4.0, 9.0)], [(1.0, 3.0), (1.5, 2.0)]
    trivial = [[(1.0, 1.0)], [(1.0, 2.0), (1.02, 1.0)]]
    assert format_choices([right, wrong, right, *trivial]) == [
        "choice of the layout: 3 groups (1 of 2 layouts, 2 of 3 layouts); in parentheses: a random choice",
        "  groups that do not count, because all their layouts are within 3 % of the best: 1",
        "  pairs over 10 % apart that are in order: 6 of 7 (3.5)",
        "  groups whose predicted best is within 3 % of the best: 2 of 3 (1.17)",
        "  slowdown of the predicted best: mean 16.7 % (97.2 %), largest 50.0 %",
    ]
    assert format_choices(trivial)[0] == "choice of the layout: no group in which a choice can be wrong"
    rows = [row for path in FILES for row in _file(path)["rows"] if row["group"]]
    groups = [[row for row in rows if row["group"] == name] for name in {row["group"] for row in rows}]
    assert format_choices([[(row["seconds"], row["seconds"]) for row in group] for group in groups])[:2] == [
        "choice of the layout: 47 groups (23 of 2 layouts, 24 of 3 layouts); in parentheses: a random choice",
        "  groups that do not count, because all their layouts are within 3 % of the best: 0",
    ]
