"""Overlap of the data ranks' communication with computation, where communication takes as long as computation.

Two ranks train a GPT by the framework's own training step, with real collectives over an emulated slow link (`slow_link`).
In each round the computation of a step is timed first, with no collective of the data ranks at all; then the link gets the
bandwidth at which the bytes of a step take just as long; then steps with overlap off and with overlap on are timed. What a step
takes beyond its computation is exposed communication.

A step cannot always hide as much: an all-reduce, for one, can be hidden only by the last backward. So what a step takes with
perfect overlap is simulated from the measured times of the model's units (`overlap_bound`), and the bound is asked for where
perfect overlap keeps it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.bucket_plan import plan_buckets
from megatron.model.build import build_model
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_parameters
from megatron.training.step import TrainStep
from megatron_lab.benchmarks.overlap_bound import BucketTimes, shortest_step
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY
from megatron_lab.benchmarks.runner import all_in_turns
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.benchmarks.slow_link import SENT, SlowLink
from megatron_lab.benchmarks.unit_times import UnitClock
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.25
"""How many times the longer of computation and communication a step with overlap may take."""

_RANKS = 2
_STEPS = 2  # timed together
_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Settings:
    """What is run."""

    shape: Shape
    """Of each rank's microbatch."""
    strategies: tuple[ShardingStrategy, ...]
    accumulate: tuple[int, ...]
    """Microbatches of a step."""
    repeats: int
    dtype: torch.dtype = torch.bfloat16
    """Gradients are summed in float32, so a reduction moves twice what a gather does, as a backward computes twice a forward."""

    @property
    def bucket_size(self) -> int:
        """Elements: the matrices of a block."""
        return 12 * self.shape.hidden**2


@dataclass(frozen=True)
class Case:
    """One strategy with so many microbatches a step."""

    strategy: ShardingStrategy
    microbatches: int

    @property
    def reduces_every_microbatch(self) -> bool:
        """Or once a step."""
        return self.strategy == "optim_grads"


@dataclass(frozen=True)
class Result:
    """Seconds a step of one case: in each round one of each, in turn."""

    case: Case
    sent: float
    """Bytes that a rank sends in a step."""
    perfect: float
    """The ratio with perfect overlap."""
    computation: list[float]
    """Communication takes as long."""
    off: list[float]
    on: list[float]

    @property
    def ratio(self) -> float:
        """The step with overlap against computation."""
        return statistics.median(on / computation for on, computation in zip(self.on, self.computation, strict=True))

    def exposed(self, steps: Sequence[float]) -> float:
        """What steps take beyond computation."""
        return statistics.median(step - computation for step, computation in zip(steps, self.computation, strict=True))


def measure(settings: Settings, show: Callable[[Result], None]) -> list[Result]:
    """Run every case.

    Args:
        show: called with each result as soon as it is there, in the process of rank 0.
    """
    cases = [Case(strategy, microbatches) for strategy in settings.strategies for microbatches in settings.accumulate]

    def live(rank: int) -> list[Result]:
        context = make_context(Topology(dp=_RANKS), rank, torch.device("cpu"), timeout_minutes=_TIMEOUT / 60)
        link, results = SlowLink(), []
        with link.installed():
            for case in cases:
                results.append(_run_case(case, settings, context, link))
                if rank == 0:
                    show(results[-1])
        return results

    return run_ranks(_RANKS, live, timeout=_TIMEOUT)[0]


def _run_case(case: Case, settings: Settings, context: ParallelContext, link: SlowLink) -> Result:
    batch = [_inputs(settings.shape, seed=_RANKS * i + context.rank) for i in range(case.microbatches)]
    steps = {name: _train_step(case, settings, context, overlap=name == "on") for name in ("computation", "off", "on")}
    clock = UnitClock(steps["computation"])
    losses: dict[str, float] = {}

    def timed(name: str) -> float:
        """Seconds a step of the slowest rank. One step goes before, because what a step leaves to the next is a part of it."""
        link.connected = name != "computation"
        for step in range(1 + _STEPS):
            if step == 1:
                link.sent, began = 0.0, time.perf_counter()
            losses[name] = steps[name].run(batch, iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).loss
        seconds = torch.tensor((time.perf_counter() - began) / _STEPS)
        steps[name].finish_publishing()
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    computation: list[float] = []

    def begin_round() -> None:
        computation.append(timed("computation"))
        link.bandwidth = link.sent / _STEPS / computation[-1]

    found = all_in_turns({name: partial(timed, name) for name in ("off", "on")}, settings.repeats, begin_round)
    times = {"computation": computation[1:], **found}  # the first round makes connections and memory
    if losses["on"] != losses["off"]:
        raise RuntimeError(f"{case.strategy}: overlap changes the loss from {losses['off']} to {losses['on']}")
    return Result(
        case, link.sent / _STEPS, _perfect(case, settings, steps["computation"], clock, times["computation"], link), **times
    )


def _perfect(case: Case, settings: Settings, train: TrainStep, clock: UnitClock, times: Sequence[float], link: SlowLink) -> float:
    """A step with perfect overlap against computation, from the fastest times: they are the least disturbed."""
    computation, sent = min(times), link.sent / _STEPS
    buckets = _on_the_link(case, settings, train, bandwidth=sent / computation)
    rounds = case.microbatches if case.reduces_every_microbatch else 1
    planned = sum(rounds * bucket.reduce + bucket.gather for bucket in buckets) / computation
    if not math.isclose(planned, 1.0):
        raise RuntimeError(f"{case.strategy}: the plan of the buckets says that a step sends {planned:.3f} of what it does")
    units = clock.times()
    rest = max(0.0, computation - case.microbatches * sum(sum(unit) for unit in units))
    step = shortest_step(units, rest, buckets, case.microbatches, every_microbatch=case.reduces_every_microbatch)
    return step / computation


def _inputs(shape: Shape, seed: int) -> ModelInputs:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(shape.vocab, (shape.seq + 1, shape.batch), generator=generator)
    positions = torch.arange(shape.seq).unsqueeze(1).expand(-1, shape.batch)
    return ModelInputs(positions, window[:-1].contiguous(), window[1:].contiguous(), torch.ones(shape.seq, shape.batch))


def _train_step(case: Case, settings: Settings, context: ParallelContext, *, overlap: bool) -> TrainStep:
    shape = settings.shape
    model = build_model(
        shape.model,
        context,
        dtype=settings.dtype,
        vocab_size=shape.vocab,
        sequence_parallel=False,
        seed=0,
        materialized=False,
    )
    parallel = ParallelConfig(
        data_parallel_sharding_strategy=case.strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and case.strategy != "no_shard",
        ddp_bucket_size=settings.bucket_size,
    )
    return TrainStep(
        model,
        context,
        GradScaler(1.0),
        parallel=parallel,
        optimizer=OptimizerConfig(clip_grad=CLIP),
        micro_batch_size=shape.batch,
        skip_overflow=False,
    )


def _on_the_link(case: Case, settings: Settings, train: TrainStep, bandwidth: float) -> list[BucketTimes]:
    """What each bucket of the model takes."""
    (chunk,) = train.model.chunks.values()
    first_use: dict[int, int] = {}
    for number, unit in enumerate(chunk.units()):
        for param in unit.parameters():
            first_use.setdefault(id(param), number)
    reduced = SENT["start_all_reduce" if case.strategy == "no_shard" else "start_reduce_scatter"]
    grad_dtype, buckets = torch.promote_types(settings.dtype, torch.float32), []
    for plan in plan_buckets(train.model.params, train.context, bucket_size=settings.bucket_size):
        grads = torch.empty(plan.size, dtype=grad_dtype, device="meta")
        part = torch.empty(plan.slice_size, dtype=settings.dtype, device="meta")
        gathered = 0.0 if case.strategy == "no_shard" else SENT["start_all_gather"](part, _RANKS)
        number = min(first_use[id(placed.entry.param)] for placed in plan.params)
        buckets.append(BucketTimes(number, reduced(grads, _RANKS) / bandwidth, gathered / bandwidth))
    return buckets


def misses(results: Sequence[Result]) -> list[str]:
    """In words, what is not as it must be."""
    return [
        f"{result.case.strategy} with {result.case.microbatches} microbatches takes {result.ratio:.2f} x computation with overlap; "
        f"at most {BOUND} is asked for"
        for result in results
        if result.ratio > BOUND >= result.perfect
    ]


_COLUMNS = {
    "strategy": 12,
    "microbatches": 13,
    "MB sent": 9,
    "computation": 13,
    "overlap off": 25,
    "overlap on": 25,
    "exposed off": 13,
    "on": 8,
    "ratio": 8,
    "perfect": 9,
}


def row(*cells: str) -> str:
    """Cells of the table in their columns."""
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True))


def cells(result: Result) -> list[str]:
    """A row of the table; times in milliseconds."""
    steps = [
        f"{1e3 * statistics.median(times):.1f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
        for times in (result.off, result.on)
    ]
    exposed = [f"{1e3 * result.exposed(times):.1f}" for times in (result.off, result.on)]
    computation = f"{1e3 * statistics.median(result.computation):.1f}"
    ratios = [f"{ratio:.2f}" for ratio in (result.ratio, result.perfect)]
    case = result.case
    return [case.strategy, str(case.microbatches), f"{result.sent / 1e6:.2f}", computation, *steps, *exposed, *ratios]


def run(settings: Settings) -> bool:
    """Print the step of every case; returns whether the bound holds where it is asked for."""
    shape = settings.shape
    print(
        f"{_RANKS} ranks of one thread, {count_parameters(shape.model, shape.vocab):,} parameters in {str(settings.dtype)[6:]}, "
        f"microbatches of {shape.batch} x {shape.seq} tokens, buckets of at most {settings.bucket_size:,} elements\n"
        f"the link is slowed so that communication takes as long as computation; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}\nmilliseconds a step, medians of {settings.repeats} (min to max)"
    )
    print(row(*_COLUMNS), flush=True)
    results = measure(settings, lambda result: print(row(*cells(result)), flush=True))
    missed, asked = misses(results), sum(result.perfect <= BOUND for result in results)
    print(
        "ratio: overlap on / computation. perfect: what it would be with perfect overlap, by simulation\n"
        f"a ratio of at most {BOUND} is asked for where perfect overlap gives that: in {asked} of {len(results)}"
    )
    if asked:
        print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "all bounds hold")
    return not missed
