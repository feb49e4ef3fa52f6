"""Interface between the tensors of a run and its checkpoints: the slices of each global tensor that a rank holds. Also the dtype
names and raw bytes of tensors.

The checkpoint package knows nothing else about the layout of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.checkpoint.safetensors_file import DTYPES
from megatron.parallel.tensor_slice import BufferSlice

WEIGHT = "model"
"""Prefix of weights: they are named `model.<parameter name>`. Optimizer moments are named, for example, `exp_avg.<parameter
name>`."""
EMA = "ema"
"""Prefix of the exponential moving averages of weights: they are named `ema.<parameter name>`."""


@dataclass
class GlobalTensor:
    """One tensor of the unsharded model or optimizer state, and the slices of it that are in the memory of this rank.

    If several ranks hold replicas of a slice, all of them list it. A save writes each slice only once, from one of these ranks. A
    load fills the slice on all of them.
    """

    name: str
    """Global name, the same at every layout, such as `model.layers.3.mlp.up.weight`."""
    global_shape: tuple[int, ...]
    """Shape of the tensor in the unsharded model, without padding."""
    local: torch.Tensor
    """Elements of the tensor in the memory of this rank: contiguous, on any device, of any shape. `slices` gives offsets into the
    flattened tensor."""
    slices: list[BufferSlice]
    """Slices of the global tensor that `local` holds, each with its offset in the flattened `local`. Empty if `local` holds only
    padding."""

    def __post_init__(self) -> None:
        assert self.local.is_contiguous(), f"{self.name}: the local tensor must be contiguous"
        for local_slice in self.slices:
            tensor_slice = local_slice.slice
            assert tensor_slice.numel, f"{self.name}: {tensor_slice} is empty"
            assert len(tensor_slice.offsets) == len(self.global_shape), (
                f"{self.name}: {tensor_slice} does not have the number of dimensions of the global shape"
            )
            assert local_slice.offset + tensor_slice.numel <= self.local.numel(), (
                f"{self.name}: {local_slice} lies beyond the local tensor"
            )
            ends = (offset + size for offset, size in zip(tensor_slice.offsets, tensor_slice.sizes, strict=True))
            assert all(end <= size for end, size in zip(ends, self.global_shape, strict=True)), (
                f"{self.name}: {tensor_slice} is outside the global shape {self.global_shape}"
            )

    def get_local_view(self, local_slice: BufferSlice) -> torch.Tensor:
        """Return the elements of a slice as a view of `local`, in the shape of the slice."""
        flat = self.local.detach().view(-1)
        return flat[local_slice.offset : local_slice.offset + local_slice.slice.numel].view(local_slice.slice.sizes)


_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def get_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a dtype name of a checkpoint's manifest, such as `bfloat16`."""
    return _BY_NAME[name]


def get_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the raw bytes of a tensor in row-major order. The bytes are copied only if the tensor is not contiguous in host
    memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
