"""Streams that are as late as they may be, on the CPU: what is issued on one runs only when something waits for it.

On a real device a missing wait is seen now and then; here always. A copy that nobody waits for never happens, and one whose source
is written to too early copies what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Stream:
    """Work in its order."""

    def __init__(self, device: Any = None) -> None:
        self.issued: list[Callable[[], None]] = []
        self.done = 0
        self.knows_main = False
        """Whether what is issued next runs after all that the main stream did before."""

    def wait_stream(self, other: Stream) -> None:
        """Of the main stream and another, one waits. The main stream's work is done at once, so only main has to wait really."""
        if self is MAIN:
            other.run(len(other.issued))
        else:
            assert other is MAIN
            self.knows_main = True

    def run(self, until: int) -> None:
        """Do what was issued first."""
        while self.done < until:
            self.done += 1
            self.issued[self.done - 1]()


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        """All that was issued so far."""
        self.stream, self.place = stream, len(stream.issued)

    def synchronize(self) -> None:
        """The host waits; not at all for what was never recorded."""
        if self.stream is not None:
            self.stream.run(self.place)


MAIN = Stream()
_current = MAIN


def current_stream(device: Any = None) -> Stream:
    """The one on which work is issued."""
    return _current


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Issue on another stream, which must know what the main stream did."""
    global _current
    assert chosen.knows_main, "work is issued beside the main stream without waiting for it"
    _current = chosen
    try:
        with _Put(chosen):
            yield
    finally:
        _current, chosen.knows_main = MAIN, False


class _Put(TorchDispatchMode):
    """Puts operations into a stream. They must return nothing that is used."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._stream.issued.append(lambda: func(*args, **(kwargs or {})))
