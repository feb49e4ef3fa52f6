"""Attention that stays within documents against attention over the whole sample, forward and backward, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from megatron.attention.core import core_attention
from megatron.attention.documents import Documents
from megatron_lab.benchmarks.runner import in_turns, timed

_SEQ_LENGTH, _BATCH, _HEADS, _KV_HEADS, _HEAD_SIZE = 2048, 1, 8, 4, 64


def documents_of(mean_length: int, batch: int, device: torch.device) -> Documents:
    """Documents whose lengths are spread exponentially, cut where a sample ends."""
    random = np.random.default_rng(0)
    bounds = [0]
    while bounds[-1] < batch * _SEQ_LENGTH:
        end_of_sample = (bounds[-1] // _SEQ_LENGTH + 1) * _SEQ_LENGTH
        bounds.append(min(end_of_sample, bounds[-1] + 1 + int(random.exponential(mean_length))))
    array = np.array(bounds, dtype=np.int32)
    return Documents(array, torch.from_numpy(array).to(device), batch)


def run(mean_lengths: tuple[int, ...] = (2048, 256, 16, 1), turns: int = 7, device: str = "cpu") -> bool:
    """Print times and ratios; returns whether packing is faster where documents are of about 256 tokens."""
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    inputs = [
        torch.randn(_SEQ_LENGTH, _BATCH, heads, _HEAD_SIZE, device=place, dtype=dtype, requires_grad=True)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    ]
    print(
        f"packing, {_BATCH} x {_SEQ_LENGTH:,} tokens, {_HEADS} heads of {_HEAD_SIZE} ({_KV_HEADS} of keys and values), {dtype}, "
        f"{torch.get_num_threads()} threads, {device}, median of {turns} turns"
    )
    good = True
    for mean_length in mean_lengths:
        documents = documents_of(mean_length, _BATCH, place)
        wait = torch.get_device_module(place).synchronize
        whole, packed = map(
            statistics.median,
            in_turns(timed(partial(_once, inputs, None, wait), wait), timed(partial(_once, inputs, documents, wait), wait), turns),
        )
        count = len(documents.bounds) - 1
        print(
            f"  {count:5d} documents of about {mean_length:4d} tokens: packed {1000 * packed:7.2f} ms, "
            f"whole samples {1000 * whole:7.2f} ms, ratio {packed / whole:.2f}"
        )
        good &= mean_length != 256 or packed < whole
    print("the bound holds" if good else "MISSED: packed samples of 256 tokens take longer than whole ones", flush=True)
    return good


def _once(inputs: list[torch.Tensor], documents: Documents | None, wait: Callable[[], None]) -> None:
    q, k, v = inputs
    core_attention(q, k, v, documents).sum().backward()
    wait()
