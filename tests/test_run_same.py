"""What must not change a run: running it again, the number of loader threads, overlap, the numbering of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.data_parallel.buckets import GradBuckets
from tests.byte_dataset import FLAGS, write_bytes
from tests.equality import assert_equal_tensors, number_differences
from tests.runs import arguments, digest, losses, run, saved_tensors, timeless

STEPS = 4

BASE: dict[str, Any] = {
    **FLAGS,
    "bf16": True,
    "pipeline_model_parallel_size": 2,  # with the two data ranks of a world of four
    "ddp_bucket_size": 5000,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "train_iters": STEPS,
    "eval_iters": 2,
}

CHANGES: dict[str, dict[str, Any]] = {
    "again": {},
    "no loader threads": {"num_workers": 0},
    "many loader threads": {"num_workers": 4},
    "overlap": {"overlap_grad_reduce": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run that others are compared with, and its settings."""
    folder = tmp_path_factory.mktemp("base")
    settings = {**BASE, "data_path": write_bytes(folder / "text"), "num_workers": 2}
    run(arguments(**settings, save=folder / "save", metrics_file=folder / "metrics"), 4)
    return folder, settings


@pytest.mark.parametrize("change", CHANGES)
def test_bit_for_bit_the_same(base: tuple[Path, dict[str, Any]], tmp_path: Path, change: str) -> None:
    """Every weight, moment and logged number of two pipeline stages and two data ranks, with dropout, in bfloat16."""
    folder, settings = base
    run(arguments(**{**settings, **CHANGES[change]}, save=tmp_path / "save", metrics_file=tmp_path / "metrics"), 4)
    assert timeless(tmp_path / "metrics") == timeless(folder / "metrics")
    assert digest(tmp_path / "save", STEPS) == digest(folder / "save", STEPS)


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_begins_reductions_before_the_end_of_backward(overlap: bool) -> None:
    """So that the comparison above compares two things."""

    def before(rank: int) -> None:
        finish = GradBuckets.finish

        def counting(self: GradBuckets) -> None:
            print(f"begun: {sum(bucket.pending is not None for bucket in self.buckets)}")
            finish(self)

        GradBuckets.finish = counting  # type: ignore[method-assign]

    said = run(arguments(train_iters=1, overlap_grad_reduce=overlap, ddp_bucket_size=5000), 2, before=before)
    assert ("begun: 0" not in said) == overlap


def test_another_seed_is_another_run(base: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """What the comparison above would see: another order of data, other masks and other initial weights."""
    folder, settings = base
    run(arguments(**settings, seed=4321, save=tmp_path / "save", metrics_file=tmp_path / "metrics"), 4)
    assert set(losses(tmp_path / "metrics")).isdisjoint(losses(folder / "metrics"))
    assert digest(tmp_path / "save", STEPS) != digest(folder / "save", STEPS)


def test_both_numberings_of_the_ranks(tmp_path: Path) -> None:
    """In float64, since the sums over ranks may be made in another order."""
    settings = {"fp64": True, "train_iters": STEPS, "pipeline_model_parallel_size": 2}
    for name, changes in (("default", {}), ("mapping", {"use_tp_pp_dp_mapping": True})):
        run(arguments(**settings, **changes, save=tmp_path / name, metrics_file=tmp_path / f"{name}.jsonl"), 4)
    found, wanted = losses(tmp_path / "mapping.jsonl"), losses(tmp_path / "default.jsonl")
    assert not number_differences("losses", found, wanted, 1e-10)
    assert_equal_tensors(saved_tensors(tmp_path / "mapping", STEPS), saved_tensors(tmp_path / "default", STEPS), what="weights")
