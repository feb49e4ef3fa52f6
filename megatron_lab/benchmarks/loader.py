"""The loader beside a step of 5 ms: the share of it that is spent waiting for data.

The step only sleeps, as a host does whose device computes. A microbatch is of 4 samples of 2,048 tokens, a step of 8 of them, so
the loader has to read and prepare 6,400 samples a second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DocumentRules, SampleSource
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.training.inputs import BatchMaker

BOUND = 0.1
"""Share of the time that may be spent waiting where threads read ahead."""

_STEP_S = 0.005
_SEQ_LENGTH, _MICRO_BATCH_SIZE, _MICROBATCHES = 2048, 4, 8
_GLOBAL_BATCH_SIZE = _MICRO_BATCH_SIZE * _MICROBATCHES
_VOCAB_SIZE, _MEAN_LENGTH = 50257, 500
_EOD = _VOCAB_SIZE - 1
_WARM_UP_STEPS = 10


class Waiting(NamedTuple):
    """Of a number of steps."""

    share: float
    """Of the time."""
    longest_s: float


def write_tokens(prefix: str, num_tokens: int) -> None:
    """Write random documents, each ended by the end of document, whose lengths are spread exponentially."""
    random = np.random.default_rng(0)
    lengths = 2 + random.exponential(_MEAN_LENGTH, num_tokens // _MEAN_LENGTH).astype(np.int64)
    with write_dataset(prefix, np.uint16) as writer:
        for length in lengths.tolist():
            tokens = random.integers(0, _EOD, length, dtype=np.uint16)
            tokens[-1] = _EOD
            writer.add_documents(tokens)


def waiting(batches: Iterator[list[ModelInputs]], steps: int) -> Waiting:
    """Sleep for each of some steps, and see how long the next batch takes to come."""
    for _ in range(_WARM_UP_STEPS):
        next(batches)
        time.sleep(_STEP_S)
    waits = []
    start = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked)
        time.sleep(_STEP_S)
    return Waiting(sum(waits) / (time.perf_counter() - start), max(waits))


def measure(source: SampleSource, rules: DocumentRules, num_workers: int, steps: int, device: torch.device) -> Waiting:
    """Waiting with so many threads."""
    maker = BatchMaker(make_context(Topology(), 0, device), 1, _SEQ_LENGTH, _MICRO_BATCH_SIZE, rules)
    batches = maker.steps(
        source,
        global_batch_size_at=lambda _: _GLOBAL_BATCH_SIZE,
        consumed_samples=0,
        total_samples=_GLOBAL_BATCH_SIZE * (steps + _WARM_UP_STEPS),
        num_workers=num_workers,
    )
    return waiting(batches, steps)


def run(num_tokens: int = 20_000_000, steps: int = 200, device: str = "cpu") -> bool:
    """Print the share for 0, 2 and 4 threads, with plain and with packed samples; returns whether the bound holds.

    Args:
        num_tokens: about so many are in the file (2 bytes each), which is read once before.
    """
    missed = []
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        prefix = str(Path(folder, "tokens"))
        write_tokens(prefix, num_tokens)
        dataset = IndexedDataset(prefix)
        source = GPTDataset(dataset, range(dataset.num_documents), split=0, seed=1, seq_length=_SEQ_LENGTH, vocab_size=_VOCAB_SIZE)
        source.samples(0, num_tokens // _SEQ_LENGTH)
        print(
            f"loader, steps of {1000 * _STEP_S:g} ms with {_MICROBATCHES} microbatches of {_MICRO_BATCH_SIZE} x {_SEQ_LENGTH:,} "
            f"tokens ({_GLOBAL_BATCH_SIZE / _STEP_S:,.0f} samples/s), {steps} steps, {device}"
        )
        for name, rules in (("plain", DocumentRules(_EOD)), ("packed", DocumentRules(_EOD, True, True, True))):
            for num_workers in (0, 2, 4):
                found = measure(source, rules, num_workers, steps, torch.device(device))
                print(
                    f"  {name:6s}  {num_workers} workers: {found.share:6.1%} of the time is spent waiting, "
                    f"at most {1000 * found.longest_s:.2f} ms"
                )
                if num_workers and found.share > BOUND:
                    missed.append(f"{name}, {num_workers} workers: {found.share:.1%} waiting; at most {BOUND:.0%} is asked for")
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bound holds", flush=True)
    return not missed
