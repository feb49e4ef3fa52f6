"""What is observed of a run at a layout and of the plain reference. It is data only, so a comparison needs neither.

Names of parameters are the global ones of their records, values are float64. Shapes: `B` samples of a global batch, `s` sequence,
`h` hidden size, `b` samples of a microbatch, `M` microbatches of a global batch over all data ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.data.samples import DocumentRules
from megatron.parallel.boxes import Box
from megatron.pipeline_parallel.partition import Chunk
from megatron_lab.verification.random_samples import RandomSamples

EVALUATED_BATCHES = 2
"""Held-out batches of an evaluation. With one, nobody would see how several are averaged or whether they are the same."""
EVALUATED_STEPS = 4
"""Number of steps at the start of a run with an evaluation after them; each costs as much as a step."""


@dataclass(frozen=True)
class ProofTask:
    """The input of both runs."""

    config: Config
    vocab_size: int
    """Rows of the word embedding."""
    rules: DocumentRules
    start: dict[str, Tensor]
    """Weights to begin with, by global name."""
    samples: RandomSamples
    held_out: RandomSamples
    """Samples to evaluate on: the first ones, as many as the held-out batches have."""
    data_size: int
    """Number of data ranks. With the microbatch size it gives the default batch, and the numbers of microbatches."""
    most_steps: int | None
    """The most iterations; None for the whole run."""


@dataclass(frozen=True)
class TensorPart:
    """A box of a named global tensor, as one rank holds it, without padding."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    values: Tensor
    """The elements of the box."""

    @property
    def box(self) -> Box:
        """Its place in the whole tensor."""
        return Box(self.offsets, tuple(self.values.shape))

    def cut(self, whole: Tensor) -> Tensor:
        """The same box of a whole tensor."""
        return whole[self.box.index]

    def __reduce__(self) -> tuple[Callable[..., TensorPart], tuple[Any, ...]]:
        """Pickle it as an array: a tensor takes longer to send to another process."""
        return _part, (self.name, self.offsets, self.shape, self.values.numpy())


def _part(name: str, offsets: tuple[int, ...], shape: tuple[int, ...], array: Any) -> TensorPart:
    return TensorPart(name, offsets, shape, torch.from_numpy(array))


@dataclass(frozen=True)
class RankStep:
    """One training step as one rank saw it."""

    iteration: int
    """The iteration, counted from 1. Those that --iterations-to-skip leaves out have no step."""
    loss: float
    """Global mean loss, as every rank reports it."""
    grad_norm: float
    """Global norm before clipping, as every rank reports it."""
    skipped: bool
    """Whether the update was skipped because the gradient overflowed."""
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    """Number of microbatches of this rank's data rank."""
    loss_sum: float
    """This rank's share of the sum of mask x loss over the global batch; 0 where another rank counts it."""
    token_count: float
    """This rank's share of the sum of the mask; 0 where another rank counts it."""
    gradients: list[TensorPart]
    """Gradients of this rank's shards, as the optimizer got them: reduced, without the loss scale, not clipped. None if skipped."""
    counted_squares: dict[str, float]
    """What this rank adds to the square of the global norm (without the loss scale), by parameter."""
    main_params: list[TensorPart]
    """Main parameters of this rank's shards after the update."""
    parameters: list[TensorPart]
    """After the update, the parameters that this rank holds whole (its tensor rank's part of them), as the next forward uses them.
    With --data-parallel-sharding-strategy optim_grads_params there are none: only shards are held."""
    overwritten: list[str]
    """Tensors that were written to while they were being sent to other ranks, in words."""


class MaskDrawn(NamedTuple):
    """A dropout mask that a rank drew."""

    microbatch: int
    """Counted on its data rank."""
    layer: int
    site: str
    seed: int
    """What the mask is a function of."""


@dataclass(frozen=True)
class RankObservation:
    """Everything that was observed on one rank."""

    rank: int
    coordinates: dict[str, int]
    """This rank's place on the axes tp, cp, dp and pp."""
    initial: list[TensorPart]
    """Initial values of its shards, as the layout makes them."""
    start: list[TensorPart]
    """Values of its shards before the first step: the start weights, which both runs were given."""
    steps: list[RankStep]
    evaluations: list[float]
    """Global mean losses over the held-out batches: before the first step, and after each of the first of `steps`."""
    activations: list[TensorPart]
    """Outputs of modules in the first step, in the order in which they were computed. Each microbatch gives a part [b, positions,
    h] of the [B, s, h] of the global batch. They are named `embedding`, and for layer 3 `layers.3.attention`, `layers.3.mlp`
    (both before they are added to the residual stream) and `layers.3` (the residual stream after the layer)."""
    masks: list[MaskDrawn] = field(default_factory=list)
    """The dropout masks of a step with dropout, in the order in which they were drawn."""


@dataclass(frozen=True)
class PlainStep:
    """One training step of the reference."""

    iteration: int
    num_samples: int
    """Number of samples in the global batch."""
    loss: float
    grad_norm: float
    learning_rate: float
    weight_decay: float
    loss_sum: float
    token_count: float
    gradients: dict[str, Tensor]
    """Gradients by name, before clipping."""
    weights: dict[str, Tensor]
    """Weights by name, after the update."""


@dataclass(frozen=True)
class PlainRun:
    """The reference's run."""

    steps: list[PlainStep]
    evaluations: list[float]
    """Mean losses as in `RankObservation`."""
    activations: dict[str, Tensor]
    """Outputs of modules in the first step, by the same names, [B, s, h], in the order of the samples."""
    microbatches: list[tuple[int, int]]
    """(data rank, microbatch) of the M microbatches of the first step, in the order of their samples."""
    microbatch_tokens: list[float]
    """The sum of the loss mask of each of these."""
    contributions: dict[str, Tensor]
    """What each of `microbatches` adds to the gradient of every parameter in the first step: [M, ...shape]."""


@dataclass(frozen=True)
class Observation:
    """Both runs of the same settings."""

    config: Config
    """The settings as they ran."""
    vocab_size: int
    layer_table: list[Chunk]
    ranks: list[RankObservation]
    """The framework's run at the layout, rank by rank."""
    plain: PlainRun
    initial: dict[str, Tensor]
    """Weights as the framework initialises them in one process."""
    start: dict[str, Tensor]
    """Weights that both runs began with: random ones, in which no bias is zero and no norm one."""
    replaced: list[str]
    """A line for each setting that was replaced, because it cannot be proved in float64 or changes nothing on a CPU."""
