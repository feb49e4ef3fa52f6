"""One process of this framework against other loops, speed and peak memory, as ratios within one run.

All train on the same tokens from memory. On a CPU the framework and a peer take turns, because such machines are noisy, so two
models are in memory at a time. On a GPU each is timed by itself, and only one model is in memory.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.config.launcher import module_start
from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.metrics.measures import peak_flops
from megatron.model.build import build_model
from megatron.model.compiled import BlockCompiler
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_parameters, flops_per_step
from megatron.tensor_parallel.cross_entropy import LossForm
from megatron.training.step import TrainStep
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY, Step, peers, plain_step, random_tokens
from megatron_lab.benchmarks.runner import in_turns
from megatron_lab.benchmarks.shapes import Shape

OURS = "ours"


class Comparison(NamedTuple):
    """Times of the loops in one dtype."""

    seconds: dict[str, list[float]]
    """Seconds of a step, for each peer and turn."""
    ours: dict[str, list[float]]
    """Seconds of the framework's step, in the turns beside each peer."""
    losses: dict[str, float]
    """Loss of the first step of each loop."""

    def ratios(self, peer: str) -> list[float]:
        """Return how much faster the framework is than a peer, in each turn."""
        return [theirs / ours for theirs, ours in zip(self.seconds[peer], self.ours[peer], strict=True)]

    @property
    def all_seconds(self) -> dict[str, list[float]]:
        """Seconds of a step, for each loop: those of the framework are of all turns."""
        return {OURS: [time for times in self.ours.values() for time in times], **self.seconds}


def our_step(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    loss: LossForm = LossForm(),  # noqa: B008 (frozen)
    compiler: BlockCompiler | None = None,
) -> Step:
    """The peers' step by the framework, in one process."""
    context = make_context(Topology(), 0, device)
    model = build_model(
        shape.model,
        context,
        dtype=dtype,
        vocab_size=shape.vocab,
        sequence_parallel=False,
        seed=0,
        loss=loss,
        compiler=compiler,
    )
    train = TrainStep(
        model,
        context,
        GradScaler(1.0),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(clip_grad=CLIP),
        micro_batch_size=shape.batch,
        skip_overflow=False,
    )
    tokens, labels = random_tokens(shape, device)
    positions = torch.arange(shape.seq, device=device).unsqueeze(1).expand(-1, shape.batch)
    mask = torch.ones(shape.seq, shape.batch, device=device)
    inputs = ModelInputs(positions, tokens.t().contiguous(), labels.t().contiguous(), mask)

    def step() -> float:
        return train.run([inputs], iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).loss

    return step


def run(
    shape: Shape, device: torch.device, dtype_names: Sequence[str], pairs: int, steps: int, *, compiled: bool = False
) -> dict[str, Comparison]:
    """Print speed and peak memory of all, and return them by dtype.

    Args:
        pairs: how often each is timed, in turn.
        steps: in each turn.
        compiled: the framework and the loop by hand take part compiled too.
    """
    flops = flops_per_step(shape.model, shape.vocab, shape.batch)
    threads = f"{torch.get_num_threads()} threads" if _clock(device) is time.perf_counter else "processor time of 1 thread"
    how = f"{threads}, {device}, torch {torch.__version__}"
    print(f"{count_parameters(shape.model, shape.vocab):,} parameters, {shape}, {how}")
    found = {name: _compare(shape, getattr(torch, name), device, pairs, steps, compiled=compiled) for name in dtype_names}
    for name, comparison in found.items():
        for which, seconds in comparison.all_seconds.items():
            middle = statistics.median(seconds)
            line = f"{name:9} {which:14} {1e3 * middle:9.1f} ms a step ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}), "
            line += f"{shape.batch * shape.seq / middle:,.0f} tokens/s, {flops / middle / 1e12:.3f} TFLOP/s"
            peak = peak_flops(torch.cuda.get_device_name(device), name) if device.type == "cuda" else None
            print(line + (f", MFU {flops / middle / peak:.1%}" if peak else "") + f", first loss {comparison.losses[which]:.3f}")
        for which in comparison.seconds:
            ratios = comparison.ratios(which)
            spread = f"median of {pairs} turns, {min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{name:9} speed of ours / {which}: {statistics.median(ratios):.3f} ({spread})")
    for name in dtype_names:
        peaks = {which: _peak_memory(which, shape, name, device, compiled=compiled) for which in found[name].all_seconds}
        for which, peak_bytes in peaks.items():
            share = f", ours / {which} {peaks[OURS] / peak_bytes:.3f}" if which != OURS else ""
            print(f"{name:9} peak memory: {which} {peak_bytes / 2**20:.0f} MiB{share}")
    return found


def steps_of(shape: Shape, dtype: torch.dtype, *, compiled: bool) -> dict[str, Callable[..., Step]]:
    """Return what makes the step of each loop that is compared, the framework's first."""
    with_compiler: dict[str, Callable[..., Step]] = {
        "compiled": functools.partial(our_step, compiler=BlockCompiler()),
        "plain compiled": functools.partial(plain_step, compiled=True),
    }
    return {OURS: our_step, **peers(shape, dtype), **(with_compiler if compiled else {})}


def _compare(shape: Shape, dtype: torch.dtype, device: torch.device, pairs: int, steps: int, *, compiled: bool) -> Comparison:
    """Time the framework beside each peer."""
    makers = steps_of(shape, dtype, compiled=compiled)
    make_ours = makers.pop(OURS)
    result = Comparison({}, {}, {})

    def warmed(which: str, make: Callable[..., Step]) -> Step:
        step = make(shape, dtype, device)
        result.losses[which] = step()
        step()
        return step

    def alone(which: str, make: Callable[..., Step]) -> list[float]:
        step = warmed(which, make)
        seconds = [_timed(step, steps, _clock(device)) for _ in range(pairs)]
        del step
        release_memory(device)
        return seconds

    if device.type == "cuda":
        ours = alone(OURS, make_ours)
        for which, make in makers.items():
            result.ours[which], result.seconds[which] = ours, alone(which, make)
        return result

    def timer(step: Step) -> Callable[[], float]:
        return lambda: _timed(step, steps, _clock(device))

    our = timer(warmed(OURS, make_ours))
    for which, make in makers.items():
        result.ours[which], result.seconds[which] = in_turns(our, timer(warmed(which, make)), pairs)
    return result


def release_memory(device: torch.device) -> None:
    """Free what a model that nobody holds any more has left on the device: cycles of Python and the allocator's blocks."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize() -> None:
    """Wait for the device: a step may leave its update running."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds. On one thread of a CPU they are those of the processor, to which other programs on the machine add little."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _timed(step: Step, steps: int, clock: Callable[[], float]) -> float:
    """Seconds a step."""
    _synchronize()
    began = clock()
    for _ in range(steps):
        step()
    _synchronize()
    return (clock() - began) / steps


def _peak_memory(which: str, shape: Shape, dtype_name: str, device: torch.device, *, compiled: bool) -> int:
    """Peak bytes of a few steps in a fresh process, above what the process held before the model was made."""
    words = (which, json.dumps(asdict(shape)), dtype_name, device, int(compiled))
    command, environment = module_start("megatron_lab.benchmarks.single", *words)
    return int(subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(which: str, shape: Shape, dtype: torch.dtype, device: torch.device, *, compiled: bool) -> None:
    """The process that `_peak_memory` starts."""
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    before = _memory("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = steps_of(shape, dtype, compiled=compiled)[which](shape, dtype, device)
    for _ in range(3):
        step()
    if device.type == "cuda":
        print(torch.cuda.max_memory_allocated())
    else:
        print(_memory("VmHWM") - before)


def _memory(field: str) -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at the peak (getrusage would count the parent's peak too)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    which, shape, dtype_name, device, compiled = sys.argv[1:]
    measure_memory(which, Shape(**json.loads(shape)), getattr(torch, dtype_name), torch.device(device), compiled=compiled == "1")
