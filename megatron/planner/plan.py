"""What a dry run tells, as data: the job, each distinct kind of rank, what a step sends over which links, idle time, work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.data_parallel.state_layout import Bytes
from megatron.pipeline_parallel.partition import Chunk


@dataclass(frozen=True)
class Job:
    """Sizes that everything else follows from."""

    world_size: int
    gpus_per_node: int
    nodes: int
    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool
    device: str
    dtype: str
    sharding: str
    schedule: str
    chunks_per_stage: int
    micro_batch_size: int
    global_batch_size: int
    """After any ramp-up."""
    num_microbatches: int
    """Of a data rank in a step."""
    seq_length: int
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True)
class RankMemory:
    """Of one rank, by what it is for."""

    parameters: Bytes
    gradients: Bytes
    main_params: Bytes
    """Those that are not the parameters themselves."""
    moments: Bytes
    buffers: Bytes
    """What of parameters and gradients only passes through, at most."""
    activations: Bytes
    """At the peak of the schedule."""

    @property
    def total(self) -> Bytes:
        """All together."""
        return sum((getattr(self, part.name) for part in fields(self)), Bytes())


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step over one group, counted as in a ring: each to the next of the group, in the order of ranks."""

    over: str
    """The group."""
    what: str
    bytes: int
    group_size: int
    between_nodes: float
    """Share of it that goes to another node, over all ranks of the kind."""


@dataclass(frozen=True)
class Places:
    """Ranks of a stage: one tensor rank of some data ranks."""

    tensor: int
    data: range


@dataclass(frozen=True)
class Kind:
    """Ranks that are alike to the byte."""

    stages: tuple[int, ...]
    places: tuple[Places, ...]
    """Of each of these stages."""
    first_rank: int
    parameters: int
    """Elements of the model that such a rank computes with, without padding; whatever of them it keeps."""
    memory: RankMemory
    sent: tuple[Traffic, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.stages) * sum(len(places.data) for places in self.places)

    @property
    def inside_bytes(self) -> float:
        """Sent in a step inside the node, on average."""
        return sum(one.bytes * (1 - one.between_nodes) for one in self.sent)

    @property
    def between_bytes(self) -> float:
        """Sent in a step to other nodes, on average."""
        return sum(one.bytes * one.between_nodes for one in self.sent)

    def sent_over(self, over: str, what: str) -> int:
        """Bytes for one purpose over one group."""
        return sum(one.bytes for one in self.sent if (one.over, one.what) == (over, what))

    def holds(self, stage: int, tensor: int, data: int) -> bool:
        """Whether the rank at these coordinates is of this kind."""
        return stage in self.stages and any(places.tensor == tensor and data in places.data for places in self.places)


@dataclass(frozen=True)
class Work:
    """Of one step."""

    tokens: int
    flops_per_token: int
    flops: float
    """Forward and backward, of the whole model."""
    bubble: float
    """Share of all ranks' time in which they wait in the pipeline, if time is FLOPs and messages take none."""

    def flops_per_rank(self, world_size: int) -> float:
        """On average."""
        return self.flops / world_size


@dataclass(frozen=True)
class Plan:
    """A job on paper."""

    job: Job
    layers: Sequence[Chunk]
    parameters: int
    """Of the model, each once."""
    parameters_by_stage: tuple[int, ...]
    """Each once, a tied one on the stage of its first chunk."""
    kinds: tuple[Kind, ...]
    """Every rank is of one of them."""
    work: Work
    notes: tuple[str, ...] = ()
    """What the numbers assume."""
    advice: tuple[str, ...] = ()
    """What would waste less."""

    @property
    def fullest(self) -> int:
        """Index of the kind with most on the device."""
        return max(range(len(self.kinds)), key=lambda index: self.kinds[index].memory.total.device)
