"""What the training step sees of data parallelism: a provider of shards. Buckets and `fully_shard` are two; a step may use both.

Every provider counts the gradients that reach its parameters, to know when those of a microbatch are complete, and that a step
leaves none out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from megatron.parallel.params import ParamEntry
from megatron.parallel.shards import ShardGroup

Inspect = Callable[[ParamEntry, torch.Tensor], None]
"""Is handed a parameter and one gradient of it on this rank: of one use in one microbatch, in the parameter's local shape."""


@dataclass
class HeldTensors:
    """Tensors that a provider keeps, by what they are for. Their bytes are what the report at the start counts."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """What only passes through: gradients of a bucket before they are reduced."""


class Provider(ABC):
    """Divides the state of some of the model's parameters over the data ranks, and moves gradients and weights between them.

    In each step, in this order: `start_step`; forwards, and `before_backward` in front of each backward; `finish_gradients`; the
    optimizer updates the shards of one group after another and calls the group's `publish`; `finish_publishing`.
    """

    groups: list[ShardGroup]
    """This rank's shards, in about the order in which the forward needs them: the optimizer updates and publishes them so."""

    @abstractmethod
    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """Forget the last step's gradients and expect this many microbatches.

        Args:
            inspect: is handed each gradient as it is written. Nothing is summed or reduced then, and the shards keep the gradients
                that they have.
        """

    def before_backward(self, chunk: int) -> None:  # noqa: B027
        """The next backward is of this chunk. Nothing where the gradients that arrive say it all."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Complete the gradients of all shards. (Not after a step that inspects.)

        Raises:
            RuntimeError: a parameter got no gradient, or one too many.
        """

    def nonfinite(self) -> set[str]:
        """Parameters whose gradient, this rank's part of the sum, is not finite."""
        shards = [shard for group in self.groups for shard in group.shards]
        return {shard.record.name for shard in shards if not torch.isfinite(shard.grad).all()}

    def finish_publishing(self) -> None:  # noqa: B027
        """Wait until every parameter holds its new values. Nothing where parameters are gathered in front of their use."""

    def finish_evaluation(self) -> None:  # noqa: B027
        """Forwards without backwards are through: let go of what is kept for a backward, if anything is."""

    @abstractmethod
    def held(self) -> HeldTensors:
        """What is kept now."""


class WriteCount:
    """How often the parameters of a bucket got a gradient in a step.

    Args:
        uses: how often each gets one in a microbatch.
    """

    def __init__(self, uses: Sequence[int]) -> None:
        self.uses = list(uses)
        self.start()

    def start(self) -> None:
        """A new step."""
        self.writes = [0] * len(self.uses)
        self.rounds = 0
        """Microbatches of which all gradients are there."""
        self._behind = len(self.uses)

    def add(self, number: int) -> bool:
        """Count one; returns whether the gradients of one microbatch more are complete now.

        With late weight gradients, those that are not late are microbatches ahead of the others.
        """
        self.writes[number] += 1
        if self.writes[number] != self.uses[number] * (self.rounds + 1):
            return False
        self._behind -= 1
        if self._behind:
            return False
        self.rounds += 1
        self._behind = sum(writes < uses * (self.rounds + 1) for writes, uses in zip(self.writes, self.uses, strict=True))
        return True


def complain(rank: int, counts: Iterable[tuple[str, int, int]]) -> NoReturn:
    """Say what is missing.

    Args:
        counts: name of a parameter, gradients that reached it in this step, gradients that should have. Those that agree are fine.

    Raises:
        RuntimeError: always.
    """
    words = []
    for name, found, wanted in counts:
        if found > wanted:
            words.append(f"{found - wanted} gradients too many reached {name}")
        elif found < wanted:
            words.append(f"{name} lacks {wanted - found} gradients" if found else f"no gradient reached {name}")
    raise RuntimeError(f"rank {rank}: the backward passes of this step are incomplete: {'; '.join(words)}")
