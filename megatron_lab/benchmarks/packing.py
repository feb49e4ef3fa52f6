"""Benchmark of packed attention, forward and backward: attention within documents, compared with attention over complete
samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from megatron.attention.core import core_attention
from megatron.attention.documents import Documents
from megatron_lab.benchmarks.runner import make_timer, run_pair_in_turns

_SEQ_LENGTH, _BATCH, _HEADS, _KV_HEADS, _HEAD_SIZE = 2048, 1, 8, 4, 64


def create_documents(mean_length: int, batch: int, device: torch.device) -> Documents:
    """Create random boundaries of documents that fill a batch of samples. Document lengths are exponentially distributed.

    No document crosses the end of a sample.

    Args:
        mean_length: mean document length in tokens.
        batch: number of samples.
    """
    random = np.random.default_rng(0)
    bounds = [0]
    while bounds[-1] < batch * _SEQ_LENGTH:
        end_of_sample = (bounds[-1] // _SEQ_LENGTH + 1) * _SEQ_LENGTH
        bounds.append(min(end_of_sample, bounds[-1] + 1 + int(random.exponential(mean_length))))
    array = np.array(bounds, dtype=np.int32)
    return Documents(array, torch.from_numpy(array).to(device), batch)


def run(mean_lengths: tuple[int, ...] = (2048, 256, 16, 1), turns: int = 7, device: str = "cpu") -> bool:
    """Print the times of packed attention and of attention over full samples, and their ratio, for each mean document length.

    Args:
        mean_lengths: mean document lengths in tokens.
        turns: number of repetitions of the measurement.

    Returns:
        Whether packed attention is faster for documents of about 256 tokens.
    """
    torch_device = torch.device(device)
    dtype = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    inputs = [
        torch.randn(_SEQ_LENGTH, _BATCH, heads, _HEAD_SIZE, device=torch_device, dtype=dtype, requires_grad=True)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    ]
    print(
        f"packing, {_BATCH} x {_SEQ_LENGTH:,} tokens, {_HEADS} heads of {_HEAD_SIZE} ({_KV_HEADS} of keys and values), {dtype}, "
        f"{torch.get_num_threads()} threads, {device}, median of {turns} turns"
    )
    is_within_bound = True
    for mean_length in mean_lengths:
        documents = create_documents(mean_length, _BATCH, torch_device)
        synchronize = torch.get_device_module(torch_device).synchronize
        full, packed = map(
            statistics.median,
            run_pair_in_turns(
                make_timer(partial(_run_pass, inputs, None, synchronize), synchronize),
                make_timer(partial(_run_pass, inputs, documents, synchronize), synchronize),
                turns,
            ),
        )
        num_documents = len(documents.cu_seqlens) - 1
        print(
            f"  {num_documents:5d} documents of about {mean_length:4d} tokens: packed {1000 * packed:7.2f} ms, "
            f"full samples {1000 * full:7.2f} ms, ratio {packed / full:.2f}"
        )
        is_within_bound &= mean_length != 256 or packed < full
    print(
        "the bound holds"
        if is_within_bound
        else "MISSED: attention to documents of 256 tokens takes longer than attention to full samples",
        flush=True,
    )
    return is_within_bound


def _run_pass(inputs: list[torch.Tensor], documents: Documents | None, synchronize: Callable[[], None]) -> None:
    q, k, v = inputs
    core_attention(q, k, v, documents).sum().backward()
    synchronize()
