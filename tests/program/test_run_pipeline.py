"""Whole runs through every pipeline: the same weights bit for bit, resumed across schedules, measured, and told at the start."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.pipeline_layout import LayerCosts, read_layer_costs
from megatron_lab.monitoring import start_up_log
from megatron_lab.planner.advice import build_advice
from tests.support.runs import arguments, launch, report, run, saved_tensors

STEPS = 2
# Untied, not clipped: where layers lie elsewhere, the two parts of a tied gradient and the norm are summed in another order.
BASE: dict[str, Any] = {
    "num_layers": 5,
    "pipeline_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "clip_grad": 0.0,
    "hidden_dropout": 0.1,
    "bf16": True,
    "micro_batch_size": 1,
    "global_batch_size": 3,
    "train_iters": STEPS,
    "lr_decay_style": "constant",
    "eval_iters": 1,
    "eval_interval": 1,
}
PIPELINES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "zb-h1": {"pipeline_schedule": "zb-h1", "decoder_first_pipeline_num_layers": 1},
    "zb-v": {"pipeline_schedule": "zb-v"},
    "layout": {"pipeline_model_parallel_layout": "E|ttt||ttL"},
    "balanced": {"pipeline_split": "balanced"},
    "recompute": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "recompute by stage": {
        "pipeline_schedule": "zb-h1",
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_layers_per_stage": "3,1",
    },
    "host memory": {"pipeline_schedule": "gpipe", "cpu_offload_activations": True},
    "host memory, recompute, zb-v": {
        "pipeline_schedule": "zb-v",
        "cpu_offloading": True,
        "recompute_granularity": "full",
        "recompute_num_layers": 2,
    },
}


QUICK = ("host memory, recompute, zb-v",)
"""What comes late, again and back. Any pipeline: tests/proof/test_layouts_pipeline.py and test_layouts_memory.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_every_pipeline_gives_the_same_bits:
        metafunc.parametrize("pipeline", PIPELINES if metafunc.config.getoption("--full") else QUICK)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return saved_tensors(folder, STEPS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by 1F1B after the first step too."""
    folder = tmp_path_factory.mktemp("base")
    run(arguments(**BASE, save=folder, save_interval=1), 2)
    return folder


def measure(**settings: Any) -> str:
    """Run with --profile-pipeline, and with the advice. Returns all that rank 0 had to say."""

    def before(rank: int) -> None:
        start_up_log.build_advice = build_advice

    ended = launch([*arguments(**BASE | settings), "--profile-pipeline"], 2, before=before)
    assert all(end.code == 0 for end in ended), report(ended)
    return ended[0].stdout + ended[0].stderr


def assert_same(folder: Path, base: Path) -> None:
    found, expected = weights(folder), weights(base)
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_every_pipeline_gives_the_same_bits(base: Path, tmp_path: Path, pipeline: str) -> None:
    """Weights, moments and main parameters, with dropout, in bfloat16."""
    run(arguments(**BASE, **PIPELINES[pipeline], save=tmp_path), 2)
    assert_same(tmp_path, base)


def go_on(base: Path, folder: Path, pipeline: str) -> str:
    """Resume the run of `base` after its first step, with other stages. Returns what is printed."""
    said = run(arguments(**BASE, **PIPELINES[pipeline], load=base, ckpt_step=1, save=folder), 2)
    assert_same(folder, base)
    return said


@pytest.mark.full("the next test, at zb-v")
def test_a_run_goes_on_with_another_schedule(base: Path, tmp_path: Path) -> None:
    go_on(base, tmp_path, "interleaved")


def test_a_run_that_goes_on_tells_of_its_pipeline(base: Path, tmp_path: Path) -> None:
    """The start-up log describes it."""
    lines = [line.strip() for line in go_on(base, tmp_path, "zb-v").splitlines()]
    table = lines.index(next(line for line in lines if line.startswith("stage")))
    assert "0-0 (1)" in lines[table + 1] and "4-4 (1)" in lines[table + 1] and "loss" in lines[table + 1]
    assert "1-1 (1)" in lines[table + 2] or "1-2 (2)" in lines[table + 2]
    assert any(line.startswith("deferred weight gradients take at most ") for line in lines)
    assert any(line.startswith("pipeline schedule zb-v: 3 microbatches through 2 stages of 2 chunks, ") for line in lines)


def test_the_pipeline_is_measured(tmp_path: Path) -> None:
    """Planned and measured, each operation once on each; the measured ones of a stage follow each other."""
    folder = tmp_path / "profile"
    recompute = {"recompute_granularity": "full"}
    said = measure(train_iters=2, profile_step_start=2, profile_dir=folder, pipeline_schedule="zb-v", **recompute)
    names = ["layer_costs_step2.json", *(f"pipeline_step2.{suffix}" for suffix in ("json", "svg", "txt"))]
    assert sorted(path.name for path in folder.iterdir()) == names
    text = (folder / "pipeline_step2.txt").read_text()
    assert "zb-v, simulated" in text and "zb-v, measured in iteration 2" in text and "R recompute" in text
    events = [event for event in json.loads((folder / "pipeline_step2.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 2 * 2 * 4 * 3, "panels x stages x chunks x kinds x microbatches"
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        assert len(row) == 2 * 4 * 3
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(row)), "microseconds"
    assert "peak memory for deferred weight gradients (MiB, by stage): " in said


def test_a_split_by_measured_costs_is_the_same_run(base: Path, tmp_path: Path) -> None:
    """The costs of a profile are taken, and costs that move the cut give the same bits."""
    profiled = arguments(**{**BASE, "train_iters": 1, "eval_iters": 0}, profile_step_start=1, profile_dir=tmp_path / "profile")
    run([*profiled, "--profile-pipeline"], 2)
    path = tmp_path / "profile" / "layer_costs_step1.json"
    costs = read_layer_costs(str(path))
    assert len(costs.layers) == BASE["num_layers"] and min(*costs.layers, costs.embedding, costs.loss) > 0
    LayerCosts(costs.layers, 1.5 * sum(costs.layers), 0.0).write(path)
    out = run(arguments(**BASE, pipeline_split="balanced", layer_costs=path, save=tmp_path / "run"), 2)
    lines = [line.split() for line in out.splitlines()]
    stages = lines[lines.index(["stage", "layers"]) + 1 :][:2]
    assert stages[0] == ["0", "embedding"] and "(5)," in stages[1] and "loss" in stages[1], stages
    assert_same(tmp_path / "run", base)


def test_after_a_ramp_up_the_log_tells_of_both_batches() -> None:
    out = run(
        [*arguments(**{**BASE, "train_iters": None, "train_samples": 8, "global_batch_size": 4}, rampup_batch_size=(2, 2, 4))], 2
    )
    told = [line.split(":")[1].split("through")[0].strip() for line in out.splitlines() if "pipeline schedule 1f1b" in line]
    assert told == ["2 microbatches", "4 microbatches"]


def test_a_run_that_ends_too_early_is_not_measured(tmp_path: Path) -> None:
    said = measure(train_iters=3, exit_interval=1, profile_step_start=2, profile_dir=tmp_path, global_batch_size=1)
    assert "--profile-pipeline measured nothing: the run ended before iteration 2" in said and not list(tmp_path.iterdir())
    assert "advice: 1 microbatches through 2 pipeline stages leave " in said


def test_a_step_that_is_left_out_is_not_measured(tmp_path: Path) -> None:
    said = measure(train_iters=1, profile_step_start=1, profile_dir=tmp_path, iterations_to_skip=1)
    assert "--profile-pipeline measured nothing: iteration 1 was skipped" in said and not list(tmp_path.iterdir())


def test_the_layers_that_run_again_are_chosen_by_the_memory_there_is(tmp_path: Path) -> None:
    """As few of each stage as fit: the first stage of 1F1B keeps two microbatches, the second one. Or the reason why none do."""
    settings = {**BASE, "num_layers": 2, "train_iters": 1, "bf16": False, "device": "cpu", "seq_length": 64, "micro_batch_size": 4}
    settings |= {"global_batch_size": 12, "recompute_granularity": "full", "recompute_method": "block", "eval_iters": 0}
    plan = tmp_path / "plan.json"
    dry_run = ["--dry-run", "--world-size", "2", "--dry-run-json", str(plan)]
    run([*arguments(**settings, recompute_layers_per_stage="1,0"), *dry_run])
    needed = json.loads(plan.read_text())["device_bytes"] / 1e9
    auto = arguments(**settings, recompute_layers_per_stage="auto")
    line = "1 of 2 layers keep only their input and run again in backward; by stage 1,0"
    assert line in run([*auto, "--device-memory-gb", str(1.1 * needed)], 2)
    ends = launch([*auto, "--device-memory-gb", str(0.1 * needed)], 2)
    assert all(end.code for end in ends) and "even with all of its layers recomputed" in report(ends)
