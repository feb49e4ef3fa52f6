"""Threads that work beside the training thread and never keep the process from ending."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_Tasks = queue.SimpleQueue[_Task | None]

_GRACE_S = 2.0
"""How long the end of the process waits for what is being read."""


class ReadingThreads:
    """Runs functions in the order in which they are handed in, several at once.

    The threads start with the first function. They know their tasks but not this object, so dropping it ends them. A read that
    never returns (a file server that is gone) holds neither `close` nor, for long, the end of the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}_{number}", daemon=True) for number in range(count)
        ]
        self._dropped = weakref.finalize(self, _stop, self._tasks, count)
        self._dropped.atexit = False  # `_end_all` does it, and waits
        _open_pools.add(self)

    def submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Have a thread call a function; its result, or its exception, arrives in the future."""
        future: Future[_T] = Future()
        self._tasks.put((future, function, args))
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return future

    def close(self) -> None:
        """End the threads after what they are doing now; what they have not begun is cancelled. Does not wait."""
        if self._dropped.detach():
            _stop(self._tasks, len(self._threads))

    def wait(self, timeout: float) -> None:
        """Wait until the threads have ended, at most so many seconds."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, function, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the result
                future.set_exception(error)
        del task, future, function, args  # while this thread waits, nothing is kept


def _stop(tasks: _Tasks, count: int) -> None:
    with contextlib.suppress(queue.Empty):
        while (task := tasks.get_nowait()) is not None:
            task[0].cancel()
    for _ in range(count):
        tasks.put(None)


_open_pools: weakref.WeakSet[ReadingThreads] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that comes back from a library into an interpreter that is gone would abort the process."""
    pools, deadline = list(_open_pools), time.monotonic() + _GRACE_S
    for pool in pools:
        pool.close()
    for pool in pools:
        pool.wait(deadline - time.monotonic())
