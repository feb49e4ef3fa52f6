"""Which layout takes a job's steps in the least time: many are judged roughly, the best of them planned and played exactly.

Rough times and bytes are those of one stage that holds the whole model, run on tensors without memory once for each way to divide a
layer (tensor, context and expert ranks, what is computed again), and divided among stages and data ranks by arithmetic. They only
choose what is looked at; all figures that are shown come from `step_time.predict` and the exact plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.checks.finding import Change, change, without
from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.config.rules import violations
from megatron.spec.operations import OpKind
from megatron.spec.schedules import SCHEDULES
from megatron_lab.planner.advice import ENOUGH_TOKENS
from megatron_lab.planner.chunk_trace import Traces
from megatron_lab.planner.cluster import Cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import COMPILED, OURS, Durations, Ranks
from megatron_lab.planner.fit import usable
from megatron_lab.planner.step_time import StepTime, dtype_of, predict, spent_in

_CLOSE = 1.15
"""Shares of the memory of a device up to which a layout is planned exactly: judgements of memory may be off by as much."""
_IDLE = {"zb-h1": 0.5, "zb-v": 0.2}
"""Idle time beside that of 1F1B, roughly."""
_ON_HOST = ("cpu_offload_activations", "optimizer_cpu_offload")
_LONG = 16_384
"""Tokens of a sequence from which on context ranks are tried."""
_RECOMPUTE: tuple[Mapping[str, Any], ...] = (
    {},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp_act")},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
_SAVERS: tuple[Mapping[str, Any], ...] = (
    {"loss_chunk_tokens": ENOUGH_TOKENS},
    {"cpu_offload_activations": True},
    {"optimizer_cpu_offload": True},
    {"optimizer_cpu_offload": True, "cpu_offload_activations": True},
)
"""What is tried of a layout that has too little memory."""
AXES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "micro": "micro_batch_size",
}
"""Names under which a user fixes or bounds a size."""
SEARCHED = (
    *AXES.values(),
    *("sequence_parallel", "expert_tensor_parallel_size", "overlap_p2p_communication"),
    *("data_parallel_sharding_strategy", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    "pipeline_model_parallel_layout",
    *("recompute_granularity", "recompute_activations", "recompute_modules", "recompute_method", "recompute_num_layers"),
    "recompute_layers_per_stage",
    *("loss_chunk_tokens", "cpu_offload_activations", "cpu_offloading", "cpu_offloading_num_layers"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction"),
)
"""Settings that a search chooses: what was given of them does not bind it."""


@dataclass(frozen=True)
class Limits:
    """What a search may try."""

    fixed: Mapping[str, int] = field(default_factory=dict)
    """Sizes by the names in `AXES`."""
    most: Mapping[str, int] = field(default_factory=dict)

    def allowed(self, axis: str, sizes: Sequence[int]) -> list[int]:
        """Those of some sizes that may be tried."""
        if axis in self.fixed:
            return [self.fixed[axis]]
        return [size for size in sizes if size <= self.most.get(axis, size)]


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with what it takes, exactly."""

    config: Config
    time: StepTime

    def fits(self, cluster: Cluster) -> bool:
        """Whether its fullest rank has memory enough."""
        return self.time.device_bytes <= usable(int(cluster.memory_gb * 1e9))


@dataclass(frozen=True)
class Outcome:
    """What a search has found."""

    found: tuple[PlannedLayout, ...]
    """Layouts that fit, the fastest first."""
    closest: PlannedLayout | None
    """The one of those that were planned that needs the least memory, if none fits."""
    judged: int
    """How many layouts were judged."""
    planned: int
    """How many of them exactly."""

    def ties(self) -> tuple[PlannedLayout, ...]:
        """Layouts that may be as fast as the best: half of the range of each reaches the other's prediction."""
        best = self.found[0].time
        return tuple(one for one in self.found if one.time.seconds / best.seconds <= (best.high / best.seconds) ** 0.5)


class LayoutSearch:
    """Looks for layouts of a job.

    Args:
        config: settings with the model, the batch and whatever is not searched.
        dry_run: the job's ranks, and how many a node has.

    Raises:
        ConfigError: the cluster's peak in the model's dtype is not known.
    """

    def __init__(self, config: Config, dry_run: DryRun, vocab_size: int, cluster: Cluster, limits: Limits | None = None) -> None:
        cluster.peak(dtype_of(config))
        self._config, _ = without(config, *SEARCHED[len(AXES) :]).apply(config, dry_run.world_size)
        self._dry_run, self._vocab_size, self._cluster = dry_run, vocab_size, cluster
        self._limits = limits or Limits()
        self._rough: dict[object, _Rough | None] = {}
        self._traces: dict[object, Traces] = {}
        self._exact: dict[Change, PlannedLayout | None] = {}

    def run(self, exact: int = 16) -> Outcome:
        """Judge all layouts, then plan the best of them until so many fit."""
        limit = usable(int(self._cluster.memory_gb * 1e9))
        judged: list[tuple[tuple[float, float], Change]] = []
        for one in self.candidates():
            estimate = self._estimate(one)
            if estimate is None:
                continue
            judged.append((estimate, one))
            if estimate[1] > _CLOSE * limit:
                judged += [(less, other) for other in self._with_less_memory(one) if (less := self._estimate(other)) is not None]
        likely = sorted((time, index) for index, ((time, memory), _) in enumerate(judged) if memory <= _CLOSE * limit)
        if not likely:
            likely = sorted((memory, index) for index, ((_, memory), _) in enumerate(judged))[:exact]
        planned: list[PlannedLayout] = []
        for _, index in likely:
            if sum(one.fits(self._cluster) for one in planned) >= exact or len(planned) >= 3 * exact:
                break
            if (found := self.exactly(judged[index][1])) is not None:
                planned.append(found)
        fitting = sorted((one for one in planned if one.fits(self._cluster)), key=lambda one: one.time.seconds)
        closest = min(planned, key=lambda one: one.time.device_bytes, default=None)
        return Outcome(tuple(fitting), None if fitting else closest, len(judged), len(planned))

    def exactly(self, one: Change) -> PlannedLayout | None:
        """A layout's exact plan and prediction; None if it cannot be laid out."""
        if one not in self._exact:
            config, ranks = one.apply(self._config, self._dry_run.world_size)
            parallel = config.parallel
            sharers = (
                *(parallel.tensor_model_parallel_size, parallel.context_parallel_size),
                *(parallel.expert_model_parallel_size, parallel.expert_tensor_size),
            )
            splits = SCHEDULES[parallel.schedule].splits_backward
            key = sharers, config.training.micro_batch_size, config.memory, splits, parallel.sharding
            try:
                time = predict(
                    config,
                    replace(self._dry_run, world_size=ranks),
                    self._vocab_size,
                    self._cluster,
                    traces=self._traces.setdefault(key, {}),
                )
                self._exact[one] = PlannedLayout(config, time)
            except ValueError:
                self._exact[one] = None
        return self._exact[one]

    def candidates(self) -> Iterator[Change]:
        """All layouts that the rules accept."""
        config, world = self._config, self._dry_run.world_size
        model, limits = config.model, self._limits
        powers = [2**k for k in range(11)]
        per_node = self._dry_run.gpus_per_node
        tensor = limits.allowed("tensor", [n for n in powers if n <= min(per_node, model.num_attention_heads)])
        pipeline = limits.allowed("pipeline", [n for n in powers if n <= min(world, model.num_layers)])
        context = limits.allowed("context", [n for n in powers if n <= 16] if model.seq_length >= _LONG else [1])
        expert = limits.allowed("expert", [n for n in powers if n <= min(model.num_experts or 1, world)])
        micro = limits.allowed("micro", [1, 2, 4, 8])
        for t, p, c, e, b in itertools.product(tensor, pipeline, context, expert, micro):
            if world % (t * p * c) or (e > 1 and (world // p) % e):
                continue
            of_experts = [{"expert_tensor_parallel_size": n} for n in dict.fromkeys((1, t))] if e > 1 else [{}]
            ways = self._sharding(p), self._schedules(p), _RECOMPUTE, of_experts
            for sharing, schedule, again, experts in itertools.product(*ways):
                one = change(
                    **dict(zip(AXES.values(), (t, p, c, e, b), strict=True)),
                    sequence_parallel=t > 1,
                    **experts,
                    **sharing,
                    **schedule,
                    **again,
                )
                if not violations(*one.apply(config, world)):
                    yield one

    def _with_less_memory(self, one: Change) -> Iterator[Change]:
        """A layout with what it may move to the host or make in pieces, as the rules accept it."""
        for saver in _SAVERS:
            other = Change((*one.fields, *change(**saver).fields))
            if not violations(*other.apply(self._config, self._dry_run.world_size)):
                yield other

    def _sharding(self, stages: int) -> list[Mapping[str, Any]]:
        optim = {"data_parallel_sharding_strategy": "optim", "overlap_grad_reduce": True, "overlap_param_gather": True}
        whole = {"data_parallel_sharding_strategy": "optim_grads_params"}
        return [optim, whole] if stages == 1 else [optim]

    def _schedules(self, stages: int) -> list[Mapping[str, Any]]:
        if stages == 1:
            return [{}]
        along = {"overlap_p2p_communication": True}
        layers = self._config.model.num_layers
        virtual = [v for v in (2, 4, 8) if v * stages <= layers]
        return [
            {**along, "pipeline_schedule": "1f1b"},
            {**along, "pipeline_schedule": "zb-h1"},
            {**along, "pipeline_schedule": "zb-v"},
            *({**along, "pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": v} for v in virtual),
        ]

    def _estimate(self, one: Change) -> tuple[float, float] | None:
        """Seconds of a step and bytes of the fullest rank, roughly."""
        config, world = one.apply(self._config, self._dry_run.world_size)
        parallel, given = config.parallel, dict(one.fields)
        stages, tensor, context = (given[AXES[axis]] for axis in ("pipeline", "tensor", "context"))
        rough = self._rough_of(config, given)
        data = world // (stages * tensor * context)
        batch = config.training.global_batch_size or data
        number, rest = divmod(batch, data * config.training.micro_batch_size)
        if rough is None or rest or not number:
            return None
        virtual = parallel.num_virtual_stages_per_pipeline_rank or 1
        idle = (stages - 1) / (virtual * number) * _IDLE.get(parallel.schedule, 1.0)
        computing = rough.seconds * config.training.micro_batch_size * number / stages * (1 + idle)
        parameters = rough.parameters / stages
        whole = parallel.sharding == "optim_grads_params"
        sharers = data * context
        moments = 12 / sharers
        state = parameters * ((6 / sharers + 4 * rough.largest) if whole else 6)
        on_host = 0.0
        if config.optimizer.optimizer_cpu_offload:
            on_host += 2 * parameters * moments
        else:
            state += parameters * moments
        held = min(number, stages) * (1 + (stages - 1) / (stages * virtual) if virtual > 1 else 1) / stages
        kept = rough.kept * config.training.micro_batch_size
        if config.memory.offloads:
            on_host += max(0.0, 2 * kept * number / stages - computing * self._cluster.host_gb_s * 1e9)
            kept *= min(1.0, 2 * stages * virtual / config.model.num_layers)  # about two layers of a chunk are there
        activations = kept * held + rough.peak * config.training.micro_batch_size
        near = Ranks(sharers, max(1.0, min(sharers, self._dry_run.gpus_per_node / tensor)))
        rate = Durations(self._cluster).sending(1e9, 0, near) / 1e9
        # A reduction in float32 and a gather in 16 bits: once a step, or with each microbatch where nothing is kept.
        sent = parameters * (8 * number if whole else 6) * rate
        waiting = max(0.05 * sent, sent - 0.8 * computing) + on_host / (self._cluster.host_gb_s * 1e9)
        return computing + waiting, state + activations

    def _rough_of(self, config: Config, given: Mapping[str, Any]) -> _Rough | None:
        tensor, context, expert = (given[AXES[axis]] for axis in ("tensor", "context", "expert"))
        of_experts, memory = config.parallel.expert_tensor_size, config.memory
        key = tensor, context, expert, of_experts, memory.recompute, memory.loss_chunk_tokens
        if key not in self._rough:
            ranks = math.lcm(tensor * context, expert * of_experts)
            of_state = ("data_parallel_sharding_strategy", "overlap_grad_reduce", "overlap_param_gather", *_ON_HOST)
            of_stages = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "overlap_p2p_communication")
            sizes = {AXES["pipeline"]: 1, AXES["micro"]: 1, "global_batch_size": ranks // (tensor * context)}
            alone = without(config, *of_state, *of_stages, **sizes)
            job, _ = alone.apply(config, ranks)
            self._rough[key] = self._whole(job, ranks)
        return self._rough[key]

    def _whole(self, job: Config, ranks: int) -> _Rough | None:
        """One stage with the whole model, one sequence."""
        try:
            work = Planner(job, replace(self._dry_run, world_size=ranks), self._vocab_size, few=True).work()
        except ValueError:
            return None
        durations = Durations(self._cluster, COMPILED if job.speed.compile else OURS)
        seconds = spent_in(work, durations).total
        for ops in work.ops:
            for span in ops.values():
                seconds += sum(durations.sending(one.bytes, one.calls, _ranks(work.groups, one.over)) for one in span.sent) / 2
        forward = work.ops[0][OpKind.FORWARD]
        peak = max(span.peak for span in work.ops[0].values()) - forward.change if len(work.ops) == 1 else 0
        held = max(kind.parameters for kind in work.kinds)
        return _Rough(seconds, forward.change, max(peak, 0), held, min(1.0, 2 / job.model.num_layers))


@dataclass(frozen=True)
class _Rough:
    """What one sequence takes on ranks that hold all layers."""

    seconds: float
    kept: int
    """Bytes between forward and backward."""
    peak: int
    """The most bytes above them."""
    parameters: int
    """Elements that a rank computes with."""
    largest: float
    """Share of them that is gathered at once."""


def _ranks(groups: Mapping[str, tuple[int, float]], over: str) -> Ranks:
    return Ranks(*groups.get(over, (1, 1)))


def why_not(best: PlannedLayout, other: PlannedLayout) -> str:
    """What a layout loses to the best, and where: shares of the best's step."""
    lost = {
        name: other.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0) for name in {**best.time.parts, **other.time.parts}
    }
    total = other.time.seconds / best.time.seconds - 1
    parts = sorted(((seconds / best.time.seconds, name) for name, seconds in lost.items()), reverse=True)
    worse = ", ".join(f"{share:.1%} {name}" for share, name in parts[:3] if share >= 0.002)
    better = ", ".join(f"{-share:.1%} {name}" for share, name in parts[::-1][:2] if share <= -0.002)
    return f"takes {total:+.1%}: more of {worse or 'nothing'}" + (f"; less of {better}" if better else "")
