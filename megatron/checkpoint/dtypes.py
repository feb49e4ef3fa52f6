"""Between torch's dtypes and the names that checkpoints use, and from tensors to raw bytes."""

from __future__ import annotations

import torch

from megatron.checkpoint.format.dtypes import DTYPES

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`; also of dtypes that checkpoints do not hold."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name in a manifest."""
    return _BY_NAME[name]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, row-major; a copy only if it is not contiguous in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
