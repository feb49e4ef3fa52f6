"""Benchmark of the data loader: the share of the time for which a training loop with steps of 5 ms waits for data.

A step only sleeps, as the host does while its device computes. A microbatch has 4 samples of 2048 tokens, and a step has 8
microbatches. So the loader must read and prepare 6400 samples per second.
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
from megatron.training.inputs import BatchBuilder

BOUND = 0.1
"""Maximum share of the time that the training loop waits, if worker threads read ahead."""

_STEP_S = 0.005
_SEQ_LENGTH, _MICRO_BATCH_SIZE, _MICROBATCHES = 2048, 4, 8
_GLOBAL_BATCH_SIZE = _MICRO_BATCH_SIZE * _MICROBATCHES
_VOCAB_SIZE, _MEAN_LENGTH = 50257, 500
_EOD = _VOCAB_SIZE - 1
_WARM_UP_STEPS = 10


class WaitTimes(NamedTuple):
    """Time for which a training loop waits for data: as a share of the total time, and the longest wait of one step in seconds."""

    share: float
    """Time that all steps wait, divided by the total time of the loop."""
    max_s: float


def write_tokens(prefix: str, num_tokens: int) -> None:
    """Write a dataset of random documents with exponentially distributed lengths. Each document ends with the end-of-document
    token.

    Args:
        prefix: path of the dataset's files, without the suffixes .bin and .idx.
        num_tokens: approximate number of tokens of the dataset.
    """
    random = np.random.default_rng(0)
    lengths = 2 + random.exponential(_MEAN_LENGTH, num_tokens // _MEAN_LENGTH).astype(np.int64)
    with write_dataset(prefix, np.uint16) as writer:
        for length in lengths.tolist():
            tokens = random.integers(0, _EOD, length, dtype=np.uint16)
            tokens[-1] = _EOD
            writer.add_documents(tokens)


def measure_waits(batches: Iterator[list[ModelInputs]], steps: int) -> WaitTimes:
    """Run a training loop whose steps only sleep, and measure how long each step waits for its batch."""
    for _ in range(_WARM_UP_STEPS):
        next(batches)
        time.sleep(_STEP_S)
    waits = []
    start = time.perf_counter()
    for _ in range(steps):
        request_time = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - request_time)
        time.sleep(_STEP_S)
    return WaitTimes(sum(waits) / (time.perf_counter() - start), max(waits))


def measure_loader(
    source: SampleSource, document_rules: DocumentRules, num_workers: int, steps: int, device: torch.device
) -> WaitTimes:
    """Measure how long training steps wait for the data loader.

    Args:
        source: samples to read.
        document_rules: what happens at the ends of documents within a sample, such as a reset of positions and attention mask.
        num_workers: threads that read batches ahead of the training loop; 0 to read each batch when its step needs it.
        steps: number of steps to measure.
    """
    batch_builder = BatchBuilder(make_context(Topology(), 0, device), 1, _SEQ_LENGTH, _MICRO_BATCH_SIZE, document_rules)
    batches = batch_builder.iter_batches(
        source,
        global_batch_size_at=lambda _: _GLOBAL_BATCH_SIZE,
        consumed_samples=0,
        total_samples=_GLOBAL_BATCH_SIZE * (steps + _WARM_UP_STEPS),
        num_workers=num_workers,
    )
    return measure_waits(batches, steps)


def run(num_tokens: int = 20_000_000, steps: int = 200, device: str = "cpu") -> bool:
    """Print for which share of the time the training loop waits, with 0, 2 and 4 worker threads, for plain and for packed samples.

    In packed samples, attention and positions restart at each document.

    Args:
        num_tokens: approximate number of tokens of the file, with 2 bytes each. The file is read once before the measurement.
        steps: number of training steps of each measurement.

    Returns:
        Whether the share is at most `BOUND` with worker threads.
    """
    violations = []
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        prefix = str(Path(folder, "tokens"))
        write_tokens(prefix, num_tokens)
        dataset = IndexedDataset(prefix)
        source = GPTDataset(dataset, range(dataset.num_documents), split=0, seed=1, seq_length=_SEQ_LENGTH, vocab_size=_VOCAB_SIZE)
        source.get_samples(0, num_tokens // _SEQ_LENGTH)
        print(
            f"loader, steps of {1000 * _STEP_S:g} ms with {_MICROBATCHES} microbatches of {_MICRO_BATCH_SIZE} x {_SEQ_LENGTH:,} "
            f"tokens ({_GLOBAL_BATCH_SIZE / _STEP_S:,.0f} samples/s), {steps} steps, {device}"
        )
        for name, document_rules in (("plain", DocumentRules(_EOD)), ("packed", DocumentRules(_EOD, True, True, True))):
            for num_workers in (0, 2, 4):
                wait_times = measure_loader(source, document_rules, num_workers, steps, torch.device(device))
                print(
                    f"  {name:6s}  {num_workers} workers: {wait_times.share:6.1%} of the time is spent waiting, "
                    f"at most {1000 * wait_times.max_s:.2f} ms in one step"
                )
                if num_workers and wait_times.share > BOUND:
                    violations.append(
                        f"{name}, {num_workers} workers: {wait_times.share:.1%} of the time is spent waiting; "
                        f"the limit is {BOUND:.0%}"
                    )
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
