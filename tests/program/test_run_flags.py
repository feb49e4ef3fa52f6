"""Flags that act on a whole run: its length, what is taken from a checkpoint, what is kept, how Python and torch behave."""

from __future__ import annotations

import gc
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import (
    TINY,
    arguments,
    at_iteration,
    checkpoint,
    complete_checkpoints,
    digest,
    read_metrics,
    run,
    saved_state,
    saved_tensors,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "unit" in metafunc.fixturenames:
        cases = [(unit, batch) for unit in ("train_iters", "train_samples") for batch in (4, 16)]
        metafunc.parametrize(("unit", "batch"), cases if metafunc.config.getoption("--full") else [cases[3]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of iterations 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    run(arguments(train_iters=3, save=folder, save_interval=1, lr_decay_style="constant"))
    return folder


def _load_and_save(folder: Path, *switches: str, **settings: Any) -> None:
    """Load, leave the only iteration that is left out, and save."""
    run([*arguments(lr_decay_style="constant", save=folder, **settings), *switches])


def test_a_run_counted_in_samples(tmp_path: Path) -> None:
    """--train-samples gives the same run as --train-iters; what is left over for no whole batch is dropped."""
    run(arguments(train_iters=3, save=tmp_path / "iters", lr_warmup_iters=1))
    run(arguments(train_samples=24, save=tmp_path / "samples", lr_warmup_samples=8))
    assert digest(tmp_path / "iters", 3) == digest(tmp_path / "samples", 3)
    run(arguments(train_samples=15, save=tmp_path / "more"))
    assert complete_checkpoints(tmp_path / "more") == ["iter_0000001"]


def test_the_batch_grows(tmp_path: Path) -> None:
    """--rampup-batch-size 2 2 18: three increments, each after 6 samples; the run ends with the samples."""
    run(arguments(rampup_batch_size=(2, 2, 18), train_samples=42, metrics_file=tmp_path / "metrics"))
    lines = read_metrics(tmp_path / "metrics")
    assert [line["global_batch_size"] for line in lines] == [2, 2, 2, 4, 4, 6, 8, 8]
    assert [line["consumed_samples"] for line in lines] == [2, 4, 6, 10, 14, 20, 28, 36]
    rates = [TINY["lr"] * (1 - samples / 42) for samples in (0, 2, 4, 6, 10, 14, 20, 28)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates, rel=1e-12)


def test_the_batch_grows_by_a_schedule(tmp_path: Path) -> None:
    """In tokens, of which a sample has 16. The run goes on with more ranks, where its first batch is no whole step and is left out
    of the schedule: batches and rates are the same as without the stop."""
    starts = ((1, "0:2 64:4 144:8", {"exit_interval": 3}), (2, "0:4 144:8", {"load": tmp_path}))
    for ranks, schedule, settings in starts:
        words = {"train_samples": 36, "lr_decay_samples": 30, "save": tmp_path, "metrics_file": tmp_path / f"metrics {ranks}"}
        run(arguments(**words, **settings, global_batch_size=None, step_batch_size_schedule=schedule), ranks)
    lines = [line for ranks in (1, 2) for line in read_metrics(tmp_path / f"metrics {ranks}")]
    assert [line["global_batch_size"] for line in lines] == [2, 2, 4, 4, 8, 8, 8]
    assert [line["consumed_samples"] for line in lines] == [2, 4, 8, 12, 20, 28, 36]
    rates = [TINY["lr"] * max(0, 1 - samples / 30) for samples in (0, 2, 4, 8, 12, 20, 28)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates, rel=1e-12)


def test_a_batch_of_another_size_after_a_resume(saved: Path, tmp_path: Path, batch: int, unit: str) -> None:
    """Smaller or larger, the run goes on where the data was left, until its iterations are made or its samples are used up."""
    length = 5 if unit == "train_iters" else 24 + 2 * batch
    settings = {unit: length, "global_batch_size": batch, "lr_decay_style": "constant", "load": saved, "num_workers": 2}
    said = run(arguments(**settings, save=tmp_path, metrics_file=tmp_path / "metrics"))
    assert f"--global-batch-size 8 there, {batch} here" in said and "iteration        4/       5" in said
    assert [line["consumed_samples"] for line in read_metrics(tmp_path / "metrics")] == [24 + batch, 24 + 2 * batch]
    assert saved_state(tmp_path, 5)["progress"]["consumed_samples"] == 24 + 2 * batch


def test_a_batch_that_follows_the_data_ranks_after_a_resume(tmp_path: Path) -> None:
    """Without --global-batch-size the batch is the micro-batch times the data ranks: another number of them is no silent change."""
    settings = {"global_batch_size": None, "lr_decay_style": "constant", "save": tmp_path, "load": tmp_path}
    run(arguments(**settings, train_iters=1))
    said = run(arguments(**settings, train_iters=2), 2)
    assert "--global-batch-size 2 there, 4 here" in said
    assert saved_state(tmp_path, 2)["progress"]["consumed_samples"] == 2 + 4


def test_finetune_takes_the_weights_alone(saved: Path, tmp_path: Path) -> None:
    """Counts, moments, schedules and the metrics file begin afresh."""
    metrics = tmp_path / "metrics"
    metrics.write_text("of another run\n")
    _load_and_save(tmp_path, load=saved, finetune=True, train_iters=1, iterations_to_skip=(1,), lr=1e-3, metrics_file=metrics)
    assert [line["iteration"] for line in read_metrics(metrics)] == [1]
    _assert_weights_without_moments(saved, tmp_path, 1)
    assert saved_state(tmp_path, 1)["progress"]["consumed_samples"] == TINY["global_batch_size"]
    assert saved_state(tmp_path, 1)["schedule"]["lr"] == 1e-3


def test_no_load_optim_goes_on_counting(saved: Path, tmp_path: Path) -> None:
    """The weights and the place in the data; moments begin at zero."""
    _load_and_save(tmp_path, "--no-load-optim", load=saved, train_iters=4, iterations_to_skip=(4,))
    _assert_weights_without_moments(saved, tmp_path, 4)
    assert saved_state(tmp_path, 4)["progress"]["consumed_samples"] == 4 * TINY["global_batch_size"]


def _assert_weights_without_moments(saved: Path, folder: Path, iteration: int) -> None:
    before, after = saved_tensors(saved, 3), saved_tensors(folder, iteration)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(moment.any() for moment in saved_tensors(folder, iteration, "exp_avg_sq").values())
    assert saved_state(folder, iteration)["optimizer_updates"] == 0


def test_the_shape_comes_from_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    """--use-checkpoint-args: without the model's flags and the tokenizer's, the run goes on as with them."""
    settings: dict[str, Any] = {"train_iters": 4, "load": saved, "lr_decay_style": "constant"}
    run(arguments(**settings, save=tmp_path / "given"))
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "tokenizer_type", "vocab_size")
    run(arguments(**settings, **dict.fromkeys(names), use_checkpoint_args=True, save=tmp_path / "taken"))
    assert digest(tmp_path / "taken", 4) == digest(tmp_path / "given", 4)


def test_which_checkpoints_are_kept(tmp_path: Path) -> None:
    """The newest, and every third."""
    run(arguments(train_iters=8, save=tmp_path, save_interval=1, keep_last=2, save_retain_interval=3))
    assert complete_checkpoints(tmp_path) == [f"iter_{iteration:07d}" for iteration in (3, 6, 7, 8)]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "8\n"


def test_settings_versions_and_command_are_saved(saved: Path) -> None:
    """With each checkpoint, so that a run can be repeated."""
    record = json.loads((checkpoint(saved, 2) / "config.json").read_text())
    assert record["config"]["model"]["hidden_size"] == 32
    text = json.dumps(record)
    assert metadata.version("torch") in text and "--save-interval" in text


@pytest.mark.parametrize("flag", ["deterministic_mode", "manual_gc"])
def test_switches_of_the_process(saved: Path, tmp_path: Path, flag: str) -> None:
    """They are on while the steps run, and the results stay the same on CPU."""

    def tell(_: Any) -> None:
        print(f"deterministic: {torch.are_deterministic_algorithms_enabled()}, collecting: {gc.isenabled()}", flush=True)
        fills = torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()
        print(f"fills new memory: {fills}", flush=True)

    settings: dict[str, Any] = {flag: True, "train_iters": 3, "save": tmp_path, "lr_decay_style": "constant"}
    if flag == "manual_gc":
        settings["manual_gc_interval"] = 2
    said = run(arguments(**settings), before=lambda rank: at_iteration(2, tell))
    deterministic, collecting = flag == "deterministic_mode", flag != "manual_gc"
    assert f"deterministic: {deterministic}, collecting: {collecting}" in said and "fills new memory: False" in said
    assert digest(tmp_path, 3) == digest(saved, 3)
