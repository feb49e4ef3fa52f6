"""Dropout whose mask is a function of where and when it is drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.parallel.random import DropoutKey, seed_device


def dropout(x: torch.Tensor, probability: float, key: DropoutKey | None, layer: int, site: str, coordinate: int) -> torch.Tensor:
    """Zero elements with a probability and scale up the rest; nothing without a key.

    Args:
        coordinate: the tensor rank where x is split over the tensor group, else 0, so that replicas draw the same mask.
    """
    if key is None or probability == 0.0:
        return x
    seed_device(x.device, key.site(layer, site, coordinate))
    return F.dropout(x, probability)
