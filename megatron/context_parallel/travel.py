"""How keys and values of all context ranks come to each of them, and their gradients back. Transfers run beside products.

Shapes: `t` tokens of a rank, `b` microbatch, `g` key-value heads, `d` size of a key head, `e` of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from megatron.attention.parts import KeyGrads
from megatron.parallel.collectives import Pending, start_all_gather, start_pass_on, start_reduce_scatter
from megatron.parallel.context import Group

Held = tuple[int, torch.Tensor, torch.Tensor]
"""A rank, and its keys and values, [t, b, g, d] and [t, b, g, e]."""
Differentiate = Callable[[int, torch.Tensor, torch.Tensor, KeyGrads], None]
"""Adds what this rank's queries give to the gradients of a rank's keys and values."""


class Travel(Protocol):
    """Brings keys and values to this rank, its own first."""

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """Yield those of each rank."""

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, differentiate: Differentiate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of this rank's keys and values over all ranks, in a dtype."""


class Gathering:
    """One all-gather, while the own part is computed; backward one more, and a reduce-scatter."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """See `Travel`."""
        pending = start_all_gather(_packed(k, v), self._group)
        yield self._group.index, k, v
        yield from self._others(pending, k, v)

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, differentiate: Differentiate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Travel`."""
        whole = torch.zeros((self._group.size, *_packed_shape(k, v)), dtype=dtype, device=k.device)
        for holder, keys, values in self.forward(k, v):
            differentiate(holder, keys, values, KeyGrads.within(whole[holder], k.shape[-1]))
        del keys, values  # they are parts of what was gathered
        return _unpacked(start_reduce_scatter(whole.flatten(0, 1), self._group).wait(), k, v)

    def _others(self, pending: Pending, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        whole = pending.wait().unflatten(0, (self._group.size, -1))
        for holder in range(self._group.size):
            if holder != self._group.index:
                yield holder, *_unpacked(whole[holder], k, v)


class Ring:
    """Each rank passes on what it has computed with, and receives the next meanwhile. Gradients follow on a ring of their own."""

    def __init__(self, group: Group, of_gradients: Group) -> None:
        self._group, self._of_gradients = group, of_gradients

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """See `Travel`."""
        held, keys, values = _packed(k, v), k, v
        for step in range(self._group.size):
            pending = start_pass_on(held, self._group) if step < self._group.size - 1 else None
            yield (self._group.index - step) % self._group.size, keys, values
            if pending is not None:
                held = pending.wait()
                keys, values = _unpacked(held, k, v)

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, differentiate: Differentiate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Travel`. What is passed on last is the own sum, from the rank before."""
        pending: Pending | None = None
        for holder, keys, values in self.forward(k, v):
            summed = torch.zeros(_packed_shape(k, v), dtype=dtype, device=k.device)
            differentiate(holder, keys, values, KeyGrads.within(summed, k.shape[-1]))
            if pending is not None:
                summed += pending.wait()
            pending = start_pass_on(summed, self._of_gradients)
        assert pending is not None
        return _unpacked(pending.wait(), k, v)


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values in one message: [t, b, g, d + e]."""
    return torch.cat([k, v], -1)


def _packed_shape(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return (*k.shape[:-1], k.shape[-1] + v.shape[-1])


def _unpacked(both: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = both.split([k.shape[-1], v.shape[-1]], -1)
    return keys, values
