"""Output for a terminal or a pipe that does not accept it now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_lab.resilience import output_queue
from megatron_lab.resilience.output_queue import OutputQueue

LINE = b"x" * 4095 + b"\n"


class Pipe:
    """A pipe to which nothing more can be written until it is read."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.write_fd, False)
        self.filled = 0
        with suppress(BlockingIOError):
            while True:
                self.filled += os.write(self.write_fd, LINE)
        os.set_blocking(self.write_fd, True)
        os.set_blocking(self.read_fd, False)

    def read(self, queue: OutputQueue) -> bytes:
        """All that was written, after the first filling, once the queue is empty."""
        text = b""
        while queue.blocked_fds:
            with suppress(BlockingIOError):
                text += os.read(self.read_fd, 1 << 16)
            queue.write_waiting()
        with suppress(BlockingIOError):
            while True:
                text += os.read(self.read_fd, 1 << 16)
        return text[self.filled :]

    def close(self) -> None:
        for fd in (self.read_fd, self.write_fd):
            with suppress(OSError):
                os.close(fd)


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pipe]]:
    """Full pipes in the place of stdout and stderr."""
    made = [Pipe(), Pipe()]
    monkeypatch.setattr(output_queue, "STDOUT_FD", made[0].write_fd)
    monkeypatch.setattr(output_queue, "STDERR_FD", made[1].write_fd)
    yield made
    for pipe in made:
        pipe.close()


@pytest.mark.parametrize("blocks", [True, False])
def test_output_waits_until_it_is_accepted(tmp_path: Path, pipes: list[Pipe], blocks: bool) -> None:
    """Nothing is lost, and the mode of the pipe, which other processes share, stays."""
    stdout, stderr = pipes
    os.set_blocking(stdout.write_fd, blocks)
    queue = OutputQueue(tmp_path)
    lines = [b"%05d\n" % i * 1000 for i in range(50)]
    for line in lines:
        queue.write(stdout.write_fd, line)
    queue.write(stderr.write_fd, b"message\n")
    assert len(queue.blocked_fds) == 2
    assert os.get_blocking(stdout.write_fd) == blocks
    os.set_blocking(stderr.read_fd, True)
    os.read(stderr.read_fd, stderr.filled)
    queue.write_waiting()
    assert os.read(stderr.read_fd, 1 << 16) == b"message\n", "stdout blocks stderr"
    assert stdout.read(queue) == b"".join(lines)


def test_the_oldest_lines_are_dropped(tmp_path: Path, pipes: list[Pipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_queue, "MAX_QUEUED_BYTES", 3 * len(LINE))
    queue = OutputQueue(tmp_path)
    for i in range(10):
        queue.write(pipes[0].write_fd, b"%d" % i + LINE)
    shown = pipes[0].read(queue).split(b"\n")
    assert shown[0] == f"... 8 lines are only in the log files in {tmp_path}".encode()
    assert [line[:1] for line in shown[1:]] == [b"8", b"9", b""]


def test_a_common_terminal_keeps_the_order(tmp_path: Path, pipes: list[Pipe], monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = pipes[0]
    second_fd = os.dup(stdout.write_fd)
    monkeypatch.setattr(output_queue, "STDERR_FD", second_fd)
    queue = OutputQueue(tmp_path)
    for i in range(6):
        queue.write((stdout.write_fd, second_fd)[i % 2], b"%d\n" % i)
    assert stdout.read(queue) == b"0\n1\n2\n3\n4\n5\n"
    os.close(second_fd)


def test_a_reader_that_has_ended_is_reported_once(tmp_path: Path, pipes: list[Pipe]) -> None:
    stdout, stderr = pipes
    queue = OutputQueue(tmp_path)
    queue.write(stdout.write_fd, b"waits\n")
    os.close(stdout.read_fd)
    queue.write(stdout.write_fd, b"lost\n")
    queue.write(stdout.write_fd, b"lost\n")
    text = stderr.read(queue).decode()
    assert text.count("stdout cannot be written (Broken pipe)") == text.count("\n") == 1 and not queue.blocked_fds
