"""The training step's view of data parallelism: a provider of shards. There are two, buckets and `fully_shard`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.parallel.accumulate import GradSink
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup

Inspect = Callable[[ParamEntry, torch.Tensor], None]
"""Receives a parameter and one gradient of it on this rank: that of one use in one microbatch, in the parameter's local shape."""


@dataclass(frozen=True)
class HeldTensors:
    """Tensors that keep memory, by what it is for. Several may share a storage."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]
    """Memory that gradients pass through."""
    on_host: bool = False
    """Whether parameters and gradients are in host memory, which on the CPU is the device's too."""


class Provider(ABC):
    """Divides the state of some of the model's parameters over the data ranks, and moves gradients and weights between them.

    Order of calls in each step: `start_step`; forwards, with `before_backward` before each backward; `finish_gradients`; then the
    optimizer updates the shards of one group after another and calls the group's `publish`; `finish_publishing`.
    """

    groups: list[ShardGroup]
    """This rank's shards, in about the order in which the forward needs them. The optimizer updates and publishes in this order."""
    frozen: Sequence[Shard] = ()
    """Parameters that no step changes: shards that are in no group, whose weights are all there is of them."""
    follows_backward = False
    """Whether it is told of each backward. Otherwise the gradients that arrive are enough to follow a step."""

    @abstractmethod
    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """Begin a step: forget the last one's gradients and expect this many microbatches.

        Args:
            inspect: receives each gradient as it is written. Nothing is summed or reduced then; shards keep their gradients.
        """

    def before_backward(self, chunk: int) -> None:  # noqa: B027
        """Called before each backward of this chunk, if the provider `follows_backward`."""

    def before_remake(self, modules: Sequence[nn.Module]) -> None:  # noqa: B027
        """Called before these modules run again in backward. Does nothing where their parameters always have memory."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Complete the gradients of all shards. (Not after a step that inspects.)

        Raises:
            RuntimeError: a parameter got no gradient, or one too many.
        """

    @abstractmethod
    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Where the gradient of each parameter is written."""

    @abstractmethod
    def held(self) -> HeldTensors:
        """The memory that it keeps between two steps."""

    def nonfinite(self) -> set[str]:
        """Names of parameters whose gradient, this rank's part of the sum, is not finite."""
        shards = [shard for group in self.groups for shard in group.shards]
        return {shard.record.name for shard in shards if not torch.isfinite(shard.grad).all()}

    def finish_publishing(self) -> None:  # noqa: B027
        """Wait until every parameter holds its new values. Does nothing where parameters are gathered before their use."""

    def finish_evaluation(self) -> None:  # noqa: B027
        """After forwards without backwards: free what is kept for a backward, if anything is."""
