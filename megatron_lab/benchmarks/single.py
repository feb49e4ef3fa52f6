"""Benchmark of this framework in a single process, compared with other training loops of the same model: speed and peak memory.

All loops train on the same tokens from memory. CPUs are noisy, so on a CPU the framework and another loop are measured alternately,
and two models are in memory at a time. On a GPU each loop is timed separately, and only one model is in memory.
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

from megatron.config.launcher import build_module_command
from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.metrics.measures import get_peak_flops
from megatron.model.build import build_model
from megatron.model.compiled import BlockCompiler
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_flops_per_step, count_parameters
from megatron.tensor_parallel.cross_entropy import LossOptions
from megatron.training.step import TrainStep
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY, Step, build_plain_step, create_random_tokens, get_peers
from megatron_lab.benchmarks.runner import run_pair_in_turns
from megatron_lab.benchmarks.shapes import Shape

FRAMEWORK = "ours"


class Comparison(NamedTuple):
    """Step times and losses of the framework and of its peers (other training loops of the same model) in one dtype."""

    peer_times: dict[str, list[float]]
    """Seconds per step of each peer (another training loop of the same model), by the name of the peer; one value per repetition of
    the measurement."""
    framework_times: dict[str, list[float]]
    """Seconds per step of the framework, by the name of a peer. The framework and this peer were measured alternately."""
    losses: dict[str, float]
    """Loss of the first step, by the name of the training loop."""

    def compute_ratios(self, peer: str) -> list[float]:
        """Return the step time of a peer (another training loop of the same model) divided by that of the framework, one value per
        repetition of the measurement.

        A value above 1 means that the framework is faster.
        """
        return [
            peer_time / framework_time
            for peer_time, framework_time in zip(self.peer_times[peer], self.framework_times[peer], strict=True)
        ]

    @property
    def all_times(self) -> dict[str, list[float]]:
        """Seconds per step by the name of the training loop: the framework and all peers (other training loops of the same model).

        The framework's list contains its times from the comparisons with all peers.
        """
        return {FRAMEWORK: [time for times in self.framework_times.values() for time in times], **self.peer_times}


def build_framework_step(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    loss: LossOptions = LossOptions(),  # noqa: B008 (frozen)
    compiler: BlockCompiler | None = None,
) -> Step:
    """Build a training step of the framework in one process, for the same model and tokens as those of the peers (other training
    loops).

    Args:
        loss: how the loss is computed, such as in chunks of tokens.
        compiler: compiler of the layers; None runs them without compilation.
    """
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
    train_step = TrainStep(
        model,
        context,
        GradScaler(1.0),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(clip_grad=CLIP),
        micro_batch_size=shape.batch,
        skip_overflow=False,
    )
    tokens, labels = create_random_tokens(shape, device)
    positions = torch.arange(shape.seq, device=device).unsqueeze(1).expand(-1, shape.batch)
    mask = torch.ones(shape.seq, shape.batch, device=device)
    inputs = ModelInputs(positions, tokens.t().contiguous(), labels.t().contiguous(), mask)

    def step() -> float:
        return train_step.run([inputs], iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).loss

    return step


def run(
    shape: Shape, device: torch.device, dtype_names: Sequence[str], num_turns: int, steps_per_turn: int, *, compiled: bool = False
) -> dict[str, Comparison]:
    """Print the speed and the peak memory of the framework and of its peers (other training loops of the same model).

    Args:
        dtype_names: names of dtypes in torch, such as "bfloat16".
        num_turns: number of repetitions of the measurement.
        steps_per_turn: steps that each training loop runs in a repetition.
        compiled: also measure the framework and the loop written by hand with compiled layers.

    Returns:
        The measured times and losses by the name of the dtype.
    """
    flops = count_flops_per_step(shape.model, shape.vocab, shape.batch)
    threads = f"{torch.get_num_threads()} threads" if _select_clock(device) is time.perf_counter else "processor time of 1 thread"
    setup = f"{threads}, {device}, torch {torch.__version__}"
    print(f"{count_parameters(shape.model, shape.vocab):,} parameters, {shape}, {setup}")
    comparisons = {
        name: _compare(shape, getattr(torch, name), device, num_turns, steps_per_turn, compiled=compiled) for name in dtype_names
    }
    for name, comparison in comparisons.items():
        for loop, times in comparison.all_times.items():
            median = statistics.median(times)
            text = f"{name:9} {loop:14} {1e3 * median:9.1f} ms per step ({1e3 * min(times):.1f} to {1e3 * max(times):.1f}), "
            text += f"{shape.batch * shape.seq / median:,.0f} tokens/s, {flops / median / 1e12:.3f} TFLOP/s"
            peak_flops = get_peak_flops(torch.cuda.get_device_name(device), name) if device.type == "cuda" else None
            print(
                text
                + (f", MFU {flops / median / peak_flops:.1%}" if peak_flops else "")
                + f", first loss {comparison.losses[loop]:.3f}"
            )
        for loop in comparison.peer_times:
            ratios = comparison.compute_ratios(loop)
            range_text = f"median of {num_turns} turns, {min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{name:9} speed of ours / {loop}: {statistics.median(ratios):.3f} ({range_text})")
    for name in dtype_names:
        peaks_by_loop = {
            loop: _measure_peak_memory(loop, shape, name, device, compiled=compiled) for loop in comparisons[name].all_times
        }
        for loop, peak_bytes in peaks_by_loop.items():
            share = f", ours / {loop} {peaks_by_loop[FRAMEWORK] / peak_bytes:.3f}" if loop != FRAMEWORK else ""
            print(f"{name:9} peak memory: {loop} {peak_bytes / 2**20:.0f} MiB{share}")
    return comparisons


def get_step_builders(shape: Shape, dtype: torch.dtype, *, compiled: bool) -> dict[str, Callable[..., Step]]:
    """Return functions that build the training steps of the framework and of its peers (other training loops), by name.

    The framework is first.

    Args:
        compiled: also return functions for steps with compiled layers.
    """
    with_compiler: dict[str, Callable[..., Step]] = {
        "compiled": functools.partial(build_framework_step, compiler=BlockCompiler()),
        "plain compiled": functools.partial(build_plain_step, compiled=True),
    }
    return {FRAMEWORK: build_framework_step, **get_peers(shape, dtype), **(with_compiler if compiled else {})}


def _compare(
    shape: Shape, dtype: torch.dtype, device: torch.device, num_turns: int, steps_per_turn: int, *, compiled: bool
) -> Comparison:
    """Time the training steps of the framework and of each peer (another training loop of the same model) in one dtype.

    On a CPU the framework and a peer are measured alternately. On a GPU each is timed separately, so that only one model is in
    memory.
    """
    builders = get_step_builders(shape, dtype, compiled=compiled)
    build_framework = builders.pop(FRAMEWORK)
    result = Comparison({}, {}, {})

    def build_warm_step(loop: str, build: Callable[..., Step]) -> Step:
        step = build(shape, dtype, device)
        result.losses[loop] = step()
        step()
        return step

    def time_separately(loop: str, build: Callable[..., Step]) -> list[float]:
        step = build_warm_step(loop, build)
        times = [_time_steps(step, steps_per_turn, _select_clock(device)) for _ in range(num_turns)]
        del step
        release_memory(device)
        return times

    if device.type == "cuda":
        framework_times = time_separately(FRAMEWORK, build_framework)
        for loop, build in builders.items():
            result.framework_times[loop], result.peer_times[loop] = framework_times, time_separately(loop, build)
        return result

    def make_timer(step: Step) -> Callable[[], float]:
        return lambda: _time_steps(step, steps_per_turn, _select_clock(device))

    framework_timer = make_timer(build_warm_step(FRAMEWORK, build_framework))
    for loop, build in builders.items():
        result.framework_times[loop], result.peer_times[loop] = run_pair_in_turns(
            framework_timer, make_timer(build_warm_step(loop, build)), num_turns
        )
    return result


def release_memory(device: torch.device) -> None:
    """Free device memory that belongs to a deleted model: collect reference cycles and empty the caching allocator."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize() -> None:
    """Wait until the GPU, if there is one, has finished its work, because a step may return before its update is complete."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _select_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock that times steps, in seconds.

    On a CPU with one thread it measures processor time, which other programs on the machine hardly change. Otherwise it measures
    wall time.
    """
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _time_steps(step: Step, num_steps: int, clock: Callable[[], float]) -> float:
    """Run `num_steps` steps, and return the mean seconds per step by `clock`."""
    _synchronize()
    start = clock()
    for _ in range(num_steps):
        step()
    _synchronize()
    return (clock() - start) / num_steps


def _measure_peak_memory(loop: str, shape: Shape, dtype_name: str, device: torch.device, *, compiled: bool) -> int:
    """Build a training loop and run a few steps in a new process. Return the bytes by which its peak memory exceeds the memory
    before the model is built.

    On a GPU, the value is the peak of the memory that torch has allocated.

    Args:
        loop: name of the training loop: the framework or one of its peers.
        dtype_name: name of the dtype in torch, such as "bfloat16".
        compiled: also look for `loop` among the training loops with compiled layers.
    """
    args = (loop, json.dumps(asdict(shape)), dtype_name, device, int(compiled))
    command, environment = build_module_command("megatron_lab.benchmarks.single", *args)
    return int(subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.split()[-1])


def print_peak_memory(loop: str, shape: Shape, dtype: torch.dtype, device: torch.device, *, compiled: bool) -> None:
    """Print the peak memory of one training loop in bytes. The process that `_measure_peak_memory` starts calls this function.

    Args:
        loop: name of the training loop: the framework or one of its peers.
        compiled: also look for `loop` among the training loops with compiled layers.
    """
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    initial_memory = _read_memory("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = get_step_builders(shape, dtype, compiled=compiled)[loop](shape, dtype, device)
    for _ in range(3):
        step()
    if device.type == "cuda":
        print(torch.cuda.max_memory_allocated())
    else:
        print(_read_memory("VmHWM") - initial_memory)


def _read_memory(field: str) -> int:
    """Return the resident memory of this process in bytes, from /proc/self/status.

    getrusage is not used, because its peak would include the memory of the parent process.

    Args:
        field: "VmRSS" for the current value, "VmHWM" for the peak.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    loop, shape, dtype_name, device, compiled = sys.argv[1:]
    print_peak_memory(loop, Shape(**json.loads(shape)), getattr(torch, dtype_name), torch.device(device), compiled=compiled == "1")
