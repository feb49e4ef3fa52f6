"""A digest of a tensor's bits, computed where the tensor is: a wrapping 64-bit sum of its words, each times an odd weight.

One changed word always changes it, since an odd weight times a difference is not 0; other changes go unseen once in about 2^63.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from megatron.parallel.random import stable_seed

_ROW = 1 << 14
"""Words with a weight each; each row of so many words has a further weight."""
_ROWS_AT_ONCE = 64


def bit_digest(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on the tensor's device: the same for the same bytes in the same order, at any address."""
    words = _words(tensor)
    weights, row_weights = _weights(tensor.device), _odd_numbers(-(-len(words) // _ROW))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        rows = (whole[start : start + _ROWS_AT_ONCE] * weights).sum(1)
        total += (rows * row_weights[start : start + len(rows)].to(tensor.device)).sum()
    rest = words[whole.numel() :]
    if len(rest):
        total += (rest * weights[: len(rest)]).sum() * int(row_weights[-1])
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as 64-bit words, zeros behind them."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """Of the words of a row: int64 [16384]."""
    return _odd_numbers(_ROW).to(device)


@functools.lru_cache(maxsize=64)
def _odd_numbers(count: int) -> torch.Tensor:
    """Drawn once and for all: int64 [count], in host memory; a longer list begins with a shorter one."""
    drawn = np.random.Generator(np.random.Philox(stable_seed("bits"))).bytes(8 * count)
    return torch.from_numpy(np.frombuffer(drawn, dtype=np.int64) | 1)
