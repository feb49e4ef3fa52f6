"""Peaks of activations, planned against measured, and step times, for the ways to hold less: one process of a Llama on CPU."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron.config.cli import LoadedConfig, load
from megatron.config.given import DryRun
from megatron.data.tokenizer import planned_rows
from megatron.spec.counts import flops_per_token, output_flops
from megatron_lab.benchmarks.runner import all_in_turns
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.memory_plots.measure import Measured, measure, prepare
from megatron_lab.planner.dry_run import Planner
from megatron_lab.verification.local_ranks import run_ranks

OFF_BOUND = 0.005
"""How far a measured peak may be off the planned one."""


@dataclass(frozen=True)
class Way:
    """Settings about activation memory."""

    flags: str
    bound: float | None = None
    """Times the step without any of them that a step may take."""


PLAIN, FULL = "none", "full"
_LOSS = "--loss-chunk-tokens"
WAYS = {
    PLAIN: Way(""),
    "selective": Way("--recompute-granularity selective --recompute-modules layernorm mlp_act", bound=1.06),
    FULL: Way("--recompute-granularity full", bound=1.30),
    "host": Way("--cpu-offload-activations"),
    "full, host": Way("--recompute-granularity full --cpu-offload-activations"),
    "chunked loss": Way(f"{_LOSS} 128", bound=1.10),
    "full, chunked": Way(f"--recompute-granularity full {_LOSS} 128"),
}
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --device cpu --mock-data --tokenizer-type NullTokenizer
    --make-vocab-size-divisible-by 1 --train-iters 1 --lr 1e-3 --eval-iters 0"""


@dataclass(frozen=True)
class Result:
    """Of one way."""

    name: str
    planned: int
    """Bytes at the peak of activations, beside the step's inputs."""
    measured: Measured
    seconds: tuple[float, ...]
    """Of the step in each turn."""
    ratios: tuple[float, ...]
    """To the step without, in each turn."""
    processor: float
    """The median ratio of the processor's times, which other programs of the machine hardly change."""
    planned_host: int = 0
    """Bytes of buffers in host memory."""

    @property
    def off(self) -> float:
        """Measured beyond planned, as a part of the planned."""
        return self.measured.peak / self.planned - 1.0


def settings(shape: Shape, way: Way) -> LoadedConfig:
    """Those of a run of this shape."""
    sizes = f"""--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads}
        --seq-length {shape.seq} --micro-batch-size {shape.batch} --vocab-size {shape.vocab - 1}"""  # and the end of document
    whole = "" if _LOSS in way.flags else f"{_LOSS} 0"
    return load(shlex.split(f"{sizes} {LLAMA} {whole} {way.flags}"), 1)


def run(shape: Shape, turns: int) -> bool:
    """Print a line for each way, and the bound of full recompute; returns whether all bounds hold.

    Args:
        turns: in each of which every way makes a step.
    """
    loaded = {name: settings(shape, way) for name, way in WAYS.items()}
    model = loaded[PLAIN].config.model
    head = output_flops(model, shape.vocab) / (flops_per_token(model, shape.vocab) / 3)
    print(
        f"memory: a Llama of {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, "
        f"{shape.batch} x {shape.seq:,} tokens, vocabulary {shape.vocab:,} ({head:.0%} of the work is the head's), float32, "
        f"{torch.get_num_threads()} threads, "
        f"median (min to max) of {turns} turns"
    )
    planned = dict(zip(loaded, _planned([*loaded.values()]), strict=True))
    measured = {name: measure(one.config, 1)[0] for name, one in loaded.items()}
    (one_layer,) = measure(settings(Shape(**{**vars(shape), "layers": 1}), WAYS[PLAIN]).config, 1)
    times = _in_turns({name: _stepper(one) for name, one in loaded.items()}, turns)
    results = [_result(name, *planned[name], measured[name], times) for name in WAYS]
    print(f"{'':14}{'planned MiB':>12}{'measured MiB':>14}{'off':>8}{'on host':>9}   {'step ms':28}{f'/ {PLAIN}':24}processor")
    for result in results:
        print(_line(result))
    missed = misses(results)
    inputs = shape.layers * shape.seq * shape.batch * shape.hidden * torch.float32.itemsize
    one, found, without = (_in_layers(each) for each in (one_layer, measured[FULL], measured[PLAIN]))
    print(
        f"full, from when the gradient reaches the last layer: {found / 2**20:.2f} MiB at most; asked for are layers x s b h x 4 "
        f"bytes + one layer = {inputs / 2**20:.2f} + {one / 2**20:.2f} = {(inputs + one) / 2**20:.2f} MiB "
        f"(without: {without / 2**20:.2f} MiB)"
    )
    if found > inputs + one:
        missed.append(f"full recompute holds {found - inputs - one:,} bytes more than its bound")
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "all bounds hold", flush=True)
    return not missed


def misses(results: Sequence[Result]) -> list[str]:
    """What is out of bounds, in words."""
    found = [
        f"{one.name}: the measured peak is {one.off:+.2%} off the planned one; {OFF_BOUND:.1%} is asked for"
        for one in results
        if abs(one.off) > OFF_BOUND
    ]
    found += [
        f"{one.name}: {one.measured.host:,} bytes of host memory are taken; planned are {one.planned_host:,}"
        for one in results
        if one.measured.host != one.planned_host
    ]
    for one in results:
        ratio, bound = statistics.median(one.ratios), WAYS[one.name].bound
        if bound is not None and ratio > bound:
            found.append(f"{one.name}: a step takes {ratio:.2f} x the one without; at most {bound:.2f} is asked for")
    return found


def _result(name: str, planned: int, host: int, measured: Measured, times: dict[str, list[tuple[float, float]]]) -> Result:
    mine, plain = (list(zip(*times[which], strict=True)) for which in (name, PLAIN))
    wall, processor = (tuple(a / b for a, b in zip(*both, strict=True)) for both in zip(mine, plain, strict=True))
    return Result(name, planned, measured, tuple(mine[0]), wall, statistics.median(processor), host)


def _planned(loaded: Sequence[LoadedConfig]) -> list[tuple[int, int]]:
    """Return the planned bytes of each run, on the device and in host memory.

    All plans are made in one process of their own, which may be a rank of any world.
    """

    def plan(_: int) -> list[tuple[int, int]]:
        held = [Planner(one.config, DryRun(1, 1, None), planned_rows(one.config.data)).step(0).held for one in loaded]
        return [(max(op.peak for op in ops), ops[-1].host) for ops in held]

    (found,) = run_ranks(1, plan, init=False)
    return found


def _in_layers(measured: Measured) -> int:
    assert measured.in_layers is not None
    return measured.most(measured.in_layers, measured.times[-1])


def _stepper(one: LoadedConfig) -> Callable[[], object]:
    step, batch = prepare(one.config)
    return lambda: step.run(batch, iteration=1, learning_rate=1e-3, weight_decay=0.0)


def _in_turns(actions: dict[str, Callable[[], object]], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each in each turn, by the clock and of the processor; see `all_in_turns`."""

    def measured(action: Callable[[], object]) -> tuple[float, float]:
        began, busy = time.perf_counter(), time.process_time()
        action()
        return time.perf_counter() - began, time.process_time() - busy

    return all_in_turns({name: partial(measured, action) for name, action in actions.items()}, turns)


def _line(result: Result) -> str:
    ms = [1e3 * seconds for seconds in result.seconds]
    time_text = f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"
    ratio = f"{statistics.median(result.ratios):.3f} ({min(result.ratios):.3f} to {max(result.ratios):.3f})"
    sizes = (
        f"{result.planned / 2**20:12.2f}{result.measured.peak / 2**20:14.2f}{result.off:+8.2%}{result.measured.host / 2**20:9.2f}"
    )
    return f"{result.name:14}{sizes}   {time_text:28}{ratio:24}{result.processor:9.3f}"
