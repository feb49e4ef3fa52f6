"""What a run keeps in its folder for those who watch it: the record, and the picture drawn of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

from megatron.config.version import get_extra_install_command
from megatron.metrics.history import HISTORY_FILE, read_history
from megatron.training.step import TrainStep
from megatron_lab.commands import plot_loss
from megatron_lab.commands import report as report_of
from megatron_lab.monitoring import loss_picture
from tests.program.test_readme import commands
from tests.support.cli import ROOT
from tests.support.runs import arguments, launch, losses, on_rank, read_metrics, report, run, spoil
from tests.support.warm_python import warm_python

KEPT: dict[str, Any] = {
    "train_iters": 8,
    "log_interval": 3,
    "eval_iters": 1,
    "eval_interval": 4,
    "save_interval": 3,
    "micro_batch_size": 4,
}


def test_the_record_goes_on_after_a_stop(tmp_path: Path) -> None:
    """Every step once, with the loss that the metrics file has; from a checkpoint that is older than the record, at two stages."""
    stages = {"pipeline_model_parallel_size": 2}
    run(arguments(**KEPT | {"log_interval": 1, "save_interval": None}, metrics_file=tmp_path / "each", fp64=True))
    settings = {**KEPT, **stages, "fp64": True, "save": tmp_path / "run", "load": tmp_path / "run"}
    run(arguments(**settings, exit_interval=5, metrics_file=tmp_path / "metrics"), 2)
    run(arguments(**settings, ckpt_step=3, log_layer_norms=True, timing_log_level=1, metrics_file=tmp_path / "metrics"), 2)
    found = read_history(tmp_path / "run")
    assert [step.iteration for step in found.steps] == [*range(1, 9)]
    assert [step.lm_loss for step in found.steps] == pytest.approx(losses(tmp_path / "each"), rel=1e-7)
    assert [(step.tokens, step.batch) for step in found.steps] == [(number * 8 * 16, 8) for number in range(1, 9)]
    assert all(step.grad_norm and step.learning_rate and step.seconds for step in found.steps)
    assert [(line["iteration"], line["validation_loss"]) for line in found.evaluations] == [
        (line["iteration"], pytest.approx(line["validation_loss"], rel=1e-10))
        for line in read_metrics(tmp_path / "each")
        if "validation_loss" in line
    ]
    assert [line["iteration"] for line in found.starts] == [0, 3]
    first = found.starts[0]
    assert first["world_size"] == 2 and first["layout"] == {"tp": 1, "cp": 1, "dp": 1, "pp": 2} and first["device"] == "cpu"
    assert first["config"]["training"]["train_iters"] == first["total_iterations"] == 8 and "torch" in first["versions"]
    assert [line["iteration"] for line in found.logs] == [1, 3, 4, 6]  # the first step of each start, then every third
    last, logged = found.logs[-1], [line for line in read_metrics(tmp_path / "metrics") if line["iteration"] == 6][-1]
    assert {name: last[name] for name in logged if "/" not in name} == {k: v for k, v in logged.items() if "/" not in k}
    assert any("/" in name for name in logged) and not any("/" in name for name in last)
    assert last["memory_bytes"] > 10**7 and last["spent"]["steps"] > 0 and last["timers_ms"]["optimizer"] > 0
    assert [(line["event"], line["iteration"]) for line in found.events] == [
        *(("save", 3), ("save", 5), ("end", 5)),
        *(("save", 6), ("save", 8), ("end", 8)),
    ]


_COMPILER = ("torch._dynamo", "torch._inductor")


class CompilerImports(MetaPathFinder):
    """Prints a line when a run imports torch's compiler, which takes seconds."""

    words = "slow import of"

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name in ("sympy", *_COMPILER):
            print(self.words, name)


def test_the_picture_is_there_at_the_end(tmp_path: Path) -> None:
    """Of a run that stops early, and of one whose numbers are not finite any more, whose end is in the record; that one has only
    --tensorboard-dir. Without any folder nothing is kept, and the log says what would keep it."""
    kept = {**KEPT, "train_iters": 4, "no_loss_picture": False, "no_report": False}
    python = warm_python()

    def draws_warmly(rank: int) -> None:
        sys.executable = python
        for name in [name for name in sys.modules if name.split(".")[0] == "sympy" or name.startswith(_COMPILER)]:
            del sys.modules[name]
        sys.meta_path.insert(0, CompilerImports())

    def spoils(rank: int) -> None:
        draws_warmly(rank)
        on_rank(0, 3, spoil(float("nan")))(rank)

    said = run(arguments(**kept, exit_interval=2, save=tmp_path / "stopped"), before=draws_warmly)
    assert (
        f"the record of the run is {tmp_path}/stopped/{HISTORY_FILE}, its picture is loss.png there and report.html at the end"
        in said
    )
    nan = launch(arguments(**kept | {"save_interval": None, "no_report": True}, tensorboard_dir=tmp_path / "nan"), before=spoils)
    assert nan[0].code == 1, report(nan)
    end = read_history(tmp_path / "nan").events[-1]
    assert end["event"] == "end" and "gradient" in end["words"] and len(read_history(tmp_path / "nan").steps) == 2
    assert f"writing loss.png and report.html into {tmp_path}/stopped ..." in said and CompilerImports.words not in said
    without = run(arguments(**{**kept, "no_loss_picture": True, "no_report": True}, save=tmp_path / "without"))
    assert "loss.png" not in without and "report.html" not in without
    assert not [*(tmp_path / "without").glob("*.png"), *(tmp_path / "without").glob("*.html")]
    assert "at iteration 2 (--exit-interval 2)" in (tmp_path / "stopped" / "report.html").read_text()
    assert "no record of the run and no loss.png: --save or --tensorboard-dir" in run(arguments(train_iters=1, save="memory://x"))
    assert (tmp_path / "stopped" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    for _ in range(1000):  # nothing waits for that of a run that failed
        if (tmp_path / "nan" / "loss.png").exists():
            break
        time.sleep(0.02)
    assert (tmp_path / "nan" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_picture_and_report_are_left_out_if_the_job_may_be_killed_soon(tmp_path: Path) -> None:
    """After a signal in a step, after one in the last evaluation when everything is saved, and after the time limit."""

    def evaluates(rank: int) -> None:
        real = TrainStep.evaluate

        def evaluate(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *args, **kwargs)

        TrainStep.evaluate = evaluate  # type: ignore[method-assign]

    in_a_step = on_rank(0, 2, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    for name, told, code, more in (
        ("step", in_a_step, 85, {}),
        ("evaluation", evaluates, 0, {"eval_iters": 1}),
        ("limit", None, 0, {"exit_duration_in_mins": 1e-9}),
    ):
        folder = tmp_path / name
        settings = {"train_iters": 3, "micro_batch_size": 4, "no_loss_picture": False, "no_report": False, "save": folder, **more}
        ended = launch(arguments(**settings), before=told)
        assert ended[0].code == code, report(ended)
        lines = ended[0].stdout.splitlines()
        assert lines[-2:] == [
            "to end quickly, the run leaves out loss.png and report.html. To write them:",
            f"  python tools/plot_loss.py {folder}; python tools/report.py {folder}",
        ]
        assert not any(line.startswith("writing") for line in lines)
        assert not (folder / "report.html").exists() and not (folder / "loss.png").exists()
        assert (folder / f"iter_000000{1 if name == 'limit' else 3}").exists()


_DAY_S = 86_400.0


def test_only_time_that_a_failure_took_counts_between_starts(tmp_path: Path) -> None:
    """A day after its end a run is extended, goes back, is copied without its history, is branched off, or gives its weights. A run
    that was stopped by a signal loses the day. On a machine whose clock is a day behind, nothing is known of the time between."""
    one_step: dict[str, Any] = {"micro_batch_size": 4, "save_interval": 2, "log_interval": 1}
    real = time.time

    def shifts_clock(days: float) -> Any:
        return lambda rank: setattr(time, "time", lambda: real() + days * _DAY_S)

    def measure(folder: Path, train_iters: int, days: float = 1, **settings: Any) -> float:
        """Start the run in a folder, some days from now, and return the days that count as lost between starts."""
        more = {"save": folder, "load": folder, "resume_schedule": "new", **settings}
        run(arguments(train_iters=train_iters, **one_step, **more), before=shifts_clock(days))
        return float(read_history(folder).logs[-1]["spent"]["between starts"]) / _DAY_S

    done, stopped = tmp_path / "done", tmp_path / "stopped"
    run(arguments(train_iters=4, **one_step, save=done))
    stop = launch(arguments(train_iters=4, **one_step, save=stopped), before=on_rank(0, 2, lambda _: os.kill(os.getpid(), 15)))
    assert stop[0].code == 85, report(stop)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copytree(done / "iter_0000004", bare / "iter_0000004")
    shutil.copy(done / "latest_checkpointed_iteration.txt", bare)
    back, behind = (Path(shutil.copytree(done, tmp_path / name)) for name in ("back", "behind"))
    lost = {
        "extended": measure(done, 6),
        "went back": measure(back, 6, ckpt_step=2),
        "copied without its history": measure(bare, 6),
        "branch of a run that was stopped": measure(tmp_path / "branch", 8, load=stopped),
        "weights of another run": measure(tmp_path / "weights", 6, load=stopped, finetune=True, resume_schedule=None),
        "clock behind": measure(behind, 6, days=-1),
    }
    assert max(lost.values()) < 0.01, lost
    assert measure(stopped, 4) == pytest.approx(1.0, abs=0.01)


def test_a_full_disk_and_a_picture_that_cannot_be_drawn_do_not_end_a_run(tmp_path: Path) -> None:
    """Each is told once. Neither is a library that is not there."""
    folder = tmp_path / "run"
    (folder / "loss.png").mkdir(parents=True)
    (folder / HISTORY_FILE).symlink_to("/dev/full")

    def draws_at_once(rank: int) -> None:
        loss_picture.FIRST_DELAY_S = loss_picture.INTERVAL_S = 0.01

    ended = launch(arguments(train_iters=6, save=folder, no_loss_picture=False), before=draws_at_once)
    assert ended[0].code == 0, report(ended)
    said = ended[0].stderr.splitlines()
    assert sum("history.jsonl cannot be written (No space left on device)" in line for line in said) == 1, said
    assert sum("loss.png cannot be created" in line for line in said) == 1, said

    def lacks_matplotlib(rank: int) -> None:
        sys.modules["matplotlib"] = None  # type: ignore[assignment]
        search = importlib.util.find_spec
        setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else search(name))  # noqa: B010

    said_2 = run(arguments(train_iters=2, save=tmp_path / "two", no_loss_picture=False), before=lacks_matplotlib)
    assert said_2.count(f"loss.png needs matplotlib, which is not installed: {get_extra_install_command('matplotlib')}") == 1
    assert json.loads((tmp_path / "two" / HISTORY_FILE).read_text().splitlines()[-1])["event"] == "end"


def test_the_page_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands and the code of docs/watching.md, on a run that saves in `checkpoints`."""
    page = (ROOT / "docs/watching.md").read_text()
    monkeypatch.chdir(tmp_path)
    run(arguments(train_iters=2, save="checkpoints"))
    picture, whole, loggers = (shlex.split(command)[1:] for command in commands(page))
    assert picture[0] == "tools/plot_loss.py" and plot_loss.main(picture[1:]) == 0
    assert (tmp_path / picture[-1]).read_text().startswith("<?xml")
    assert whole[0] == "tools/report.py" and report_of.main(whole[1:]) == 0
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    run(loggers[1:])
    assert set(json.loads((tmp_path / "run1" / "loggers.json").read_text())) == {"folder", "trackio", "wandb"}
    from trackio.utils import TRACKIO_DIR  # of the test before, if it has imported the package

    assert list(TRACKIO_DIR.glob("demo*.db")) and list((tmp_path / "wandb").glob("offline-run-*"))
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("2 256 3.9")
