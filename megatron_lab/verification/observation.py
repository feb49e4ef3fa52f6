"""Recorded values of a run at a layout and of the reference run. They contain only data, so that they can be compared after both
runs have ended.

Parameters have their global names, and values are float64. Shapes: `B` samples of a global batch, `s` sequence length, `h` hidden
size, `b` samples of a microbatch, `M` microbatches of a global batch over all data ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.data.samples import DocumentRules
from megatron.parallel.tensor_slice import TensorSlice
from megatron.pipeline_parallel.partition import Chunk
from megatron_lab.verification.random_samples import RandomSamples

EVALUATED_BATCHES = 2
"""Number of batches of an evaluation. Two batches reveal an error in their mean, or that one batch is used twice."""
EVALUATED_STEPS = 4
"""Number of steps at the start of a run after each of which the model is evaluated. Each evaluation costs as much as a step."""


@dataclass(frozen=True)
class ProofTask:
    """Settings, weights and samples with which both the layout's run and the reference run train."""

    config: Config
    vocab_size: int
    """Rows of the word embedding."""
    document_rules: DocumentRules
    start: dict[str, Tensor]
    """Start weights of both runs, by global name."""
    samples: RandomSamples
    eval_samples: RandomSamples
    """Samples of the evaluations. Each evaluation reads the first `EVALUATED_BATCHES` global batches of them."""
    dp_size: int
    """Number of data ranks. Together with the microbatch size it determines the default batch size and the number of
    microbatches."""
    max_steps: int | None
    """Maximum number of iterations; None for the full run."""


@dataclass(frozen=True)
class LocalTensor:
    """Slice of a global tensor that one rank holds, with its name and without padding."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    values: Tensor
    """Elements of the slice."""

    @property
    def tensor_slice(self) -> TensorSlice:
        """Position of the slice in the global tensor."""
        return TensorSlice(self.offsets, tuple(self.values.shape))

    def select(self, full: Tensor) -> Tensor:
        """Return the elements of a full tensor at this slice."""
        return full[self.tensor_slice.index]

    def __reduce__(self) -> tuple[Callable[..., LocalTensor], tuple[Any, ...]]:
        """Pickle the values as a NumPy array, because sending a torch tensor to another process takes longer."""
        return _rebuild_local_tensor, (self.name, self.offsets, self.shape, self.values.numpy())


def _rebuild_local_tensor(name: str, offsets: tuple[int, ...], shape: tuple[int, ...], array: Any) -> LocalTensor:
    return LocalTensor(name, offsets, shape, torch.from_numpy(array))


@dataclass(frozen=True)
class RankStep:
    """Values of one training step, as recorded on one rank."""

    iteration: int
    """Iteration, counted from 1. Iterations selected by --iterations-to-skip are not recorded."""
    loss: float
    """Global mean loss that this rank reports."""
    grad_norm: float
    """Global gradient norm before clipping that this rank reports."""
    skipped: bool
    """Whether the update was skipped because a gradient overflowed."""
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    """Number of microbatches of this data rank."""
    loss_sum: float
    """Contribution of this rank to the sum of mask x loss over the global batch; 0 if another rank contributes the same
    samples."""
    token_count: float
    """Contribution of this rank to the sum of the mask over the global batch; 0 if another rank contributes the same
    samples."""
    gradients: list[LocalTensor]
    """Gradients of this rank's shards as the optimizer receives them: reduced, without loss scale, not clipped. Empty if the
    step was skipped."""
    squared_norms: dict[str, float]
    """Contribution of this rank to the squared global gradient norm (without loss scale), by parameter."""
    main_params: list[LocalTensor]
    """Main parameters of this rank's shards after the update."""
    parameters: list[LocalTensor]
    """Parameters after the update, as the next forward uses them; of a tensor-parallel parameter, this rank's shard. Empty with
    --data-parallel-sharding-strategy optim_grads_params, which shards them over data ranks."""
    overwritten: list[str]
    """Descriptions of tensors that were overwritten while they were being sent to other ranks."""


class DropoutMask(NamedTuple):
    """Record of a dropout mask that a rank drew: where in the model, and with which seed."""

    microbatch: int
    """Index of the microbatch on its data rank."""
    layer: int
    site: str
    seed: int
    """Seed that determines the mask."""


@dataclass(frozen=True)
class RankObservation:
    """Values that one rank recorded during the layout's run."""

    rank: int
    coordinates: dict[str, int]
    """Coordinates of this rank on the axes tp, cp, dp and pp."""
    initial: list[LocalTensor]
    """Values with which the layout initializes this rank's shards."""
    start: list[LocalTensor]
    """Values of this rank's shards before the first step: the start weights, which both runs load."""
    steps: list[RankStep]
    evaluations: list[float]
    """Global mean losses over the evaluation batches: one before the first step, then one after each of the first
    `EVALUATED_STEPS` steps."""
    activations: list[LocalTensor]
    """Outputs of modules in the first step, in the order of their computation. Each microbatch adds a slice [b, positions, h]
    of the global batch's output [B, s, h].

    Their names are `embedding`, and for layer 3 `layers.3.attention` and `layers.3.mlp` (both before they are added to the
    residual stream) and `layers.3` (the residual stream after the layer).
    """
    masks: list[DropoutMask] = field(default_factory=list)
    """Dropout masks drawn in a separate step with dropout, in the order in which they were drawn."""


@dataclass(frozen=True)
class ReferenceStep:
    """Values of one training step, as recorded in the reference run."""

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
class ReferenceRun:
    """Values recorded during the reference run."""

    steps: list[ReferenceStep]
    evaluations: list[float]
    """Mean losses over the evaluation batches, at the same times as in `RankObservation`."""
    activations: dict[str, Tensor]
    """Outputs of modules in the first step [B, s, h] in the order of the samples, with the names of
    `RankObservation.activations`."""
    microbatches: list[tuple[int, int]]
    """(data rank, microbatch) of each of the M microbatches of the first step, in the order of their samples."""
    microbatch_tokens: list[float]
    """Sum of the loss mask of each microbatch."""
    contributions: dict[str, Tensor]
    """Contribution of each microbatch to the gradient of each parameter in the first step: [M, ...shape]."""


@dataclass(frozen=True)
class Observation:
    """Recorded values of the layout's run and of the reference run, with the settings that both use."""

    config: Config
    """Settings of both runs."""
    vocab_size: int
    layer_table: list[Chunk]
    ranks: list[RankObservation]
    """Values that each rank of the layout's run recorded."""
    reference: ReferenceRun
    initial: dict[str, Tensor]
    """Weights as the framework initializes them in one process."""
    start: dict[str, Tensor]
    """Start weights of both runs. They are random, so that no bias is zero and no norm weight one."""
    replaced_settings: list[str]
    """A line of text for each setting that was replaced, because it cannot be tested in float64 or has no effect on a CPU."""
