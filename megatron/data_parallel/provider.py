"""Interface between the training step and data parallelism: a shard provider stores parameters and gradients and communicates them.

There are three implementations: `BucketedParams`, `FrozenParams` and `FullyShardedParams`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.parallel.accumulate import GradSink
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup

GradInspector = Callable[[ParamEntry, torch.Tensor], None]
"""Function that receives a parameter and one of its local gradients: the gradient of one use in one microbatch, in the parameter's
local shape."""


@dataclass(frozen=True)
class PersistentTensors:
    """Tensors that stay allocated between steps, by purpose, for the memory report. Several tensors may share a storage."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]
    """Buffers that hold gradients temporarily, until the gradients are reduced."""
    on_host: bool = False
    """Whether parameters and gradients are in host memory. (On the CPU, host memory is also the device's memory.)"""


class ShardProvider(ABC):
    """Interface of a data-parallel strategy: holds some parameters and their gradients, sharded over the data ranks or not, reduces
    the gradients, and gathers updated parameters.

    Calls in each step, in this order: `start_step`; forwards, with `before_backward` before each backward; `finish_gradients`; for
    one shard group after another, the optimizer's update and `ShardGroup.gather_params`; `finish_param_gather`.
    """

    groups: list[ShardGroup]
    """Shards of this rank, in groups whose parameters are gathered together. The order is approximately that in which forward
    needs the parameters. The optimizer updates and gathers one group after the other."""
    frozen: Sequence[Shard] = ()
    """Shards of frozen parameters. Each has values, but no gradient and no optimizer state, and is in none of `groups`."""
    uses_before_backward = False
    """Whether `before_backward` must be called. Providers that do not need it follow a step by the gradients that they receive."""

    @abstractmethod
    def start_step(self, num_microbatches: int, *, inspect: GradInspector | None = None) -> None:
        """Start a step of `num_microbatches` microbatches: discard the gradients of the last step.

        Args:
            inspect: receives each gradient as it is written. Nothing is then summed or reduced, and shards keep their gradients.
        """

    def before_backward(self, chunk: int) -> None:  # noqa: B027
        """Prepare the parameters for a backward of the model chunk with index `chunk`. Called before each backward, but only if
        `uses_before_backward` is true."""

    def before_recompute(self, modules: Sequence[nn.Module]) -> None:  # noqa: B027
        """Make sure that the parameters of these modules are allocated before backward recomputes the modules. Does nothing if
        their parameters are always allocated."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Wait until the gradients of all shards are complete. Not called after a step with `inspect`.

        Raises:
            RuntimeError: a parameter received too few or too many gradients.
        """

    @abstractmethod
    def iter_grad_sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Yield each parameter's `ParamRecord` (name, shape, split over ranks) and the sink that receives its gradients."""

    @abstractmethod
    def get_persistent_tensors(self) -> PersistentTensors:
        """Return the tensors that stay allocated between steps: parameters, gradients and buffers."""

    def find_nonfinite_params(self) -> set[str]:
        """Return the names of parameters whose gradient is not finite in this rank's shard."""
        shards = [shard for group in self.groups for shard in group.shards]
        return {shard.record.name for shard in shards if not torch.isfinite(shard.grad).all()}

    def finish_param_gather(self) -> None:  # noqa: B027
        """Wait until every parameter has its updated values. Does nothing if each module gathers its parameters only before their
        use."""

    def finish_evaluation(self) -> None:  # noqa: B027
        """Free the memory that forwards keep for a backward, such as gathered parameters. Called after evaluation, which has no
        backward."""
