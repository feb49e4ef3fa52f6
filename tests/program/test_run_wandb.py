"""Runs at Weights & Biases: the real package, and a stand-in for its server on this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.cli import load
from megatron_lab.monitoring.curve_sinks import wandb_sink
from megatron_lab.monitoring.curve_sinks.run_links import LOGGERS_FILE, open_run_start
from megatron_lab.monitoring.curve_sinks.wandb_sink import WandB
from tests.support.fake_wandb_server import FakeWandbServer, wandb
from tests.support.runs import arguments, launch, on_rank, report, run, spoil
from tests.support.wandb_files import read_offline_runs


@pytest.fixture(params=[True])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandbServer]:
    server = FakeWandbServer(rewinds=request.param)
    settings = {"API_KEY": "a" * 40, "BASE_URL": server.url, "MODE": "online", "DIR": str(tmp_path), "SILENT": "true"}
    settings |= {"CONSOLE": "off", "DISABLE_GIT": "true", "X_DISABLE_STATS": "true", "DISABLE_CODE": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()  # what a test before has set
    yield server
    wandb.teardown()
    server.close()


without_rewind = pytest.mark.parametrize("server", [False], indirect=True)


def open_sink(save: Path, iteration: int, **flags: Any) -> WandB:
    config = load(arguments(train_iters=99, save=save, load=save, wandb_project="p", **flags), 1).config
    return WandB(config.logging, open_run_start(config, iteration, {"config": {"model": {"num_layers": 2}}}))


def log(sink: WandB, iterations: range, value: float) -> None:
    for iteration in iterations:
        sink.log_scalars(iteration, 8 * iteration, {"lm_loss": value})


def entry(save: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((save / LOGGERS_FILE).read_text())["wandb"]
    return stored


def test_a_restart_continues_one_run(server: FakeWandbServer, tmp_path: Path) -> None:
    for first in (1, 5):
        sink = open_sink(tmp_path, first - 1, wandb_exp_name=f"name{first}")
        log(sink, range(first, first + 4), 1.0)
        sink.close()
    ((run_id, known),) = server.runs.items()
    assert run_id == entry(tmp_path)["id"]
    assert server.points(run_id, "lm_loss") == [(step, 1.0) for step in range(1, 9)]
    assert server.points(run_id, "consumed_samples")[-1] == (8, 64)
    assert (known["state"], known["starts"], known["display_name"]) == ("finished", 2, "name5")
    assert known["config"]["model"]["value"] == {"num_layers": 2}


def test_a_restart_from_an_earlier_checkpoint_removes_the_abandoned_points(server: FakeWandbServer, tmp_path: Path) -> None:
    """The first process ended like one that is killed: the server takes its run for a running one, which it does not rewind."""
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 7), 1.0)
    sink._run.finish()
    (run_id,) = server.runs
    server.runs[run_id]["state"] = "running"
    sink = open_sink(tmp_path, 4)
    log(sink, range(5, 9), 2.0)
    sink.close()
    assert list(server.runs) == [run_id]
    assert server.points(run_id, "lm_loss") == [*((step, 1.0) for step in range(1, 5)), *((step, 2.0) for step in range(5, 9))]


def test_a_rewind_in_the_process_removes_the_abandoned_points(server: FakeWandbServer, tmp_path: Path) -> None:
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 7), 1.0)
    sink.rewind(4)
    log(sink, range(5, 7), 2.0)
    sink.rewind(9)  # nothing is abandoned
    log(sink, range(7, 8), 2.0)
    sink.close()
    (run_id,) = server.runs
    assert server.points(run_id, "lm_loss") == [*((step, 1.0) for step in range(1, 5)), *((step, 2.0) for step in range(5, 8))]


class OldRun:
    """A run as wandb.Api returns it; the stand-in for the server has no tables of the history to read."""

    def __init__(self, server: FakeWandbServer, run_id: str) -> None:
        self.tags, self.saved_tags, self._rows = ["mine"], list[str](), server.runs[run_id]["history"]

    def scan_history(self, *, max_step: int) -> list[dict[str, Any]]:
        return [row | {"loss_scale": "NaN"} for row in self._rows if row["_step"] < max_step]

    def update(self) -> None:
        self.saved_tags = self.tags


@without_rewind
@pytest.mark.parametrize("in_process", [False, True])
def test_without_the_preview_a_new_run_has_the_points_before(
    server: FakeWandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_process: bool
) -> None:
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 4), 1.0)
    sink.log_text(3, 24, "samples/first", "<b> & so on")
    log(sink, range(4, 7), 1.0)
    old_id, opened = entry(tmp_path)["id"], list[OldRun]()

    def open_old(path: str) -> OldRun:
        assert path == f"p/{old_id}"
        opened.append(OldRun(server, old_id))
        return opened[-1]

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(run=open_old))
    if in_process:
        sink.rewind(4)
    else:
        sink.close()
        sink = open_sink(tmp_path, 4)
    log(sink, range(5, 9), 2.0)
    sink.close()
    new_id = entry(tmp_path)["id"]
    assert list(server.runs) == [old_id, new_id]
    assert server.points(new_id, "lm_loss") == [*((step, 1.0) for step in range(1, 5)), *((step, 2.0) for step in range(5, 9))]
    assert server.points(old_id, "samples/first")[0][1]["_type"] == "html-file"
    assert server.runs[new_id]["config"]["parent_run"]["value"] == {"id": old_id, "project": "p", "entity": None, "iteration": 4}
    assert opened[0].saved_tags == ["mine", "abandoned after 4"]
    assert f"a new run {new_id} continues the run {old_id} after iteration 4" in capsys.readouterr().err


def test_killed_between_the_identifier_and_the_run(
    server: FakeWandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", die)
        with pytest.raises(KeyboardInterrupt):
            open_sink(tmp_path, 0)
    run_id = entry(tmp_path)["id"]
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 3), 1.0)
    sink.close()
    assert list(server.runs) == [run_id] and len(server.points(run_id, "lm_loss")) == 2


def test_a_run_that_was_deleted_there_begins_anew(server: FakeWandbServer, tmp_path: Path) -> None:
    sink = open_sink(tmp_path, 0)
    sink.close()
    server.deleted = set(server.runs)
    server.runs.clear()
    sink = open_sink(tmp_path, 4)
    log(sink, range(5, 7), 1.0)
    sink.close()
    assert list(server.runs) == [entry(tmp_path)["id"]] and not server.deleted & set(server.runs)


@pytest.mark.parametrize(
    ("end", "state", "preempting"), [("finished", "finished", 0), ("stopped", "failed", 1), ("failed", "failed", 0)]
)
def test_the_end_of_the_run_is_its_state_there(
    server: FakeWandbServer, tmp_path: Path, end: Any, state: str, preempting: bool
) -> None:
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 3), 1.0)
    sink.close(end)
    (known,) = server.runs.values()
    assert (known["state"], known["preempting"]) == (state, preempting)


def test_an_evaluation_at_the_first_iteration_of_a_restart_is_not_dropped(server: FakeWandbServer, tmp_path: Path) -> None:
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 5), 1.0)
    sink.close()
    sink = open_sink(tmp_path, 4)
    sink.log_scalars(4, 32, {"validation_loss": 3.0})
    log(sink, range(5, 6), 1.0)
    sink.close()
    (run_id,) = server.runs
    assert server.points(run_id, "validation_loss") == [(5, 3.0)]


def test_a_server_that_is_away_costs_one_warning(
    server: FakeWandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_sink, "_INIT_S", 2.0)
    sink = open_sink(tmp_path, 0)
    sink.close()
    run_id = entry(tmp_path)["id"]
    server.close()
    sink = open_sink(tmp_path, 0)
    log(sink, range(1, 4), 1.0)
    sink.close()
    message = capsys.readouterr().err
    assert message.count("Weights & Biases cannot be reached") == 1 and f"wandb sync {tmp_path}/wandb/offline-run-" in message
    wandb.teardown()  # the file is complete when the package's service has ended
    ((written_id, rows, _),) = read_offline_runs(tmp_path)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert written_id == entry(tmp_path)["id"] == run_id


def test_without_a_login_the_run_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: FakeWandbServer) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    with pytest.raises(
        ValueError, match=r"--wandb-project p: .* Run `wandb login` or set WANDB_API_KEY; or set WANDB_MODE=offline"
    ):
        open_sink(tmp_path / "save", 0)


def test_without_a_login_all_ranks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rank opens loggers; the others must not wait for it."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, str(value))
    ended = launch(arguments(**RUN, save=tmp_path / "save"), 2, before=lambda rank: wandb.teardown())
    assert [end.code for end in ended] == [1, 1], report(ended)
    assert "rank 0: --wandb-project p: Weights & Biases refuses the run" in ended[0].stderr, report(ended)


# ---- Whole runs, offline.

RUN: dict[str, Any] = {"train_iters": 8, "save_interval": 2, "wandb_project": "p", "wandb_exp_name": "my run"}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """For `before`: the rank writes to a local folder; and what the server would refuse is an error here."""
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return lambda rank: wandb.teardown()


def test_two_ranks_write_one_run_over_restarts(tmp_path: Path, offline: Callable[[int], None]) -> None:
    """The second start continues the run, the third resumes from an earlier checkpoint and begins a new one."""
    settings = {**RUN, "save": tmp_path / "save", "load": tmp_path / "save"}
    run(arguments(**settings, exit_interval=4), 2, before=offline)
    run(arguments(**settings, exit_interval=6), 2, before=offline)
    first_id = entry(tmp_path / "save")["id"]
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("4")
    run(arguments(**settings), 2, before=offline)
    second_id = entry(tmp_path / "save")["id"]
    assert first_id != second_id
    runs = read_offline_runs(tmp_path)
    assert [(run_id, [row["_step"] for row in rows], code) for run_id, rows, code in runs] == [
        (first_id, [1, 2, 3, 4], 0),
        (first_id, [5, 6], 0),
        (second_id, [5, 6, 7, 8], 0),
    ]
    assert all({"lm_loss", "learning_rate", "consumed_samples"} <= set(row) for _, rows, _ in runs for row in rows)


def test_a_failed_run_and_one_that_a_signal_ends_are_not_finished(tmp_path: Path, offline: Callable[[int], None]) -> None:
    def stop(rank: int) -> None:
        offline(rank)
        on_rank(0, 3, lambda step: os.kill(os.getpid(), signal.SIGTERM))(rank)

    ended = launch(arguments(**RUN, save=tmp_path / "stopped", exit_signal_handler=True), before=stop)
    assert ended[0].code == 85, report(ended)

    def fail(rank: int) -> None:
        offline(rank)
        on_rank(0, 3, spoil(float("nan")))(rank)

    ended = launch(arguments(**RUN, save=tmp_path / "failed", check_for_nan_in_loss_and_grad=True), before=fail)
    assert ended[0].code not in (0, 85), report(ended)
    assert [code for _, _, code in read_offline_runs(tmp_path)] == [1, 1]
