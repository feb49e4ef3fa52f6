"""Whole runs: the best checkpoint (--keep-best) and early stopping (--early-stopping-patience)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.local_storage import LocalDraft, LocalStorage
from megatron.checkpoint.save_folder import BEST, find_checkpoint, find_problem, read_latest
from megatron.checkpoint.storage_url import open_storage
from megatron.metrics.history import HISTORY_FILE
from megatron.training import loop
from megatron.training.step import TrainStep
from megatron_lab.checkpoints.best_checkpoint import Evaluation, find_best
from megatron_lab.checkpoints.text import parse_step
from megatron_lab.foreign.open_source import open_source
from tests.program.test_run_spikes import REWINDS, bad_batches
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.runs import arguments, checkpoint, complete_checkpoints, digest, launch, read_metrics, report, run
from tests.support.supervised import Job

STEPS = 8
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 2.5, 6: 2.0, 7: math.nan, 8: 3.0}
"""Validation loss by iteration. The lowest comes twice, and the first counts."""
SETTINGS: dict[str, Any] = {"num_layers": 1, "train_iters": STEPS, "eval_interval": 1, "eval_iters": 1, "global_batch_size": 4}
KEEPS: dict[str, Any] = {**SETTINGS, "keep_best": True}
STOPS: dict[str, Any] = {**SETTINGS, "early_stopping_patience": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "stages": (2, {"num_layers": 2, "pipeline_model_parallel_size": 2}),
    "data": (2, {"use_distributed_optimizer": True}),
}


def scripted(losses: Mapping[int, float] = LOSSES) -> Callable[[int], None]:
    """For `before`: an evaluation gives the loss of the table instead of the model's."""

    def before(rank: int) -> None:
        original = loop.evaluate

        def changed(step: TrainStep, *args: Any) -> tuple[float, float | None] | None:
            assert original(step, *args) is not None
            return losses[step.optimizer.num_steps], None

        loop.evaluate = changed  # type: ignore[assignment]

    return before


def names(*iterations: int) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


def best(folder: Path | str) -> tuple[int, float] | None:
    found = find_best(open_storage(folder))
    return None if found is None else (found.iteration, found.loss)


# ---- best checkpoint


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_save", [False, True])
def test_the_checkpoint_with_the_lowest_loss_is_kept(tmp_path: Path, layout: str, async_save: bool) -> None:
    ranks, flags = LAYOUTS[layout]
    settings = {**KEEPS, **flags, "keep_last": 1, "save_interval": 3, "async_save": async_save}
    said = run(arguments(**settings, save=tmp_path), ranks, before=scripted())
    assert complete_checkpoints(tmp_path) == names(4, 8) and best(tmp_path) == (4, 2.0)
    assert f"best checkpoint: {checkpoint(tmp_path, 4)}, validation loss 2.000000E+00" in said
    assert find_checkpoint(tmp_path, "best") == checkpoint(tmp_path, 4) and find_checkpoint(tmp_path) == checkpoint(tmp_path, 8)


@pytest.mark.parametrize(
    "flags, kept",
    [
        ({"save_interval": 3}, (3, 4, 6, 8)),
        ({"save_interval": 2}, (2, 4, 6, 8)),
        ({}, (4, 8)),
        ({"save_interval": 1, "save_retain_interval": 5}, (4, 5, 8)),
    ],
)
def test_checkpoints_that_are_only_the_best_are_removed_and_others_stay(
    tmp_path: Path, flags: dict[str, Any], kept: tuple[int, ...]
) -> None:
    run(arguments(**KEEPS, **flags, save=tmp_path), before=scripted())
    assert complete_checkpoints(tmp_path) == names(*kept) and best(tmp_path) == (4, 2.0)
    assert json.loads((tmp_path / BEST).read_text())["superseded"] is None


def test_the_best_checkpoint_in_an_object_store(tmp_path: Path) -> None:
    run(arguments(**KEEPS, keep_last=1, save_interval=3, async_save=True, save=f"local://{tmp_path}"), before=scripted())
    assert best(f"local://{tmp_path}") == (4, 2.0)
    assert find_checkpoint(f"local://{tmp_path}", "best") == f"local://{tmp_path}/iter_0000004"


def test_a_resumed_run_knows_the_best_checkpoint(tmp_path: Path) -> None:
    """Also one that does not keep the best one does not remove it."""
    settings = {**KEEPS, "keep_last": 1, "save": tmp_path, "load": tmp_path}
    run(arguments(**settings, exit_interval=5), before=scripted())
    assert complete_checkpoints(tmp_path) == names(4, 5)
    run(arguments(**{**settings, "keep_best": None}, exit_interval=6), before=scripted())
    assert complete_checkpoints(tmp_path) == names(4, 6)
    run(arguments(**settings), before=scripted({**LOSSES, 7: 2.1, 8: 1.5}))
    assert complete_checkpoints(tmp_path) == names(8) and best(tmp_path) == (8, 1.5)


def test_an_evaluation_after_the_last_save_counts(tmp_path: Path) -> None:
    settings = {**KEEPS, "eval_interval": 3, "save": tmp_path}
    said = run(arguments(**settings), before=scripted({3: 4.0, 6: 3.0, 8: 1.0}))
    assert complete_checkpoints(tmp_path) == names(8) and best(tmp_path) == (8, 1.0)
    assert f"best checkpoint: {checkpoint(tmp_path, 8)}, validation loss 1.0" in said


def test_a_run_that_goes_back_replaces_the_best_checkpoint(tmp_path: Path) -> None:
    """The iteration of the best one is trained again from an earlier one, with a higher loss. Until it is saved, the old one
    counts; then the lowest of the others."""
    settings = {**KEEPS, "save_interval": 1, "save": tmp_path, "load": tmp_path}
    run(arguments(**settings), before=scripted())
    higher = {iteration: 3.5 - iteration / 10 for iteration in LOSSES}
    run(arguments(**settings, ckpt_step=2, exit_interval=3), before=scripted(higher))
    assert best(tmp_path) == (4, 2.0)
    run(arguments(**settings, exit_interval=4), before=scripted(higher))
    assert best(tmp_path) == (6, 2.0)
    run(arguments(**settings), before=scripted(higher))
    assert best(tmp_path) == (8, higher[8])


def test_a_run_starts_from_the_best_checkpoint(tmp_path: Path) -> None:
    save = tmp_path / "first"
    run(arguments(**KEEPS, save_interval=1, save=save), before=scripted())
    said = run(arguments(**SETTINGS, load=save, ckpt_step="best", save=tmp_path / "second"))
    assert f"resuming from {checkpoint(save, 4)} at iteration 4" in said
    assert digest(tmp_path / "second", STEPS) == digest(save, STEPS)
    assert open_source(save, parse_step("best")).name == str(checkpoint(save, 4))


def test_a_folder_without_a_best_checkpoint(tmp_path: Path) -> None:
    run(arguments(**SETTINGS, save=tmp_path))
    [ended] = launch(arguments(**SETTINGS, load=tmp_path, ckpt_step="best"))
    assert ended.code == 1 and f"{tmp_path} has no best checkpoint" in ended.stderr + ended.stdout


def test_a_rewind_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    """The spike of iteration 6 goes back to the newest checkpoint, which is the best one."""
    settings = {**REWINDS, **KEEPS, "global_batch_size": 8, "train_iters": 7, "keep_last": 1}
    spikes, losses = bad_batches(40), scripted({**LOSSES, 5: 1.5})

    def before(rank: int) -> None:
        spikes(rank)
        losses(rank)

    said = run(arguments(**settings, save=tmp_path), before=before)
    assert f"rewound to {checkpoint(tmp_path, 5)}" in said
    assert complete_checkpoints(tmp_path) == names(5, 7) and best(tmp_path) == (5, 1.5)


def dies_before(number: int) -> Callable[[int], None]:
    """For `before`: the process is killed before its change of the save folder with this number."""
    losses = scripted()

    def before(rank: int) -> None:
        losses(rank)
        count = 0

        def kill_before(owner: type, name: str) -> None:
            original = getattr(owner, name)

            def changed(self: Any, *args: Any) -> Any:
                nonlocal count
                count += args[:1] != (".writable",)
                if count == number:
                    os.kill(os.getpid(), 9)
                return original(self, *args)

            setattr(owner, name, changed)

        kill_before(LocalStorage, "write")
        kill_before(LocalStorage, "remove_checkpoint")
        kill_before(LocalDraft, "create_folder")
        kill_before(LocalDraft, "publish")

    return before


@pytest.mark.parametrize("flags", [{"keep_last": 1}, {}], ids=["keep last", "keep all"])
def test_a_run_that_is_killed_at_any_change_of_its_folder(tmp_path: Path, full: bool, flags: dict[str, Any]) -> None:
    """There is always a complete best checkpoint once there was one, and the run that goes on ends like one that was not killed."""
    settings = {**KEEPS, **flags, "train_iters": 6, "lr_decay_style": "constant"}
    whole = tmp_path / "whole"
    run(arguments(**settings, save=whole), before=scripted())
    number, was_killed, step = 1, True, 1 if full else 3
    while was_killed:
        folder = tmp_path / str(number)
        [ended] = launch(arguments(**settings, save=folder), before=dies_before(number))
        was_killed = ended.code == -9
        assert was_killed or ended.code == 0, report([ended])
        storage, found = open_storage(folder), best(folder)
        latest = read_latest(storage) or STEPS  # killed before it is written, a run starts from the checkpoint that it names
        saved = [name for name in complete_checkpoints(folder) if int(name[5:]) <= latest]
        assert (found is not None) == bool(saved)
        if found is not None:
            assert find_problem(storage.get_child(names(found[0])[0])) is None
            assert found[1] == min(LOSSES[int(name[5:])] for name in saved)
        run(arguments(**settings, save=folder, load=folder), before=scripted())
        assert best(folder) == (4, 2.0) and complete_checkpoints(folder) == complete_checkpoints(whole) == names(4, 6)
        assert digest(folder, 4) == digest(whole, 4) and digest(folder, 6) == digest(whole, 6)
        number += step
    assert number > 20, "the run changed its folder often enough"


def test_a_marker_that_does_not_fit_its_checkpoint_is_ignored(tmp_path: Path) -> None:
    run(arguments(**KEEPS, save_interval=1, save=tmp_path), before=scripted())
    marker = json.loads((tmp_path / BEST).read_text())
    contents: list[Any] = [
        {**marker, "iteration": 7},
        {**marker, "manifest": "x"},
        {**marker, "validation_loss": 1e999},
        [],
        7,
        "{",
    ]
    for content in contents:
        (tmp_path / BEST).write_text(content if isinstance(content, str) else json.dumps(content))
        assert best(tmp_path) == (4, 2.0)
    assert Evaluation.from_json({"iteration": 10**400, "validation_loss": 10**400}) is None


# ---- early stopping


def read_events(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]
    return [line["words"] for line in lines if line.get("event") == "end"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_ends_when_its_validation_loss_no_longer_falls(tmp_path: Path, layout: str) -> None:
    """It is complete: it saves, and the same command does not train again."""
    ranks, flags = LAYOUTS[layout]
    argv = arguments(**{**STOPS, **flags}, save=tmp_path, load=tmp_path, metrics_file=tmp_path / "metrics")
    said = run(argv, ranks, before=scripted())
    reason = (
        "early stopping: the validation loss was not lower in 2 evaluations (--early-stopping-patience), "
        "compared with 2.000000E+00 at iteration 4"
    )
    assert f"done after 6 iterations: {reason}" in said and "exiting" not in said
    assert complete_checkpoints(tmp_path)[-1] == "iter_0000006"
    before = digest(tmp_path, 6)
    said = run(argv, ranks, before=scripted())
    assert f"the run has ended early at iteration 6 and is not trained further: {reason}" in said
    assert complete_checkpoints(tmp_path)[-1] == "iter_0000006" and digest(tmp_path, 6) == before
    assert [line["iteration"] for line in read_metrics(tmp_path / "metrics") if "lm_loss" in line] == [1, 2, 3, 4, 5, 6]
    assert read_events(tmp_path) == [f"done after 6 iterations: {reason}"] * 2


def test_the_state_survives_a_resume(tmp_path: Path) -> None:
    settings = {**STOPS, "save": tmp_path, "load": tmp_path}
    run(arguments(**settings, exit_interval=5), before=scripted())
    assert "done after 6 iterations: early stopping" in run(arguments(**settings), before=scripted())
    said = run(arguments(**{**settings, "early_stopping_patience": 3}), before=scripted())
    assert "done after 7 iterations: early stopping" in said, "a loss that is not a number is no improvement"
    said = run(arguments(**{**settings, "early_stopping_patience": None}), before=scripted())
    assert f"done after {STEPS} iterations\n" in said


def test_a_rewind_goes_back_to_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    """The evaluation of iteration 5 was made, and is made again."""
    settings = {**REWINDS, **STOPS, "global_batch_size": 8, "train_iters": 9, "early_stopping_patience": 3}
    spikes, losses = bad_batches(40), scripted({1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0, 5: 2.5, 6: 2.5, 7: 2.5, 8: 2.5, 9: 2.5})

    def before(rank: int) -> None:
        spikes(rank)
        losses(rank)

    said = run(arguments(**settings, save=tmp_path), before=before)
    assert "(iteration 4)" in said and "done after 7 iterations: early stopping" in said


@pytest.mark.parametrize(
    "flags, losses, expected",
    [
        (
            {"early_stopping_min_delta": 1.5},
            LOSSES,
            "done after 4 iterations: early stopping: the validation loss was not lower by more than 1.5 (--early-stopping-"
            "min-delta) in",
        ),
        ({}, dict.fromkeys(LOSSES, math.nan), "done after 2 iterations: early stopping"),
        ({}, {iteration: -iteration for iteration in LOSSES}, f"done after {STEPS} iterations\n"),
        ({"early_stopping_patience": STEPS}, LOSSES, f"done after {STEPS} iterations\n"),
        ({"eval_interval": 2}, LOSSES, f"done after {STEPS} iterations: early stopping"),
    ],
    ids=["delta", "never finite", "falls", "patience", "interval"],
)
def test_what_counts_as_an_improvement(flags: dict[str, Any], losses: Mapping[int, float], expected: str) -> None:
    assert expected in run(arguments(**{**STOPS, **flags}), before=scripted(losses))


def test_an_early_end_is_followed_by_the_test(tmp_path: Path) -> None:
    data = {**FLAGS, "split": "60,20,20", "data_path": write_bytes(tmp_path / "text")}
    settings = {**STOPS, **data, "keep_best": True, "save": tmp_path / "run", "metrics_file": tmp_path / "metrics"}
    said = run(arguments(**settings), before=scripted())
    assert [line["iteration"] for line in read_metrics(tmp_path / "metrics") if "test_loss" in line] == [6]
    assert f"best checkpoint: {checkpoint(tmp_path / 'run', 4)}" in said


def test_a_supervised_run_that_ends_early_is_complete(tmp_path: Path) -> None:
    """The supervisor does not start it again."""
    settings = {**STOPS, "early_stopping_patience": 1, "early_stopping_min_delta": 100.0}
    with Job(tmp_path) as job:
        node = job.node("--nproc-per-node", "2", **settings)
        assert node.ended() == 0, node.said()
        assert node.said().count("done after 2 iterations: early stopping") == 1 and job.saved() == 2
