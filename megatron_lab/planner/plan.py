"""A plan as data and as JSON: the job, each distinct kind of rank, what a step sends over which links, work, idle time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.counts import (
    flops_in_8_bits,
    flops_per_step,
    flops_per_token,
    output_flops,
    recompute_flops,
)
from megatron.spec.operations import Schedule
from megatron_lab.planner.allowances import Allowance
from megatron_lab.planner.costs import idle_share
from megatron_lab.planner.state_layout import Bytes, StateMemory


@dataclass(frozen=True)
class Job:
    """Sizes that everything else follows from."""

    world_size: int
    gpus_per_node: int
    nodes: int
    tensor: int
    context: int
    pipeline: int
    data: int
    """Data ranks; with the context ranks of each they share the state."""
    sequence_parallel: bool
    device: str
    dtype: str
    sharding: str
    schedule: str
    chunks_per_stage: int
    micro_batch_size: int
    global_batch_size: int
    """Sequences in a step, after any ramp-up."""
    num_microbatches: int
    """Microbatches of one data rank in a step."""
    seq_length: int
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True)
class RankMemory(StateMemory):
    """Memory of one rank, by purpose: the model's state, what a step adds, and what CUDA takes."""

    activations: Bytes = field(default_factory=Bytes)
    """Activations at the peak of the schedule."""
    cuda: Bytes = field(default_factory=Bytes)
    """What CUDA takes for itself, an estimate: the sum of `RankKind.allowances`. All other parts are exact to the byte."""


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step over one group, counted as in a ring: each rank sends to the next in the order of ranks; but
    tokens on their way to experts and whole matrices go to all alike."""

    over: str
    """The group."""
    what: str
    bytes: int
    group_size: int
    between_nodes: float
    """The share of it that goes to another node, over all ranks of the kind."""


@dataclass(frozen=True)
class Places:
    """Ranks of one stage: one tensor rank, several data ranks."""

    tensor: int
    data: range


@dataclass(frozen=True)
class RankKind:
    """Ranks that are alike to the byte."""

    stages: tuple[int, ...]
    places: tuple[Places, ...]
    """The ranks of this kind, in each of the stages."""
    first_rank: int
    parameters: int
    """Elements of the model that such a rank computes with, without padding, however few of them it keeps."""
    memory: RankMemory
    sent: tuple[Traffic, ...]
    allowances: tuple[Allowance, ...] = ()
    """What CUDA takes for itself on such a rank; empty on the CPU."""
    to_host: int = 0
    """Bytes of activations that such a rank moves to the host in a step, and back."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.stages) * sum(len(places.data) for places in self.places)

    @property
    def inside_bytes(self) -> float:
        """Bytes that a rank sends in a step inside its node, on average."""
        return sum(one.bytes * (1 - one.between_nodes) for one in self.sent)

    @property
    def between_bytes(self) -> float:
        """Bytes that a rank sends in a step to other nodes, on average."""
        return sum(one.bytes * one.between_nodes for one in self.sent)

    def sent_over(self, over: str, what: str) -> int:
        """Bytes for one purpose over one group."""
        return sum(one.bytes for one in self.sent if (one.over, one.what) == (over, what))


@dataclass(frozen=True)
class Work:
    """The work of one step, and how long ranks wait in it."""

    tokens: int
    flops_per_token: int
    flops: float
    """FLOPs of forward and backward of the whole model."""
    bubble: float
    """The share of all ranks' time in which they wait in the pipeline, if time is FLOPs and messages take none."""
    again: float = 0.0
    """FLOPs beside `flops` that compute layers and logits again in backward."""
    in_8_bits: float = 0.0
    """Those of `flops` that are done in 8 bits."""

    def flops_per_rank(self, world_size: int) -> float:
        """FLOPs of one rank in a step, on average."""
        return self.flops / world_size


@dataclass(frozen=True)
class ExpertsPlan:
    """What tokens travel to experts, and the memory of ranks whose experts get more of them."""

    layers: int
    """Those with experts."""
    dispatched: int | None
    """Bytes that a rank sends in a step to and from ranks of experts, on the stage with most; None where the group of these ranks
    serves other purposes too, of which they are not told apart."""
    dispatched_a_layer: int | None
    """The same of one layer there."""
    factor: float | None
    """How many times the mean of choices the experts of the busiest rank are taken to get; None: as many as their capacity."""
    unbalanced: tuple[RankKind, ...]
    """Kinds of ranks where the experts of each get so many; empty where nothing was asked and no capacity bounds it."""

    @property
    def fullest(self) -> RankKind:
        """The one of these that takes most of its device."""
        return max(self.unbalanced, key=lambda kind: kind.memory.total.device)


@dataclass(frozen=True)
class Plan:
    """What a job will take."""

    job: Job
    layers: Sequence[Chunk]
    parameters: int
    """Elements of the whole model, each counted once."""
    active_parameters: int
    """Those that a token is multiplied with or looks up: of experts the chosen ones."""
    parameters_by_stage: tuple[int, ...]
    """The same by stage; a tied parameter counts on the stage of its first chunk."""
    kinds: tuple[RankKind, ...]
    """Every rank is of one of them."""
    work: Work
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""
    advice: tuple[str, ...] = ()
    """Lines that say what would waste less."""
    limit: int | None = None
    """Bytes of a device's memory, if that is known."""
    experts: ExpertsPlan | None = None
    """None where the model has none."""

    def kind_at(self, stage: int, tensor: int, data: int) -> RankKind:
        """The kind of the rank at this pipeline stage, tensor rank and data rank."""
        found = (kind for kind in self.kinds if stage in kind.stages)
        return next(kind for kind in found if any(at.tensor == tensor and data in at.data for at in kind.places))

    @property
    def fullest(self) -> int:
        """Index of the kind that keeps most on its device."""
        return max(range(len(self.kinds)), key=lambda index: self.kinds[index].memory.total.device)


def step_work(
    model: ModelConfig,
    vocab_size: int,
    table: Sequence[Chunk],
    schedule: Schedule,
    global_batch_size: int,
    *,
    loss_again: bool = False,
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
) -> Work:
    """The work of a step of `global_batch_size` sequences, each of them one document.

    Args:
        precision: which layers compute in 8 bits.
        loss_again: backward computes the logits again.
    """
    again = sum(recompute_flops(model, segment) for chunk in table for segment in chunk.segments)
    return Work(
        tokens=model.seq_length * global_batch_size,
        flops_per_token=flops_per_token(model, vocab_size),
        flops=flops_per_step(model, vocab_size, global_batch_size),
        in_8_bits=model.seq_length * global_batch_size * flops_in_8_bits(model, precision),
        bubble=idle_share(model, vocab_size, table, schedule, loss_again=loss_again),
        again=model.seq_length * global_batch_size * (again + loss_again * output_flops(model, vocab_size)),
    )


def plan_to_json(plan: Plan, time: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The whole plan in types that JSON has, with the time of a step where it is predicted."""
    fullest = plan.kinds[plan.fullest]
    return {
        "job": asdict(plan.job),
        "device_bytes": fullest.memory.total.device,
        "host_bytes": max(kind.memory.total.host for kind in plan.kinds),
        "fullest": plan.fullest,
        "model": {
            "parameters": plan.parameters,
            "active_parameters": plan.active_parameters,
            "parameters_by_stage": list(plan.parameters_by_stage),
        },
        "tokens_per_step": plan.work.tokens,
        "flops": {
            "per_token": plan.work.flops_per_token,
            "per_step": plan.work.flops,
            "per_step_in_8_bits": plan.work.in_8_bits,
            "per_rank": plan.work.flops_per_rank(plan.job.world_size),
            "computed_again_per_step": plan.work.again,
        },
        "pipeline": {"bubble_share": plan.work.bubble},
        "experts": None if plan.experts is None else _experts(plan.experts),
        "links": _links(max(plan.kinds, key=lambda kind: kind.inside_bytes + kind.between_bytes)),
        "layers": [
            {
                "chunk": chunk.index,
                "stage": chunk.stage,
                "first_layer": chunk.layers.start if len(chunk.layers) else None,
                "num_layers": len(chunk.layers),
                "embedding": chunk.first,
                "loss": chunk.last,
            }
            for chunk in plan.layers
        ],
        "time": time,
        "kinds": [_kind(kind) for kind in plan.kinds],
        "notes": list(plan.notes),
        "advice": list(plan.advice),
    }


def write_plan(plan: Plan, path: str, time: Mapping[str, Any] | None = None) -> None:
    """Write a plan to a JSON file. Missing folders are made.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w") as file:
            json.dump(plan_to_json(plan, time), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise ValueError(f"--dry-run-json {path} cannot be written: {(error.strerror or str(error)).lower()}.") from error


def _kind(kind: RankKind) -> dict[str, Any]:
    return {
        "stages": list(kind.stages),
        "tensor": sorted({places.tensor for places in kind.places}),
        "places": [{"tensor": at.tensor, "data": [at.data.start, at.data.stop]} for at in kind.places],
        "ranks": kind.ranks,
        "first_rank": kind.first_rank,
        "parameters": kind.parameters,
        "memory": asdict(kind.memory),
        "allowances": [asdict(one) for one in kind.allowances],
        "device_bytes": kind.memory.total.device,
        "host_bytes": kind.memory.total.host,
        "sent": [asdict(one) for one in kind.sent],
        "activations_to_host_bytes": kind.to_host,
        "links": _links(kind),
    }


def _experts(experts: ExpertsPlan) -> dict[str, Any]:
    worst = experts.fullest if experts.unbalanced else None
    return {
        "layers": experts.layers,
        "dispatched_bytes": experts.dispatched,
        "dispatched_bytes_a_layer": experts.dispatched_a_layer,
        "imbalance": experts.factor,
        "unbalanced_device_bytes": None if worst is None else worst.memory.total.device,
        "unbalanced_activation_bytes": None if worst is None else worst.memory.activations.device,
    }


def _links(kind: RankKind) -> dict[str, float]:
    return {"inside_bytes": kind.inside_bytes, "between_bytes": kind.between_bytes}
