"""A rank's writing process (`writer_main.py`) as training sees it, and the messages between the two. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.commit import Retention
from megatron.checkpoint.rank_parts import RankPart


class Begin(NamedTuple):
    """Sent once: what each save writes. The data lies in the shared memory in the order of the files and their boxes."""

    location: str
    """The save folder, as a path or URL."""
    part: RankPart
    num_ranks: int
    retention: Retention


class Save(NamedTuple):
    """The shared memory is filled: write it."""

    iteration: int
    token: str
    files: dict[str, bytes] | None
    """`config.json` and `state.json`, for the process that makes a checkpoint of the parts of all ranks; None for the others."""


class AllWritten(NamedTuple):
    """To the process that waits for the parts: every rank reports that its part is written."""


class GiveUp(NamedTuple):
    """To the process that waits for the parts: one will not come."""

    reason: str


class End(NamedTuple):
    """There will be no other message."""


Message = Begin | Save | AllWritten | GiveUp | End


class Alive(NamedTuple):
    """The save goes on: more is on the disk than before, or it waits for the parts of other ranks."""


class PartWritten(NamedTuple):
    """This rank's part is on the disk, or could not be written. The shared memory may be filled again."""

    iteration: int
    failure: str | None


class Committed(NamedTuple):
    """The checkpoint is complete, or will not be."""

    iteration: int
    failure: str | None
    content_digest: str
    seconds: float
    """Seconds since the memory was filled."""


class Note(NamedTuple):
    """A line for the log: something went wrong after the checkpoint was complete."""

    text: str


Reply = Alive | PartWritten | Committed | Note


def part_file(rank: int) -> str:
    """Name of the file in which a rank describes the part that it has written."""
    return f"rank_{rank:05d}.part.json"


def failure_mark(rank: int) -> str:
    """Name of the file with the reason why a rank could not write its part."""
    return f"rank_{rank:05d}.failed"


_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `megatron`."""


_DIES_WITHIN_S = 2.0


class WriterDied(Exception):
    """The process has ended by itself."""


class WriterProcess:
    """A process that runs `writer_main.py`.

    Args:
        fd: file descriptor of the shared memory.
        num_bytes: its size.
        begin: what each save writes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, fd: int, num_bytes: int, begin: Begin) -> None:
        # -P, so that no file in the working directory is taken for a module.
        command = [sys.executable, "-P", "-m", "megatron.checkpoint.writer_main", str(fd), str(num_bytes), str(os.getpid())]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=(fd,),
            start_new_session=True,  # signals to the job's process group are not for it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._received = bytearray()
        self.send(begin)

    @property
    def pid(self) -> int:
        """Number of the process, for messages."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send it a message. If it has ended, `receive` reports it."""
        with contextlib.suppress(BrokenPipeError):
            self._in.write(pickle.dumps(message))
            self._in.flush()

    def receive(self, timeout: float = 0.0) -> list[Reply]:
        """Replies that have come, or that come within `timeout` seconds.

        Raises:
            WriterDied: there is none left, and the process has ended.
        """
        replies = self._complete()
        while not replies:
            if timeout > 0.0 and not self._poll.poll(1000.0 * timeout):
                return []
            try:
                data = os.read(self._out, 1 << 16)
            except BlockingIOError:
                return []
            if not data:
                code = self._process.wait()
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise WriterDied(f"the process that writes it {how}")
            self._received += data
            replies = self._complete()
        return replies

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a file system cannot even be killed
            self._process.wait(_DIES_WITHIN_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _complete(self) -> list[Reply]:
        """Take the replies that have arrived whole."""
        replies: list[Reply] = []
        while len(self._received) >= 4:
            length = 4 + int.from_bytes(self._received[:4], "little")
            if len(self._received) < length:
                break
            replies.append(pickle.loads(self._received[4:length]))
            del self._received[:length]
        return replies
