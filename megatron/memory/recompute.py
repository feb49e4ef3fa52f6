"""Regions of the model that are run again in backward, so that of their forward only the input is kept (Chen et al. 2016).

Autograd records a region's forward as any other, but in place of each tensor that it saves it gets a number. Before backward needs
the first of them, the region runs again from its input (a *remake*), and the tensors that its operations save are kept under these
numbers until backward takes them. So there is one graph, made by the first forward: what hangs on it, such as the hooks of
`fully_shard`, acts once. The remake ends as soon as the last tensor is there: the region's last product is not computed again.

A remake gives the same bits: dropout masks follow from keys (`megatron.parallel.random`), and nothing else is drawn.

The schedule decides when the last region of a chunk is remade (`OpKind.RECOMPUTE`): before its gradient has arrived. The others
are remade within backward, each when backward enters it, so that only one is held at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.memory.host import HostMemory

# ---- What one microbatch of a chunk keeps in ways of its own: regions that run again, and layers whose tensors are in host memory.
#
# Set around its forward, so that the model's parts find it; the executor holds it until its backward.

BeforeRemake = Callable[[Sequence[nn.Module]], None]
"""Is called with the modules of a region before it runs again: their parameters must have memory then."""


class MovedLayer(Protocol):
    """A layer whose saved tensors are in host memory between its forward and its backward (`megatron.memory.offload`)."""

    remade_ahead: bool
    """Whether it runs again in an operation of its own, before backward."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is in host memory and not asked back yet."""

    def settle(self) -> None:
        """Give the device copies free. Whatever is computed from now on waits until they have been copied."""

    def fetch(self) -> None:
        """Begin to bring back what was moved."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Begin to move a tensor, if that is worth it. The result takes its place."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor of which `pack` gave this."""


class Kept:
    """What one microbatch of a chunk keeps.

    Args:
        before_remake: called before each remake of a region.
        host: where saved tensors go that are moved; without it, none is.
        back_soon: the first of its backward operations comes so soon that the last chosen layer stays on the device.
        living: tensors that live until its backward whatever is saved, such as a received input.
    """

    def __init__(
        self,
        before_remake: BeforeRemake | None = None,
        host: HostMemory | None = None,
        *,
        back_soon: bool = False,
        living: Iterable[torch.Tensor] = (),
    ) -> None:
        self.before_remake, self.host, self.back_soon = before_remake, host, back_soon
        self.living = {storage_key(tensor) for tensor in living}
        self.remakes: list[Callable[[], None]] = []
        """Runs a region again: one for each that the schedule may remake, in the order of the forward."""
        self.layers: list[MovedLayer] = []
        """Those chosen to have their tensors in host memory, in the order of the forward."""
        self.on_host: MovedLayer | None = None
        """The one of them that runs its forward now."""

    def remake_last(self) -> None:
        """Run the region again that backward enters first."""
        self.remakes.pop()()
        self.remakes.clear()  # the others live as long as the graph needs them

    def settle(self) -> None:
        """Give the device memory free of what the forward has moved last; whatever is computed from now on waits for the copy."""
        if self.layers:
            self.layers[-1].settle()

    def fetch(self, *, for_remake: bool) -> None:
        """Begin to bring back what the next operation needs first.

        Args:
            for_remake: it runs the last region again; otherwise it is a backward.
        """
        if self.layers and (self.layers[-1].remade_ahead or not for_remake):
            self.layers[-1].fetch()


# Set around one forward. A plain global, as in `megatron.parallel.accumulate`.
_kept: Kept | None = None


def current() -> Kept | None:
    """That of the forward that runs now, if the executor (or a plan) runs it."""
    return _kept


@contextmanager
def keeping(kept: Kept | None = None) -> Iterator[Kept]:
    """Around the forward of one microbatch of a chunk: note what it keeps."""
    global _kept
    assert _kept is None, "keeping() does not nest"
    _kept = kept = kept or Kept()
    try:
        yield kept
    finally:
        _kept = None


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors of one storage, as long as it lives. (Addresses would do, but a plan's tensors have none.)"""
    return tensor.untyped_storage()._cdata


Decision = TypeVar("Decision")
RegionFunction = Callable[..., torch.Tensor]
"""Computes a region from its inputs. Its argument `again` is set in a remake, which must call no hooks of modules: they have
acted."""


class _Complete(Exception):
    """Every tensor that backward needs is there."""


class _Region:
    """One forward of a region, until its backward has taken all tensors."""

    def __init__(self, function: RegionFunction, inputs: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> None:
        self._function, self._modules = function, modules
        kept = current()
        self._before_remake = None if kept is None else kept.before_remake
        self._on_host = None if kept is None else kept.on_host
        self._with_gradient = [x.requires_grad for x in inputs]
        self._inputs: Sequence[Any] = [x.detach() if self._on_host is None else self._on_host.pack(x) for x in inputs]
        self._count = 0
        self.decisions: deque[Any] = deque()
        """What the first forward decided, and the remake must not decide again; see `decided`."""
        self._saved: list[torch.Tensor | None] | None = None

    def run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The first forward."""
        global _running
        _running = self
        try:
            with saved_tensors_hooks(self._number, self._take):
                return self._function(*inputs, again=False)
        finally:
            _running = None

    def remake(self) -> None:
        """Run the region again, up to the last tensor that backward needs. Does nothing the second time."""
        global remaking
        if self._saved is not None:
            return
        if self._before_remake is not None:
            self._before_remake(self._modules)
        self._saved, remaking = [], self
        inputs = [self._input(*one) for one in zip(self._inputs, self._with_gradient, strict=True)]
        self._inputs = ()
        try:
            if self._count:
                with torch.enable_grad(), saved_tensors_hooks(self._save, _never):
                    self._function(*inputs, again=True)
        except _Complete:
            pass
        finally:
            remaking = None
        assert len(self._saved) == self._count, "a remake saves what the forward did"

    def offer(self, x: torch.Tensor) -> None:
        """Take what an operation is about to save, if it is the last tensor."""
        assert self._saved is not None
        if len(self._saved) == self._count - 1:
            self._save(x)

    def _input(self, kept: Any, with_gradient: bool) -> torch.Tensor:
        x: torch.Tensor = kept if self._on_host is None else self._on_host.unpack(kept)
        return x.requires_grad_(with_gradient)

    def _number(self, tensor: torch.Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _save(self, tensor: torch.Tensor) -> None:
        assert self._saved is not None
        self._saved.append(tensor.detach())
        if len(self._saved) == self._count:
            raise _Complete

    def _take(self, number: int) -> torch.Tensor:
        self.remake()
        assert self._saved is not None
        tensor, self._saved[number] = self._saved[number], None
        assert tensor is not None, "backward takes each tensor once"
        return tensor


def _never(saved: None) -> torch.Tensor:
    raise AssertionError("nothing goes backward through a remake")


# Set around one forward or remake. Plain globals, as in `megatron.parallel.accumulate`.
_running: _Region | None = None
remaking: _Region | None = None
"""The region that runs again now. An operation that saves one tensor for its backward, and nothing else, offers it before it
computes (`_Region.offer`), so that a remake which needs no more ends there."""


def recomputed(
    function: RegionFunction, *inputs: torch.Tensor, modules: Sequence[nn.Module] = (), ahead: bool = False
) -> torch.Tensor:
    """Run a region, and again in backward. Where there is no backward it simply runs. Regions do not lie in each other.

    Args:
        function: computes the region; it may read tensors without gradient (positions, masks) that outlive the microbatch.
        inputs: all tensors with a gradient that it reads, but for parameters.
        modules: those whose parameters it uses.
        ahead: whether the schedule may remake it before backward.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, again=False)
    assert remaking is None, "a region in a region"
    region, kept = _Region(function, inputs, modules), current()
    if ahead and kept is not None:
        kept.remakes.append(region.remake)
    return region.run(inputs)


def decided(make: Callable[[], Decision]) -> Decision:
    """What `make` gives, which has no gradient: in a remake that of the first forward. For choices that must not fall otherwise,
    and for what the ranks tell each other."""
    if remaking is not None:
        found: Decision = remaking.decisions.popleft()
        return found
    made = make()
    if _running is not None:
        _running.decisions.append(made)
    return made


def is_remade() -> bool:
    """Whether what runs now has run before, in the forward."""
    return remaking is not None
