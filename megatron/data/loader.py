"""The microbatches of a data rank, a whole step at a time, read ahead by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from megatron.data.batches import Microbatch, SampleSource, read_microbatch

_STEPS_AHEAD = 2


class StepLoader(Iterator[list[Microbatch]]):
    """Iterates over steps; each is the list of this data rank's microbatches.

    The step at `consumed` samples is made of the next `global_batch_size_at(consumed)` samples. Microbatch m of data rank r holds
    the `micro_batch_size` samples from consumed + (m * data_size + r) * micro_batch_size on. So which samples a step holds does not
    depend on the layout, and `consumed_samples`, the samples of all steps given out so far, is the whole state.

    Args:
        dataset: Where samples come from.
        micro_batch_size: Samples in a microbatch.
        data_rank: This rank's place on the data axis.
        data_size: Number of data ranks.
        global_batch_size_at: Samples of the step that starts after so many consumed samples.
        consumed_samples: Where to start.
        total_samples: No step starts at or after it.
        num_workers: Threads that read two steps ahead; 0 reads when asked. The result is the same.
    """

    def __init__(
        self,
        dataset: SampleSource,
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
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._data_rank = data_rank
        self._data_size = data_size
        self._global_batch_size_at = global_batch_size_at
        self._total_samples = total_samples
        # The threads start with the first read. They know the dataset but not this object, so dropping it ends them.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="loader") if num_workers else None
        self._ahead: deque[tuple[int, list[Future[Microbatch]]]] = deque()
        self._planned = consumed_samples
        self._closed = False

    def __next__(self) -> list[Microbatch]:
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
                step = [read_microbatch(self._dataset, first, self._micro_batch_size) for first in firsts]
            else:
                self._read_ahead(self._threads)
                size, futures = self._ahead.popleft()
                self._read_ahead(self._threads)  # the threads work on while this step is computed
                step = [future.result() for future in futures]
        except BaseException:
            self.close()
            raise
        self.consumed_samples += size
        return step

    def close(self) -> None:
        """End the threads; what they have not begun is not read."""
        self._closed = True
        self._ahead.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _plan(self, consumed: int) -> tuple[int, range]:
        """Samples of the step, and the first sample of each microbatch of this rank."""
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

    def _read_ahead(self, threads: ThreadPoolExecutor) -> None:
        while len(self._ahead) < _STEPS_AHEAD and self._planned < self._total_samples:
            size, firsts = self._plan(self._planned)
            futures = [threads.submit(read_microbatch, self._dataset, first, self._micro_batch_size) for first in firsts]
            self._ahead.append((size, futures))
            self._planned += size
