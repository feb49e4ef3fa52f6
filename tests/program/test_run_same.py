"""What must not change a run: running it again, loader threads, overlap, pipeline and data ranks, even with dropout."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.data_parallel import bucket
from megatron.data_parallel.buckets import BucketedParams
from megatron.model.inputs import ModelInputs
from megatron.training.step import TrainStep
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.runs import arguments, at_iteration, digest, launch, losses, read_metrics, report, run, saved_tensors, timeless

STEPS = 2

BASE: dict[str, Any] = {
    **FLAGS,
    "bf16": True,
    "pipeline_model_parallel_size": 2,  # with the two data ranks of a world of four
    "ddp_bucket_size": 5000,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "train_iters": STEPS,
    "eval_iters": 1,
}

CHANGES: dict[str, dict[str, Any]] = {
    "again": {},
    "no loader threads": {"num_workers": 0},
    "many loader threads": {"num_workers": 4},
    "overlap": {"overlap_grad_reduce": True},
    "waiting for messages": {"overlap_p2p_communication": False},
    "late weight gradients": {"pipeline_schedule": "zb-h1", "overlap_grad_reduce": True},
}


TOGETHER: dict[str, dict[str, Any]] = {
    "many loader threads, late weight gradients, overlap, waiting for messages": {
        **CHANGES["many loader threads"],
        **CHANGES["late weight gradients"],
        **CHANGES["waiting for messages"],
    },
}
"""These changes in one run. Runs of other tests have no loader threads."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take each change, layout or pair alone with --full, and without it a few that have all settings."""
    full = metafunc.config.getoption("--full")
    if "change" in metafunc.fixturenames:
        changes = CHANGES if full else TOGETHER
        metafunc.parametrize("change", changes.values(), ids=changes)
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS if full else ["pp2-dp2, ranks of a pipeline side by side"])
    if "sequence_parallel" in metafunc.fixturenames:
        pairs = itertools.product((False, True), (1, 2))
        metafunc.parametrize(("sequence_parallel", "stages"), [*pairs])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run that others are compared with, and its settings."""
    folder = tmp_path_factory.mktemp("base")
    settings = {**BASE, "data_path": write_bytes(folder / "text"), "num_workers": 2}
    run(arguments(**settings, save=folder / "save", metrics_file=folder / "metrics"), 4)
    return folder, settings


def test_bit_for_bit_the_same(base: tuple[Path, dict[str, Any]], tmp_path: Path, change: dict[str, Any]) -> None:
    """Every weight, moment and logged number of two pipeline stages and two data ranks, with dropout, in bfloat16."""
    folder, settings = base
    run(arguments(**{**settings, **change}, save=tmp_path / "save", metrics_file=tmp_path / "metrics"), 4)
    assert timeless(tmp_path / "metrics") == timeless(folder / "metrics")
    assert digest(tmp_path / "save", STEPS) == digest(folder / "save", STEPS)


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_begins_reductions_before_the_end_of_backward(overlap: bool) -> None:
    """So that the comparison above compares two things."""

    def before(rank: int) -> None:
        finish = BucketedParams.finish_gradients
        begun = []
        start = bucket.start_all_reduce

        def noting(*args: Any) -> Any:
            begun.append(args)
            return start(*args)

        def counting(self: BucketedParams) -> None:
            print(f"begun: {len(begun)}")
            finish(self)

        bucket.start_all_reduce = noting  # type: ignore[assignment]
        BucketedParams.finish_gradients = counting  # type: ignore[method-assign]

    said = run(arguments(train_iters=1, overlap_grad_reduce=overlap, ddp_bucket_size=5000), 2, before=before)
    assert ("begun: 0" not in said) == overlap


DROPOUT: dict[str, Any] = {"attention_dropout": 0.1, "hidden_dropout": 0.1}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2}),
    "pp2-dp2, ranks of a pipeline side by side": (4, {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True}),
}
STAGE_OF_RANK = {"pp2-dp2": [0, 0, 1, 1], "pp2-dp2, ranks of a pipeline side by side": [0, 1, 0, 1]}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process in float64, with dropout."""
    folder = tmp_path_factory.mktemp("one")
    run(arguments(**DROPOUT, fp64=True, train_iters=STEPS, save=folder, metrics_file=folder / "metrics"))
    return folder


def test_another_seed_is_another_run(one_rank: Path, tmp_path: Path) -> None:
    """What the comparisons would see: another order of data, other masks and other initial weights."""
    settings = {**DROPOUT, "fp64": True, "train_iters": STEPS, "seed": 4321}
    run(arguments(**settings, save=tmp_path, metrics_file=tmp_path / "metrics"))
    assert set(losses(tmp_path / "metrics")).isdisjoint(losses(one_rank / "metrics"))
    assert digest(tmp_path, STEPS) != digest(one_rank, STEPS)


def test_dropout_is_the_same_over_pipeline_and_data_ranks(one_rank: Path, tmp_path: Path, layout: str) -> None:
    """In float64, since sums over ranks are made in another order. The ranks of a pipeline are two apart, or side by side.

    Side by side they talk through shared memory, else over gloo as a user's.
    """
    world_size, flags = LAYOUTS[layout]
    settings = {**DROPOUT, **flags, "fp64": True, "train_iters": STEPS}

    def before(rank: int) -> None:
        at_iteration(1, lambda step: print(f"layers of rank {rank}: {list(step.model.chunks)}", flush=True))

    argv = arguments(**settings, save=tmp_path, metrics_file=tmp_path / "metrics")
    ended = launch(argv, world_size, before=before, gloo="use_tp_pp_dp_mapping" not in flags)
    assert [end.code for end in ended] == [0] * world_size, report(ended)
    assert not number_differences("losses", losses(tmp_path / "metrics"), losses(one_rank / "metrics"), 1e-10)
    assert_equal_tensors(saved_tensors(tmp_path, STEPS), saved_tensors(one_rank, STEPS), what="weights")
    for rank, stage in enumerate(STAGE_OF_RANK.get(layout, ())):
        assert f"layers of rank {rank}: [{stage}]" in ended[rank].stdout, report(ended)


def test_context_ranks_share_a_sequence_in_any_way(tmp_path: Path, full: bool) -> None:
    """Another --cp-comm-type for each layer, and with --full each alone, gives the run of one process, evaluations too, where
    documents end within samples. (The ring has its own communicators.)"""
    settings: dict[str, Any] = {"num_layers": 3, "train_iters": 2, "eval_iters": 1, "eval_interval": 2, "fp64": True}
    settings |= {"micro_batch_size": 1, "global_batch_size": 2, "position_embedding_type": "rope"}
    settings |= {"reset_position_ids": True, "reset_attention_mask": True}
    run(arguments(**settings, metrics_file=tmp_path / "one"))

    def numbers(name: str) -> list[float]:
        return [line[what] for line in read_metrics(tmp_path / name) for what in ("lm_loss", "validation_loss") if what in line]

    assert len(numbers("one")) == 3
    for ways in (*((("all_gather",), ("p2p",), ("a2a",)) if full else ()), ("a2a", "p2p", "all_gather")):
        said = run(arguments(**settings, context_parallel_size=2, cp_comm_type=ways, metrics_file=tmp_path / ways[0]), 2)
        assert "context 2" in said and "context imbalance" in said, ways
        assert not number_differences(f"losses of {ways}", numbers(ways[0])[-3:], numbers("one"), 1e-10)


def test_no_two_microbatches_have_the_same_masks() -> None:
    """On any data rank, in any step; what a mask depends on is printed by the ranks."""

    def before(rank: int) -> None:
        gradients = TrainStep.compute_gradients

        def telling(self: TrainStep, batch: Sequence[ModelInputs]) -> tuple[torch.Tensor, torch.Tensor]:
            for inputs in batch:
                print(f"key: {inputs.dropout_key}", flush=True)
            return gradients(self, batch)

        TrainStep.compute_gradients = telling  # type: ignore[method-assign, assignment]

    ended = launch(arguments(**DROPOUT, train_iters=3), 2, before=before)
    keys = [line for end in ended for line in end.stdout.splitlines() if line.startswith("key: ")]
    assert len(keys) == len(set(keys)) == 3 * 4, report(ended)  # steps x microbatches of both ranks


@pytest.mark.full("test_run_checks.py::test_checks_find_nothing_and_change_nothing compares them bit for bit")
def test_replicas_stay_equal(sequence_parallel: bool, stages: int) -> None:
    """What several ranks hold of a parameter is the same bit for bit after some steps, with dropout and in bfloat16."""
    lines = []

    def before(rank: int) -> None:
        at_iteration(STEPS, _print_parameters)

    settings = {**DROPOUT, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": stages, "bf16": True}
    settings |= {"sequence_parallel": sequence_parallel, "train_iters": STEPS}
    for end in launch(arguments(**settings), 4, before=before):
        lines += [line for line in end.stdout.splitlines() if line.startswith("parameter ")]
    parts = {line.rpartition(" ")[0] for line in lines}
    assert len(parts) == len(set(lines)) < len(lines), "a part with several values is listed several times"


def _print_parameters(step: TrainStep) -> None:
    context = step.context
    for entry in step.model.params:
        box = entry.record.get_local_slice(context.axis_sizes, context.coordinates)
        data = entry.param.detach().contiguous().view(torch.uint8).numpy().tobytes()
        print(f"parameter {entry.record.name} {box} {zlib.crc32(data)}", flush=True)
