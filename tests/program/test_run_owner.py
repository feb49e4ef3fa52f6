"""Two starts on one folder: one that is refused leaves the other alone, and one that is told to takes over ends it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import heartbeat
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.heartbeat import ALIVE_FILE, Heartbeat, check_no_live_owner
from megatron.checkpoint.save_folder import RUN
from megatron.checkpoint.storage_url import open_storage
from tests.support.forked_modules import fork_modules
from tests.support.runs import Ended, arguments, complete_checkpoints, launch, on_rank, report, run

LIVING: dict[str, Any] = {"train_iters": 9, "save_interval": 3}


def start(folder: Path, **settings: Any) -> Ended:
    (ended,) = launch(arguments(**{**LIVING, "save": folder, "load": folder, **settings}))
    return ended


@pytest.mark.parametrize("save", [pytest.param("now", marks=pytest.mark.full("the other case")), "async"])
def test_a_start_that_is_refused_leaves_a_run_alone(tmp_path: Path, save: str) -> None:
    """Whatever it is refused for: that run lives, other settings, a checkpoint that is not there, a folder of curves."""
    told: list[Ended] = []
    marks: list[bytes] = []

    def meanwhile(_: Any) -> None:
        while not (tmp_path / "others have ended").exists():
            time.sleep(0.05)

    running: list[list[Ended]] = []

    def before(rank: int) -> None:
        fork_modules()
        on_rank(0, 5, meanwhile)(rank)

    def first() -> None:
        flags = {**LIVING, "save": tmp_path, "async_save": save == "async"}
        running.append(launch(arguments(**flags), before=before))

    thread = threading.Thread(target=first)
    thread.start()
    while not complete_checkpoints(tmp_path):
        time.sleep(0.05)
    marks.append((tmp_path / RUN).read_bytes())
    others: list[dict[str, Any]] = [{"lr": 0.5}, {"ckpt_step": 2}, {"hidden_size": 64}]
    told += [start(tmp_path, **other) for other in others]
    marks.append((tmp_path / RUN).read_bytes())
    (tmp_path / "others have ended").touch()
    thread.join()
    assert [end.code for end in running[0]] == [0], report(running[0])
    assert complete_checkpoints(tmp_path) == [f"iter_{number:07d}" for number in (3, 6, 9)]
    assert marks[0] == marks[1] == (tmp_path / RUN).read_bytes()
    for end in told:
        assert end.code == 1 and "saves there and is alive" in end.stderr and "--take-over" in end.stderr, report([end])
    assert not (tmp_path / ALIVE_FILE).exists(), "it has ended"


def test_settings_that_are_refused_take_nothing_over(tmp_path: Path) -> None:
    """Of a run that has ended."""
    run(arguments(train_iters=2, save=tmp_path))
    before = (tmp_path / RUN).read_bytes()
    for other in ({"hidden_size": 64}, {"ckpt_step": 1}, {"tensorboard_dir": tmp_path / RUN}):
        ended = start(tmp_path, **other)
        assert ended.code != 0 and (tmp_path / RUN).read_bytes() == before, report([ended])


def test_a_run_that_is_taken_over_ends_and_says_by_whom(tmp_path: Path) -> None:
    """At the next step after a beat."""

    def before(rank: int) -> None:
        heartbeat.Heartbeat.__init__.__kwdefaults__ = None
        heartbeat.Heartbeat.__init__.__defaults__ = (0.05,)  # type: ignore[attr-defined]
        on_rank(0, 5, lambda _: taken())(rank)

    def taken() -> None:
        record = json.loads((tmp_path / RUN).read_bytes())
        (tmp_path / RUN).write_text(json.dumps({**record, "token": "another", "host": "gpu-7", "pid": 4321}))
        time.sleep(0.5)

    (ended,) = launch(arguments(train_iters=10_000, save=tmp_path), before=before)
    assert ended.code == 1 and f"a run on gpu-7 (process 4321) has taken over {tmp_path}" in ended.stderr, report([ended])


@contextlib.contextmanager
def owned(folder: Path, **changes: Any) -> Iterator[None]:
    """A folder whose owner is this process, or another one."""
    beating = Heartbeat(str(folder), "abc", interval_s=60.0)
    found = json.loads((folder / ALIVE_FILE).read_text())
    (folder / ALIVE_FILE).write_text(json.dumps({**found, **changes}))
    yield
    beating.stop()


def test_who_is_taken_for_alive(tmp_path: Path) -> None:
    """A process of this host by its number and its begin; one of another host by its beats."""
    said: list[str] = []
    storage = open_storage(tmp_path)
    check_no_live_owner(storage, said.append)
    with owned(tmp_path), pytest.raises(CheckpointError, match=f"process {os.getpid()}.*is alive"):
        check_no_live_owner(storage, said.append)
    check_no_live_owner(storage, said.append)
    with owned(tmp_path, pid=1):  # another process has the number of one that is gone
        check_no_live_owner(storage, said.append)
    for nonsense in ("", "[]", '{"host": 3}', "\0"):
        (tmp_path / ALIVE_FILE).write_text(nonsense)
        check_no_live_owner(storage, said.append)
    assert not said
    with owned(tmp_path, host="another"):
        check_no_live_owner(storage, said.append, patience_s=0.2)
        assert len(said) == 1 and "did not end by itself" in said[0]
        stop = threading.Event()

        def beats() -> None:
            for number in range(100):
                content = {"host": "another", "pid": 5, "process": "x", "beat": number}
                storage.write(ALIVE_FILE, json.dumps(content).encode())
                if stop.wait(0.05):
                    break

        thread = threading.Thread(target=beats)
        thread.start()
        with pytest.raises(CheckpointError, match="a run on another"):
            check_no_live_owner(storage, said.append, patience_s=2.0)
        stop.set()
        thread.join()
    assert socket.gethostname() != "another"
