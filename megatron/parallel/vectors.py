"""Modules that use vectors (weights of norms, biases) in ordinary torch operations: how these enter, and where their gradients go.

Outside of compiled code a vector enters where it is used (`through`). A compiled graph gets them as inputs instead: they enter in
front of it, and what it gives back for them goes on from there. So no compiler has to know of a side effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron.parallel.accumulate import through

Vectors = tuple[torch.Tensor | None, ...]


class VectorUser(nn.Module):
    """A module that uses vectors in ordinary operations."""

    _entered: Vectors | None = None
    """Those that have entered in front of a compiled graph, while it runs."""

    def vectors(self) -> tuple[nn.Parameter | None, ...]:
        """The parameters, looked up anew: others take their place when they are sharded."""
        raise NotImplementedError

    def entering(self) -> Vectors:
        """The same for use in the module's forward."""
        if torch.compiler.is_compiling():
            assert self._entered is not None, "a compiled graph gets its vectors as inputs"
            return self._entered
        return tuple(None if vector is None else through(vector) for vector in self.vectors())


def vector_users(module: nn.Module) -> list[VectorUser]:
    """Those in a module that have vectors."""
    return [one for one in module.modules() if isinstance(one, VectorUser) and any(v is not None for v in one.vectors())]


@contextmanager
def entered(users: Sequence[VectorUser]) -> Iterator[None]:
    """Around one call of a compiled graph: its vectors are inputs."""
    try:
        for user in users:
            user._entered = user.entering()
        yield
    finally:
        for user in users:
            user._entered = None
