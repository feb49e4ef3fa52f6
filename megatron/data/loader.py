"""Gives a data rank its microbatches, a whole step at a time; threads read ahead."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from megatron.data.samples import DocumentRules, Microbatch, SampleSource, read_microbatch

T = TypeVar("T")
_TASK_SAMPLES = 64
"""A thread reads consecutive microbatches of about this many samples at a time. So the other threads sleep while one is enough:
several at once would take Python's lock from each other so often that together they are slower than one."""
_STEPS_AHEAD = 2
_TASKS_AHEAD = 2
"""How many tasks are read ahead for each thread, where two steps are too few to keep all threads busy."""


class StepLoader(Iterator[list[T]], Generic[T]):
    """Iterates over steps; each is the list of this data rank's microbatches.

    The step at `consumed` samples is made of the next `global_batch_size_at(consumed)` samples. Microbatch m of data rank r holds
    the `micro_batch_size` samples from consumed + (m * data_size + r) * micro_batch_size on. So the samples of a step do not depend
    on the layout. The whole state is `consumed_samples`, the number of samples in all steps given out so far.

    Threads read ahead two steps or, if that is more, two tasks of some 64 samples for each thread. So much is kept in memory.

    Args:
        prepare: Turns a microbatch into what is given out; runs in the thread that has read it.
        global_batch_size_at: Samples of the step that starts after so many consumed samples.
        total_samples: No step starts at or after it.
        num_workers: Threads that read ahead; 0 reads when asked. The result is the same.
    """

    def __init__(
        self,
        dataset: SampleSource,
        rules: DocumentRules,
        prepare: Callable[[Microbatch], T],
        *,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        global_batch_size_at: Callable[[int], int],
        consumed_samples: int,
        total_samples: int,
        num_workers: int,
    ) -> None:
        self.consumed_samples = consumed_samples
        # The threads hold this and not the loader, so that a dropped loader ends them.
        self._read = functools.partial(_read, dataset, rules, prepare, micro_batch_size)
        self._micro_batch_size = micro_batch_size
        self._data_rank = data_rank
        self._data_size = data_size
        self._global_batch_size_at = global_batch_size_at
        self._total_samples = total_samples
        self._threads = ReadingThreads(num_workers, "loader") if num_workers else None
        self._tasks_ahead = _TASKS_AHEAD * num_workers
        self._ahead: deque[tuple[int, list[Future[list[T]]]]] = deque()
        self._planned = consumed_samples
        self._closed = False

    def __next__(self) -> list[T]:
        """The next step.

        Raises:
            ValueError: the global batch does not divide by micro-batch x data ranks, or a sample cannot be read.
        """
        if self.consumed_samples >= self._total_samples:
            self.close()
            raise StopIteration
        if self._closed:
            raise RuntimeError("the loader is closed")
        try:
            if self._threads is None:
                size, firsts = self._plan(self.consumed_samples)
                step = self._read(firsts)
            else:
                self.read_ahead()
                size, futures = self._ahead.popleft()
                step = [made for future in futures for made in future.result()]
        except BaseException:
            self.close()
            raise
        self.consumed_samples += size
        return step

    def read_ahead(self) -> None:
        """Have the threads read what comes after the last step given out. Call this when that step is on its way to the device.

        It is not done at once: a thread that begins to read slows down whatever else runs in Python.
        """
        while self._threads is not None and not self._closed and self._planned < self._total_samples and self._wants_more():
            size, firsts = self._plan(self._planned)
            count = max(1, _TASK_SAMPLES // self._micro_batch_size)
            tasks = [firsts[start : start + count] for start in range(0, len(firsts), count)]
            self._ahead.append((size, [self._threads.submit(self._read, task) for task in tasks]))
            self._planned += size

    def close(self) -> None:
        """End the threads without waiting for them. What they have not begun is not read."""
        self._closed = True
        self._ahead.clear()
        if self._threads is not None:
            self._threads.close()

    def _plan(self, consumed: int) -> tuple[int, range]:
        """The number of samples in the step, and the first sample of each of this rank's microbatches."""
        size = self._global_batch_size_at(consumed)
        row = self._micro_batch_size * self._data_size
        if size < 1 or size % row:
            raise ValueError(
                f"the global batch of {size} samples (at {consumed} consumed samples) does not divide by --micro-batch-size "
                f"{self._micro_batch_size} x {self._data_size} data ranks.\n  Use a multiple of {row} for --global-batch-size "
                "(and for START and INCREMENT of --rampup-batch-size)."
            )
        start = consumed + self._data_rank * self._micro_batch_size
        return size, range(start, consumed + size, row)

    def _wants_more(self) -> bool:
        return len(self._ahead) < _STEPS_AHEAD or sum(len(tasks) for _, tasks in self._ahead) < self._tasks_ahead


def _read(
    dataset: SampleSource, rules: DocumentRules, prepare: Callable[[Microbatch], T], size: int, first_samples: Iterable[int]
) -> list[T]:
    """Microbatches, read and prepared."""
    return [prepare(read_microbatch(dataset, first, size, rules)) for first in first_samples]


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_Tasks = queue.SimpleQueue[_Task | None]

_GRACE_S = 2.0
"""Seconds that the end of the process waits for reads under way."""


class ReadingThreads:
    """Runs functions in threads, in the order in which they are handed in, several at once.

    The threads start with the first function. They know their tasks but not this object, so dropping it ends them. A read that
    never returns (a file server that is gone) delays neither `close` nor, for long, the end of the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}_{number}", daemon=True) for number in range(count)
        ]
        self._dropped = weakref.finalize(self, _stop, self._tasks, count)
        self._dropped.atexit = False  # `_end_all` does it, and waits
        _open_pools.add(self)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Have a thread call a function. Its result, or its exception, arrives in the future."""
        future: Future[T] = Future()
        self._tasks.put((future, function, args))
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return future

    def close(self) -> None:
        """End the threads after what they are doing now, without waiting. What they have not begun is cancelled."""
        if self._dropped.detach():
            _stop(self._tasks, len(self._threads))

    def wait(self, timeout: float) -> None:
        """Wait until the threads have ended, at most `timeout` seconds."""
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
        del task, future, function, args  # while this thread waits, it keeps no result alive


def _stop(tasks: _Tasks, count: int) -> None:
    with contextlib.suppress(queue.Empty):
        while (task := tasks.get_nowait()) is not None:
            task[0].cancel()
    for _ in range(count):
        tasks.put(None)


_open_pools: weakref.WeakSet[ReadingThreads] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads: one that returns from a library into an interpreter that is gone would abort the process."""
    pools, deadline = list(_open_pools), time.monotonic() + _GRACE_S
    for pool in pools:
        pool.close()
    for pool in pools:
        pool.wait(deadline - time.monotonic())
