"""Runs of MLflow and trackio: the real packages, and local stores. Whole runs that restart and rewind."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from megatron.api import Trainer
from megatron.config.cli import load
from megatron_lab.monitoring.curve_sinks import mlflow_sink, trackio_sink
from megatron_lab.monitoring.curve_sinks.mlflow_sink import MLflow, clean_name
from megatron_lab.monitoring.curve_sinks.run_links import LOGGERS_FILE, open_run_start
from megatron_lab.monitoring.curve_sinks.trackio_sink import Trackio
from tests.program.test_run_spikes import BAD, REWINDS, STEPS, bad_batches
from tests.support.runs import arguments, read_metrics, run

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # the package reads it when it is imported
atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)
FACTS = {"config": {"model": {"num_layers": 2, "long": "x" * 999, "none": None}}, "command": ["--a", "b c"], "layout": {"tp": 1}}


@pytest.fixture(autouse=True)
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store in files, which the small package can read, and which it only opens on request; short waits."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(mlflow_sink, "_RETRY_S", 0.01)
    monkeypatch.setattr(mlflow_sink, "_BATCH_S", 0.01)
    yield f"file://{tmp_path}/mlruns"


def open_mlflow(save: Path, store: str, iteration: int, **flags: Any) -> MLflow:
    flags = {"mlflow_experiment": "x", "mlflow_tracking_uri": store, **flags}
    config = load(arguments(train_iters=99, save=save, load=save, **flags), 1).config
    return MLflow(config.logging, open_run_start(config, iteration, FACTS))


def log(sink: MLflow | Trackio, iterations: range, value: float) -> None:
    for iteration in iterations:
        sink.log_scalars(iteration, 8 * iteration, {"lm_loss": value})


def read_mlflow(store: str) -> list[tuple[Any, list[tuple[int, float]]]]:
    """The runs, oldest first, each with the points of the loss."""
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("x")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["start_time ASC"])
    points = [[(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "lm_loss")] for run in runs]
    return list(zip(runs, points, strict=True))


# ---- MLflow.


def test_a_restart_continues_one_run(tmp_path: Path, mlflow_store: str) -> None:
    for first in (1, 5):
        sink = open_mlflow(tmp_path / "my save", mlflow_store, first - 1)
        log(sink, range(first, first + 4), 1.0)
        sink.log_text(first + 3, 0, "samples/what is: this?", "a text\n")
        sink.close("stopped" if first == 1 else "finished")
        ((known, points),) = read_mlflow(mlflow_store)
        assert known.info.status == ("KILLED" if first == 1 else "FINISHED")
    assert points == [(step, 1.0) for step in range(1, 9)]
    assert (known.info.run_name, known.data.params["num_layers"], len(known.data.params["long"])) == ("my save", "2", 500)
    assert known.data.tags["command"] == "--a 'b c'" and json.loads(known.data.tags["layout"]) == {"tp": 1}
    client, run_id = MlflowClient(mlflow_store), known.info.run_id
    names = [file.path for file in client.list_artifacts(run_id, "samples/what is_ this_")]
    assert [Path(name).name for name in names] == ["00000004.txt", "00000008.txt"]
    assert [Path(file.path).name for file in client.list_artifacts(run_id, "starts")] == ["00000000.json", "00000004.json"]


@pytest.mark.parametrize("in_process", [False, True])
def test_going_back_copies_the_points_before_into_a_new_run(tmp_path: Path, mlflow_store: str, in_process: bool) -> None:
    sink = open_mlflow(tmp_path, mlflow_store, 0)
    log(sink, range(1, 7), 1.0)
    if in_process:
        sink.rewind(4)
        sink.rewind(4)
    else:
        sink.close()
        sink = open_mlflow(tmp_path, mlflow_store, 4)
    log(sink, range(5, 9), 2.0)
    sink.close()
    (old, old_points), (new, points) = sorted(
        read_mlflow(mlflow_store), key=lambda pair: "abandoned_after" not in pair[0].data.tags
    )
    assert points == [*((step, 1.0) for step in range(1, 5)), *((step, 2.0) for step in range(5, 9))]
    assert old_points == [(step, 1.0) for step in range(1, 7)]
    assert (old.info.status, old.data.tags["abandoned_after"], old.data.tags["continued_by_run"]) == (
        "KILLED",
        "4",
        new.info.run_id,
    )
    assert new.data.tags["continues_run"] == old.info.run_id
    sink = open_mlflow(tmp_path, mlflow_store, 8)
    log(sink, range(9, 10), 3.0)
    sink.close("failed")
    assert [len(points) for _, points in read_mlflow(mlflow_store) if len(points) == 9] == [9], "continues the new run"


def test_killed_between_the_run_and_its_first_point(tmp_path: Path, mlflow_store: str) -> None:
    """The identifier is in the folder before the run is at the server; the server finds the run by it."""
    for _ in range(2):
        sink = open_mlflow(tmp_path, mlflow_store, 0)
        sink.close("failed")
    assert len(read_mlflow(mlflow_store)) == 1
    (tmp_path / LOGGERS_FILE).unlink()
    open_mlflow(tmp_path, mlflow_store, 0).close()
    assert len(read_mlflow(mlflow_store)) == 2


def test_a_server_that_fails_for_a_time_loses_nothing(
    tmp_path: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logging never waits for the server. One message says that it fails, and one that it works again."""
    sink = open_mlflow(tmp_path, mlflow_store, 0)
    log_batch, is_away, was_called = MlflowClient.log_batch, threading.Event(), threading.Event()

    def fail(self: MlflowClient, *args: Any, **named: Any) -> Any:
        was_called.set()
        if is_away.is_set():
            raise MlflowException("API request failed: connection refused")
        return log_batch(self, *args, **named)

    is_away.set()
    monkeypatch.setattr(MlflowClient, "log_batch", fail)
    log(sink, range(1, 4), 1.0)
    assert was_called.wait(20)
    was_called.clear()
    assert was_called.wait(20), "tries again"
    is_away.clear()
    log(sink, range(4, 6), float("nan"))
    sink.close()
    ((_, points),) = read_mlflow(mlflow_store)
    assert [step for step, _ in points] == [1, 2, 3, 4, 5] and points[-1][1] != points[-1][1]
    messages = [line for line in capsys.readouterr().err.splitlines() if "--mlflow-experiment" in line]
    assert [("cannot be written" in line, "written again" in line) for line in messages] == [(True, False), (False, True)]


def test_what_the_server_refuses_is_left_out(tmp_path: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_mlflow(tmp_path, mlflow_store, 0)
    monkeypatch.setattr(mlflow_sink, "clean_name", lambda name: "?" if name == "bad" else name)
    sink.log_scalars(1, 8, {"bad": 1.0})
    sink.log_text(1, 8, "between", "two batches")
    log(sink, range(2, 4), 1.0)
    sink.close()
    ((_, points),) = read_mlflow(mlflow_store)
    assert [step for step, _ in points] == [2, 3]


def test_a_server_that_never_answers_delays_neither_start_nor_end(
    tmp_path: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_sink, "_OPEN_S", 0.05)
    monkeypatch.setattr(mlflow_sink, "_CLOSE_S", {"finished": 0.05})
    monkeypatch.setattr(mlflow_sink, "_MAX_QUEUED", 5)
    answer = threading.Event()

    def hang(*_: Any) -> Any:
        answer.wait(60)
        raise MlflowException("no answer")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", hang)
    sink = open_mlflow(tmp_path, mlflow_store, 0)
    log(sink, range(1, 4), 1.0)
    sink.close()
    answer.set()
    messages = capsys.readouterr().err
    assert "MLflow has not answered" in messages and "MLflow has not received 5 values" in messages


@pytest.mark.parametrize(("uri", "reason"), [("nonsense://x", "nonsense"), ("sqlite:///x.db", "pip install mlflow")])
def test_an_address_that_cannot_work_is_refused(tmp_path: Path, uri: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--mlflow-experiment x cannot be used: (.|\n)*{reason}"):
        open_mlflow(tmp_path, uri, 0)


@pytest.mark.parametrize(
    "name", ["a", "validation_loss/web text", "a:b", "../../etc", "/x", "a//b", "", ".", "é/ß", "x" * 999, "a\nb", "%"]
)
def test_any_name_becomes_one_that_is_accepted(tmp_path: Path, mlflow_store: str, name: str) -> None:
    client = MlflowClient(mlflow_store)
    run_id = client.create_run("0").info.run_id if client.get_experiment("0") else ""
    client.log_metric(run_id, clean_name(name), 1.0)
    assert list(client.get_run(run_id).data.metrics) == [clean_name(name)]


# ---- trackio.


@pytest.fixture
def project(tmp_path: Path) -> str:
    """A project of this test only: the package reads the folder of all projects when it is imported."""
    return f"p-{tmp_path.name}-{os.getpid()}"


def open_trackio(save: Path, project: str, iteration: int, **flags: Any) -> Trackio:
    config = load(arguments(train_iters=99, save=save, load=save, trackio_project=project, **flags), 1).config
    return Trackio(config.logging, open_run_start(config, iteration, FACTS))


def read_trackio(project: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each run by its name, oldest run first."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = sorted(trackio.Api().runs(project), key=lambda run: str((run.config or {})["_Created"]))
    return {run.name: SQLiteStorage.get_logs(project, run.name, run_id=run.id) for run in runs}


def test_trackio_continues_one_run(tmp_path: Path, project: str, capsys: pytest.CaptureFixture[str]) -> None:
    for first in (1, 5):
        sink = open_trackio(tmp_path / "my save", project, first - 1)
        log(sink, range(first, first + 4), 1.0)
        sink.log_text(first + 3, 0, "samples/first", "```\na text")
        sink.close()
    ((name, rows),) = read_trackio(project).items()
    assert name.startswith("my save-") and [row["step"] for row in rows if "lm_loss" in row] == list(range(1, 9))
    assert rows[4]["samples/first"] == {"_type": "trackio.markdown", "_value": "````\n```\na text\n````"}
    assert capsys.readouterr().out == "", "stdout is the log of the run"


@pytest.mark.parametrize("space", [None, "me/space"])
@pytest.mark.parametrize("ending", ["rewind", "close", "killed"])
def test_trackio_goes_back_in_a_new_run(
    tmp_path: Path, project: str, monkeypatch: pytest.MonkeyPatch, ending: str, space: str | None
) -> None:
    """A Space cannot be read back: the new run there has only the later points. Here the Space is this machine."""
    import trackio

    init = trackio.init
    monkeypatch.setattr(trackio, "init", lambda **named: init(**{**named, "space_id": None}))
    sink = open_trackio(tmp_path, project, 0, trackio_space_id=space)
    log(sink, range(1, 7), 1.0)
    if ending == "rewind":
        sink.rewind(4)
    else:
        sink.close("failed" if ending == "killed" else "finished")
        sink = open_trackio(tmp_path, project, 4, trackio_space_id=space)
    log(sink, range(5, 9), 2.0)
    sink.close()
    (old_name, old_rows), (_, rows) = read_trackio(project).items()
    before = [] if space else [(step, 1.0) for step in range(1, 5)]
    assert [(row["step"], row["lm_loss"]) for row in rows] == [*before, *((step, 2.0) for step in range(5, 9))]
    assert len(old_rows) == 6 and old_name.endswith(" (abandoned after 4)") == (space is None)


def test_trackio_after_a_kill_at_the_checkpoint_continues_the_run(tmp_path: Path, project: str) -> None:
    sink = open_trackio(tmp_path, project, 0)
    log(sink, range(1, 5), 1.0)
    sink.close("failed")
    sink = open_trackio(tmp_path, project, 4)
    log(sink, range(5, 7), 1.0)
    sink.close()
    assert [[row["step"] for row in rows] for rows in read_trackio(project).values()] == [[1, 2, 3, 4, 5, 6]]


def test_trackio_errors_do_not_end_the_run(
    tmp_path: Path, project: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = open_trackio(tmp_path, project, 0)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(sink._run, "log", fail)
        log(sink, range(1, 4), 1.0)
    finish, blocked = sink._run.finish, threading.Event()
    monkeypatch.setattr(sink._run, "finish", lambda: blocked.wait(60))
    monkeypatch.setattr(trackio_sink, "_FINISH_S", {"finished": 0.05})
    sink.close()
    blocked.set()
    finish()
    messages = capsys.readouterr().err
    assert messages.count("disk full") == 1 and "not completely sent" in messages


# ---- Whole runs.


def test_a_run_that_rewinds_after_a_spike_has_the_right_curves(tmp_path: Path, mlflow_store: str) -> None:
    """The metrics file has the abandoned step twice, the curves once: with the value of the metrics file's last line for it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings: dict[str, Any] = {"mlflow_experiment": "x", "mlflow_tracking_uri": mlflow_store, "tensorboard_dir": tmp_path / "tb"}
    files = {"save": tmp_path / "save", "metrics_file": tmp_path / "metrics"}
    run(arguments(**REWINDS, **files, **settings, train_iters=STEPS), before=bad_batches(BAD))
    lines = [(line["iteration"], line["lm_loss"]) for line in read_metrics(tmp_path / "metrics") if "lm_loss" in line]
    assert [step for step, _ in lines] == [1, 2, 3, 4, 5, 5, 6, 7], "the step with the spike is not logged"
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss/training")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6, 7]
    curves = {known.info.status: points for known, points in read_mlflow(mlflow_store)}
    assert curves == {"KILLED": lines[:5], "FINISHED": [*lines[:4], *lines[5:]]}
    assert [event.value for event in events] == pytest.approx([value for _, value in curves["FINISHED"]])


def test_a_program_that_loads_an_earlier_checkpoint_has_the_right_curves(tmp_path: Path, mlflow_store: str) -> None:
    """`Trainer.load` goes back as a rewind does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings: dict[str, Any] = {
        "mlflow_experiment": "x",
        "mlflow_tracking_uri": mlflow_store,
        "tensorboard_dir": str(tmp_path / "tb"),
    }
    with Trainer(load(arguments(**settings, train_iters=9), 1), quiet=True) as trainer:
        trainer.fit(3)
        trainer.save(tmp_path / "save")
        trainer.fit(3)
        trainer.load(tmp_path / "save")
        trainer.fit(2)
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss/training")
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    assert sorted([step for step, _ in points] for _, points in read_mlflow(mlflow_store)) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
