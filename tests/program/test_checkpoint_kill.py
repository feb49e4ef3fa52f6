"""A run that is killed again and again while it saves in the background ends as one that never was: bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.save_folder import find_checkpoint, get_checkpoint_name, list_iterations, read_latest
from megatron.checkpoint.storage import MANIFEST
from megatron.checkpoint.storage_url import open_storage
from megatron_lab.verification.local_ranks import set_parent_death_signal
from tests.support.runs import (
    Ended,
    arguments,
    at_iteration,
    checkpoint,
    complete_checkpoints,
    digest,
    launch,
    report,
    run,
    saved_tensors,
)

STEPS, INTERVAL, KEPT, RANKS = 12, 2, 2, 2
SETTINGS: dict[str, Any] = {
    "num_layers": 1,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": STEPS,
    "save_interval": INTERVAL,
    "keep_last": KEPT,
    "async_save": True,
    "use_distributed_optimizer": True,
    "attention_dropout": 0.1,
    "lr_decay_style": "cosine",
}
KILLS = {"path": (2, 50), "url": (1, 20)}
"""In the normal run, and in all."""
MARK = "MEGATRON_TEST_RUN"
"""Variable of the environment by which the processes that a run starts are known."""


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when."""

    victim: str
    """`job`: all ranks at once, as a scheduler does. `rank`: one of them. `writer`: the process that writes for a rank."""
    rank: int
    iteration: int | None
    """The delay counts from the beginning of this step, or of the process."""
    delay: float

    @staticmethod
    def draw(chance: random.Random, resumed_at: int) -> Kill:
        victim = chance.choice(["job", "job", "job", "rank", "writer"])
        if victim == "job" and chance.random() < 0.4:
            return Kill(victim, 0, None, chance.uniform(0.0, 1.0))
        # Not before the first step: where no launcher ends them, ranks wait long for one that never comes.
        iteration = min(STEPS, resumed_at + chance.randint(1, 2 * INTERVAL + 1))
        return Kill(victim, chance.randrange(RANKS), iteration, chance.uniform(0.0, 0.1))

    def arm(self, rank: int) -> None:
        """In a rank, before its run begins: have another process do it, for this one may be held up at that moment."""
        if self.victim != "job" and rank != self.rank:
            return
        listen, tell = os.pipe()
        me = os.getpid()
        if os.fork() == 0:
            try:
                set_parent_death_signal(me, signal.SIGKILL)
                os.read(listen, 1)
                time.sleep(self.delay)
                for pid in children(me) - {os.getpid()} if self.victim == "writer" else [me]:
                    os.kill(pid, signal.SIGKILL)
            finally:
                os._exit(0)

        def start(_: object) -> None:
            os.write(tell, b"x")

        if self.iteration is None:
            start(None)
        else:
            at_iteration(self.iteration, start)


def children(parent: int) -> set[int]:
    """The processes that a process started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.add(int(path.parent.name))
    return found


def marked(mark: str) -> set[int]:
    """The processes that were started with this mark in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def attempt(argv: list[str], kill: Kill | None) -> list[Ended]:
    """One start of the job; afterwards nothing of it runs any more."""
    mark = uuid.uuid4().hex

    def before(rank: int) -> None:
        os.environ[MARK] = mark
        if kill is not None:
            kill.arm(rank)

    ended = launch(argv, RANKS, before=before, gloo=True)
    deadline = time.monotonic() + 10.0
    while left := marked(mark):
        assert time.monotonic() < deadline, f"{kill}: processes {left} outlive the job"
        time.sleep(0.01)
    return ended


def assert_sound(folder: Path, in_place: bool) -> int:
    """The checkpoint that the next start takes is there to its last byte. Returns its iteration, 0 without one.

    Args:
        in_place: as in an object store, a checkpoint is written under its own name and complete when its manifest is there.
    """
    storage = open_storage(folder)
    found, latest = list_iterations(storage), read_latest(storage)
    complete = [
        iteration for iteration in found if storage.get_file_size(f"{get_checkpoint_name(iteration)}/{MANIFEST}") is not None
    ]
    assert in_place or complete == found
    if not complete:
        assert latest is None
        return 0
    # Without a latest file it was killed between the end of its first checkpoint and this file.
    expected = max(complete) if latest is None else latest
    assert find_checkpoint(folder, warn=lambda _: None) == checkpoint(folder, expected)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        assert saved_tensors(folder, expected, kind)
    return expected


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is not interrupted, and writes nothing in the background."""
    folder = tmp_path_factory.mktemp("whole")
    run(arguments(**{**SETTINGS, "async_save": False}, save=folder), RANKS, gloo=True)
    return folder


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("kind", KILLS)
def test_a_run_that_is_killed_goes_on_from_a_complete_checkpoint(tmp_path: Path, whole: Path, full: bool, kind: str) -> None:
    left, chance = KILLS[kind][full], random.Random(kind)
    rounds = 0
    while left:
        folder = tmp_path / str(rounds)
        left = until_the_end(folder, str(folder) if kind == "path" else f"local://{folder}", left, chance)
        assert digest(folder, STEPS) == digest(whole, STEPS)
        assert complete_checkpoints(folder)[-1] == f"iter_{STEPS:07d}" and len(complete_checkpoints(folder)) <= KEPT
        assert not list(folder.glob(".*")), "what killed saves left is removed"
        rounds += 1


def until_the_end(folder: Path, save: str, left: int, chance: random.Random) -> int:
    """Start the job until it is done. Returns how many kills are left to do."""
    while True:
        resumed_at = assert_sound(folder, save != str(folder))
        kill = Kill.draw(chance, resumed_at) if left else None
        ended = attempt(arguments(**SETTINGS, save=save, load=save), kill)
        said = ended[0].stdout
        if resumed_at and "resuming from" in said:
            assert f"at iteration {resumed_at}" in said, f"{kill}\n{report(ended)}"
        assert (read_latest(open_storage(folder)) or 0) >= resumed_at
        codes = [end.code for end in ended]
        done = codes == [0] * RANKS
        if kill is not None and kill.victim != "writer":
            killed = range(RANKS) if kill.victim == "job" else [kill.rank]
            # Or the run was faster, which does not count. One rank's end may have ended another before its own turn came.
            assert done or any(codes[rank] == -signal.SIGKILL for rank in killed), f"{kill}\n{report(ended)}"
            left -= not done
        elif kill is not None:  # the run goes on, and fails only if this was its last save
            assert done or set(codes) == {1}, f"{kill}\n{report(ended)}"
            left -= 1
        else:
            assert done, report(ended)
        if done:
            return left
