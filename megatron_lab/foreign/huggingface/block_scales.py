"""FP8 weights with one scale per block of a matrix, as published by DeepSeek-V3 (report, section 3.3). They are read as float32.

`x.weight` [out, in] is float8_e4m3fn; `out` and `in` are the numbers of output and input features. `x.weight_scale_inv` [ceil(out /
rows), ceil(in / columns)] is float32 and contains the number by which each block of [rows, columns] elements is multiplied. Each
product is rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron_lab.foreign.huggingface.weight_files import FileTensor

_SCALE_SUFFIX = "_scale_inv"


def get_block_size(quantization: object) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of the blocks that each have one FP8 scale. Return None if the weights are quantized
    in any other way.

    Args:
        quantization: value of `quantization_config` in config.json.
    """
    config: dict[str, Any] = quantization if isinstance(quantization, dict) else {}
    size = config.get("weight_block_size")
    is_fp8 = config.get("quant_method") == "fp8" and config.get("fmt", "e4m3") == "e4m3"
    if not is_fp8 or not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        return None
    return size[0], size[1]


def apply_scales(tensors: Mapping[str, FileTensor], block_size: tuple[int, int]) -> dict[str, FileTensor]:
    """Replace the FP8 matrices among the tensors of a folder by the products of matrix and scales in float32, and leave out the
    tensors of scales. A matrix is multiplied when it is read.

    Args:
        tensors: tensors of the weight files, by Hugging Face name.
        block_size: numbers of rows and columns of a block, which has one scale.

    Raises:
        DamagedCheckpointError: scales are missing, or their shape does not match the blocks of the matrix.
    """
    scaled_tensors = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float8_e4m3fn:
            continue
        scales = scaled_tensors.pop(f"{name}{_SCALE_SUFFIX}", None)
        expected_shape = tuple(-(-size // step) for size, step in zip(tensor.shape, block_size, strict=False))
        if scales is None or len(tensor.shape) != 2 or scales.shape != expected_shape or scales.dtype is not torch.float32:
            description = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise DamagedCheckpointError(
                f"the FP8 matrix {name} has the shape {list(tensor.shape)} and one scale for each block of "
                f"{block_size[0]} x {block_size[1]} elements. So the tensor of scales {name}{_SCALE_SUFFIX} must be torch.float32 "
                f"{list(expected_shape)}, but it is {description}. Copy the files of the model again"
            )
        scaled_tensors[name] = FileTensor(tensor.shape, torch.float32, partial(_read_scaled, tensor, scales, block_size))
    return scaled_tensors


def _read_scaled(tensor: FileTensor, scales: FileTensor, block_size: tuple[int, int]) -> torch.Tensor:
    """Read an FP8 matrix and its scales, and return their product in float32."""
    values, factors = tensor.read().float(), scales.read()
    for rows, row_scales in zip(values.split(block_size[0]), factors, strict=True):
        rows.mul_(row_scales.repeat_interleave(block_size[1])[: values.shape[1]])
    return values
