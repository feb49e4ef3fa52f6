"""The part of a global tensor that a rank holds (checkpoints know nothing else of layouts), and its dtype and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.checkpoint.safetensors_file import DTYPES
from megatron.parallel.boxes import PlacedBox

WEIGHT = "model"
"""Tensors that are weights are named `model.<parameter name>`. Moments are named, for example, `exp_avg.<parameter name>`."""
AVERAGE = "ema"
"""The exponential moving average of a weight is named `ema.<parameter name>`."""


@dataclass
class GlobalTensor:
    """The part of one global tensor that this rank holds.

    Ranks that hold replicas give the same boxes: each is written once in the world, and read by everybody who holds it.
    """

    name: str
    """Global name, the same at every layout, e.g. `model.layers.3.mlp.up.weight`."""
    global_shape: tuple[int, ...]
    """Shape in the whole model, without padding."""
    local: torch.Tensor
    """The elements, contiguous; the starts of boxes are indices into it, flattened. On any device."""
    boxes: list[PlacedBox]
    """The boxes of the global tensor that it holds; empty if it holds only padding."""

    def __post_init__(self) -> None:
        assert self.local.is_contiguous(), f"{self.name}: the local tensor must be contiguous"
        for placed in self.boxes:
            box = placed.box
            assert box.numel, f"{self.name}: {box} is empty"
            assert len(box.offsets) == len(self.global_shape), f"{self.name}: {box} has another number of dimensions"
            assert placed.start + box.numel <= self.local.numel(), f"{self.name}: {placed} lies beyond the local tensor"
            ends = (offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))
            assert all(end <= size for end, size in zip(ends, self.global_shape, strict=True)), f"{self.name}: {box} is outside"

    def part(self, placed: PlacedBox) -> torch.Tensor:
        """The local elements of a box, as a view in the shape of the box."""
        flat = self.local.detach().view(-1)
        return flat[placed.start : placed.start + placed.box.numel].view(placed.box.sizes)


_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype with a name in a manifest."""
    return _BY_NAME[name]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, row-major; a copy only if it is not contiguous in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
