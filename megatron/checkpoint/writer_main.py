"""The process that writes a rank's part beside the training, and on the first rank makes a checkpoint of all parts.

    python -m megatron.checkpoint.writer_main MEMORY NUM_BYTES CONNECTION PARENT

It is started by `rank_writer.py`: a program of its own, not a fork, because a fork of a process with a CUDA device or many
gigabytes is dangerous or slow. It imports no torch. The data lies in the memory behind the first file descriptor, messages come and
replies go through the second. When training (the process PARENT) ends, in whatever way, it ends at once too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.manifest import Manifest, part_from_json
from megatron.checkpoint.rank_parts import write_part
from megatron.checkpoint.save_folder import checkpoint_name, commit, retain
from megatron.checkpoint.storage import Draft
from megatron.checkpoint.storage_kinds import open_storage
from megatron.checkpoint.writer_messages import (
    Alive,
    Begin,
    Committed,
    End,
    Mark,
    Message,
    Note,
    PartsEnded,
    PartWritten,
    Reply,
    Save,
    failure_mark,
    part_file,
)

_PR_SET_PDEATHSIG = 1
_NICE = 10
"""Priority of the process: training goes first where there is no core left for both."""
LONGEST_PAUSE_S = 0.5
"""The most seconds between two looks whether all parts are there."""
ALIVE_EVERY_S = 2.0
VISIBLE_WITHIN_S = 60.0
"""Seconds within which a written part must be seen here: network file systems show new names late."""
_WHOLE_WITHIN_S = 10.0


class Background:
    """One rank's writer.

    Args:
        data: the shared memory.
        inbox: messages; only those after `Begin`.
        begin: what to write.
        reply: sends answers.
    """

    def __init__(self, data: memoryview, inbox: queue.Queue[Message], begin: Begin, reply: Callable[[Reply], None]) -> None:
        self._inbox, self._begin, self._reply = inbox, begin, reply
        self._storage = open_storage(begin.location)
        self._said_alive_at = -ALIVE_EVERY_S
        self._doing = ""
        self._data = {box: data[place] for box, place in begin.part.places().items()}

    def run(self) -> None:
        """Write whenever training asks for it, until the message `End`."""
        while not isinstance(message := self._inbox.get(), End):
            if isinstance(message, Save):
                self._save(message)
            elif isinstance(message, Mark):
                self._leave_mark(self._draft(message.iteration, message.token), message.failure)
        self._abandon(message)

    def _save(self, message: Save) -> None:
        began = time.monotonic()
        rank = self._begin.part.rank
        draft = self._draft(message.iteration, message.token)
        try:
            self._begins("the removal of what failed saves left" if message.failed else "its folder")
            self._abandon(message)
            draft.join()
            self._begins("the write of its part")
            part = write_part(draft, self._begin.part, self._data.__getitem__, self._alive)
            draft.storage.write(draft.file_name(part_file(rank)), part.to_json())
            failure = None
        except Exception as error:  # noqa: BLE001 - training goes on and says so
            failure = _reason(error, rank)
            self._leave_mark(draft, failure)
        self._reply(PartWritten(failure))
        if message.files is None:
            return
        digest = ""
        try:
            digest = str(self._commit(draft, message, failure).content_digest)
            failure = None
        except Exception as error:  # noqa: BLE001 - as above
            failure = str(error) if isinstance(error, CheckpointError) else _reason(error, rank)
            draft.abandon()
        self._reply(Committed(message.iteration, failure, digest, time.monotonic() - began))
        if failure is None:
            self._begins("the removal of old checkpoints")
            self._retain()

    def _abandon(self, message: Save | End) -> None:
        for iteration in message.failed:
            self._draft(iteration, message.token).abandon()

    def _draft(self, iteration: int, token: str) -> Draft:
        return self._storage.draft(checkpoint_name(iteration), token)

    def _leave_mark(self, draft: Draft, failure: str) -> None:
        with contextlib.suppress(Exception):
            draft.storage.write(draft.file_name(failure_mark(self._begin.part.rank)), failure.encode())

    def _commit(self, draft: Draft, message: Save, failure: str | None) -> Manifest:
        if failure is not None:
            raise CheckpointError(failure)
        self._wait_for_parts(draft)
        self._begins("the files that make it a checkpoint")
        parts = []
        for rank in range(self._begin.num_ranks):
            name = draft.file_name(part_file(rank))
            parts.append(_whole_part(draft, name))
            draft.storage.remove(name)
        assert message.files is not None
        return commit(self._storage, draft, message.iteration, parts, message.files, run=message.token)

    def _wait_for_parts(self, draft: Draft) -> None:
        """Wait until all ranks have written.

        Raises:
            CheckpointError: one of them could not, or training reports that it will not.
        """
        missing = set(range(self._begin.num_ranks))
        pause, deadline = 0.002, float("inf")
        while True:
            there = set(draft.storage.names())
            failed = [rank for rank in sorted(missing) if draft.file_name(failure_mark(rank)) in there]
            if failed:
                reasons = dict.fromkeys(
                    draft.storage.read(draft.file_name(failure_mark(rank))).decode(errors="replace") for rank in failed
                )
                raise CheckpointError(listed(list(reasons), "\n  "))
            missing = {rank for rank in missing if draft.file_name(part_file(rank)) not in there}
            if not missing:
                return
            self._begins(f"parts of other ranks ({listed([str(rank) for rank in sorted(missing)])})")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {min(missing)} has written its part, but not into {draft.storage.location} as the first rank sees it: "
                    f"--save must be a folder on a file system that all nodes share"
                )
            with contextlib.suppress(queue.Empty):
                message = self._inbox.get(timeout=pause)
                if isinstance(message, End):
                    self._inbox.put(message)
                    raise CheckpointError("training has ended before all parts were written")
                if isinstance(message, PartsEnded):
                    if message.failure is not None:
                        raise CheckpointError(message.failure)
                    deadline = time.monotonic() + VISIBLE_WITHIN_S
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self._alive(further=False)

    def _begins(self, doing: str) -> None:
        """Say what it does from now on: its storage may not answer."""
        if doing != self._doing:
            self._doing = doing
            self._reply(Alive(doing, True))

    def _alive(self, *, further: bool = True) -> None:
        """Send a sign that the save goes on; seldom, since training may not read it for a long time."""
        if (now := time.monotonic()) - self._said_alive_at >= ALIVE_EVERY_S:
            self._said_alive_at = now
            self._reply(Alive(self._doing, further))

    def _retain(self) -> None:
        try:
            retain(self._storage, self._begin.retention)
        except Exception as error:  # noqa: BLE001 - the checkpoint is complete all the same
            self._reply(Note(f"old checkpoints in {self._storage.location} could not be removed: {error}"))


def _whole_part(draft: Draft, name: str) -> Manifest:
    """What a rank says of its part. Some file systems behind a URL show a file while it is written."""
    until = time.monotonic() + _WHOLE_WITHIN_S
    while True:
        try:
            return part_from_json(draft.storage.read(name), draft.storage.location, name)
        except DamagedCheckpointError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _reason(error: Exception, rank: int) -> str:
    """The reason as the user sees it; faults of the program with their kind."""
    text = str(error) if isinstance(error, (CheckpointError, OSError)) else repr(error)
    return f"rank {rank}: {text}"


def _end_with_parent(parent: int) -> None:
    """Have the system kill this process when the one that trains ends, also in the middle of a write."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _receive(connection: Connection, inbox: queue.Queue[Message]) -> None:
    """Pass on all messages; end with the last one, which means that training has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    os._exit(0)


def main() -> None:
    """Map the memory, then write when asked to."""
    memory, num_bytes, messages, parent = (int(text) for text in sys.argv[1:])
    _end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for training, which decides whether a save is finished
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    data = memoryview(mmap.mmap(memory, num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))
    os.close(memory)
    connection, inbox = Connection(messages), queue.Queue[Message]()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    begin = inbox.get()
    assert isinstance(begin, Begin)
    Background(data, inbox, begin, connection.send).run()
    os._exit(0)  # without waiting for the thread that waits for messages


if __name__ == "__main__":
    main()
