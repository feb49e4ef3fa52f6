"""Benchmark of the overlap of data-parallel communication with computation, on a link where both take the same time.

Two ranks train a GPT with the framework's training step and real collectives over an emulated slow link (`slow_link`). Each
repetition has three parts. First it times the computation of a step, without any data-parallel collective. Then it sets the
bandwidth of the link so that sending the bytes of a step takes as long as the computation. Then it times steps with overlap off and
with overlap on. Exposed communication is the time of a step minus its computation.

Not all communication can be hidden: an all-reduce, for example, overlaps only with the last backward. So a simulation computes the
step time with perfect overlap from the measured times of the model's layers (`overlap_bound`). The bound on the step time is
checked only in cases in which perfect overlap would satisfy it.
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
from megatron_lab.benchmarks.overlap_bound import BucketTimes, simulate_shortest_step
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY
from megatron_lab.benchmarks.runner import run_in_turns
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.benchmarks.slow_link import SENT_BYTES, SlowLink
from megatron_lab.benchmarks.unit_times import UnitClock
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.25
"""Maximum ratio of a step with overlap to the computation (and so to the communication, which takes the same time)."""

_RANKS = 2
_STEPS = 2  # steps per measurement
_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Settings:
    """Model, sharding strategies and numbers of microbatches to measure, and number of repetitions."""

    shape: Shape
    """Shape of the model and of each rank's microbatch."""
    strategies: tuple[ShardingStrategy, ...]
    microbatch_counts: tuple[int, ...]
    """Numbers of microbatches per step. Each is measured with each sharding strategy."""
    repeats: int
    dtype: torch.dtype = torch.bfloat16
    """Dtype of weights and activations.

    Gradients are reduced in float32. So the reduction of the gradients moves twice the bytes of the gather of the weights, just as
    a backward computes twice as much as a forward.
    """

    @property
    def bucket_size(self) -> int:
        """Maximum number of elements of a gradient bucket: the number of elements of the matrices of one transformer block."""
        return 12 * self.shape.hidden**2


@dataclass(frozen=True)
class Case:
    """One measured configuration: a sharding strategy and a number of microbatches per step."""

    strategy: ShardingStrategy
    num_microbatches: int

    @property
    def reduces_every_microbatch(self) -> bool:
        """Whether gradients are reduced in every microbatch instead of once per step."""
        return self.strategy == "optim_grads"


@dataclass(frozen=True)
class CaseResult:
    """Step times of one case in seconds, one value per repetition, and the simulated ratio with perfect overlap."""

    case: Case
    sent_bytes: float
    """Bytes that a rank sends in one step."""
    perfect_ratio: float
    """Simulated time of a step with perfect overlap, divided by the time of the step's computation."""
    computation: list[float]
    """Seconds of steps without communication. The bandwidth of the link is set so that the communication of a step takes the same
    time."""
    off: list[float]
    """Seconds of steps with communication, without overlap."""
    on: list[float]
    """Seconds of steps with communication that overlaps with computation."""

    @property
    def ratio(self) -> float:
        """Median over the repetitions of the step time with overlap divided by the time of the computation."""
        return statistics.median(on / computation for on, computation in zip(self.on, self.computation, strict=True))

    def compute_exposed_time(self, steps: Sequence[float]) -> float:
        """Return the median exposed communication in seconds: step time minus computation.

        Args:
            steps: step times in seconds, one per repetition: the list `off` or the list `on`.
        """
        return statistics.median(step - computation for step, computation in zip(steps, self.computation, strict=True))


def measure(settings: Settings, on_result: Callable[[CaseResult], None]) -> list[CaseResult]:
    """Measure all cases of the settings on two ranks.

    Args:
        on_result: called in the process of rank 0 with the result of each case as soon as it is available.
    """
    cases = [Case(strategy, microbatches) for strategy in settings.strategies for microbatches in settings.microbatch_counts]

    def run_rank(rank: int) -> list[CaseResult]:
        context = make_context(Topology(dp=_RANKS), rank, torch.device("cpu"), timeout_minutes=_TIMEOUT / 60)
        link, results = SlowLink(), []
        with link.installed():
            for case in cases:
                results.append(_run_case(case, settings, context, link))
                if rank == 0:
                    on_result(results[-1])
        return results

    return run_ranks(_RANKS, run_rank, timeout=_TIMEOUT)[0]


def _run_case(case: Case, settings: Settings, context: ParallelContext, link: SlowLink) -> CaseResult:
    batch = [_build_inputs(settings.shape, seed=_RANKS * i + context.rank) for i in range(case.num_microbatches)]
    steps = {name: _build_train_step(case, settings, context, overlap=name == "on") for name in ("computation", "off", "on")}
    clock = UnitClock(steps["computation"])
    losses: dict[str, float] = {}

    def time_steps(name: str) -> float:
        """Return the seconds per step on the slowest rank.

        One step runs before the clock starts, because a step may leave communication, such as the gather of parameters, to the next
        step.

        Args:
            name: variant to run: "computation", "off" or "on".
        """
        link.is_connected = name != "computation"
        for step in range(1 + _STEPS):
            if step == 1:
                link.sent_bytes, start = 0.0, time.perf_counter()
            losses[name] = steps[name].run(batch, iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).loss
        step_time = torch.tensor((time.perf_counter() - start) / _STEPS)
        steps[name].finish_param_gather()
        dist.all_reduce(step_time, dist.ReduceOp.MAX)
        return step_time.item()

    computation: list[float] = []

    def start_turn() -> None:
        computation.append(time_steps("computation"))
        link.bandwidth = link.sent_bytes / _STEPS / computation[-1]

    turn_times = run_in_turns({name: partial(time_steps, name) for name in ("off", "on")}, settings.repeats, start_turn)
    times = {"computation": computation[1:], **turn_times}  # the first turn opens connections and allocates memory
    if losses["on"] != losses["off"]:
        raise RuntimeError(
            f"internal error of the benchmark ({case.strategy}): the loss is {losses['off']} without overlap of communication and "
            f"computation, but {losses['on']} with this overlap; the losses must be equal. Please report this"
        )
    return CaseResult(
        case,
        link.sent_bytes / _STEPS,
        _simulate_perfect_ratio(case, settings, steps["computation"], clock, times["computation"], link),
        **times,
    )


def _simulate_perfect_ratio(
    case: Case, settings: Settings, train_step: TrainStep, clock: UnitClock, times: Sequence[float], link: SlowLink
) -> float:
    """Return the simulated time of a step with perfect overlap, as a multiple of the step's computation.

    The simulation uses the shortest measured times, because other programs disturb them least.

    Args:
        clock: measured times of the model's units (embedding, blocks, final norm, output layer).
        times: seconds of steps without communication.
        link: emulated link, which has counted the bytes of the measured steps.
    """
    computation, sent_bytes = min(times), link.sent_bytes / _STEPS
    buckets = _predict_bucket_times(case, settings, train_step, bandwidth=sent_bytes / computation)
    reductions = case.num_microbatches if case.reduces_every_microbatch else 1
    predicted_share = sum(reductions * bucket.reduce + bucket.gather for bucket in buckets) / computation
    if not math.isclose(predicted_share, 1.0):
        raise RuntimeError(
            f"internal error of the benchmark ({case.strategy}): the gradient buckets have {predicted_share:.3f} times the bytes "
            "that a step has sent; the two numbers of bytes must be equal. Please report this"
        )
    units = clock.compute_times()
    update_time = max(0.0, computation - case.num_microbatches * sum(sum(unit) for unit in units))
    step_time = simulate_shortest_step(
        units, update_time, buckets, case.num_microbatches, every_microbatch=case.reduces_every_microbatch
    )
    return step_time / computation


def _build_inputs(shape: Shape, seed: int) -> ModelInputs:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(shape.vocab, (shape.seq + 1, shape.batch), generator=generator)
    positions = torch.arange(shape.seq).unsqueeze(1).expand(-1, shape.batch)
    return ModelInputs(positions, window[:-1].contiguous(), window[1:].contiguous(), torch.ones(shape.seq, shape.batch))


def _build_train_step(case: Case, settings: Settings, context: ParallelContext, *, overlap: bool) -> TrainStep:
    shape = settings.shape
    model = build_model(
        shape.model,
        context,
        dtype=settings.dtype,
        vocab_size=shape.vocab,
        sequence_parallel=False,
        seed=0,
        should_materialize=False,
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


def _predict_bucket_times(case: Case, settings: Settings, train_step: TrainStep, bandwidth: float) -> list[BucketTimes]:
    """Return the seconds that the link needs to reduce the gradients and to gather the parameters of each bucket.

    Args:
        bandwidth: bytes per second of the link.
    """
    (chunk,) = train_step.model.chunks.values()
    first_use: dict[int, int] = {}
    for unit_index, unit in enumerate(chunk.get_units()):
        for param in unit.parameters():
            first_use.setdefault(id(param), unit_index)
    count_reduce_bytes = SENT_BYTES["start_all_reduce" if case.strategy == "no_shard" else "start_reduce_scatter"]
    grad_dtype, buckets = torch.promote_types(settings.dtype, torch.float32), []
    for plan in plan_buckets(train_step.model.params, train_step.context, bucket_size=settings.bucket_size):
        grads = torch.empty(plan.size, dtype=grad_dtype, device="meta")
        shard = torch.empty(plan.slice_size, dtype=settings.dtype, device="meta")
        gather_bytes = 0.0 if case.strategy == "no_shard" else SENT_BYTES["start_all_gather"](shard, _RANKS)
        unit_index = min(first_use[id(bucket_param.entry.param)] for bucket_param in plan.params)
        buckets.append(BucketTimes(unit_index, count_reduce_bytes(grads, _RANKS) / bandwidth, gather_bytes / bandwidth))
    return buckets


def find_violations(results: Sequence[CaseResult]) -> list[str]:
    """Return a message for each case whose step time with overlap is above `BOUND` times the computation, although perfect overlap
    would satisfy this bound."""
    return [
        f"{result.case.strategy} with {result.case.num_microbatches} microbatches takes {result.ratio:.2f} x computation "
        f"with overlap; the limit is {BOUND}"
        for result in results
        if result.ratio > BOUND >= result.perfect_ratio
    ]


_COLUMN_WIDTHS = {
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


def format_row(*cells: str) -> str:
    """Return one line of the table: the cells, padded to the widths of the columns."""
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMN_WIDTHS.values(), strict=True))


def format_cells(result: CaseResult) -> list[str]:
    """Return the texts of the cells of a result's row, with times in milliseconds."""
    steps = [
        f"{1e3 * statistics.median(times):.1f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
        for times in (result.off, result.on)
    ]
    exposed = [f"{1e3 * result.compute_exposed_time(times):.1f}" for times in (result.off, result.on)]
    computation = f"{1e3 * statistics.median(result.computation):.1f}"
    ratios = [f"{ratio:.2f}" for ratio in (result.ratio, result.perfect_ratio)]
    case = result.case
    return [case.strategy, str(case.num_microbatches), f"{result.sent_bytes / 1e6:.2f}", computation, *steps, *exposed, *ratios]


def run(settings: Settings) -> bool:
    """Print the step times of all cases as a table. Return whether `find_violations` finds nothing."""
    shape = settings.shape
    print(
        f"{_RANKS} ranks of one thread, {count_parameters(shape.model, shape.vocab):,} parameters in {str(settings.dtype)[6:]}, "
        f"microbatches of {shape.batch} x {shape.seq} tokens, buckets of at most {settings.bucket_size:,} elements\n"
        f"the link is slowed so that communication takes as long as computation; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}\nmilliseconds per step, medians of {settings.repeats} (min to max)"
    )
    print(format_row(*_COLUMN_WIDTHS), flush=True)
    results = measure(settings, lambda result: print(format_row(*format_cells(result)), flush=True))
    violations, num_bounded = find_violations(results), sum(result.perfect_ratio <= BOUND for result in results)
    print(
        "ratio: step time with overlap / computation. perfect: simulated ratio with perfect overlap\n"
        f"the limit of {BOUND} for the ratio applies where perfect overlap is within it: in {num_bounded} of {len(results)} cases"
    )
    if num_bounded:
        print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "all bounds hold")
    return not violations
