"""How long a step takes: the schedule is played with the times of its operations, and what comes at its end is added.

All of it comes from what a plan has run on tensors without memory (`Planner.work`): products by their shapes on one rank,
attention, bytes through memory, collectives with their bytes and groups. `durations.py` gives each its time on a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron.config.config import Config
from megatron.config.extras import is_missing
from megatron.config.given import DryRun
from megatron.pipeline_parallel.simulate import Timeline, simulate
from megatron.spec.counts import flops_per_step
from megatron.spec.operations import Op, OpKind
from megatron_lab.planner.chunk_trace import Traces
from megatron_lab.planner.cluster import DEFAULT, Cluster, load_cluster, shipped_name
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import COMPILED, OURS, Durations, Ranks, Spent, Stack, added
from megatron_lab.planner.plan import RankKind
from megatron_lab.planner.state_layout import Bytes, StateMemory
from megatron_lab.planner.step_work import StepWork

_SURE = 1.645
"""Standard deviations on each side that hold 90 % of a normal distribution."""
_LAYERS_AHEAD = 0.03
"""The share of a chunk's gathers and reductions that nothing can hide: those of its first and last layer."""


@dataclass(frozen=True)
class StepTime:
    """A prediction."""

    parts: Mapping[str, float]
    """Seconds of the busiest rank by what they are spent on; together the step."""
    tokens: int
    """Tokens of a step, over all ranks."""
    flops: float
    """Model FLOPs of a step."""
    world_size: int
    peak: float
    """Peak of one device, in FLOP/s and the model's dtype."""
    device_bytes: int
    """Memory of the fullest rank."""
    spread: float
    """Standard deviation of the logarithm of measured over predicted time."""
    cluster: str
    """Its name."""
    outside: tuple[str, ...] = ()
    """Sizes of the layout beyond those of the runs that the cluster's constants were fitted to: there the range is too narrow."""

    @cached_property
    def seconds(self) -> float:
        """The step."""
        return sum(self.parts.values())

    @property
    def low(self) -> float:
        """In one of 20 cases it takes less."""
        return self.seconds * math.exp(-_SURE * self.spread)

    @property
    def high(self) -> float:
        """In one of 20 cases it takes more."""
        return self.seconds * math.exp(_SURE * self.spread)

    def shares(self) -> list[tuple[str, float]]:
        """Parts with what they take of the step, the longest first, without those below 0.3 %."""
        found = ((name, seconds / self.seconds) for name, seconds in self.parts.items())
        return sorted(((name, share) for name, share in found if share >= 0.003), key=lambda each: -each[1])

    def to_json(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {
            "cluster": self.cluster,
            "seconds": self.seconds,
            "low": self.low,
            "high": self.high,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "mfu": self.mfu,
            "device_bytes": self.device_bytes,
            "outside": list(self.outside),
            "parts": dict(self.parts),
        }

    @property
    def tokens_per_s(self) -> float:
        """Tokens that each device works off in a second."""
        return self.tokens / self.seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOPs that the model needs over what the devices could do at their peak."""
        return self.flops / self.seconds / self.world_size / self.peak


def predict(
    config: Config,
    dry_run: DryRun,
    vocab_size: int,
    cluster: Cluster,
    stack: Stack | None = None,
    traces: Traces | None = None,
) -> StepTime:
    """How long a step takes.

    Args:
        config: settings that `load` accepted for this number of ranks.
        vocab_size: rows of the word embedding, without padding.
        stack: software other than ours.
        traces: those made before for jobs whose chunks do the same (`Planner`).

    Raises:
        ValueError: the layout is impossible, or a step has too many operations to be laid out.
    """
    work = Planner(config, dry_run, vocab_size, few=True, traces=traces).work()
    return time_of(work, config, dry_run, vocab_size, cluster, stack)


def time_of(
    work: StepWork, config: Config, dry_run: DryRun, vocab_size: int, cluster: Cluster, stack: Stack | None = None
) -> StepTime:
    """See `predict`."""
    stack = stack or (COMPILED if config.speed.compile else OURS)
    sequences = num_sequences(work, config, dry_run)
    return StepTime(
        dict(_Step(work, config, dry_run, cluster, stack).parts()),
        sequences * config.model.seq_length,
        flops_per_step(config.model, vocab_size, sequences),
        dry_run.world_size,
        cluster.peak(dtype_of(config)),
        max(kind.memory.total.device for kind in work.kinds),
        cluster.spread,
        cluster.name,
        tuple(_outside(config, dry_run, cluster)),
    )


def _outside(config: Config, dry_run: DryRun, cluster: Cluster) -> Iterator[str]:
    parallel = config.parallel
    sizes = {
        "ranks": dry_run.world_size,
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "expert": parallel.expert_model_parallel_size,
    }
    for name, most in cluster.calibrated.items():
        if sizes[name] > most:
            yield f"{sizes[name]} {name}{'' if name == 'ranks' else ' ranks'} (calibrated to {most:g})"


def cluster_of(config: Config) -> Cluster | None:
    """Return the cluster whose times a plan reports (see `cluster_name_of`); None for CPUs.

    Raises:
        ConfigError: there is no such cluster, or the file does not describe one.
    """
    name = cluster_name_of(config)
    return None if name is None else load_cluster(name)


def cluster_name_of(config: Config) -> str | None:
    """Return the name of the cluster whose times a plan reports: that of --plan-cluster, else that of this machine's GPU, else
    H100. None for CPUs, which differ too much, and where PyYAML is missing, which reads their files."""
    if config.logging.plan_cluster is not None or config.parallel.device == "cpu" or is_missing("yaml"):
        return config.logging.plan_cluster
    return (shipped_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None) or DEFAULT


def num_sequences(work: StepWork, config: Config, dry_run: DryRun) -> int:
    """Sequences of a step."""
    parallel = config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    return work.num_microbatches * config.training.micro_batch_size * (dry_run.world_size // ranks)


def dtype_of(config: Config) -> str:
    """The model's dtype, as the table of devices names it."""
    precision = config.precision
    return next(
        (name for name, on in (("bfloat16", precision.bf16), ("float16", precision.fp16), ("float64", precision.fp64)) if on),
        "float32",
    )


@dataclass(frozen=True)
class _OpTime:
    """The time of an operation on one microbatch."""

    spent: Spent
    of_layers: Mapping[str, float]
    """Waiting for what its layers send, by group."""
    of_state: float
    """Waiting for parameters that are gathered and gradients that are reduced beside it."""

    @property
    def total(self) -> float:
        return self.spent.total + sum(self.of_layers.values()) + self.of_state


class _Step:
    def __init__(self, work: StepWork, config: Config, dry_run: DryRun, cluster: Cluster, stack: Stack) -> None:
        self._work, self._config, self._cluster = work, config, cluster
        self._crowd = max(1.0, min(dry_run.world_size, dry_run.gpus_per_node) / (cluster.shared_by or math.inf))
        self._durations = Durations(cluster, stack)
        self._hidden = min(1.0, cluster.hidden * stack.hidden)
        self._rings = {name: Ranks(*each) for name, each in work.groups.items()}
        self._kind_of_stage = {stage: kind for kind in work.kinds for stage in kind.stages}
        self._by_layers = config.parallel.sharding == "optim_grads_params"

    def parts(self) -> Iterator[tuple[str, float]]:
        """What a step's time is spent on, by the rank that is the last to finish."""
        work, schedule = self._work, self._work.schedule
        times = {(chunk, kind): self._op(chunk, kind) for chunk, ops in enumerate(work.ops) for kind in ops}
        self._times = times
        between = any(work.crossings[:-1]) if schedule.num_stages > 1 else False
        message = self._durations.message(work.message, between_nodes=between)
        sent = message * (1 - self._hidden if self._config.parallel.overlap_p2p_communication else 1.0)
        line = simulate(schedule, self._duration, p2p=message)
        extra = work.num_microbatches - schedule.num_microbatches
        busy = line.busy
        longest = max(range(len(busy)), key=lambda stage: busy[stage])
        microbatches = schedule.num_microbatches
        whole = line.step_time + extra * busy[longest] / microbatches
        mine: dict[str, float] = {}
        for span in line.spans[longest]:
            for name, seconds in self._named(span.op):
                mine[name] = mine.get(name, 0.0) + seconds
        scale = work.num_microbatches / microbatches
        # Sending costs the stages a little also where it is hidden; it stands with the messages.
        messages = sent * 2 * work.num_microbatches * (len(work.ops) // schedule.num_stages) if schedule.num_stages > 1 else 0.0
        if self._crowd > 1:  # while one waits, others that share its cores go on: what counts is the work of all together
            scale *= self._crowd * sum(busy) / len(busy) / busy[longest]
        computing = sum(mine.values()) * scale
        yield from ((name, seconds * scale) for name, seconds in mine.items())
        yield "messages", messages
        yield "moves to the host", self._moves(longest, computing)
        yield "pipeline idle", max(0.0, whole - computing)
        yield from ((name, seconds * self._crowd) for name, seconds in self._at_the_end(line, longest))
        yield "other", self._cluster.step_ms * 1e-3

    def _named(self, op: Op) -> Iterator[tuple[str, float]]:
        time = self._times[op.chunk, op.kind]
        name = "recompute" if op.kind is OpKind.RECOMPUTE else ""
        for part, seconds in zip(Spent._fields, time.spent, strict=True):
            yield name or part, seconds
        for group, seconds in time.of_layers.items():
            yield f"{group} ranks", seconds
        yield "sharded state", time.of_state

    def _duration(self, op: Op) -> float:
        return self._times[op.chunk, op.kind].total

    def _op(self, chunk: int, kind: OpKind) -> _OpTime:
        span = self._work.ops[chunk][kind]
        spent = self._durations.of(span.work, fresh=span.peak)
        hidden_by = 0.0
        if kind is not OpKind.FORWARD:
            # Backward gathers its input while it makes the input's gradient, and sends that while it makes the weights'.
            hidden_by = self._hidden * spent.products / 2
        of_layers: dict[str, float] = {}
        for one in span.sent:
            seconds = self._durations.sending(one.bytes, one.calls, self._ring(one.over), one.operation)
            if one.over == "cp":  # the next keys and values come while attention works on those that are there
                hidden_by = max(hidden_by, self._hidden * (spent.attention + spent.products / 2))
            elif one.over == "tp" and self._config.parallel.tp_comm_overlap:
                hidden_by = self._hidden * spent.products
            shown = max(0.0, seconds - hidden_by) if one.over in ("tp", "cp") else seconds
            hidden_by = max(0.0, hidden_by - seconds)
            of_layers[one.over] = of_layers.get(one.over, 0.0) + shown
        return _OpTime(spent, of_layers, self._of_state(chunk, kind, spent.total + sum(of_layers.values())))

    def _ring(self, over: str) -> Ranks:
        return self._rings.get(over, Ranks(1, 1))

    def _of_state(self, chunk: int, kind: OpKind, computing: float) -> float:
        """Waiting within an operation for parameters and gradients that are sent with each microbatch."""
        parallel = self._config.parallel
        if not self._by_layers and parallel.sharding != "optim_grads":
            return 0.0
        stage = self._work.schedule.stage_of_chunk[chunk]
        chunks = len(self._work.ops) // self._work.schedule.num_stages
        ops = chunks * self._work.num_microbatches
        sent = 0.0
        if kind is OpKind.FORWARD and self._by_layers:
            sent = self._state(stage, "parameters") / ops / 2
        elif kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD):
            sent = self._state(stage, "gradients") / ops
            if self._by_layers:
                sent += self._state(stage, "parameters") / ops / 2
            else:
                sent /= self._work.share
        return max(0.0, sent * (1 - _LAYERS_AHEAD) - self._hidden * computing) + _LAYERS_AHEAD * sent

    def _state(self, stage: int, what: str) -> float:
        """Seconds in which a rank of a stage sends gradients, or parameters, in a step."""
        kind, sharding = self._kind(stage), self._config.parallel.sharding
        operation = "all-gather" if what == "parameters" else "all-reduce" if sharding == "no_shard" else "reduce-scatter"
        return sum(
            self._durations.sending(one.bytes, self._buckets(one.bytes), self._ring(one.over), operation)
            for one in kind.sent
            if one.what == what
        )

    def _kind(self, stage: int) -> RankKind:
        return self._kind_of_stage.get(stage) or self._work.kinds[-1]

    def _buckets(self, num_bytes: int) -> float:
        """Collectives for so many bytes."""
        return max(1.0, num_bytes / 2e8)

    def _at_the_end(self, line: Timeline, stage: int) -> Iterator[tuple[str, float]]:
        """What follows the last backward."""
        parallel, kind = self._config.parallel, self._kind(stage)
        if not self._by_layers:
            gradients, parameters = self._state(stage, "gradients"), self._state(stage, "parameters")
            if parallel.sharding == "optim_grads":
                gradients = 0.0
            backward = sum(
                self._times[chunk, op].total
                for chunk, ops in enumerate(self._work.ops)
                for op in ops
                if self._work.schedule.stage_of_chunk[chunk] == stage and op in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
            )
            forward = sum(
                self._times[chunk, OpKind.FORWARD].total
                for chunk in range(len(self._work.ops))
                if self._work.schedule.stage_of_chunk[chunk] == stage
            )
            yield "gradients", self._shown(gradients, backward, parallel.overlap_grad_reduce)
            yield "parameters", self._shown(parameters, forward, parallel.overlap_param_gather)
        moved = updated_bytes(kind.memory)
        yield "optimizer", self._durations.update(moved.device) + self._to_host(moved.host)
        world = [one for one in kind.sent if one.over == "world"]
        yield "numbers", sum(self._durations.sending(one.bytes, 1, self._ring("world")) for one in world)

    def _moves(self, stage: int, computing: float) -> float:
        """Seconds in which a rank of a stage waits for the host's memory within the microbatches of a step: for activations that
        computing does not hide, and for parameters that lie there, whose gradients go back."""
        kind, parallel, microbatches = self._kind(stage), self._config.parallel, self._work.num_microbatches
        activations = 2 * kind.to_host / self._work.share
        crossings = 2 * microbatches if parallel.fsdp_reshard_after_forward == "always" else 1
        crossings += 1 if parallel.fsdp_reduce_once else microbatches
        return max(0.0, self._to_host(activations) - self._hidden * computing) + self._to_host(
            kind.memory.parameters.host * crossings
        )

    def _to_host(self, num_bytes: float) -> float:
        return num_bytes / (self._cluster.host_gb_s * 1e9)

    def _shown(self, seconds: float, beside: float, overlaps: bool) -> float:
        """The part of sending that computing does not hide."""
        return seconds if not overlaps else max(0.05 * seconds, seconds - self._hidden * beside)


def updated_bytes(memory: StateMemory) -> Bytes:
    """What the optimizer's step reads and writes: each number of the state once, and gradients once more for their norm."""
    state = [memory.main_params, memory.moments, memory.averages, memory.parameters, memory.gradients]
    device, host = sum(one.device for one in state), sum(one.host for one in state)
    return Bytes(2 * device + memory.gradients.device, 2 * host)


def spent_in(work: StepWork, durations: Durations) -> Spent:
    """All operations of one microbatch, over all chunks."""
    return added(durations.of(span.work) for ops in work.ops for span in ops.values())
