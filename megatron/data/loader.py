"""Loader of the microbatches of a data-parallel rank. It yields the microbatches of one step at a time, and threads read ahead."""

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
"""Approximate number of samples that a thread reads per task, in consecutive microbatches.

The tasks are large so that other threads sleep while one thread is fast enough. Several active threads would pass Python's global
lock back and forth and together be slower than one thread.
"""
_PREFETCHED_STEPS = 2
_PREFETCHED_TASKS = 2
"""Number of tasks to read ahead per thread, if two steps are too few to keep all threads busy."""


class StepLoader(Iterator[list[T]], Generic[T]):
    """Iterator over the training steps of a data-parallel rank. Each item is the list of the rank's microbatches.

    The step at `consumed` samples consists of the next `global_batch_size_at(consumed)` samples. Microbatch m of data rank r has
    the `micro_batch_size` samples from consumed + (m * data_size + r) * micro_batch_size on. So the samples of a step do not depend
    on the layout. The only state is `consumed_samples`, the number of samples in all steps that the loader has returned.

    Threads read two steps ahead. A task of a thread reads about 64 samples. If two steps have fewer than two tasks per thread, the
    threads read more steps ahead. These samples are in memory.

    Args:
        prepare: converts a microbatch to the form that the loader returns. Runs in the thread that read the microbatch.
        data_rank: index of this rank among the data-parallel ranks.
        data_size: number of data-parallel ranks.
        global_batch_size_at: returns the number of samples of the step that starts after the given number of consumed samples.
        consumed_samples: number of samples that the run has already read.
        total_samples: no step starts at this sample or later.
        num_workers: number of threads; 0 to read in the calling thread. The number does not affect the result.
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
        # The threads refer to this function and not to the loader, so that they end when the loader is deleted.
        self._read_batches = functools.partial(_read_microbatches, dataset, rules, prepare, micro_batch_size)
        self._micro_batch_size = micro_batch_size
        self._data_rank = data_rank
        self._data_size = data_size
        self._global_batch_size_at = global_batch_size_at
        self._total_samples = total_samples
        self._threads = ReaderThreads(num_workers, "loader") if num_workers else None
        self._min_tasks = _PREFETCHED_TASKS * num_workers
        self._prefetched: deque[tuple[int, list[Future[list[T]]]]] = deque()
        self._planned_samples = consumed_samples
        self._closed = False

    def __next__(self) -> list[T]:
        """Return the microbatches of the next step.

        Raises:
            ValueError: the global batch size is not a multiple of micro-batch size x data ranks, or a sample cannot be read.
        """
        if self.consumed_samples >= self._total_samples:
            self.close()
            raise StopIteration
        if self._closed:
            raise RuntimeError("the data loader is closed: it was closed by `close` or by an earlier error. Build a new loader.")
        try:
            if self._threads is None:
                size, first_samples = self._plan(self.consumed_samples)
                step = self._read_batches(first_samples)
            else:
                self.prefetch()
                size, futures = self._prefetched.popleft()
                step = [microbatch for future in futures for microbatch in future.result()]
        except BaseException:
            self.close()
            raise
        self.consumed_samples += size
        return step

    def prefetch(self) -> None:
        """Let the threads read the steps after the last returned step. Call this when the returned step is being copied to the
        device.

        The loader does not prefetch before that, because a thread that starts to read slows down all other Python code.
        """
        while (
            self._threads is not None
            and not self._closed
            and self._planned_samples < self._total_samples
            and self._should_prefetch()
        ):
            size, first_samples = self._plan(self._planned_samples)
            task_microbatches = max(1, _TASK_SAMPLES // self._micro_batch_size)
            tasks = [first_samples[start : start + task_microbatches] for start in range(0, len(first_samples), task_microbatches)]
            self._prefetched.append((size, [self._threads.submit(self._read_batches, task) for task in tasks]))
            self._planned_samples += size

    def close(self) -> None:
        """Stop the threads without waiting for them. Tasks that have not started are cancelled."""
        self._closed = True
        self._prefetched.clear()
        if self._threads is not None:
            self._threads.close()

    def _plan(self, consumed: int) -> tuple[int, range]:
        """Return the number of samples in the step that starts after `consumed` samples, and the first sample of each of this
        rank's microbatches."""
        size = self._global_batch_size_at(consumed)
        stride = self._micro_batch_size * self._data_size
        if size < 1 or size % stride:
            raise ValueError(
                f"the global batch of {size} samples (at {consumed} consumed samples) is not divisible by --micro-batch-size "
                f"{self._micro_batch_size} x {self._data_size} data ranks.\n  Use a multiple of {stride} for --global-batch-size "
                "(and for START and INCREMENT of --rampup-batch-size)."
            )
        start = consumed + self._data_rank * self._micro_batch_size
        return size, range(start, consumed + size, stride)

    def _should_prefetch(self) -> bool:
        return len(self._prefetched) < _PREFETCHED_STEPS or sum(len(tasks) for _, tasks in self._prefetched) < self._min_tasks


def _read_microbatches(
    dataset: SampleSource, rules: DocumentRules, prepare: Callable[[Microbatch], T], size: int, first_samples: Iterable[int]
) -> list[T]:
    """Read microbatches and convert each of them with `prepare`.

    Args:
        size: samples per microbatch.
        first_samples: index of the first sample of each microbatch.
    """
    return [prepare(read_microbatch(dataset, first_sample, size, rules)) for first_sample in first_samples]


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_Tasks = queue.SimpleQueue[_Task | None]

_GRACE_S = 2.0
"""Seconds that the end of the process waits for reads in progress."""


class ReaderThreads:
    """Pool of threads that run functions in the order of their submission.

    The threads start at the first submission. They refer to the queue of tasks but not to this object, so they end when this object
    is deleted. A read that never returns (a file server that is gone) does not delay `close`, and delays the end of the process
    only briefly.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run_tasks, args=(self._tasks,), name=f"{name}_{i}", daemon=True) for i in range(count)
        ]
        self._finalizer = weakref.finalize(self, _stop_threads, self._tasks, count)
        self._finalizer.atexit = False  # at exit, `_close_all` stops the threads and waits for them
        _open_readers.add(self)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Schedule a function call. Its result or exception is set in the returned future."""
        future: Future[T] = Future()
        self._tasks.put((future, function, args))
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return future

    def close(self) -> None:
        """Let each thread end after its current task, without waiting. Cancel tasks that have not started."""
        if self._finalizer.detach():
            _stop_threads(self._tasks, len(self._threads))

    def wait(self, timeout: float) -> None:
        """Wait until the threads have ended, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


def _run_tasks(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, function, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)
        del task, future, function, args  # keep no result alive while this thread waits


def _stop_threads(tasks: _Tasks, count: int) -> None:
    with contextlib.suppress(queue.Empty):
        while (task := tasks.get_nowait()) is not None:
            task[0].cancel()
    for _ in range(count):
        tasks.put(None)


_open_readers: weakref.WeakSet[ReaderThreads] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop the threads of all pools at the exit of Python. A thread that returns from a library while the interpreter shuts down
    would abort the process."""
    readers, deadline = list(_open_readers), time.monotonic() + _GRACE_S
    for reader in readers:
        reader.close()
    for reader in readers:
        reader.wait(deadline - time.monotonic())
