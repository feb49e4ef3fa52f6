"""Weights in 8 bits with a scale for each block of a matrix, as DeepSeek-V3 is published (report, section 3.3): read as float32.

`x.weight` [out, in] is float8_e4m3fn, and `x.weight_scale_inv` [ceil(out / rows), ceil(in / columns)] float32 holds what each block
is multiplied by. The products are rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron_lab.foreign.huggingface.weight_files import FileTensor

_SCALES = "_scale_inv"


def block_size(quantization: object) -> tuple[int, int] | None:
    """Rows and columns of a block, of the `quantization_config` of a config.json; None if it is of another kind."""
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else {}
    size = settings.get("weight_block_size")
    known = settings.get("quant_method") == "fp8" and settings.get("fmt", "e4m3") == "e4m3"
    if not known or not isinstance(size, list) or len(size) != 2 or any(type(one) is not int or one < 1 for one in size):
        return None
    return size[0], size[1]


def without_scales(stored: Mapping[str, FileTensor], block: tuple[int, int]) -> dict[str, FileTensor]:
    """The tensors of a folder with those in 8 bits as float32, and without their scales.

    Raises:
        DamagedCheckpointError: scales are missing, or of another shape than the matrix has blocks.
    """
    found = dict(stored)
    for name, tensor in stored.items():
        if tensor.dtype is not torch.float8_e4m3fn:
            continue
        scales = found.pop(f"{name}{_SCALES}", None)
        blocks = tuple(-(-size // step) for size, step in zip(tensor.shape, block, strict=False))
        if scales is None or len(tensor.shape) != 2 or scales.shape != blocks or scales.dtype is not torch.float32:
            there = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise DamagedCheckpointError(
                f"{name} {list(tensor.shape)} is in 8 bits, with blocks of {block[0]} x {block[1]}; {name}{_SCALES} must be "
                f"torch.float32 {list(blocks)}, but is {there}"
            )
        found[name] = FileTensor(tensor.shape, torch.float32, partial(_scaled, tensor, scales, block))
    return found


def _scaled(tensor: FileTensor, scales: FileTensor, block: tuple[int, int]) -> torch.Tensor:
    values, factors = tensor.read().float(), scales.read()
    for row, each in zip(values.split(block[0]), factors, strict=True):
        row.mul_(each.repeat_interleave(block[1])[: values.shape[1]])
    return values
