"""The reference's Muon: the direction in which one parameter goes, from its momentum (Jordan et al. 2024, Liu et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class MuonUpdate:
    """How matrices are made of parameters, and what is done to them."""

    queries: int = 1
    """Query heads to each key head and value head."""
    head_size: int = 1
    fused: Literal["three", "heads", "one"] = "three"
    """What of queries, keys and values, fused in one weight, is one matrix: each of the three, each head, or all."""
    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    scale: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    extra: float = 1.0

    def updates(self, name: str) -> bool:
        """Whether a parameter is updated so; else by adam."""
        return name.startswith(("layers.", "mtp.")) and name.endswith(".weight") and "norm" not in name

    def direction(self, name: str, u: Tensor) -> Tensor:
        """What the learning rate is multiplied by, from the gradient with momentum."""
        if u.dim() == 3:
            return torch.stack([self._matrix(one) for one in u])
        if not name.endswith("attention.qkv.weight") or self.fused == "one":
            return self._matrix(u)
        heads = list(u.split(self.head_size))
        if self.fused == "heads":
            return torch.cat([self._matrix(head) for head in heads])
        group = self.queries + 2
        which = {
            "q": [i for i in range(len(heads)) if i % group < self.queries],
            "k": [i for i in range(len(heads)) if i % group == self.queries],
            "v": [i for i in range(len(heads)) if i % group == self.queries + 1],
        }
        for places in which.values():
            found = self._matrix(torch.cat([heads[i] for i in places])).split(self.head_size)
            for i, head in zip(places, found, strict=True):
                heads[i] = head
        return torch.cat(heads)

    def _matrix(self, u: Tensor) -> Tensor:
        outputs, inputs = u.shape
        x = u / (u.square().sum().sqrt() + 1e-7)
        for _ in range(self.steps):
            xx = x @ x.T
            x = 3.4445 * x - 4.7750 * xx @ x + 2.0315 * xx @ xx @ x
        scales = {
            "spectral": math.sqrt(max(outputs, inputs)),
            "unit_rms_norm": math.sqrt(outputs / inputs),
            "shape_scaling": max(1.0, outputs / inputs) ** 0.5,
        }
        return self.extra * scales[self.scale] * x
