"""A shard: the part of a parameter that this rank updates. The optimizer, clipping and checkpoints see only shards.

Whoever divides the model's state over the data ranks (a provider, see `data_parallel`) makes the shards, in groups that are
published together; the optimizer makes their main parameters, and decides where these lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.parallel.boxes import FlatPiece, PlacedBox
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.state_shape import ELEMENTS, StateShape


@dataclass
class Shard:
    """One parameter's part on this rank. All tensors are flat and have the piece's number of elements."""

    record: ParamRecord
    piece: FlatPiece
    """The elements of the local parameter that the shard covers."""
    weights: torch.Tensor
    """These elements of the parameter: a view, so writing here changes the model."""
    grad: torch.Tensor
    """Their gradient, complete once the provider has finished a step; in the dtype of `main`."""
    counted: range
    """Indices of the elements that this rank counts in global norms. Each element of the model is counted once in the world, and by
    the same rank whether its state is sliced or not. So norms are the same, bit for bit."""
    copied: range = range(0)
    """Indices of the elements that another rank counts, which should have the same gradient there: on all tensor ranks but one
    where the parameter is not split over them, on the last stage where it is tied, in all replicas of FSDP but the first. A NaN may
    be in this copy alone."""
    alone: bool = False
    """Whether the rank holds nothing else of the parameter, and gathers it where it is used."""
    on_host: bool = False
    """Whether weights and gradient are in host memory, and with them the optimizer's state."""
    main: torch.Tensor = field(init=False)
    """The main parameter, in float32 or wider: the weights themselves where dtypes agree, else a copy, perhaps on the host. Set by
    the optimizer."""
    moments: dict[str, torch.Tensor] = field(init=False)
    """The optimizer's state by name; flat. Set by the optimizer."""
    state_shapes: dict[str, StateShape] = field(default_factory=dict)
    """How each state lies over the parameter; by default it has a number for each element. Set by the optimizer."""

    average: torch.Tensor | None = None
    """The exponential moving average of `main`, where the run keeps one. Set by the optimizer."""

    def boxes(self, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor that the shard holds, without padding."""
        return self.record.boxes(self.piece, context)

    def state_boxes(self, name: str, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor of a state that the shard holds, without padding."""
        return self.record.state_boxes(self.state_shape(name), self.piece, context)

    def state_shape(self, name: str) -> StateShape:
        """How a state lies over the parameter."""
        return self.state_shapes.get(name, ELEMENTS)

    def counted_boxes(self, context: ParallelContext) -> list[PlacedBox]:
        """The boxes of the global tensor that this rank counts in global norms."""
        start = self.piece.start
        return self.record.boxes(FlatPiece(start + self.counted.start, start + self.counted.stop), context)

    @property
    def counted_grad(self) -> torch.Tensor:
        """A view of the gradient of the counted elements."""
        return self.grad[self.counted.start : self.counted.stop]

    @property
    def copied_grad(self) -> torch.Tensor:
        """A view of the gradient of the copied elements."""
        return self.grad[self.copied.start : self.copied.stop]

    @property
    def counted_main(self) -> torch.Tensor:
        """A view of the main parameter's counted elements."""
        return self.main[self.counted.start : self.counted.stop]


@dataclass(frozen=True)
class DividedParam:
    """A parameter as the ranks of a stage divide it, the same for all of them."""

    record: ParamRecord
    main_dtype: torch.dtype
    cuts: tuple[int, ...] = ()
    """Elements of a rank's flattened tensor at which another rank's piece begins."""
    axes: tuple[str, ...] = ()
    """Axes of the ranks that divide a rank's tensor; none if each updates all of it."""
    num_ranks: int = 1
    """How many divide it: all along these axes, or of `fully_shard` with replicas so many neighbours."""
    first: int = 0
    """The place among these of the rank that has the first piece; the next have the next pieces."""
    tied_apart: bool = False
    """Whether another stage holds it too."""

    def pieces(self, numel: int) -> list[FlatPiece]:
        """The pieces of a rank's flattened tensor of so many elements, in order."""
        return [FlatPiece(start, stop) for start, stop in itertools.pairwise((0, *self.cuts, numel))]


def _nothing() -> None: ...


@dataclass
class ShardGroup:
    """Shards that are reduced together and published together: a bucket, or the parameters of a block."""

    shards: list[Shard]
    publish: Callable[[], None] = _nothing
    """Begin to send this rank's new weights to the other ranks that hold them. Called once all shards' weights are written."""
    params: Sequence[DividedParam] = ()
    """All parameters of the group, those of which this rank has no shard too, in an order that is the same on all ranks."""
    on_reduced: list[Callable[[Pending], None]] = field(default_factory=list)
    """Called before a step's end, when the group's gradients are on their way to being complete."""

    def announce(self, pending: Pending) -> None:
        """Call these, once a step, with what they must wait for (on CUDA, on any stream)."""
        for listen in self.on_reduced:
            listen(pending)
