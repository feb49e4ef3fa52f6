"""Plan of a job and its JSON form: sizes of the job, memory and traffic of each distinct rank, FLOPs of a step, and pipeline idle
time."""

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
    count_flops_per_step,
    count_flops_per_token,
    count_fp8_flops,
    count_output_flops,
    count_recompute_flops,
)
from megatron.spec.operations import Schedule
from megatron_lab.planner.allowances import Allowance
from megatron_lab.planner.costs import compute_bubble_share
from megatron_lab.planner.state_layout import Bytes, StateMemory


@dataclass(frozen=True)
class Job:
    """Sizes and layout of the job for which a plan is made: ranks along each axis, nodes, batch, sharding and schedule."""

    world_size: int
    gpus_per_node: int
    nodes: int
    tensor: int
    context: int
    pipeline: int
    data: int
    """Number of data ranks. State is sharded over data and context ranks."""
    sequence_parallel: bool
    device: str
    dtype: str
    sharding: str
    schedule: str
    chunks_per_stage: int
    micro_batch_size: int
    global_batch_size: int
    """Sequences in a step, after any batch-size ramp-up."""
    num_microbatches: int
    """Microbatches of one data rank in a step."""
    seq_length: int
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True)
class RankMemory(StateMemory):
    """Memory of one rank by purpose: the model's state, the activations of a step, and CUDA's own memory."""

    activations: Bytes = field(default_factory=Bytes)
    """Activations at the peak of a step."""
    cuda: Bytes = field(default_factory=Bytes)
    """Estimate of CUDA's own memory: the sum of `RankProfile.allowances`. All other memory is exact to the byte."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step over one process group for one purpose.

    Collectives count as rings, in which each rank sends to the next rank. Two count as an all-to-all, in which each rank sends
    equally many bytes to each other rank: the token dispatch, and full matrices that an optimizer such as Muon exchanges.
    """

    over: str
    """Name of the process group over which the bytes are sent."""
    what: str
    """Purpose of the traffic, such as "gradients" or "activations"."""
    bytes: int
    group_size: int
    between_nodes: float
    """Fraction of the bytes that go to another node. It is a mean over all ranks with the same profile."""


@dataclass(frozen=True)
class RankRange:
    """Ranks of a stage with the same tensor rank and consecutive data ranks. A data rank counts data and context ranks together."""

    tensor: int
    data: range


@dataclass(frozen=True)
class RankProfile:
    """Set of ranks, on all of which memory and traffic are identical to the byte."""

    stages: tuple[int, ...]
    rank_ranges: tuple[RankRange, ...]
    """Ranks with this profile within each of `stages`: ranges of data ranks, each for one tensor rank."""
    first_rank: int
    parameters: int
    """Number of parameters with which the rank computes, without padding. With sharded parameters (FSDP), it includes those
    that other ranks store."""
    memory: RankMemory
    traffic: tuple[Traffic, ...]
    allowances: tuple[Allowance, ...] = ()
    """Estimates of CUDA's own memory on the rank; empty on CPUs."""
    offloaded_bytes: int = 0
    """Bytes of activations that the rank copies to host memory and back in a step."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks with this profile."""
        return len(self.stages) * sum(len(r.data) for r in self.rank_ranges)

    @property
    def intra_node_bytes(self) -> float:
        """Bytes that a rank sends in a step to ranks of its node, as a mean over the ranks of this profile."""
        return sum(entry.bytes * (1 - entry.between_nodes) for entry in self.traffic)

    @property
    def inter_node_bytes(self) -> float:
        """Bytes that a rank sends in a step to other nodes, as a mean over the ranks of this profile."""
        return sum(entry.bytes * entry.between_nodes for entry in self.traffic)

    def get_traffic_bytes(self, group: str, purpose: str) -> int:
        """Return the bytes that a rank sends in a step over one process group for one purpose."""
        return sum(entry.bytes for entry in self.traffic if (entry.over, entry.what) == (group, purpose))


@dataclass(frozen=True)
class StepFlops:
    """Tokens and FLOPs of one step, and the pipeline idle time."""

    tokens: int
    flops_per_token: int
    flops: float
    """FLOPs of forward and backward of the full model, over all ranks."""
    bubble_share: float
    """Share of a step's time in which ranks are idle in the pipeline, as a mean over all ranks. It is assumed that an operation
    takes time in proportion to its FLOPs, and that messages take no time."""
    recompute_flops: float = 0.0
    """FLOPs that recompute layers and logits in the backward, not included in `flops`."""
    fp8_flops: float = 0.0
    """FLOPs of the matrix products in FP8, which are included in `flops`."""

    def compute_flops_per_rank(self, world_size: int) -> float:
        """Return the mean FLOPs of one rank in a step."""
        return self.flops / world_size


@dataclass(frozen=True)
class ExpertsPlan:
    """Traffic of the token dispatch, and memory of ranks whose experts get more tokens than the mean."""

    num_layers: int
    """Number of layers of the model that have experts, including multi-token prediction layers."""
    dispatched_bytes: int | None
    """Bytes that a rank sends in a step to experts and back. The number is that of the pipeline stage with the largest traffic of
    this type. None if the expert group also carries other traffic, which cannot be separated."""
    dispatched_bytes_per_layer: int | None
    """`dispatched_bytes` divided by the number of layers with experts on that stage; None if `dispatched_bytes` is None."""
    imbalance: float | None
    """Value of --plan-expert-imbalance: token assignments to the experts of the busiest rank, as a multiple of the mean over
    the ranks. None if the flag is not set; the capacity of the experts, if any, then limits the assignments."""
    unbalanced_profiles: tuple[RankProfile, ...]
    """Memory and traffic of the ranks in the worst case, in which the experts of every rank get the number of token assignments of
    the busiest rank. The busiest rank gets `imbalance` times the mean over the ranks. Without --plan-expert-imbalance, it gets the
    number of assignments that the capacity of its experts accepts. Empty if neither the flag nor a capacity is set."""

    @property
    def fullest(self) -> RankProfile:
        """Profile of the ranks that need the most device memory, among the profiles in `unbalanced_profiles` (worst-case
        distribution of the tokens to the experts)."""
        return max(self.unbalanced_profiles, key=lambda profile: profile.memory.total.device)


@dataclass(frozen=True)
class Plan:
    """Predicted memory, traffic and FLOPs of a job."""

    job: Job
    layer_table: Sequence[Chunk]
    parameters: int
    """Number of parameters of the full model, each counted once."""
    active_parameters: int
    """Number of parameters that a token uses, including embedding rows; of the experts only those that the router selects."""
    parameters_by_stage: tuple[int, ...]
    """Number of parameters of each stage. A tied parameter counts only on the stage of its first model chunk."""
    profiles: tuple[RankProfile, ...]
    """Memory and traffic of all ranks. Each profile covers the ranks on which both are identical."""
    work: StepFlops
    notes: tuple[str, ...] = ()
    """Lines of text: assumptions on which the plan is based, and what its memory does not include."""
    advice: tuple[str, ...] = ()
    """Lines of text: settings that waste memory or time, with changes that would waste less."""
    device_memory: int | None = None
    """Bytes of a device's memory, or None if not known."""
    experts: ExpertsPlan | None = None
    """Traffic of the token dispatch, and memory if some experts get more tokens than the mean. None if the model has no
    experts."""

    def profile_at(self, stage: int, tensor: int, data: int) -> RankProfile:
        """Return memory and traffic of the rank at these coordinates.

        Args:
            data: rank among the data and context ranks.
        """
        profiles = (profile for profile in self.profiles if stage in profile.stages)
        return next(
            profile for profile in profiles if any(ranks.tensor == tensor and data in ranks.data for ranks in profile.rank_ranges)
        )

    @property
    def fullest_index(self) -> int:
        """Index in `profiles` of the ranks with the largest device memory."""
        return max(range(len(self.profiles)), key=lambda index: self.profiles[index].memory.total.device)


def count_step_flops(
    model: ModelConfig,
    vocab_size: int,
    table: Sequence[Chunk],
    schedule: Schedule,
    global_batch_size: int,
    *,
    recomputes_logits: bool = False,
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
) -> StepFlops:
    """Count tokens and FLOPs of a step of `global_batch_size` sequences, each of which is one document. Also simulate the pipeline
    idle time.

    Args:
        table: model chunks, with the stage and the layers of each.
        recomputes_logits: whether the backward computes the logits again.
        precision: settings that decide which layers compute in FP8.
    """
    recompute_flops = sum(count_recompute_flops(model, segment) for chunk in table for segment in chunk.segments)
    return StepFlops(
        tokens=model.seq_length * global_batch_size,
        flops_per_token=count_flops_per_token(model, vocab_size),
        flops=count_flops_per_step(model, vocab_size, global_batch_size),
        fp8_flops=model.seq_length * global_batch_size * count_fp8_flops(model, precision),
        bubble_share=compute_bubble_share(model, vocab_size, table, schedule, recomputes_logits=recomputes_logits),
        recompute_flops=model.seq_length
        * global_batch_size
        * (recompute_flops + recomputes_logits * count_output_flops(model, vocab_size)),
    )


def plan_to_json(plan: Plan, time: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the full plan as dictionaries, lists, strings and numbers, for a JSON file.

    Args:
        time: result of `StepTime.to_json`: predicted time of a step. None if no time is predicted.
    """
    fullest = plan.profiles[plan.fullest_index]
    return {
        "job": asdict(plan.job),
        "device_bytes": fullest.memory.total.device,
        "host_bytes": max(profile.memory.total.host for profile in plan.profiles),
        "fullest": plan.fullest_index,
        "model": {
            "parameters": plan.parameters,
            "active_parameters": plan.active_parameters,
            "parameters_by_stage": list(plan.parameters_by_stage),
        },
        "tokens_per_step": plan.work.tokens,
        "flops": {
            "per_token": plan.work.flops_per_token,
            "per_step": plan.work.flops,
            "per_step_in_8_bits": plan.work.fp8_flops,
            "per_rank": plan.work.compute_flops_per_rank(plan.job.world_size),
            "computed_again_per_step": plan.work.recompute_flops,
        },
        "pipeline": {"bubble_share": plan.work.bubble_share},
        "experts": None if plan.experts is None else _experts_to_json(plan.experts),
        "links": _links_to_json(max(plan.profiles, key=lambda profile: profile.intra_node_bytes + profile.inter_node_bytes)),
        "layers": [
            {
                "chunk": chunk.index,
                "stage": chunk.stage,
                "first_layer": chunk.layers.start if len(chunk.layers) else None,
                "num_layers": len(chunk.layers),
                "embedding": chunk.is_first,
                "loss": chunk.is_last,
            }
            for chunk in plan.layer_table
        ],
        "time": time,
        "kinds": [_profile_to_json(profile) for profile in plan.profiles],
        "notes": list(plan.notes),
        "advice": list(plan.advice),
    }


def write_plan(plan: Plan, path: str, time: Mapping[str, Any] | None = None) -> None:
    """Write a plan to a JSON file. Missing folders are created.

    Args:
        time: result of `StepTime.to_json`, which is written with the plan. None if no time is predicted.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w") as file:
            json.dump(plan_to_json(plan, time), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise ValueError(
            f"--dry-run-json {path} cannot be written: {(error.strerror or str(error)).lower()}. Choose another path."
        ) from error


def _profile_to_json(profile: RankProfile) -> dict[str, Any]:
    return {
        "stages": list(profile.stages),
        "tensor": sorted({r.tensor for r in profile.rank_ranges}),
        "places": [{"tensor": r.tensor, "data": [r.data.start, r.data.stop]} for r in profile.rank_ranges],
        "ranks": profile.num_ranks,
        "first_rank": profile.first_rank,
        "parameters": profile.parameters,
        "memory": asdict(profile.memory),
        "allowances": [asdict(allowance) for allowance in profile.allowances],
        "device_bytes": profile.memory.total.device,
        "host_bytes": profile.memory.total.host,
        "sent": [asdict(traffic) for traffic in profile.traffic],
        "activations_to_host_bytes": profile.offloaded_bytes,
        "links": _links_to_json(profile),
    }


def _experts_to_json(experts: ExpertsPlan) -> dict[str, Any]:
    fullest = experts.fullest if experts.unbalanced_profiles else None
    return {
        "layers": experts.num_layers,
        "dispatched_bytes": experts.dispatched_bytes,
        "dispatched_bytes_a_layer": experts.dispatched_bytes_per_layer,
        "imbalance": experts.imbalance,
        "unbalanced_device_bytes": None if fullest is None else fullest.memory.total.device,
        "unbalanced_activation_bytes": None if fullest is None else fullest.memory.activations.device,
    }


def _links_to_json(profile: RankProfile) -> dict[str, float]:
    return {"inside_bytes": profile.intra_node_bytes, "between_bytes": profile.inter_node_bytes}
