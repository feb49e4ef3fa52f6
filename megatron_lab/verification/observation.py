"""Recorded values of a parallel run and of the reference run. They contain only data, so that they can be compared after both runs
have ended.

Parameters have their global names, and values are float64. Shapes: `B` samples of a global batch, `s` sequence length, `h` hidden
size, `b` samples of a microbatch, `M` microbatches of a global batch over all data-parallel ranks.
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
    """Settings, weights and samples with which both the parallel run and the reference run train."""

    config: Config
    vocab_size: int
    """Rows of the word embedding, without padding."""
    document_rules: DocumentRules
    start: dict[str, Tensor]
    """Start weights of both runs, by the global name of the parameter."""
    samples: RandomSamples
    eval_samples: RandomSamples
    """Samples of the evaluations. Each evaluation reads the first `EVALUATED_BATCHES` global batches of them."""
    dp_size: int
    """Number of data-parallel ranks. Together with the microbatch size it determines the default batch size and the number of
    microbatches."""
    max_steps: int | None
    """Maximum number of iterations; None to train as long as the settings say."""


@dataclass(frozen=True)
class LocalTensor:
    """Slice of a full tensor that one rank recorded, with the name of the tensor. Padding is removed."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    values: Tensor
    """Elements of the slice."""

    @property
    def tensor_slice(self) -> TensorSlice:
        """Position and size of the slice in the full tensor."""
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
    """Whether the update was skipped because the loss scaler found an overflow in the gradients."""
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    """Number of microbatches of this data-parallel rank."""
    loss_sum: float
    """Summand of this rank in the sum of (loss mask x loss) over the global batch; 0 if another rank contributes the same
    samples."""
    token_count: float
    """Summand of this rank in the sum of the loss mask over the global batch; 0 if another rank contributes the same
    samples."""
    gradients: list[LocalTensor]
    """Gradients of this rank's shards as the optimizer receives them: reduced over ranks, divided by the loss scale, not
    clipped. Empty if the step was skipped."""
    squared_norms: dict[str, float]
    """Summand of this rank in the squared global gradient norm, by parameter. The loss scale is divided out."""
    main_params: list[LocalTensor]
    """Main parameters of this rank's shards after the update."""
    parameters: list[LocalTensor]
    """Model parameters after the update, as the next forward uses them; of a tensor-parallel parameter, this rank's shard.
    Empty if data-parallel ranks shard the parameters (--data-parallel-sharding-strategy optim_grads_params)."""
    overwritten: list[str]
    """Descriptions of tensors that were overwritten while they were being sent to other ranks."""


class DropoutMask(NamedTuple):
    """Record of a dropout mask that a rank drew: the microbatch, the layer, the position in the layer (site), and the seed."""

    microbatch: int
    """Index of the microbatch on its data-parallel rank."""
    layer: int
    site: str
    seed: int
    """Seed from which the mask is generated."""


@dataclass(frozen=True)
class RankObservation:
    """Values that one rank of the parallel run recorded."""

    rank: int
    coordinates: dict[str, int]
    """Coordinates of this rank on the axes tp, cp, dp and pp."""
    initial: list[LocalTensor]
    """Initial values of this rank's shards, as the parallel run generates them. Afterwards they are replaced by the start
    weights."""
    start: list[LocalTensor]
    """Values of this rank's shards before the first step: the start weights, which are the same in both runs."""
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
    """Full gradients before clipping, by the name of the parameter."""
    weights: dict[str, Tensor]
    """Full weights after the update, by name."""


@dataclass(frozen=True)
class ReferenceRun:
    """Values recorded during the reference run."""

    steps: list[ReferenceStep]
    evaluations: list[float]
    """Mean losses over the evaluation batches: one before the first step, then one after each of the first `EVALUATED_STEPS`
    steps."""
    activations: dict[str, Tensor]
    """Outputs of modules in the first step [B, s, h], in the order of the samples. The names are those of
    `RankObservation.activations`, such as `layers.3.mlp`."""
    microbatches: list[tuple[int, int]]
    """(data-parallel rank, index on that rank) of each of the M microbatches of the first step, in the order of their
    samples."""
    microbatch_tokens: list[float]
    """Number of tokens of each microbatch that count in the loss, in the order of `microbatches`."""
    contributions: dict[str, Tensor]
    """Contribution of each microbatch of the first step to the gradient, [M, ...shape of the parameter], by the name of the
    parameter."""


@dataclass(frozen=True)
class Observation:
    """Recorded values of the parallel run and of the reference run, with the settings that both use."""

    config: Config
    """Settings of both runs."""
    vocab_size: int
    layer_table: list[Chunk]
    ranks: list[RankObservation]
    """Recorded values of each rank of the parallel run."""
    reference: ReferenceRun
    initial: dict[str, Tensor]
    """Weights as the framework initializes them in one process, by name."""
    start: dict[str, Tensor]
    """Start weights of both runs, by name. They are random, so that no bias is zero and no norm weight one."""
    replaced_settings: list[str]
    """A line of text for each setting that a proof replaces, because it cannot be tested in float64 or has no effect on a
    CPU."""
