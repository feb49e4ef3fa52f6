"""Benchmark of the chunked loss: a step that computes the loss in chunks of tokens, compared with a step that computes all logits
together.

With chunks, backward computes the logits a second time. So the output layer needs four matrix products per step (forward,
recomputation, input gradient, weight gradient) instead of three. If the output layer is a quarter of the work of a step, the
expected ratio is 1 + 1/4 x 1/3 = 1.083.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatron.spec.counts import count_flops_per_token, count_output_flops
from megatron.tensor_parallel.cross_entropy import LossOptions
from megatron_lab.benchmarks.runner import print_comparison, run_pair_in_turns
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.benchmarks.single import build_framework_step

BOUND = 1.10
"""Maximum ratio of the step with the chunked loss to the step with the full loss."""
SHAPE = Shape(layers=4, hidden=384, heads=6, seq=512, batch=2, vocab=6784)
"""Model whose output layer is a quarter of the work."""


def run(pairs: int, device: str = "cpu", chunk_tokens: int = 256) -> bool:
    """Print the step times with the full and with the chunked loss.

    Args:
        pairs: number of repetitions; each measures one step with the full loss and one step with the chunked loss.
        chunk_tokens: number of tokens whose logits the chunked loss computes together.

    Returns:
        Whether the median ratio of the chunked to the full step time is at most `BOUND`.
    """
    torch_device, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32
    share = 3 * count_output_flops(SHAPE.model, SHAPE.vocab) / count_flops_per_token(SHAPE.model, SHAPE.vocab)
    print(
        f"loss, {SHAPE}, {dtype}, {torch.get_num_threads()} threads, {device}: the output layer is {share:.1%} of the work; "
        f"{SHAPE.batch * SHAPE.seq} tokens in chunks of {chunk_tokens}"
    )
    full, chunked = (
        _make_timer(build_framework_step(SHAPE, dtype, torch_device, LossOptions(tokens)), torch_device)
        for tokens in (0, chunk_tokens)
    )
    ratio = statistics.median(print_comparison("loss", ("all at once", "in chunks"), run_pair_in_turns(full, chunked, pairs)))
    is_within_bound = ratio <= BOUND
    print(
        f"the bound of {BOUND} holds" if is_within_bound else f"MISSED: the ratio {ratio:.3f} is above the limit of {BOUND}",
        flush=True,
    )
    return is_within_bound


def _make_timer(step: Callable[[], float], device: torch.device) -> Callable[[], float]:
    """Return a function that runs `step` and returns its duration in seconds.

    On a CPU the duration is processor time, which other programs hardly change.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def timer() -> float:
        start = clock()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # a step may return before its update is complete
        return clock() - start

    return timer
