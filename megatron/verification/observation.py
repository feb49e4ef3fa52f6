"""What is seen of a run at a layout and of the plain reference: data only, so that whoever compares needs neither.

Names of parameters are the global ones of their records, values are float64. Shapes: `B` samples of a global batch, `s` sequence,
`h` hidden size, `b` samples of a microbatch, `M` microbatches of a global batch over all data ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.data.samples import DocumentRules
from megatron.pipeline_parallel.partition import Chunk
from megatron.verification.random_samples import RandomSamples

EVALUATED_BATCHES = 2
"""Held-out batches of an evaluation: of one alone, nobody sees how several are averaged or whether they are the same."""
EVALUATED_STEPS = 4
"""Steps at the start of a run that an evaluation follows: it costs as much as a step."""


@dataclass(frozen=True)
class ProofTask:
    """What both runs are told."""

    config: Config
    vocab_size: int
    """Rows of the word embedding."""
    rules: DocumentRules
    start: dict[str, Tensor]
    """Weights to begin with."""
    samples: RandomSamples
    held_out: RandomSamples
    """Samples to evaluate on: the first of them, as many as the held-out batches have."""
    data_size: int
    """Data ranks: with the micro-batch size they make the default batch, and number the microbatches."""
    most_steps: int | None
    """Iterations at most; None for the whole run."""


@dataclass(frozen=True)
class TensorPart:
    """A box of a named global tensor, as one rank holds it. Padding is left out."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    values: Tensor
    """The elements of the box."""

    def __reduce__(self) -> tuple[Callable[..., TensorPart], tuple[Any, ...]]:
        """It travels as an array: a tensor takes longer to send to another process."""
        return _part, (self.name, self.offsets, self.shape, self.values.numpy())


def _part(name: str, offsets: tuple[int, ...], shape: tuple[int, ...], array: Any) -> TensorPart:
    return TensorPart(name, offsets, shape, torch.from_numpy(array))


@dataclass(frozen=True)
class CountedSquare:
    """What one shard of this rank adds to the square of the global norm."""

    name: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Offsets and sizes of the elements of the whole tensor that it counts."""
    square: float
    """The sum of the squares of the unscaled gradient."""


@dataclass(frozen=True)
class RankStep:
    """One training step as one rank saw it."""

    iteration: int
    """Counted from 1; those that --iterations-to-skip leaves out make no step."""
    loss: float
    """Global mean, as every rank reports it."""
    grad_norm: float
    """Global, before clipping, as every rank reports it."""
    skipped: bool
    """No update was made, because the gradient overflowed."""
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    """Microbatches of this rank's data rank."""
    loss_sum: float
    """This rank's share of the sum of mask x loss over the global batch; 0 where another rank counts it."""
    token_count: float
    """This rank's share of the sum of the mask, likewise."""
    gradients: list[TensorPart]
    """Those of this rank's shards, as the optimizer got them: reduced, without the loss scale, not clipped. There are none of a
    skipped step."""
    counted_squares: list[CountedSquare]
    mains: list[TensorPart]
    """This rank's shards after the update: what the optimizer holds."""
    parameters: list[TensorPart]
    """After the update, those that this rank holds whole (its tensor rank's part of them), as the next forward uses them. Under
    --data-parallel-sharding-strategy optim_grads_params there are none: the shards are all that is held."""
    overwritten: list[str]
    """What was written to while it was on its way to other ranks."""


@dataclass(frozen=True)
class RankObservation:
    """Everything that one rank saw."""

    rank: int
    coordinates: dict[str, int]
    """Place on the axes: tp, cp, dp, pp."""
    initial: list[TensorPart]
    """Its shards' values as the layout initialises them."""
    start: list[TensorPart]
    """Its shards' values before the first step: the start weights, which both runs were given."""
    steps: list[RankStep]
    evaluations: list[float]
    """Global mean losses over the held-out batches: before the first step, and after each of the first of `steps`."""
    activations: list[TensorPart]
    """What modules gave in the first step, in the order in which they were computed: for each microbatch a part [b, positions, h]
    of the [B, s, h] of the global batch. They are named `embedding`, and of layer 3 `layers.3.attention`, `layers.3.mlp` (both
    before they are added to the residual stream) and `layers.3` (the residual stream behind it)."""


@dataclass(frozen=True)
class LayoutRun:
    """The framework's run at a layout."""

    layer_table: list[Chunk]
    ranks: list[RankObservation]
    """In the order of their numbers."""


@dataclass(frozen=True)
class PlainStep:
    """One training step of the reference."""

    iteration: int
    num_samples: int
    """Samples of the global batch."""
    loss: float
    grad_norm: float
    learning_rate: float
    weight_decay: float
    loss_sum: float
    token_count: float
    gradients: dict[str, Tensor]
    """Before clipping."""
    weights: dict[str, Tensor]
    """After the update."""


@dataclass(frozen=True)
class PlainRun:
    """The reference's run."""

    steps: list[PlainStep]
    evaluations: list[float]
    """As those of `RankObservation`."""
    activations: dict[str, Tensor]
    """What modules gave in the first step, by the same names, [B, s, h], in the order of the samples."""
    microbatches: list[tuple[int, int]]
    """(data rank, microbatch) of the first step, in the order of their samples: M of them."""
    microbatch_tokens: list[float]
    """The sum of the mask of each of them."""
    contributions: dict[str, Tensor]
    """What each of `microbatches` adds to the gradient of every parameter in the first step: [M, ...shape]."""


@dataclass(frozen=True)
class Observation:
    """Both runs of the same settings."""

    config: Config
    """As they ran."""
    world_size: int
    vocab_size: int
    layout: LayoutRun
    plain: PlainRun
    initial: dict[str, Tensor]
    """Weights as the framework initialises them in one process."""
    start: dict[str, Tensor]
    """Weights that both runs began with: random ones, in which no bias is zero and no norm one."""
    replaced: list[str] = field(default_factory=list)
    """What of the settings was replaced because it cannot be proven in float64 or changes nothing on a CPU, a line each."""
