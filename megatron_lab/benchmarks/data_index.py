"""Indexes of a large dataset, random samples of a warm file, and the rates of the two kinds of blend.

The index is timed in a process of its own on one core, with the peak of its memory: opening the dataset and its checks, the index
of an epoch, and the first sample; then the same from the cache.
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
from megatron.config.launcher import module_start
from megatron.data.blend import Blend
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import HEADER, MAGIC, VERSION, IndexedDataset
from megatron.data.indexed_writer import MIN_ENTRIES, cache_for, write_dataset
from megatron_lab.data_tools.megatron_order import greedy_choices

MAX_BUILD_S = 10.0
MAX_BUILD_MB = 1000.0
MAX_START_S = 1.0
MIN_SAMPLES_PER_S = 50_000.0

_SEQ_LENGTH = 2048
_VOCABULARY = 50257  # below 65536, so that every token is checked


def _lengths(documents: int, tokens: int) -> np.ndarray:
    """Lengths of documents, spread as those of web pages are (log-normal)."""
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, documents)
    return (lengths * (tokens / lengths.sum())).astype(np.int32) + 1


def write_synthetic(prefix: Path, documents: int, tokens: int) -> None:
    """A dataset of about so many tokens, all 0: the .bin file takes no room on the disk."""
    lengths = _lengths(documents, tokens)
    offsets = np.zeros(documents, dtype="<i8")
    np.cumsum(lengths[:-1], out=offsets[1:])
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for array in (lengths.astype("<i4"), 2 * offsets, np.arange(documents + 1, dtype="<i8")):
            array.tofile(index)
    with Path(f"{prefix}.bin").open("wb") as data:
        data.truncate(2 * int(lengths.sum(dtype=np.int64)))


def _start(prefix: str, order: DataOrder) -> dict[str, float]:
    """What the start of a run does with a dataset; the work of a child process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began, cpu = time.perf_counter(), time.process_time()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    cache = cache_for(prefix, None)
    documents = range(dataset.num_documents)
    source = GPTDataset(
        dataset, documents, split=0, seed=1, seq_length=_SEQ_LENGTH, vocab_size=_VOCABULARY, order=order, cache=cache
    )
    source.samples(0, 1)
    ended = time.perf_counter()
    cached = float(bool(cache.found))
    return {
        "opened": opened - began,
        "ready": ended - began,
        "cpu": time.process_time() - cpu,
        "peak_mb": _peak_mb(),
        "cached": cached,
    }


def _peak_mb() -> float:
    """Most memory of this process so far. What getrusage says would hold that of the parent before the process was started."""
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) / 1e3


def run_index(documents: int = 20_000_000, tokens: int = 20_000_000_000) -> bool:
    """Time an epoch's index and the start from cache, in both orders; returns whether the bounds hold."""
    print(f"index of {documents:,} documents, {tokens:,} tokens, samples of {_SEQ_LENGTH} tokens, one core:", flush=True)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "synthetic"
        write_synthetic(prefix, documents, tokens)
        for order in ("epoch", "megatron"):
            for what, most_s in (("built", MAX_BUILD_S), ("from the cache", MAX_START_S)):
                command, environment = module_start("megatron_lab.benchmarks.data_index", prefix, order)
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                times = f"{found['ready']:6.2f} s ({found['cpu']:.2f} s of processor time)"
                print(
                    f"  {order:10}{what:16}{times}, opened after {found['opened']:.2f} s; peak {found['peak_mb']:.0f} MB",
                    flush=True,
                )
                if found["cached"] != (what != "built" and documents >= MIN_ENTRIES):
                    missed.append(f"{order}: the index was not {what}")
                if found["ready"] > most_s:
                    missed.append(f"{order}: {what} in {found['ready']:.2f} s; at most {most_s:.0f} s is asked for")
                if found["peak_mb"] > MAX_BUILD_MB:
                    missed.append(f"{order}: {found['peak_mb']:.0f} MB; at most {MAX_BUILD_MB:.0f} MB is asked for")
    return _judged(missed)


def run_samples(tokens: int = 50_000_000, turns: int = 5) -> bool:
    """Rate of random samples from a warm file in one thread; returns whether the bound holds for 64 samples at once."""
    print(f"samples of {_SEQ_LENGTH} tokens in random order from a warm file of {tokens:,} tokens, ids checked, one thread:")
    rates: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "warm")
        lengths = _lengths(tokens // 1000, tokens)
        with write_dataset(prefix, np.uint16) as writer:
            ids = np.random.default_rng(1).integers(0, _VOCABULARY, int(lengths.sum()), dtype=np.uint16)
            writer.add_documents(ids, lengths)
        dataset = IndexedDataset(prefix)
        documents = range(dataset.num_documents)
        source = GPTDataset(dataset, documents, split=0, seed=1, seq_length=_SEQ_LENGTH, vocab_size=_VOCABULARY)
        for count in (1, 4, 16, 64, 256):

            def read(count: int = count) -> int:
                stop = min(source.samples_per_epoch, 8192) // count * count
                for first in range(0, stop, count):
                    source.samples(first, count)
                return stop

            rates[count] = _rate(read, turns)
            print(f"  {count:4} at once{rates[count]:12,.0f} samples/s", flush=True)
    low = rates[64] < MIN_SAMPLES_PER_S
    return _judged([f"{rates[64]:,.0f} samples/s; at least {MIN_SAMPLES_PER_S:,.0f} are asked for"] if low else [])


def run_blends(num_samples: int = 4_000_000, turns: int = 3) -> bool:
    """Rates of the two kinds of blend, for 2, 10 and 50 datasets; there is no bound."""
    print(f"blends of {num_samples:,} samples, one thread:")
    for datasets in (2, 10, 50):
        weights = np.random.default_rng(datasets).dirichlet(np.ones(datasets)).tolist()
        blend, numbers = Blend(weights), np.arange(num_samples)
        formula = _rate(lambda: len(blend.place(numbers)[0]), turns)  # noqa: B023 - called before the next turn
        greedy = _rate(lambda: len(greedy_choices(weights, num_samples)), turns)  # noqa: B023
        print(
            f"  {datasets:3} datasets: epoch order {formula / 1e6:6.1f}, Megatron's order {greedy / 1e6:6.1f} million samples/s",
            flush=True,
        )
    return True


def run() -> bool:
    """All three; returns whether the bounds hold."""
    return all([run_index(), run_samples(), run_blends()])


def _rate(work: Callable[[], int], turns: int) -> float:
    """Median of what `work` does a second, after one turn to warm up."""
    rates = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        rates.append(work() / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def _judged(missed: list[str]) -> bool:
    print("\n".join(f"  MISSED: {miss}" for miss in missed) if missed else "  the bounds hold", flush=True)
    return not missed


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1], sys.argv[2])))  # type: ignore[arg-type]
