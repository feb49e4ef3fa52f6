"""One rank's side of a save in the background: the process that writes it, the memory shared with it, and its replies."""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO

import torch

from megatron.checkpoint.global_tensor import GlobalTensor, torch_dtype
from megatron.checkpoint.rank_parts import RankPart
from megatron.checkpoint.save_folder import Retention
from megatron.checkpoint.storage import Storage
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
)
from megatron.config.launcher import module_start
from megatron.parallel.boxes import Box

_DIES_WITHIN_S = 2.0


class WriterDied(Exception):
    """The process has ended by itself."""


class WriterProcess:
    """A process that runs `writer_main.py`, and memory that it shares with this one.

    The memory has no name, so nothing of it is left when both have ended, however they ended. All of it is touched once when it is
    made: the first copy into fresh memory takes several times as long as later ones.

    Args:
        begin: what each save writes.
        pinned: for data of a CUDA device, so that copies run at the speed of the bus (where the system allows it).

    Raises:
        OSError: there is not so much memory, or the process cannot be started.
    """

    def __init__(self, begin: Begin, *, pinned: bool) -> None:
        self.begin = begin
        num_bytes = max(sum(file.num_data_bytes for file in begin.part.files), 1)
        with _anonymous_file() as file:
            try:
                file.truncate(num_bytes)
                shared = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            except OSError as error:
                reason = f"no host memory for the copy of {num_bytes:,} bytes (--async-save): {error.strerror}"
                raise OSError(error.errno, reason) from error
            self._connection, theirs = multiprocessing.Pipe()
            numbers = (file.fileno(), num_bytes, theirs.fileno(), os.getpid())
            command, environment = module_start("megatron.checkpoint.writer_main", *numbers)
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=environment,
                    pass_fds=(file.fileno(), theirs.fileno()),
                    start_new_session=True,  # signals to the job's process group are not for it
                )
        self._memory = torch.frombuffer(shared, dtype=torch.uint8)
        self.pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)) == 0
        self.targets = {
            (box.name, box.box): self._memory[place].view(torch_dtype(box.dtype)).view(box.box.sizes)
            for box, place in begin.part.places().items()
        }
        """The place of each box in the shared memory, by (name, box)."""
        self.send(begin)

    @property
    def pid(self) -> int:
        """Number of the process, for messages."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send it a message. If it has ended, `receive` reports it."""
        with contextlib.suppress(ConnectionError):
            self._connection.send(message)

    def receive(self, timeout: float = 0.0) -> list[Reply]:
        """Replies that have come, or that come within `timeout` seconds.

        Raises:
            WriterDied: there is none left, and the process has ended.
        """
        replies: list[Reply] = []
        try:
            while self._connection.poll(0.0 if replies else timeout):
                replies.append(self._connection.recv())
        except (EOFError, OSError):
            if not replies:
                code = self._process.wait()
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise WriterDied(f"the process that writes it {how}") from None
        return replies

    def stop(self) -> None:
        """End the process, whatever it is doing. The memory goes with this object."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a file system cannot even be killed
            self._process.wait(_DIES_WITHIN_S)
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())


def _anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("checkpoint", os.MFD_CLOEXEC), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


_log = logging.getLogger(__name__)

PATIENCE_S = 300.0
STALL_S = 60.0
"""Seconds without a step further after which a save in the background is told to stand still, and between two such lines."""
_TELL_AFTER_S = 10.0
_TELL_EVERY_S = 60.0


class RankWriter:
    """Writes one rank's parts, one after the other. A failure is kept until it is asked for; nothing here raises.

    Args:
        storage: the save folder.
        rank: this rank; the first one's process makes a checkpoint of the parts of all.
        num_ranks: number of parts.
        retention: which checkpoints are kept.
        patience_s: a process that makes no progress for so many seconds, while training waits for it, is ended.
    """

    def __init__(self, storage: Storage, rank: int, num_ranks: int, retention: Retention, patience_s: float = PATIENCE_S) -> None:
        self._storage, self._rank, self._num_ranks = storage, rank, num_ranks
        self._retention, self._patience_s = retention, patience_s
        self._process: WriterProcess | None = None
        self.iteration: int | None = None
        """The last save that was begun."""
        self._token = ""
        self.written: PartWritten | None = None
        """The result of this rank's part of that save, once it has ended."""
        self.committed: Committed | None = None
        """On the first rank: the result of the whole save, once it has ended."""
        self.notes: list[str] = []
        """Further lines for the log."""
        self._doing, self._further_at, self._told_at = "", 0.0, 0.0

    def start(
        self,
        iteration: int,
        token: str,
        part: RankPart,
        tensors: list[GlobalTensor],
        files: dict[str, bytes] | None,
        failed: tuple[int, ...] = (),
    ) -> None:
        """Copy what this rank writes and let the process write it. The save before must have ended.

        Args:
            iteration: number of the checkpoint.
            token: that of the run.
            part: what to write.
            tensors: what this rank holds; they may change when this returns.
            files: on the first rank, the small files of the checkpoint.
            failed: iterations whose saves left something.
        """
        self.iteration, self._token = iteration, token
        self.written = self.committed = None
        self.receive()  # it may have died since
        begin = Begin(self._storage.location, part, self._num_ranks, self._retention)
        if self._process is None or self._process.begin != begin:
            self.close()
            try:
                self._process = WriterProcess(begin, pinned=any(tensor.local.is_cuda for tensor in tensors))
            except OSError as error:
                self._fail(f"rank {self._rank}: {error}")
                return
        _copy(tensors, self._process.targets)
        self._doing, self._further_at, self._told_at = "the process that writes it", time.monotonic(), 0.0
        self._process.send(Save(iteration, token, files if self._rank == 0 else None, failed if self._rank == 0 else ()))

    def receive(self, timeout: float = 0.0) -> bool:
        """Take in the process's replies, waiting at most `timeout` seconds for one. Returns whether it is known to be alive."""
        if self._process is None:
            return False
        try:
            replies = self._process.receive(timeout)
        except WriterDied as error:
            self._fail_and_mark(f"rank {self._rank}: {error}")
            return False
        for reply in replies:
            if isinstance(reply, Alive) and (reply.further or reply.doing != self._doing):
                self._doing, self._further_at = reply.doing, time.monotonic()
            if isinstance(reply, PartWritten):
                self.written = reply
            elif isinstance(reply, Committed):
                self.committed = reply
            elif isinstance(reply, Note):
                self.notes.append(reply.text)
        return bool(replies)

    def stall(self) -> str | None:
        """On the first rank, while a save goes on: a line if it has come no further for long, once in that time."""
        now = time.monotonic()
        if self.iteration is None or self.committed is not None or now - max(self._further_at, self._told_at) < STALL_S:
            return None
        self._told_at = now
        return (
            f"save of iteration {self.iteration} has waited {now - self._further_at:.0f} s for {self._doing} on "
            f"{self._storage.location}; training goes on until the next save is due"
        )

    def wait_until_written(self) -> str | None:
        """Wait for this rank's part of the last save. Returns why it could not be written, or None."""
        self._wait_until(lambda: self.written is not None)
        return None if self.written is None else self.written.failure

    def wait_until_committed(self, failures: list[str]) -> None:
        """On the first rank: wait for the end of the last save, after all ranks report that their parts have ended.

        Args:
            failures: why ranks could not write theirs.
        """
        if self.iteration is not None and self.committed is None and self._process is not None:
            self._process.send(PartsEnded("\n  ".join(dict.fromkeys(failures)) or None))
        self._wait_until(lambda: self.committed is not None)

    def end(self, failed: tuple[int, ...] = ()) -> None:
        """Let the process finish what it has begun (the first rank's may be removing old checkpoints), and free the memory.

        Args:
            failed: iterations whose saves left something.
        """
        if self._process is not None:
            self._process.send(End(failed if self._rank == 0 else (), self._token))
        self._wait_until(lambda: self._process is None)

    def close(self) -> None:
        """End the process at once, and free the memory."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for the process as long as it makes progress. If it makes none, it is ended, and the save has failed."""
        began = heard = time.monotonic()
        tell_at = began + _TELL_AFTER_S
        while self.iteration is not None and not done():
            if self._process is None:
                self._fail(f"rank {self._rank}: the process that writes it has ended")
                return
            pid = self._process.pid
            alive = self.receive(min(1.0, self._patience_s))
            now = time.monotonic()
            heard = now if alive else heard
            if now - heard > self._patience_s:
                reason = f"made no progress for {now - heard:.0f} s and was ended"
                self._fail_and_mark(f"rank {self._rank}: the process that writes it {reason}")
            elif now > tell_at and not done():
                _log.error(
                    f"rank {self._rank}: still waiting for the save of iteration {self.iteration} "
                    f"(process {pid}, {now - began:.0f} s, last sign of life {now - heard:.0f} s ago)"
                )
                tell_at = now + _TELL_EVERY_S

    def _fail_and_mark(self, reason: str) -> None:
        """The process has ended, or has to, in a save. Only another one tells the first rank's: this one touches no storage."""
        assert self._process is not None
        begin, pinned, marks = self._process.begin, self._process.pinned, self.written is None and self.iteration is not None
        self.close()
        self._fail(reason)
        if marks and self._rank > 0:
            assert self.iteration is not None
            with contextlib.suppress(OSError):
                self._process = WriterProcess(begin, pinned=pinned)
                self._process.send(Mark(self.iteration, self._token, reason))

    def _fail(self, reason: str) -> None:
        """Record that the part, and on the first rank the checkpoint, will not be written."""
        if self.iteration is None:
            return
        if self.written is None:
            self.written = PartWritten(reason)
        if self._rank == 0 and self.committed is None:
            self.committed = Committed(self.iteration, reason, "", 0.0)


def _copy(tensors: list[GlobalTensor], targets: Mapping[tuple[str, Box], torch.Tensor]) -> None:
    """Copy the boxes that have a target."""
    devices = set()
    for tensor in tensors:
        for placed in tensor.boxes:
            target = targets.get((tensor.name, placed.box))
            if target is not None:
                target.copy_(tensor.part(placed), non_blocking=True)
                devices.add(tensor.local.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
