"""Benchmark of dataset indexes, of random samples from a file in the page cache, and of the two blend orders.

The index is timed in a separate process on one core, which also reports its peak memory. The time covers opening and checking the
dataset, building the index of an epoch, and reading the first sample. A second process does the same with the index from the cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.config.data import DataOrder
from megatron.config.launcher import build_module_command
from megatron.data.blend import Blend
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import HEADER, MAGIC, VERSION, IndexedDataset
from megatron.data.indexed_writer import MIN_ENTRIES, open_index_cache, write_dataset
from megatron_lab.data_tools.megatron_order import compute_greedy_choices

MAX_BUILD_S = 10.0
MAX_BUILD_MB = 1000.0
MAX_START_S = 1.0
MIN_SAMPLES_PER_S = 50_000.0

_SEQ_LENGTH = 2048
_VOCAB_SIZE = 50257  # below 65536, so that 16-bit tokens can be out of range and the dataset checks all of them


def _sample_lengths(num_documents: int, num_tokens: int) -> np.ndarray:
    """Return random document lengths with a log-normal distribution, as web pages have, and about `num_tokens` tokens in total."""
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, num_documents)
    return (lengths * (num_tokens / lengths.sum())).astype(np.int32) + 1


def write_synthetic_dataset(prefix: Path, num_documents: int, num_tokens: int) -> None:
    """Write a dataset of about `num_tokens` tokens that are all 0. Its .bin file is sparse and takes no disk space.

    Args:
        prefix: path of the dataset's files, without the suffixes .bin and .idx.
        num_documents: number of documents, with random lengths.
    """
    lengths = _sample_lengths(num_documents, num_tokens)
    offsets = np.zeros(num_documents, dtype="<i8")
    np.cumsum(lengths[:-1], out=offsets[1:])
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, 8, num_documents, num_documents + 1))
        for array in (lengths.astype("<i4"), 2 * offsets, np.arange(num_documents + 1, dtype="<i8")):
            array.tofile(index)
    with Path(f"{prefix}.bin").open("wb") as data:
        data.truncate(2 * int(lengths.sum(dtype=np.int64)))


def _time_start(prefix: str, order: DataOrder) -> dict[str, float]:
    """Open a dataset and read its first sample, as a run does at its start.

    The function runs in a child process.

    Args:
        prefix: path of the dataset's files, without the suffixes .bin and .idx.
        order: value of --data-order.

    Returns:
        Measured values by name. opened: seconds until the dataset is open. ready: seconds until the sample is read. cpu: seconds of
        processor time. peak_mb: peak memory in MB. cached: 1.0 if the index came from the cache, else 0.0.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start, cpu_start = time.perf_counter(), time.process_time()
    dataset = IndexedDataset(prefix)
    opened_at = time.perf_counter()
    cache = open_index_cache(prefix, None)
    documents = range(dataset.num_documents)
    source = GPTDataset(
        dataset, documents, split=0, seed=1, seq_length=_SEQ_LENGTH, vocab_size=_VOCAB_SIZE, order=order, cache=cache
    )
    source.get_samples(0, 1)
    ready_at = time.perf_counter()
    cached = float(bool(cache.loaded_files))
    return {
        "opened": opened_at - start,
        "ready": ready_at - start,
        "cpu": time.process_time() - cpu_start,
        "peak_mb": _get_peak_mb(),
        "cached": cached,
    }


def _get_peak_mb() -> float:
    """Return the peak memory of this process so far, in MB.

    It is read from /proc, because getrusage would include the memory of the parent process from before this process executed its
    program.
    """
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) / 1e3


def run_index(num_documents: int = 20_000_000, num_tokens: int = 20_000_000_000) -> bool:
    """Time two starts of a run for each value of --data-order: `epoch`, and `megatron` (the sample order of Megatron-LM). The first
    start builds the index of an epoch, and the second loads it from the cache.

    Args:
        num_documents: number of documents of the dataset.
        num_tokens: approximate number of tokens of the dataset.

    Returns:
        Whether all limits are kept: `MAX_BUILD_S` for the first start, `MAX_START_S` for the second, and `MAX_BUILD_MB` for the
        peak memory of both. The second start must also have used the cache, unless the dataset is too small to be cached.
    """
    print(f"index of {num_documents:,} documents, {num_tokens:,} tokens, samples of {_SEQ_LENGTH} tokens, one core:", flush=True)
    violations = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "synthetic"
        write_synthetic_dataset(prefix, num_documents, num_tokens)
        for order in ("epoch", "megatron"):
            for source, max_s in (("built", MAX_BUILD_S), ("from the cache", MAX_START_S)):
                command, environment = build_module_command("megatron_lab.benchmarks.data_index", prefix, order)
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                result = json.loads(done.stdout)
                times_text = f"{result['ready']:6.2f} s ({result['cpu']:.2f} s of processor time)"
                print(
                    f"  {order:10}{source:16}{times_text}, opened after {result['opened']:.2f} s; peak {result['peak_mb']:.0f} MB",
                    flush=True,
                )
                if result["cached"] != (source != "built" and num_documents >= MIN_ENTRIES):
                    violations.append(f"{order}: the index was not {source}")
                if result["ready"] > max_s:
                    violations.append(f"{order}: the index was {source} in {result['ready']:.2f} s; the limit is {max_s:.0f} s")
                if result["peak_mb"] > MAX_BUILD_MB:
                    violations.append(f"{order}: peak memory of {result['peak_mb']:.0f} MB; the limit is {MAX_BUILD_MB:.0f} MB")
    return _print_violations(violations)


def run_samples(num_tokens: int = 50_000_000, turns: int = 5) -> bool:
    """Measure how many random samples per second one thread reads from a file in the page cache.

    Args:
        num_tokens: number of tokens in the file.
        turns: number of repetitions.

    Returns:
        Whether calls that read 64 samples each reach `MIN_SAMPLES_PER_S`.
    """
    print(
        f"samples of {_SEQ_LENGTH} tokens in random order from a cached file of {num_tokens:,} tokens, "
        "token ids checked, one thread:"
    )
    samples_per_s: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "warm")
        lengths = _sample_lengths(num_tokens // 1000, num_tokens)
        with write_dataset(prefix, np.uint16) as writer:
            ids = np.random.default_rng(1).integers(0, _VOCAB_SIZE, int(lengths.sum()), dtype=np.uint16)
            writer.add_documents(ids, lengths)
        dataset = IndexedDataset(prefix)
        documents = range(dataset.num_documents)
        source = GPTDataset(dataset, documents, split=0, seed=1, seq_length=_SEQ_LENGTH, vocab_size=_VOCAB_SIZE)
        for count in (1, 4, 16, 64, 256):

            def read_samples(count: int = count) -> int:
                stop = min(source.samples_per_epoch, 8192) // count * count
                for first in range(0, stop, count):
                    source.get_samples(first, count)
                return stop

            samples_per_s[count] = _measure_rate(read_samples, turns)
            print(f"  {count:4} per call{samples_per_s[count]:12,.0f} samples/s", flush=True)
    is_too_slow = samples_per_s[64] < MIN_SAMPLES_PER_S
    return _print_violations(
        [f"{samples_per_s[64]:,.0f} samples/s; the minimum is {MIN_SAMPLES_PER_S:,.0f}"] if is_too_slow else []
    )


def run_blends(num_samples: int = 4_000_000, turns: int = 3) -> bool:
    """Print how many samples per second each of the two blend orders assigns to datasets, for blends of 2, 10 and 50 datasets.

    A blend order decides from which dataset of a weighted mixture each sample comes. The function returns True, because there is no
    limit.

    Args:
        num_samples: number of samples of a blend.
        turns: number of repetitions.
    """
    print(f"blends of {num_samples:,} samples, one thread:")
    for num_datasets in (2, 10, 50):
        weights = np.random.default_rng(num_datasets).dirichlet(np.ones(num_datasets)).tolist()
        blend, sample_indices = Blend(weights), np.arange(num_samples)
        epoch_rate = _measure_rate(lambda: len(blend.locate(sample_indices)[0]), turns)  # noqa: B023 - called before the next turn
        megatron_rate = _measure_rate(lambda: len(compute_greedy_choices(weights, num_samples)), turns)  # noqa: B023
        print(
            f"  {num_datasets:3} datasets: epoch order {epoch_rate / 1e6:6.1f}, "
            f"Megatron's order {megatron_rate / 1e6:6.1f} million samples/s",
            flush=True,
        )
    return True


def run() -> bool:
    """Run the benchmarks of dataset indexes, of random samples and of blends. Return whether all limits hold."""
    return all([run_index(), run_samples(), run_blends()])


def _measure_rate(action: Callable[[], int], turns: int) -> float:
    """Return the median number of items per second that an action processes, after one warm-up repetition.

    Args:
        action: returns the number of items that it has processed.
        turns: number of repetitions.
    """
    samples_per_s = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        samples_per_s.append(action() / (time.perf_counter() - start))
    return statistics.median(samples_per_s[1:])


def _print_violations(violations: list[str]) -> bool:
    print("\n".join(f"  MISSED: {violation}" for violation in violations) if violations else "  the bounds hold", flush=True)
    return not violations


if __name__ == "__main__":
    print(json.dumps(_time_start(sys.argv[1], sys.argv[2])))  # type: ignore[arg-type]
