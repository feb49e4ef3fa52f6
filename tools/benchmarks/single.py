"""One process of this framework against the plain loop, speed and peak memory, as ratios within one run.

All train on the same tokens from memory. Runs alternate and medians are compared, because machines are noisy.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.metrics.device_peaks import peak_flops
from megatron.model.build import build_model
from megatron.model.compiled import BlockCompiler
from megatron.model.gpt import ModelInputs
from megatron.model.output_layer import LossForm
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_parameters, flops_per_step
from megatron.training.step import TrainStep
from tools.benchmarks.plain import CLIP, LR, WEIGHT_DECAY, Step, plain_step, random_tokens
from tools.benchmarks.shapes import Shape

_ROOT = Path(__file__).resolve().parents[2]


def our_step(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    loss: LossForm = LossForm(),  # noqa: B008 (frozen)
    compiler: BlockCompiler | None = None,
) -> Step:
    """The step of the plain loop by the framework, in one process."""
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


_STEPS: dict[str, Callable[[Shape, torch.dtype, torch.device], Step]] = {
    "plain": plain_step,
    "ours": our_step,
    "compiled": lambda shape, dtype, device: our_step(shape, dtype, device, compiler=BlockCompiler()),
}


def run(shape: Shape, device: torch.device, dtype_names: Sequence[str], pairs: int, steps: int, *, compiled: bool = False) -> None:
    """Print speed and peak memory of all.

    Args:
        compiled: the framework with compiled layers takes part too.
        pairs: how many parts of each are timed, in turn.
        steps: in each part.
    """
    names = [*_STEPS] if compiled else ["plain", "ours"]
    flops = flops_per_step(shape.model, shape.vocab, shape.batch)
    print(f"{count_parameters(shape.model, shape.vocab):,} parameters, {shape}, {torch.get_num_threads()} threads, {device}")
    for name in dtype_names:
        dtype = getattr(torch, name)
        made = {which: _STEPS[which](shape, dtype, device) for which in names}
        losses = {which: step() for which, step in made.items()}
        for step in made.values():
            step()
        times: dict[str, list[float]] = {which: [] for which in names}
        for i in range(pairs):
            for which in names if i % 2 else reversed(names):
                times[which].append(_timed(made[which], steps))
        for which, found in times.items():
            middle = statistics.median(found)
            line = (
                f"{name:9} {which:8} {1000 * middle:9.1f} ms a step (spread {1000 * min(found):.1f} to {1000 * max(found):.1f}), "
            )
            line += f"{shape.batch * shape.seq / middle:,.0f} tokens/s, {flops / middle / 1e12:.3f} TFLOP/s"
            peak = peak_flops(torch.cuda.get_device_name(device), name) if device.type == "cuda" else None
            print(line + (f", MFU {flops / middle / peak:.1%}" if peak else ""))
        for one, other in pairwise(names):
            ratios = [before / after for before, after in zip(times[one], times[other], strict=True)]
            print(
                f"{name:9} speed of {other} / {one}: {statistics.median(ratios):.3f} "
                f"(median of {pairs} pairs, {min(ratios):.3f} to {max(ratios):.3f}); "
                f"first losses {losses[one]:.3f} and {losses[other]:.3f}"
            )
        del made, step
    for name in dtype_names:
        peaks = {which: _peak_memory(which, shape, name, device) for which in ("plain", "ours")}
        print(
            f"{name:9} peak memory: plain {peaks['plain'] / 2**20:.0f} MiB, ours {peaks['ours'] / 2**20:.0f} MiB, "
            f"ours / plain {peaks['ours'] / peaks['plain']:.3f}"
        )


def _synchronize() -> None:
    """Wait for the device: a step may leave its update running."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _timed(step: Step, steps: int) -> float:
    """Seconds a step."""
    _synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    return (time.perf_counter() - began) / steps


def _peak_memory(which: str, shape: Shape, dtype_name: str, device: torch.device) -> int:
    """Peak bytes of a few steps in a fresh process, above what the process held before the model was made."""
    command = [sys.executable, "-m", "tools.benchmarks.single", which, json.dumps(asdict(shape)), dtype_name, str(device)]
    return int(subprocess.run(command, check=True, cwd=_ROOT, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(which: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """The process that `_peak_memory` starts."""
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    before = _memory("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = _STEPS[which](shape, dtype, device)
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
    which, shape, dtype_name, device = sys.argv[1:]
    measure_memory(which, Shape(**json.loads(shape)), getattr(torch, dtype_name), torch.device(device))
