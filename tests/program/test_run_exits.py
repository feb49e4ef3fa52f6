"""Ways to stop early: all ranks agree, save and exit with a code that says why, and the run goes on as if it had never stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.training import resume
from megatron.training.saver import Saver
from megatron.training.step import TrainStep
from tests.support.runs import arguments, complete_checkpoints, digest, launch, on_rank, report, run, timeless

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
    assert [end.code for end in ended] == [code, code] and not ended[0].stderr, report(ended)
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

        def interrupted(self: Saver, *args: Any) -> str | None:
            _terminate(None)
            return save(self, *args)

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


def test_ctrl_c(tmp_path: Path) -> None:
    """At once and without a traceback: what is not saved is lost, which the user knows."""
    ended = launch(arguments(**SETTINGS, save=tmp_path), before=on_rank(0, 3, lambda _: os.kill(os.getpid(), signal.SIGINT)))
    assert ended[0].code == 130 and ended[0].stderr == "pretrain_gpt.py: interrupted\n", report(ended)
    assert complete_checkpoints(tmp_path) == []
