"""The step with its loss in chunks against the step with the whole loss, in turns: the logits are computed once more.

Where the output layer is a quarter of a step's products, that is one of its three products more: theory says 1 + 1/4 x 1/3 = 1.083.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatron.spec.counts import flops_per_token, output_flops
from megatron.tensor_parallel.cross_entropy import LossForm
from megatron_lab.benchmarks.runner import in_turns, show
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.benchmarks.single import our_step

BOUND = 1.10
SHAPE = Shape(layers=4, hidden=384, heads=6, seq=512, batch=2, vocab=6784)
"""The output layer is a quarter of the work."""


def run(pairs: int, device: str = "cpu", chunk_tokens: int = 256) -> bool:
    """Print times and ratios; returns whether the bound holds."""
    place, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32
    share = 3 * output_flops(SHAPE.model, SHAPE.vocab) / flops_per_token(SHAPE.model, SHAPE.vocab)
    print(
        f"loss, {SHAPE}, {dtype}, {torch.get_num_threads()} threads, {device}: the output layer is {share:.1%} of the work; "
        f"{SHAPE.batch * SHAPE.seq} tokens in chunks of {chunk_tokens}"
    )
    whole, chunked = (_timed(our_step(SHAPE, dtype, place, LossForm(tokens)), place) for tokens in (0, chunk_tokens))
    ratio = statistics.median(show("loss", ("whole", "in chunks"), in_turns(whole, chunked, pairs)))
    good = ratio <= BOUND
    print(f"the bound of {BOUND} holds" if good else f"MISSED: {ratio:.3f} is above {BOUND}", flush=True)
    return good


def _timed(step: Callable[[], float], device: torch.device) -> Callable[[], float]:
    """Seconds of a step: on CPU the processor's, so that what else runs there hardly matters."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def timed() -> float:
        began = clock()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # a step may leave its update running
        return clock() - began

    return timed
