"""Saves in the background: what is written is what was there when the save began; failures are told while training goes on."""

from __future__ import annotations

import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import rank_writer, save_plan, savers, writer_main
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.local_storage import LocalDraft, LocalStorage
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.rank_writer import WriterProcess
from megatron.checkpoint.save_folder import LATEST, RUN, Retention, find_checkpoint, list_checkpoints, read_config, read_state
from megatron.checkpoint.save_plan import SavePlan, plan_save
from megatron.checkpoint.savers import AsyncSaver, SyncSaver, build_data_reader, build_specs
from megatron.checkpoint.storage_url import open_storage
from megatron.checkpoint.writer_messages import (
    CommitResult,
    LogLine,
    Message,
    RankResult,
    RanksFinished,
    Reply,
    SaveProgress,
    SaveRequest,
    WriterSetup,
    get_rank_manifest_name,
)
from megatron.config.launcher import build_module_command
from megatron_lab.node_memory import keeper
from tests.support.checkpoint_worlds import (
    Layout,
    Shapes,
    group_of,
    hold,
    load_tensors,
    random_values,
    read_manifest,
    save_checkpoint,
    whole,
)
from tests.support.forked_modules import fork_modules
from tests.support.warm import run_forked_ranks

SHAPES: Shapes = {"up": ((2, 8, 6), 1), "norm": ((6,), None), "scale": ((), None)}
LAYOUT = Layout(2, (0.4,))
WAIT_S = 30.0
ALIVE_EVERY_S = writer_main.MAX_PAUSE_S
"""How often a writer that waits says that it is alive, where a test waits for that."""


@pytest.fixture(autouse=True)
def forked_writers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers be forks, but in tests that are about their start or their end, or that change what a later writer would call."""
    if request.function not in FRESH:
        for starter in (keeper, rank_writer):
            monkeypatch.setattr(starter, "subprocess", subprocess)  # which is then put back
        fork_modules()


class Run:
    """A rank that saves now and then, and what its log says."""

    def __init__(self, folder: Path | str, keep_last: int | None = None, patience_s: float = WAIT_S) -> None:
        self.saver = AsyncSaver(open_storage(folder), group_of(None), Retention(keep_last), patience_s=patience_s)
        self.log: list[str] = []

    def save(self, iteration: int, tensors: list[GlobalTensor]) -> None:
        self.saver.save(iteration, tensors, {"x": 1}, {"iteration": iteration}, self.log.append)

    def until(self, text: str) -> str:
        """Poll as training does until the log has a line with this text; the line."""
        deadline = time.monotonic() + WAIT_S
        while not (found := [line for line in self.log if text in line]):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.002)
            self.saver.poll(self.log.append)
        return found[0]

    def finish(self) -> None:
        self.saver.finish(self.log.append)

    @property
    def pid(self) -> int:
        """The process that writes."""
        assert self.saver._writer._process is not None
        return self.saver._writer._process._process.pid

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The process that writes does nothing meanwhile."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


def ones(value: float = 1.0) -> list[GlobalTensor]:
    return [whole("a", torch.full((1000,), value)), whole("b", torch.full((3, 5), value, dtype=torch.bfloat16))]


def value_in(path: Path) -> float:
    found = ones(0.0)
    load_tensors(path, found)
    first = float(found[0].local[0])
    assert all((tensor.local == first).all() for tensor in found)
    return first


def is_gone(pid: int) -> bool:
    """Whether a process has ended, within some seconds."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def test_the_same_checkpoint_as_a_save_that_waits(tmp_path: Path) -> None:
    values = random_values(SHAPES)

    def save(rank: int) -> list[str]:
        tensors = hold(SHAPES, LAYOUT, rank, values)
        save_checkpoint(tmp_path / "direct", 7, tensors, {"x": 1}, {"iteration": 7})
        run = Run(tmp_path / "background")
        run.save(7, tensors)
        for tensor in tensors:
            tensor.local.fill_(-1.0)  # training goes on
        run.finish()
        return run.log

    logs = run_forked_ranks(LAYOUT.world_size, save)
    direct, background = (tmp_path / name / "iter_0000007" for name in ("direct", "background"))
    assert sorted(file.name for file in direct.iterdir()) == sorted(file.name for file in background.iterdir())
    for file in direct.iterdir():
        assert file.read_bytes() == (background / file.name).read_bytes(), file.name
    assert (tmp_path / "background" / LATEST).read_text() == "7\n"
    digest = read_manifest(direct).content_digest
    assert digest is not None and logs[1:] == [[]] * (LAYOUT.world_size - 1)
    assert logs[0][0].startswith(f"saving {background} in the background (copied in ")
    assert logs[0][-1].startswith(f"saved {background} in ") and logs[0][-1].endswith(f"digest {digest[:16]}")


def test_process_and_memory_are_used_again(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2)
    tensors = ones()
    pids = set()
    for iteration in (1, 2, 3):
        tensors[0].local.fill_(iteration)
        tensors[1].local.fill_(iteration)
        run.save(iteration, tensors)
        pids.add(run.pid)
        run.until(f"saved {tmp_path / f'iter_{iteration:07d}'}")
    run.finish()
    assert len(pids) == 1 and is_gone(pids.pop())
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", "iter_0000003", LATEST}
    assert [value_in(path) for path in list_checkpoints(tmp_path).values()] == [2.0, 3.0]
    assert read_state(tmp_path / "iter_0000003") == {"iteration": 3} and read_config(tmp_path / "iter_0000003") == {"x": 1}


def test_other_tensors_are_planned_anew(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        run = Run(tmp_path)
        for iteration, rows in ((1, 4), (2, 6), (3, 6)):
            shapes: Shapes = {"up": ((rows, 3), 0)}
            run.save(iteration, hold(shapes, Layout(2), rank, random_values(shapes, iteration)))
        run.finish()

    run_forked_ranks(2, save)
    for iteration, rows in ((1, 4), (2, 6), (3, 6)):
        shapes: Shapes = {"up": ((rows, 3), 0)}
        found = hold(shapes, Layout(), 0, None)
        load_tensors(tmp_path / f"iter_{iteration:07d}", found)
        for tensor in found:
            assert torch.equal(tensor.local, random_values(shapes, iteration)[tensor.name].reshape(-1))


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, ones(1.0))
    run.until("saved")
    with run.stopped():
        run.save(2, ones(2.0))
        run.saver.poll(run.log.append)  # returns, with nothing to say
        assert len(run.log) == 3 and not (tmp_path / "iter_0000002").exists()
        threading.Timer(0.4, os.kill, (run.pid, signal.SIGCONT)).start()
        run.save(3, ones(3.0))
    assert [line for line in run.log if line.startswith("waited ") and "for the save of iteration 2" in line]
    assert value_in(tmp_path / "iter_0000002") == 2.0  # its memory was not filled anew too early
    run.finish()
    assert value_in(tmp_path / "iter_0000003") == 3.0


def test_the_process_is_told_when_the_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    seen: list[bool] = []
    send = WriterProcess.send

    def look(self: WriterProcess, message: Message) -> None:
        if isinstance(message, SaveRequest):
            written = ones(float(message.iteration))
            seen.extend(
                torch.equal(target, next(t for t in written if t.name == name).local) for (name, _), target in self.targets.items()
            )
        send(self, message)

    monkeypatch.setattr(WriterProcess, "send", look)
    for iteration in (1, 2):
        run.save(iteration, ones(float(iteration)))
    run.finish()
    assert seen == [True] * 4


def test_the_end_waits_for_the_last_save(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, ones(1.0))
    run.until("saved")
    with run.stopped():
        run.save(2, ones(2.0))
        threading.Timer(0.3, os.kill, (run.pid, signal.SIGCONT)).start()
        run.saver._writer.wait_for_rank_result()
    run.finish()
    assert value_in(tmp_path / "iter_0000002") == 2.0 and run.log[-1].startswith("saved")


FIRST = pytest.param(0, marks=pytest.mark.full("the other rank, which must tell the first"))


def failed_lines(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("SAVE FAILED")]


@pytest.mark.parametrize("victim", [FIRST, 1])
def test_a_process_that_is_killed(tmp_path: Path, victim: int) -> None:
    """Told while training goes on, and the next save is written by a new process."""

    def train(rank: int) -> list[str]:
        run = Run(tmp_path)
        run.save(1, ones(1.0))
        run.saver._writer.wait_for_rank_result()
        if rank == 0:
            run.until("saved")
        os.kill(pid := run.pid, signal.SIGSTOP)  # so that it can write nothing before it is killed
        run.save(2, ones(2.0))
        if rank == victim:
            os.kill(pid, signal.SIGKILL)
            assert is_gone(pid)
            run.saver.poll(run.log.append)
        else:
            os.kill(pid, signal.SIGCONT)
        if rank == 0:
            run.until("SAVE FAILED")
        run.save(3, ones(3.0))
        run.finish()
        return run.log

    first, other = run_forked_ranks(2, train)
    (line,) = failed_lines(first)
    assert f"cannot save {tmp_path / 'iter_0000002'}:\n  rank {victim}: the writer process was killed by signal 9" in line
    assert line.endswith("The last complete one is iter_0000001. Training goes on.") and other == []
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000003", LATEST}
    assert value_in(tmp_path / "iter_0000003") == 3.0


def test_a_rank_that_cannot_even_leave_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's process waits in vain until the ranks meet at the next save."""

    def no_space(*args: object) -> None:
        raise OSError(28, "full")

    def train(rank: int) -> list[str]:
        run = Run(tmp_path)
        run.save(1, ones(1.0))
        run.saver._writer.wait_for_rank_result()
        if rank == 1:
            os.kill(pid := run.pid, signal.SIGSTOP)
        run.save(2, ones(2.0))
        if rank == 1:
            monkeypatch.setattr(LocalStorage, "write", no_space)
            os.kill(pid, signal.SIGKILL)
            assert is_gone(pid)
            run.saver.poll(run.log.append)
        run.save(3, ones(3.0))
        run.finish()
        return run.log

    first, _ = run_forked_ranks(2, train)
    (line,) = failed_lines(first)
    assert f"cannot save {tmp_path / 'iter_0000002'}:\n  rank 1: the writer process was killed by signal 9" in line
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000003", LATEST}


def limit_files(pid: int, num_bytes: int) -> None:
    """A process can write no larger files: as on a full disk. (Its shared memory counts too, when it is made.)"""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("failing", [FIRST, 1])
def test_a_full_disk(tmp_path: Path, failing: int) -> None:
    def train(rank: int) -> tuple[list[str], str]:
        run = Run(tmp_path)
        tensors = [whole(f"t{index}", torch.ones(1000)) for index in range(4)]
        for iteration in (1, 3):
            run.save(iteration, tensors)
            run.saver._writer.wait_for_rank_result()
            if rank == failing:
                limit_files(run.pid, 2048)
            if rank == 0:
                run.until(f"saved {tmp_path / f'iter_{iteration:07d}'}")
            run.save(iteration + 1, tensors)
            run.saver._writer.wait_for_rank_result()
            if rank == failing:
                limit_files(run.pid, resource.RLIM_INFINITY)
            if rank == 0:
                run.until(f"SAVE FAILED: cannot save {tmp_path / f'iter_{iteration + 1:07d}'}")
        with pytest.raises(CheckpointError) as error:
            run.finish()
        return run.log, str(error.value)

    (first, text), (other, same) = run_forked_ranks(2, train)
    assert text == same and "the run ends without its last checkpoint" in text
    for iteration, line in zip((2, 4), failed_lines(first), strict=True):
        path = tmp_path / f"iter_{iteration:07d}"
        assert f"cannot save {path}:\n  rank {failing}: [Errno 27] File too large" in line
        assert f"The last complete one is iter_{iteration - 1:07d}" in line
    assert f"cannot save {tmp_path / 'iter_0000004'}:\n  rank {failing}: [Errno 27] File too large" in text
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000003", LATEST} and other == []


@pytest.mark.parametrize("failing", [FIRST, 1])
def test_no_memory_for_the_copy(tmp_path: Path, failing: int) -> None:
    def train(rank: int) -> list[str]:
        run = Run(tmp_path)
        tensors = [whole(f"t{index}", torch.ones(1000)) for index in range(4)]
        if rank == failing:
            limit_files(os.getpid(), 2048)
        run.save(1, tensors)
        if rank == failing == 0:  # of another rank that has no process the first learns at the next save
            run.until("SAVE FAILED")
        limit_files(os.getpid(), resource.RLIM_INFINITY)
        run.save(2, tensors)
        run.finish()
        return run.log

    first, _ = run_forked_ranks(2, train)
    (line,) = failed_lines(first)
    assert (
        f"rank {failing}: [Errno 27] not enough host memory for the copy that --async-save needs (8,000 bytes): File too large"
        in line
    )
    assert "There is no complete checkpoint yet" in line
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", LATEST}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "save").write_text("a file")
    run = Run(tmp_path / "save")
    run.save(1, ones())
    line = run.until("SAVE FAILED")
    assert "Not a directory" in line and "There is no complete checkpoint yet" in line
    (tmp_path / "save").unlink()
    run.save(2, ones(2.0))
    run.finish()
    assert value_in(tmp_path / "save" / "iter_0000002") == 2.0


def test_the_end_does_not_wait_for_a_rank_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.saver._writer._num_ranks = 2  # a part that nobody writes
    run.save(1, ones())
    pid = run.pid

    def lost(*args: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(savers, "coordinate", lost)
    with pytest.raises(RuntimeError, match="Connection closed"):
        run.finish()
    assert is_gone(pid) and not list_checkpoints(tmp_path)


def test_a_writer_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is waited for with a word, ended after a while, and the next save is written."""
    monkeypatch.setattr(rank_writer, "_FIRST_WARNING_S", 0.1)
    run = Run(tmp_path, patience_s=1.2)
    run.save(1, ones(1.0))
    run.until("saved")
    os.kill(pid := run.pid, signal.SIGSTOP)
    run.save(2, ones(2.0))
    run.save(3, ones(3.0))
    assert is_gone(pid)
    (line,) = failed_lines(run.log)
    assert "rank 0: the writer process made no progress for " in line and line.count(" s and was ended") == 1
    assert f"still waiting for the save of iteration 2 (process {pid}, " in caplog.text
    run.finish()
    assert list(list_checkpoints(tmp_path)) == [1, 3] and not list(tmp_path.glob(".*"))


def test_a_writer_that_is_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as there is progress: here it waits for the part of another rank, which comes late."""
    often = f"from megatron.checkpoint import writer_main; writer_main.PROGRESS_INTERVAL_S = {ALIVE_EVERY_S}; writer_main.main()"

    def start(module: str, *numbers: object) -> tuple[list[str], dict[str, str]]:
        command, environment = build_module_command(module, *numbers)
        at = command.index("-m")
        return [*command[:at], "-c", often, *command[at + 2 :]], environment

    monkeypatch.setattr(rank_writer, "build_module_command", start)
    run = Run(tmp_path, patience_s=ALIVE_EVERY_S + 1.0)
    run.saver._writer._num_ranks = 2
    run.save(1, [])
    storage = run.saver._draft(1).storage
    threading.Timer(ALIVE_EVERY_S + 1.5, storage.write, (get_rank_manifest_name(1), Manifest({}, {}).to_json())).start()
    run.finish()
    assert list(list_checkpoints(tmp_path)) == [1]


def test_progress_is_told_while_a_part_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "_SYNC_BYTES", 1 << 20)
    tensors = [whole(f"t{index}", torch.ones(1 << 19)) for index in range(4)]  # 2 MiB each
    draft = LocalStorage(tmp_path).draft("iter_0000001", "ab")
    draft.create_folder()
    calls: list[int] = []
    save_plan.write_rank_files(draft, plan_save([build_specs(tensors)])[0], build_data_reader(tensors), lambda: calls.append(1))
    assert len(calls) == 8


def test_the_writer_does_not_wait_when_training_ends(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saver._writer._num_ranks = 2
    run.save(1, ones())
    pid = run.pid
    run.saver._writer.shut_down()
    assert is_gone(pid) and list(tmp_path.iterdir()) == []


def test_a_storage_that_stands_still_is_told_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the process stands still, as in a call to a file system that does not answer. Training itself touches no storage."""
    run = Run(tmp_path)
    run.save(1, ones(1.0))
    run.until("saved")

    def touched(*_: object) -> None:
        raise AssertionError("training has touched the storage")

    for name in ("read", "write", "list_names", "get_file_size", "create", "remove", "create_folder", "remove_unfinished"):
        monkeypatch.setattr(LocalStorage, name, touched)
    for name in ("create_folder", "ensure_folder", "publish", "discard"):
        monkeypatch.setattr(LocalDraft, name, touched)
    monkeypatch.setattr(rank_writer, "STALL_WARNING_S", 0.2)
    with run.stopped():
        run.save(2, ones(2.0))
        line = run.until("save of iteration 2 has waited")
        words = "save of iteration 2 has waited 0 s for the writer process on"
        assert line == f"{words} {tmp_path}; training goes on until the next save is due"
        told = len(run.log)
        run.saver.poll(run.log.append)
        assert len(run.log) == told, "once in that time"
    os.kill(pid := run.pid, signal.SIGKILL)
    assert is_gone(pid)
    run.until("SAVE FAILED")
    run.save(3, ones(3.0))
    run.finish()
    monkeypatch.undo()
    assert list(list_checkpoints(tmp_path)) == [1, 3] and not list(tmp_path.glob(".*"))


def test_what_cannot_be_saved_at_all_is_an_error_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be encoded as JSON"):
        run.saver.save(1, ones(), {}, {"bad": {1, 2}}, run.log.append)
    with pytest.raises(CheckpointError, match="do not cover these tensors exactly once: model.up"):
        run.save(1, hold(SHAPES, Layout(2), 0, random_values(SHAPES)))
    assert list(tmp_path.iterdir()) == []


def test_signals_to_the_job_are_not_for_the_writer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, ones(1.0))
    run.until("saved")
    assert os.getsid(run.pid) == run.pid
    pid = run.pid
    for iteration, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), 2):
        os.kill(run.pid, number)
        run.save(iteration, ones(float(iteration)))
        run.until(f"saved {tmp_path / f'iter_{iteration:07d}'}")
        assert run.pid == pid and value_in(tmp_path / f"iter_{iteration:07d}") == iteration, number.name
    run.finish()


@pytest.mark.parametrize(
    "ending",
    [lambda: os.kill(os.getpid(), signal.SIGKILL), pytest.param(lambda: os._exit(3), marks=pytest.mark.full("the other case"))],
)
def test_the_writer_ends_with_training(tmp_path: Path, ending: Callable[[], None]) -> None:
    """Also in the middle of a write; what it has begun is swept away by the next run."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run = Run(tmp_path)
            run.save(1, ones(1.0))
            run.until("saved")
            run.saver._writer._num_ranks = 2  # it waits for a part that nobody writes
            run.save(2, ones(2.0))
            while not list(tmp_path.glob(".iter_0000002.*.saving/*.part.json")):
                time.sleep(0.01)
            os.write(write_end, str(run.pid).encode())
            ending()
        finally:
            os._exit(99)
    os.close(write_end)
    writer = int(os.read(read_end, 100))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 99
    os.close(read_end)
    assert is_gone(writer)
    assert len(list(tmp_path.glob(".iter_0000002.*.saving"))) == 1
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000001"
    (tmp_path / f".{LATEST}.{16 * '0'}.new").touch()  # of a write that was cut off
    run = Run(tmp_path)
    run.saver.claim_folder({})
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", LATEST, RUN}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_that_was_taken_over_saves_no_more(tmp_path: Path, in_background: bool) -> None:
    """One that was stopped, thought dead and comes back must not set the latest file back."""
    first, second = (SyncSaver(LocalStorage(tmp_path), group_of(None)) for _ in range(2))
    early = Run(tmp_path)
    (early.saver if in_background else first).claim_folder({"command": []})
    second.claim_folder({"command": []})
    second.save(20, ones(5.0), {}, {})
    if in_background:
        early.save(10, ones(2.0))
        assert "another run has taken over the folder" in early.until("SAVE FAILED")
        early.saver._writer.shut_down()
    else:
        with pytest.raises(CheckpointError, match="another run has taken over the folder"):
            first.save(10, ones(2.0), {}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000020", LATEST, RUN}
    assert (tmp_path / LATEST).read_text() == "20\n"


def test_what_another_run_left_is_not_touched_by_a_late_writer(tmp_path: Path) -> None:
    """Two runs write the same iteration under different names; the second sweeps, the first can finish no more."""
    early, late = Run(tmp_path), Run(tmp_path)
    early.save(1, ones(1.0))
    early.until("saved")
    with early.stopped():
        early.save(2, ones(2.0))
        late.saver.claim_folder({})
        late.save(2, ones(5.0))
        late.finish()
    assert "so this run no longer saves in it" in early.until("SAVE FAILED")
    assert value_in(tmp_path / "iter_0000002") == 5.0
    early.saver._writer.shut_down()


def test_a_part_that_is_written_but_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system of a network that shows the first rank another folder."""
    monkeypatch.setattr(writer_main, "VISIBILITY_TIMEOUT_S", 0.1)
    replies: list[Reply] = []
    inbox: queue.Queue[Message] = queue.Queue()
    writer = writer_main.BackgroundWriter(
        memoryview(b""), inbox, WriterSetup(str(tmp_path), SavePlan(0, ()), 3, Retention()), replies.append
    )
    draft = LocalStorage(tmp_path).draft("iter_0000001", "ab")
    draft.create_folder()
    draft.storage.write(get_rank_manifest_name(2), b"{}")
    inbox.put(RanksFinished(None))
    writer._save(SaveRequest(1, "ab", {}))
    written, committed = (reply for reply in replies if not isinstance(reply, SaveProgress))
    waits = [reply.activity for reply in replies if isinstance(reply, SaveProgress)]
    assert list(dict.fromkeys(waits)) == ["its folder", "the write of its files", "the files of other ranks (1)"]
    assert isinstance(written, RankResult) and written.failure is None
    assert isinstance(committed, CommitResult) and committed.failure is not None
    assert (
        committed.failure.startswith("rank 1 has written its files, but the first rank does not see them in")
        and "all nodes share" in committed.failure
    )
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    """Behind some URLs a file is seen before it has its content."""
    draft = LocalStorage(tmp_path).draft("iter_0000001", "ab")
    draft.create_folder()
    name, content = get_rank_manifest_name(1), Manifest({}, {}).to_json()
    draft.storage.write(name, b"")
    threading.Timer(0.2, draft.storage.write, (name, content)).start()
    assert writer_main._read_rank_manifest(draft, name) == Manifest({}, {})


def test_old_checkpoints_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is complete all the same."""
    replies: list[Reply] = []
    begin = WriterSetup(str(tmp_path), SavePlan(0, ()), 1, Retention(1))
    writer = writer_main.BackgroundWriter(memoryview(b""), queue.Queue(), begin, replies.append)
    for iteration in (1, 2):
        draft = LocalStorage(tmp_path).draft(f"iter_{iteration:07d}", "ab")
        draft.create_folder()
        monkeypatch.setattr(LocalStorage, "remove_checkpoint", lambda *_: os.listdir("/nowhere"))
        writer._save(SaveRequest(iteration, "ab", {"config.json": b"{}", "state.json": b"{}"}))
    replies = [reply for reply in replies if not isinstance(reply, SaveProgress)]
    assert [type(reply) for reply in replies] == [
        RankResult,
        CommitResult,
        RankResult,
        CommitResult,
        LogLine,
    ]
    assert isinstance(replies[3], CommitResult) and replies[3].failure is None
    assert isinstance(replies[4], LogLine) and "could not be removed: [Errno 2] No such file" in replies[4].text
    assert list(list_checkpoints(tmp_path)) == [1, 2]


def test_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"local://{tmp_path}/store"
    run = Run(url, keep_last=1)
    for iteration in (1, 2):
        run.save(iteration, ones(float(iteration)))
    run.finish()
    assert f"saved {url}/iter_0000002 in" in run.log[-1]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["iter_0000002", LATEST]
    found = ones(0.0)
    load_tensors(find_checkpoint(url), found)  # type: ignore[arg-type]
    assert (found[0].local == 2.0).all()


def test_the_writer_loads_no_torch() -> None:
    code = "import sys, megatron.checkpoint.writer_main; assert not {'torch', 'fsspec', 'multiprocessing.spawn'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FRESH = (
    test_signals_to_the_job_are_not_for_the_writer,
    test_the_writer_ends_with_training,
    test_a_writer_that_is_slow_is_waited_for,
    test_a_rank_that_cannot_even_leave_a_mark,
    test_a_storage_that_stands_still_is_told_while_training_goes_on,
)
"""Tests whose writers are interpreters of their own, as in a run."""
