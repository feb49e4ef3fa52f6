"""Offloading of layers' saved tensors to host memory between forward and backward (`--cpu-offload-activations`).

Autograd passes each tensor that a layer saves to a hook (`torch.autograd.graph.saved_tensors_hooks`). The hook starts to copy the
tensor's storage on a separate stream, while the layer continues. Storages are copied and not tensors, so two views of a storage, or
a tensor that is saved twice, are copied only once. For a layer that is recomputed in backward (`megatron.memory.recompute`), the
input is offloaded. Tensors are not offloaded where that would free little or no memory:

- tensors that exist anyway: parameters, the received input of the chunk, tables that layers share;
- tensors of integers: positions of documents, which belong to the batch, and seeds of kernels;
- storages smaller than a sixteenth of the layer's input, such as statistics of norms.

The device copies of a layer are freed after the forward of the next offloaded layer; those of the last layer after the next
operation of the stage. Until then the copies overlap with computation, and then computation waits for them. So at any time only one
layer is being copied to the host.

In backward, a layer is copied back to the device during the backward of the offloaded layer that follows it in the model. The last
layer is copied back during the operation that the stage runs before the microbatch's first backward operation
(`ActivationStore.fetch`). If that operation precedes the end of the copy to the host, the last layer is not offloaded
(`megatron.pipeline_parallel.executor`). Device memory for a layer is allocated when its copy to the device starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.memory.host_buffers import HostBuffer, HostBufferPool, StreamEvent
from megatron.memory.recompute import ActivationStore, get_current_store, get_storage_key

_MIN_RELATIVE_SIZE = 1 / 16
"""A storage is offloaded if it is larger than the layer's input times this factor."""


class _OffloadedStorage:
    """Torch storage whose content is copied to a host buffer, and later back to the device."""

    def __init__(self, source: torch.Tensor, buffer: HostBuffer) -> None:
        self.num_bytes, self.buffer = len(source), buffer
        self.device_bytes: torch.Tensor | None = source
        """Content on the device as uint8; None while it is only in the host buffer."""


class _OffloadedTensor(NamedTuple):
    """Placeholder that autograd saves in place of an offloaded tensor. It describes the tensor as a view of its storage."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


class LayerOffloader:
    """Offloader for one forward and backward of a layer, or of several layers that are recomputed together.

    Args:
        store: activations of the microbatch. The offloader adds itself to `store.offloaders`.
        x: input of the layer.
        shared: saved tensors that are kept alive elsewhere until backward, so offloading them would free no memory.
        stays_on_device: do not offload any tensor of this layer. In backward, the offloader then only starts to copy the previous
            offloaded layer back to the device.
        is_recomputed_ahead: the layer may be recomputed in a separate operation before its backward.
    """

    def __init__(
        self,
        store: ActivationStore,
        pool: HostBufferPool,
        x: torch.Tensor,
        shared: Iterable[torch.Tensor],
        *,
        stays_on_device: bool,
        is_recomputed_ahead: bool,
    ) -> None:
        self.is_recomputed_ahead = is_recomputed_ahead
        self._store, self._pool, self._stays_on_device, self._min_bytes = (
            store,
            pool,
            stays_on_device,
            _MIN_RELATIVE_SIZE * x.nbytes,
        )
        self._live_storages = {*store.live_storages, *map(get_storage_key, shared)}
        self._previous = store.offloaders[-1] if store.offloaders else None
        store.offloaders.append(self)
        self._storages_on_device: dict[int, _OffloadedStorage] = {}
        """Offloaded storages by key, until their device copies are freed."""
        self._storages_to_fetch: list[_OffloadedStorage] = []
        self._offload_end: StreamEvent = None
        self._fetch_end: StreamEvent = None
        self._has_entered_backward = False

    @property
    def offloaded_sizes(self) -> list[int]:
        """Sizes in bytes of the layer's storages that are only in host memory or on their way there: their copy back to the device
        has not started."""
        return [storage.num_bytes for storage in self._storages_to_fetch]

    def run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Run the forward of the layer and offload the tensors that it saves."""
        self._store.running_offloader = self
        with saved_tensors_hooks(self.pack, self.unpack):
            y = function(*inputs)
        self._store.running_offloader = None
        self._offload_end = self._pool.record_copies_to_host()
        if self._previous is not None:
            self._previous.release_device_copies()
        return y

    def release_device_copies(self) -> None:
        """Free the device copies of the offloaded storages. The current stream first waits for the copies to the host."""
        if self._storages_on_device:
            self._pool.wait(self._offload_end)
            for storage in self._storages_on_device.values():
                storage.device_bytes = None
            self._storages_on_device.clear()

    def fetch(self) -> None:
        """Start to copy the offloaded storages back to the device."""
        assert not self._storages_on_device or not self._storages_to_fetch, "fetched before the copy to the host was complete"
        if self._storages_to_fetch:
            storages, self._storages_to_fetch = self._storages_to_fetch, []
            copies, self._fetch_end = self._pool.start_copy_to_device([s.buffer for s in storages], [s.num_bytes for s in storages])
            for storage, tensor in zip(storages, copies, strict=True):
                storage.device_bytes = tensor

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _OffloadedTensor:
        """Start to copy a tensor that autograd saves to the host, if offloading it frees enough memory.

        Returns:
            the object that autograd saves instead: a placeholder, or the tensor if it is not offloaded.
        """
        if self._stays_on_device or not self._should_offload(tensor):
            return tensor.detach()
        key = get_storage_key(tensor)
        storage = self._storages_on_device.get(key)
        if storage is None:
            storage_bytes = (
                tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            )
            storage = self._storages_on_device[key] = _OffloadedStorage(storage_bytes, self._pool.start_copy_to_host(storage_bytes))
            self._storages_to_fetch.append(storage)
        return _OffloadedTensor(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: torch.Tensor | _OffloadedTensor) -> torch.Tensor:
        """Return the tensor for which autograd saved `packed`, a result of `pack`.

        The first call in backward also starts to copy the previous offloaded layer back to the device.
        """
        if not self._has_entered_backward:
            self._enter_backward()
        if isinstance(packed, torch.Tensor):
            return packed
        storage_bytes = packed.storage.device_bytes
        assert storage_bytes is not None
        return storage_bytes.view(packed.dtype).as_strided(packed.size, packed.stride, packed.storage_offset)

    def _enter_backward(self) -> None:
        self._has_entered_backward = True
        self.fetch()
        self._pool.wait(self._fetch_end)
        if self._previous is not None:
            self._previous.fetch()
            self._previous = None

    def _should_offload(self, tensor: torch.Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        return (
            (tensor.is_floating_point() or tensor.dtype is torch.bool)
            and tensor.untyped_storage().nbytes() > self._min_bytes
            and not isinstance(owner, nn.Parameter)
            and get_storage_key(tensor) not in self._live_storages
        )


def create_offloader(
    x: torch.Tensor, *, shared: Iterable[torch.Tensor] = (), is_last: bool = False, is_recomputed_ahead: bool = False
) -> LayerOffloader | None:
    """Return an offloader for a layer whose saved tensors may move to host memory, or None if offloading or autograd is off.

    Args:
        x: input of the layer.
        shared: saved tensors that are kept alive elsewhere until backward, so offloading them would free no memory.
        is_last: the layer is the last offloaded layer of the chunk.
        is_recomputed_ahead: the layer may be recomputed in a separate operation before its backward.
    """
    store = get_current_store()
    if store is None or store.host_pool is None or not torch.is_grad_enabled():
        return None
    return LayerOffloader(
        store,
        store.host_pool,
        x,
        shared,
        stays_on_device=is_last and store.is_backward_next,
        is_recomputed_ahead=is_recomputed_ahead,
    )
