"""What the training step sees of data parallelism: a provider of shards. Buckets and `fully_shard` are two; a step may use both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.parallel.params import ParamEntry
from megatron.parallel.shards import ShardGroup

Inspect = Callable[[ParamEntry, torch.Tensor], None]
"""Is handed a parameter and one gradient of it on this rank: of one use in one microbatch, in the parameter's local shape."""


@dataclass
class Held:
    """Tensors that a provider keeps, by what they are for. Their bytes are what the report at the start counts."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """What only passes through: gradients of a bucket before they are reduced."""


class Provider(Protocol):
    """Divides the state of some of the model's parameters over the data ranks, and moves gradients and weights between them.

    In each step, in this order: `start_step`; forwards, and `before_backward` in front of each backward; `finish_gradients`; the
    optimizer updates the shards of one group after another and calls the group's `publish`; `finish_publishing`.
    """

    groups: list[ShardGroup]
    """This rank's shards, in about the order in which the forward needs them: the optimizer updates and publishes them so."""

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """Forget the last step's gradients and expect this many microbatches.

        Args:
            inspect: is handed each gradient as it is written. Nothing is summed or reduced then, and the shards keep the gradients
                that they have.
        """

    def before_backward(self, chunk: int) -> None:
        """The next backward is of this chunk."""

    def finish_gradients(self) -> None:
        """Complete the gradients of all shards. (Not after a step that inspects.)

        Raises:
            RuntimeError: a parameter got no gradient, or one too many.
        """

    def nonfinite(self) -> set[str]:
        """Parameters whose gradient, this rank's part of the sum, is not finite."""

    def finish_publishing(self) -> None:
        """Wait until every parameter holds its new values; nothing if it does."""

    def finish_evaluation(self) -> None:
        """Forwards without backwards are through: let go of what is kept for a backward."""

    def held(self) -> Held:
        """What is kept now."""
