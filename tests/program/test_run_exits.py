"""Ways to stop early: all ranks agree, save and exit with a code that says why, and the run goes on as if it had never stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.api import Trainer
from megatron.api import settings as make_settings
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import claim_folder
from megatron.checkpoint.savers import SyncSaver
from megatron.config.launcher import ERROR_FILE_VARIABLE, read_error_file
from megatron.training import loop, resume
from megatron.training.saver import Saver
from megatron.training.step import TrainStep
from tests.support.runs import arguments, complete_checkpoints, digest, launch, on_rank, report, run, timeless
from tests.support.warm import run_forked_ranks

STEPS = 4
SETTINGS: dict[str, Any] = {
    "train_iters": STEPS,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "lr_decay_style": "cosine",
    "num_workers": 2,
    "micro_batch_size": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two data ranks that is not interrupted, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("whole")
    run(arguments(**SETTINGS, save=folder, save_interval=1, metrics_file=folder / "metrics"), 2)
    return folder


def _terminate(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stopped(settings: dict[str, Any], before: Callable[[int], None], code: int = 85) -> str:
    """Run on two ranks until a signal ends it; returns what the first printed."""
    ended = launch(arguments(**settings), 2, before=before)
    assert [end.code for end in ended] == [code, code], report(ended)
    return ended[0].stdout


def _assert_stopped(folder: Path, whole: Path, at: int) -> None:
    """One checkpoint, whose weights and state are those of the run that was not interrupted, and so are the metrics until there."""
    assert complete_checkpoints(folder) == [f"iter_{at:07d}"]
    assert digest(folder, at) == digest(whole, at)
    assert timeless(folder / "metrics") == timeless(whole / "metrics")[:at]


def _assert_goes_on(folder: Path, whole: Path, stopped_at: int) -> None:
    """The run also resumes to the end as if it had not been interrupted."""
    _assert_stopped(folder, whole, stopped_at)
    run(arguments(**SETTINGS, save=folder, load=folder, metrics_file=folder / "metrics"), 2)
    assert digest(folder, STEPS) == digest(whole, STEPS)
    assert timeless(folder / "metrics") == timeless(whole / "metrics")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank(tmp_path: Path, whole: Path, rank: int) -> None:
    """It comes during iteration 1, which is finished and saved. The exit code is no success, unless that is asked for."""
    settings = {**SETTINGS, "save": tmp_path, "metrics_file": tmp_path / "metrics"}
    if rank:
        said = _stopped(settings, on_rank(rank, 1, _terminate))
        assert "exiting on a signal to another rank" in said
    else:
        told = on_rank(rank, 1, lambda _: os.kill(os.getpid(), signal.SIGUSR1))
        assert "exiting on SIGUSR1" in _stopped({**settings, "exit_signal_code": 0}, told, code=0)
    # The request travels with the sums of a step: of this one, if the signal was there before it began.
    (_assert_goes_on if rank else _assert_stopped)(tmp_path, whole, 2)


def test_sigterm_again_while_saving(tmp_path: Path, whole: Path) -> None:
    """Launchers pass on a signal that the ranks have had already: the save is not cut off."""

    def before(rank: int) -> None:
        on_rank(0, 1, _terminate)(rank)
        save = Saver.save

        def interrupted(self: Saver, *args: Any, **named: Any) -> str | None:
            _terminate(None)
            return save(self, *args, **named)

        Saver.save = interrupted  # type: ignore[assignment, method-assign]

    _stopped({**SETTINGS, "save": tmp_path, "metrics_file": tmp_path / "metrics"}, before)
    _assert_stopped(tmp_path, whole, 2)


def test_sigterm_while_evaluating(tmp_path: Path, whole: Path) -> None:
    """An evaluation of thousands of batches is given up at the next one, between steps and at the end of the run."""

    def before(rank: int) -> None:
        real, seen = TrainStep.evaluate, [0]

        def evaluate(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if rank == 1 and seen[0] == 3:
                _terminate(None)
            return real(self, *args, **kwargs)

        TrainStep.evaluate = evaluate  # type: ignore[method-assign]

    settings = {**SETTINGS, "save": tmp_path / "between", "metrics_file": tmp_path / "between" / "metrics", "eval_iters": 100_000}
    said = _stopped({**settings, "eval_interval": 2}, before)
    assert "the evaluation at iteration 2 is given up on a signal to another rank" in said and "exiting on a signal" in said
    _assert_stopped(tmp_path / "between", whole, 2)
    settings["save"] = tmp_path / "end"
    said = run(arguments(**settings, eval_interval=STEPS + 1), 2, before=before)
    assert f"the evaluation at iteration {STEPS} is given up on a signal to another rank" in said and "validation loss" not in said
    assert complete_checkpoints(tmp_path / "end") == [f"iter_{STEPS:07d}"]


def test_sigterm_while_starting(tmp_path: Path) -> None:
    """While a checkpoint is read: it ends at once, and takes nothing over."""
    run(arguments(train_iters=1, save=tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())

    def in_resume(_: int) -> None:
        def resumed(*_: Any, **__: Any) -> None:
            _terminate(None)
            time.sleep(30)

        resume.resume = resumed  # type: ignore[assignment]

    ended = launch(arguments(train_iters=3, save=tmp_path, load=tmp_path), before=in_resume)
    assert ended[0].code == 85, report(ended)
    assert ended[0].stderr == "pretrain_gpt.py: SIGTERM before training: there is nothing to save\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.full("test_exit_without_saving, and resumes in test_run_resume.py and test_run_rates.py")
def test_exit_interval(tmp_path: Path, whole: Path) -> None:
    """Save and exit at each multiple before the end, which is an end as any other."""
    said = run(arguments(**SETTINGS, exit_interval=2, save=tmp_path, load=tmp_path, metrics_file=tmp_path / "metrics"), 2)
    assert "exiting at iteration 2 (--exit-interval 2)" in said
    assert complete_checkpoints(tmp_path)[-1] == "iter_0000002"
    said = run(arguments(**SETTINGS, exit_interval=2, save=tmp_path, load=tmp_path, metrics_file=tmp_path / "metrics"), 2)
    assert f"done after {STEPS} iterations" in said and "exiting" not in said
    assert digest(tmp_path, STEPS) == digest(whole, STEPS)
    assert timeless(tmp_path / "metrics") == timeless(whole / "metrics")


def test_exit_after_some_time(tmp_path: Path, whole: Path) -> None:
    """Sooner than the first step is done: one step is made."""
    said = run(arguments(**SETTINGS, exit_duration_in_mins=1e-6, save=tmp_path, metrics_file=tmp_path / "metrics"), 2)
    assert "--exit-duration-in-mins" in said
    _assert_stopped(tmp_path, whole, 1)


@pytest.mark.full("test_checkpoint_kill.py and test_supervisor.py")
def test_a_run_that_was_killed_goes_on_from_its_last_save(tmp_path: Path, whole: Path) -> None:
    """Steps after the save are made again, with the same results; the metrics file then has them twice."""
    settings = {**SETTINGS, "save": tmp_path, "load": tmp_path, "metrics_file": tmp_path / "metrics"}
    kill = on_rank(1, 4, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert [end.code for end in launch(arguments(**settings, save_interval=2), 2, before=kill, gloo=True)] == [1, -signal.SIGKILL]
    run(arguments(**settings), 2)
    assert digest(tmp_path, STEPS) == digest(whole, STEPS)
    lines, wanted = timeless(tmp_path / "metrics"), timeless(whole / "metrics")
    assert lines == [*wanted[:3], *wanted[2:]]


def test_exit_without_saving(tmp_path: Path) -> None:
    """Without --save there is nothing to write, and an exit is still an exit."""
    assert "exiting at iteration 2" in run(arguments(**SETTINGS, exit_interval=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2, pytest.param(signal.SIGHUP, marks=pytest.mark.full("SIGINT"))])
def test_other_signals_save_too(tmp_path: Path, whole: Path, number: signal.Signals) -> None:
    """The run has --save and no --save-interval. Ctrl-C says what happens, and that a second one does not wait."""
    settings = {**SETTINGS, "save": tmp_path, "metrics_file": tmp_path / "metrics"}
    errors = tmp_path / "errors"

    def before(rank: int) -> None:
        (errors / str(rank)).mkdir(parents=True)
        os.environ[ERROR_FILE_VARIABLE] = str(errors / str(rank) / "error.json")
        on_rank(0, 2, lambda _: os.kill(os.getpid(), number))(rank)

    ended = launch(arguments(**settings), 2, before=before)
    # A rank that ends first has not failed: the other still says what happens.
    reports = [read_error_file(errors / str(rank) / "error.json") for rank in range(2)]
    assert all(found is not None and found.is_consequence and found.message.startswith("exited on ") for found in reports), reports
    assert [end.code for end in ended] == [85, 85] and f"exiting on {number.name}" in ended[0].stdout, report(ended)
    name, hint = ("Ctrl-C", ". A second Ctrl-C exits at once.") if number == signal.SIGINT else (number.name, "")
    assert ended[0].stderr == f"pretrain_gpt.py: {name}: the run finishes this step, saves and exits{hint}\n"
    assert "checkpoints: every 30 minutes (the newest is kept), at the end and on a signal" in ended[0].stdout
    _assert_stopped(tmp_path, whole, 3)


def test_saves_by_time(tmp_path: Path, whole: Path) -> None:
    """Without --save-interval. One that is due by time goes when a newer checkpoint is complete, unless --keep-last keeps it."""

    def before(rank: int) -> None:
        loop.DEFAULT_SAVE_MINUTES = 0
        real = Saver.save

        def save(self: Saver, *args: Any, **named: Any) -> str | None:
            path = real(self, *args, **named)
            if rank == 0:
                print("after a save there are", *complete_checkpoints(Path(self._storage.location)))
            return path

        Saver.save = save  # type: ignore[method-assign]

    said = run(arguments(**SETTINGS, save=tmp_path / "all"), 2, before=before)
    assert said.count("after a save there are") == STEPS + 1  # the last is not written again
    assert "there are iter_0000003\n" in said and complete_checkpoints(tmp_path / "all") == [f"iter_{STEPS:07d}"]
    assert digest(tmp_path / "all", STEPS) == digest(whole, STEPS)
    run(arguments(**SETTINGS, save=tmp_path / "two", keep_last=2, async_save=True), before=before)
    assert complete_checkpoints(tmp_path / "two") == [f"iter_{STEPS - 1:07d}", f"iter_{STEPS:07d}"]
    run(arguments(**SETTINGS, save=tmp_path / "later", async_save=True), before=before)
    assert complete_checkpoints(tmp_path / "later") == [f"iter_{STEPS:07d}"]


def _save_each_step(rank: int) -> None:
    loop.DEFAULT_SAVE_MINUTES = 0


def _checkpoints(*iterations: int) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


@pytest.mark.parametrize("settings", [{}, {"async_save": True}])
def test_saves_by_time_remove_nothing_else(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A resume from an earlier checkpoint writes 2 and 3 again, which the run before was to keep."""
    run(arguments(**SETTINGS, save=tmp_path, save_interval=1))
    assert complete_checkpoints(tmp_path) == _checkpoints(1, 2, 3, 4)
    longer = {**SETTINGS, **settings, "train_iters": 6, "resume_schedule": "new"}
    run(arguments(**longer, save=tmp_path, load=tmp_path, ckpt_step=1), before=_save_each_step)
    assert complete_checkpoints(tmp_path) == _checkpoints(1, 2, 3, 4, 6)


def test_a_checkpoint_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    """Even if one of the same step was due by time."""
    settings = {"micro_batch_size": 4, "train_iters": STEPS, "lr": 1e-3, "device": "cpu", "save": str(tmp_path), "eval_iters": 0}
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "mock_data": True, "vocab_size": 16}

    def train() -> None:
        _save_each_step(0)
        with Trainer(make_settings({**settings, **model, "tokenizer_type": "NullTokenizer"}), quiet=True) as trainer:
            trainer.fit(2)
            assert trainer.save() == str(tmp_path / "iter_0000002")
            trainer.fit()

    run_forked_ranks(1, lambda rank: train())
    assert complete_checkpoints(tmp_path) == _checkpoints(2, STEPS)


def test_a_checkpoint_that_is_gone_or_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A person moves one away; later another run takes over the folder, and may have written a step again."""

    def before(rank: int) -> None:
        _save_each_step(rank)
        real = Saver._remove_timed_checkpoints

        def remove(self: Saver, log: Callable[[str], None]) -> None:
            latest = (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip()
            if latest == "2":
                (tmp_path / "iter_0000001").rename(tmp_path / "kept")
            if latest == "4":
                claim_folder(self._storage, {}, "another")
            real(self, log)

        Saver._remove_timed_checkpoints = remove  # type: ignore[method-assign]

    said = run(arguments(**SETTINGS, save=tmp_path), before=before)
    assert complete_checkpoints(tmp_path) == _checkpoints(3, 4) and (tmp_path / "kept").exists()
    assert said.count("iter_0000003 could not be removed: another run has taken over the folder") == 1


def test_a_save_by_time_that_fails_is_only_told(tmp_path: Path) -> None:
    """The disk is full for a while; the run ends with its last checkpoint, on all ranks."""

    def before(rank: int) -> None:
        _save_each_step(rank)
        real = SyncSaver.save

        def save(self: SyncSaver, iteration: int, *args: Any) -> str:
            if iteration == 2:
                raise CheckpointError("cannot save: No space left on device")
            return real(self, iteration, *args)

        SyncSaver.save = save  # type: ignore[assignment, method-assign]

    said = run(arguments(**SETTINGS, save=tmp_path), 2, before=before)
    assert said.count("SAVE FAILED: cannot save: No space left on device\n") == 1 and "Training goes on" in said
    assert complete_checkpoints(tmp_path) == _checkpoints(STEPS)
