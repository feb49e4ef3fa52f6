"""Recomputation of regions of the model in backward: only the input of a region is saved in forward (Chen et al. 2016).

Autograd records the forward of a region as usual, but saves an index in place of each tensor. Before backward needs the first
tensor of the region, the region is recomputed from its input. The tensors that its operations save are stored by index until
backward takes them. So the graph is built only once, by the first forward. Hooks attached to it, such as those of `fully_shard`,
run only once. Recomputation stops as soon as the last tensor is saved, so the last matrix product of a region is not computed
again.

Recomputation gives the same bits: dropout masks follow from seeds (`megatron.parallel.random`), and regions use no other random
numbers.

The schedule decides when the last region of a chunk is recomputed (`OpType.RECOMPUTE`): possibly before the gradient of its output
arrives. All other regions are recomputed within the backward, when it reaches them. So the tensors of only one region are in memory
at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.memory.host_buffers import HostBufferPool

# ---- Activations of one microbatch that autograd does not store itself: regions to recompute, and offloaded layers.
#
# The store is set during the microbatch's forward, where the layers find it. The executor keeps it until the microbatch's backward.

BeforeRecompute = Callable[[Sequence[nn.Module]], None]
"""Callback before a region is recomputed. It receives the modules of the region, and must make sure that their parameters are
allocated."""


class Offloader(Protocol):
    """Interface of an offloader, which keeps the saved tensors of a layer in host memory between forward and backward.

    `megatron.memory.offload` implements the interface.
    """

    is_recomputed_ahead: bool
    """Whether the schedule may recompute the layer in a separate operation before the layer's backward. Then the layer's tensors
    must be back on the device before that operation."""

    @property
    def offloaded_sizes(self) -> list[int]:
        """Sizes in bytes of the layer's storages that are only in host memory or on their way there: their copy back to the device
        has not started."""

    def release_device_copies(self) -> None:
        """Free the device copies of the offloaded storages. The current stream first waits for the copies to the host."""

    def fetch(self) -> None:
        """Start to copy the offloaded storages back to the device."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Start to copy a tensor that autograd saves to the host, if offloading it frees enough memory. Return the object that
        autograd saves instead."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor for which autograd saved `packed`, a result of `pack`."""


class ActivationStore:
    """Activations of one microbatch in one model chunk that autograd does not keep itself: the inputs of regions (parts of the
    forward) that are recomputed in backward, and layers whose saved tensors are offloaded to host memory.

    Args:
        before_recompute: called before each recomputation of a region.
        host_pool: host buffers for offloaded tensors; None without offloading.
        is_backward_next: the first backward operation of the microbatch follows so soon that the last layer is not offloaded.
        live_tensors: tensors that exist until the microbatch's backward anyway, such as a received input.
    """

    def __init__(
        self,
        before_recompute: BeforeRecompute | None = None,
        host_pool: HostBufferPool | None = None,
        *,
        is_backward_next: bool = False,
        live_tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        self.before_recompute, self.host_pool, self.is_backward_next = before_recompute, host_pool, is_backward_next
        self.live_storages = {get_storage_key(tensor) for tensor in live_tensors}
        self.recomputations: list[Callable[[], None]] = []
        """Functions that recompute the regions which the schedule may recompute ahead, in the order of the forward."""
        self.offloaders: list[Offloader] = []
        """Offloaders of the layers, in the order of the forward."""
        self.running_offloader: Offloader | None = None
        """Offloader of the layer whose forward is running; None outside of offloaded layers."""

    def recompute_last(self) -> None:
        """Recompute the last region of the model chunk, which is the region that backward enters first."""
        self.recomputations.pop()()
        self.recomputations.clear()  # all other regions are recomputed within backward, and the graph keeps them alive

    def release_device_copies(self) -> None:
        """Free the device copies of the last offloaded layer. The current stream first waits for the copies to the host."""
        if self.offloaders:
            self.offloaders[-1].release_device_copies()

    def fetch(self, *, for_recompute: bool) -> None:
        """Start to copy an offloaded layer back to the device: the layer that the microbatch's next operation needs first.

        Args:
            for_recompute: the next operation recomputes the last region; otherwise it is a backward.
        """
        if self.offloaders and (self.offloaders[-1].is_recomputed_ahead or not for_recompute):
            self.offloaders[-1].fetch()


# Set during one forward. A plain global, as in `megatron.parallel.accumulate`.
_current_store: ActivationStore | None = None


def get_current_store() -> ActivationStore | None:
    """Return the activation store of the running forward, or None if no executor or planner has set one."""
    return _current_store


@contextmanager
def storing_activations(store: ActivationStore | None = None) -> Iterator[ActivationStore]:
    """Set the activation store that `get_current_store` returns, for the forward of one microbatch in one model chunk.

    Args:
        store: activation store to use; None for a new one.
    """
    global _current_store
    assert _current_store is None, "storing_activations() does not nest"
    _current_store = store = store or ActivationStore()
    try:
        yield store
    finally:
        _current_store = None


def get_storage_key(tensor: torch.Tensor) -> int:
    """Return a key that identifies the storage of a tensor: equal for all tensors that share the storage, while the storage exists.

    Unlike an address, the key also exists on the meta device.
    """
    return tensor.untyped_storage()._cdata


Result = TypeVar("Result")
RegionFunction = Callable[..., torch.Tensor]
"""Function that computes a region from its inputs. Its argument `is_recompute` is true in recomputation. Then the function must not
call module hooks, because they have already run."""


class _AllTensorsSaved(Exception):
    """Raised to stop recomputation when all tensors that backward needs are saved."""


class _Region:
    """Part of the forward that backward recomputes, for one microbatch. Until the recomputation it stores its inputs, afterwards
    the recomputed tensors until backward has taken them."""

    def __init__(self, function: RegionFunction, inputs: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> None:
        self._function, self._modules = function, modules
        store = get_current_store()
        self._before_recompute = None if store is None else store.before_recompute
        self._offloader = None if store is None else store.running_offloader
        self._requires_grad = [x.requires_grad for x in inputs]
        self._packed_inputs: Sequence[Any] = [x.detach() if self._offloader is None else self._offloader.pack(x) for x in inputs]
        self._num_saved = 0
        self.results: deque[Any] = deque()
        """Results of the first forward that recomputation reuses, in order. See `reuse_in_recompute`."""
        self._recomputed: list[torch.Tensor | None] | None = None

    def run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the region in the forward pass. Autograd saves an index in place of each tensor that backward needs, so the
        activations are freed."""
        global _running_region
        _running_region = self
        try:
            with saved_tensors_hooks(self._count_saved, self._take_saved):
                return self._function(*inputs, is_recompute=False)
        finally:
            _running_region = None

    def recompute(self) -> None:
        """Run the region's forward again, up to the last tensor that backward needs. Further calls do nothing."""
        global recomputing_region
        if self._recomputed is not None:
            return
        if self._before_recompute is not None:
            self._before_recompute(self._modules)
        self._recomputed, recomputing_region = [], self
        inputs = [self._unpack_input(*row) for row in zip(self._packed_inputs, self._requires_grad, strict=True)]
        self._packed_inputs = ()
        try:
            if self._num_saved:
                with torch.enable_grad(), saved_tensors_hooks(self._save, _unpack_never):
                    self._function(*inputs, is_recompute=True)
        except _AllTensorsSaved:
            pass
        finally:
            recomputing_region = None
        assert len(self._recomputed) == self._num_saved, "recomputation saved another number of tensors than the forward"

    def offer(self, x: torch.Tensor) -> None:
        """Stop the recomputation before an operation computes its output, if no later tensor is needed.

        In recomputation, an operation calls this with a tensor `x` that it is about to save. If `x` is the last tensor that
        backward needs, this method saves `x` and stops the recomputation. For earlier tensors it does nothing, because the
        operation then saves `x` itself.
        """
        assert self._recomputed is not None
        if len(self._recomputed) == self._num_saved - 1:
            self._save(x)

    def _unpack_input(self, packed: Any, with_gradient: bool) -> torch.Tensor:
        x: torch.Tensor = packed if self._offloader is None else self._offloader.unpack(packed)
        return x.requires_grad_(with_gradient)

    def _count_saved(self, tensor: torch.Tensor) -> int:
        self._num_saved += 1
        return self._num_saved - 1

    def _save(self, tensor: torch.Tensor) -> None:
        assert self._recomputed is not None
        self._recomputed.append(tensor.detach())
        if len(self._recomputed) == self._num_saved:
            raise _AllTensorsSaved

    def _take_saved(self, index: int) -> torch.Tensor:
        self.recompute()
        assert self._recomputed is not None
        tensor, self._recomputed[index] = self._recomputed[index], None
        assert tensor is not None, "backward takes each saved tensor only once"
        return tensor


def _unpack_never(saved: None) -> torch.Tensor:
    raise AssertionError(
        "internal error: backward entered the autograd graph of a recomputation, from which it only needs the saved tensors; "
        "please report this error"
    )


# Set during the forward or recomputation of a region. Plain globals, as in `megatron.parallel.accumulate`.
_running_region: _Region | None = None
recomputing_region: _Region | None = None
"""The region that is being recomputed; None otherwise. An operation that saves only one tensor for backward calls `offer` of the
region before it computes its output. If backward needs no further tensor, recomputation stops without computing the output."""


def run_with_recompute(
    function: RegionFunction, *inputs: torch.Tensor, modules: Sequence[nn.Module] = (), is_recomputed_ahead: bool = False
) -> torch.Tensor:
    """Run a region of the model's forward, and recompute it in backward instead of keeping the tensors that its operations save.
    Without autograd, nothing is recomputed. Regions must not be nested.

    Args:
        function: computes the region. It may read tensors without gradient (positions, masks) that exist longer than the
            microbatch.
        inputs: all tensors with gradient that the region reads, except for parameters.
        modules: modules whose parameters the region uses.
        is_recomputed_ahead: the schedule may recompute the region in a separate operation before backward.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, is_recompute=False)
    assert recomputing_region is None, "regions to recompute must not be nested"
    region, store = _Region(function, inputs, modules), get_current_store()
    if is_recomputed_ahead and store is not None:
        store.recomputations.append(region.recompute)
    return region.run(inputs)


def reuse_in_recompute(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`. In recomputation, return the result of the first forward instead of calling `compute` again.

    Use it for decisions that must not change between forward and recomputation, and for results of communication. The result has no
    gradient.
    """
    if recomputing_region is not None:
        stored_result: Result = recomputing_region.results.popleft()
        return stored_result
    result = compute()
    if _running_region is not None:
        _running_region.results.append(result)
    return result


def is_recomputing() -> bool:
    """Return whether a region of the model's forward is being recomputed at the moment."""
    return recomputing_region is not None
