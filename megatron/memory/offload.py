"""Saved tensors of chosen layers in host memory between forward and backward, as `--cpu-offload-activations` asks for.

Autograd hands over each tensor that a layer saves (`torch.autograd.graph.saved_tensors_hooks`). Its storage begins to leave at
once, on a stream of its own, while the layer goes on. Storages are moved, not tensors: two views, or one tensor saved twice, go
once. Of a layer that runs again in backward (`recompute`), the input is moved. Not moved is what would free nothing or little:

- what lives anyway: parameters, the chunk's received input, tables that layers share;
- integers: places of documents, which belong to the batch, and seeds of kernels;
- storages of less than a sixteenth of the layer's input, such as statistics of norms.

The device copies of a layer are given free when the next chosen layer has run, those of the last when the next operation of the
stage has: until then copies hide behind computation, then computation waits for them. So at any time one layer is on its way.

A layer comes back while backward goes through the chosen layer after it; the last one while the stage's operation before the
microbatch's first backward operation computes (`Kept.fetch`). Where it would have to return before it has gone, it stays
(`megatron.pipeline_parallel.executor`). The device's memory is given to it when its copy begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.memory.host import HostBuffer, HostMemory, Mark
from megatron.memory.recompute import Kept, current, storage_key

_LEAST_SHARE = 1 / 16
"""A storage is moved if it is larger than this share of the layer's input."""


class _Storage:
    """A storage that is moved."""

    def __init__(self, source: torch.Tensor, buffer: HostBuffer) -> None:
        self.num_bytes, self.buffer = len(source), buffer
        self.on_device: torch.Tensor | None = source
        """uint8; None while it is only in the buffer."""


class _View(NamedTuple):
    """A saved tensor, in place of which autograd keeps this."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class LayerOnHost:
    """One forward of a chosen layer (or of several that run again together), until its backward.

    Args:
        kept: that of the microbatch; the layer joins it.
        x: the layer's input.
        shared: tensors that it saves and that others hold as long.
        stays: nothing is moved, but that its backward begins is noted.
        remade_ahead: it runs again in an operation of its own, before backward.
    """

    def __init__(
        self, kept: Kept, host: HostMemory, x: torch.Tensor, shared: Iterable[torch.Tensor], *, stays: bool, remade_ahead: bool
    ) -> None:
        self.remade_ahead = remade_ahead
        self._kept, self._host, self._stays, self._least = kept, host, stays, _LEAST_SHARE * x.nbytes
        self._living = {*kept.living, *map(storage_key, shared)}
        self._before = kept.layers[-1] if kept.layers else None
        kept.layers.append(self)
        self._storages: dict[int, _Storage] = {}
        """By storage, as long as the device copies live."""
        self._to_fetch: list[_Storage] = []
        self._moved: Mark = None
        self._brought: Mark = None
        self._entered = False

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is in host memory and not asked back yet."""
        return [storage.num_bytes for storage in self._to_fetch]

    def run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Run the layer's forward."""
        self._kept.on_host = self
        with saved_tensors_hooks(self.pack, self.unpack):
            y = function(*inputs)
        self._kept.on_host = None
        self._moved = self._host.moved()
        if self._before is not None:
            self._before.settle()
        return y

    def settle(self) -> None:
        """Give the device copies free. Whatever is computed from now on waits until they have been copied."""
        if self._storages:
            self._host.wait(self._moved)
            for storage in self._storages.values():
                storage.on_device = None
            self._storages.clear()

    def fetch(self) -> None:
        """Begin to bring back what was moved."""
        assert not self._storages or not self._to_fetch, "it is asked back before it has gone"
        if self._to_fetch:
            storages, self._to_fetch = self._to_fetch, []
            found, self._brought = self._host.bring([one.buffer for one in storages], [one.num_bytes for one in storages])
            for storage, tensor in zip(storages, found, strict=True):
                storage.on_device = tensor

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Begin to move a tensor, if that is worth it. The result takes its place."""
        if self._stays or not self._is_worth_it(tensor):
            return tensor.detach()
        key = storage_key(tensor)
        storage = self._storages.get(key)
        if storage is None:
            whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            storage = self._storages[key] = _Storage(whole, self._host.move(whole))
            self._to_fetch.append(storage)
        return _View(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: torch.Tensor | _View) -> torch.Tensor:
        """The tensor. The first one that backward takes of this layer lets the one before come back."""
        if not self._entered:
            self._enter()
        if isinstance(packed, torch.Tensor):
            return packed
        found = packed.storage.on_device
        assert found is not None
        return found.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _enter(self) -> None:
        self._entered = True
        self.fetch()
        self._host.wait(self._brought)
        if self._before is not None:
            self._before.fetch()
            self._before = None

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        return (
            (tensor.is_floating_point() or tensor.dtype is torch.bool)
            and tensor.untyped_storage().nbytes() > self._least
            and not isinstance(owner, nn.Parameter)
            and storage_key(tensor) not in self._living
        )


def chosen_layer(
    x: torch.Tensor, *, shared: Iterable[torch.Tensor] = (), last: bool = False, remade_ahead: bool = False
) -> LayerOnHost | None:
    """A layer that is chosen to have its saved tensors in host memory begins its forward; None where nothing is kept for backward.

    Args:
        x: its input.
        shared: tensors that it saves and that others hold as long.
        last: it is the last one of the chunk that is chosen.
        remade_ahead: it runs again in an operation of its own, before backward.
    """
    kept = current()
    if kept is None or kept.host is None or not torch.is_grad_enabled():
        return None
    return LayerOnHost(kept, kept.host, x, shared, stays=last and kept.back_soon, remade_ahead=remade_ahead)
