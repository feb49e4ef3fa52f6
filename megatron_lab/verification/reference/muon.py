"""Muon in the reference model: the direction of a parameter's update, computed from its momentum (Jordan et al. 2024, Liu et al.
2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class MuonRule:
    """Options of Muon: how a parameter is split into matrices, and how each matrix of the momentum is orthogonalized."""

    queries_per_group: int = 1
    """Query heads per key-value head."""
    head_size: int = 1
    qkv_split: Literal["three", "heads", "one"] = "three"
    """Matrices into which a fused query-key-value weight is split before orthogonalization: "three" for queries, keys and
    values, "heads" for a matrix per head, "one" for no split."""
    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    extra_scale_factor: float = 1.0

    def applies_to(self, name: str) -> bool:
        """Check whether Muon updates the parameter with this name: a matrix in a layer. Adam updates all other parameters."""
        return name.startswith(("layers.", "mtp.")) and name.endswith(".weight") and "norm" not in name

    def compute_direction(self, name: str, momentum: Tensor) -> Tensor:
        """Orthogonalize the momentum of the parameter with this name, and return the direction of the update. The update is the
        direction times the learning rate."""
        if momentum.dim() == 3:
            return torch.stack([self._orthogonalize(matrix) for matrix in momentum])
        if not name.endswith("attention.qkv.weight") or self.qkv_split == "one":
            return self._orthogonalize(momentum)
        heads = list(momentum.split(self.head_size))
        if self.qkv_split == "heads":
            return torch.cat([self._orthogonalize(head) for head in heads])
        group = self.queries_per_group + 2
        heads_by_role = {
            "q": [i for i in range(len(heads)) if i % group < self.queries_per_group],
            "k": [i for i in range(len(heads)) if i % group == self.queries_per_group],
            "v": [i for i in range(len(heads)) if i % group == self.queries_per_group + 1],
        }
        for head_indices in heads_by_role.values():
            directions = self._orthogonalize(torch.cat([heads[i] for i in head_indices])).split(self.head_size)
            for i, head in zip(head_indices, directions, strict=True):
                heads[i] = head
        return torch.cat(heads)

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        outputs, inputs = matrix.shape
        x = matrix / (matrix.square().sum().sqrt() + 1e-7)
        for _ in range(self.steps):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        scales = {
            "spectral": math.sqrt(max(outputs, inputs)),
            "unit_rms_norm": math.sqrt(outputs / inputs),
            "shape_scaling": max(1.0, outputs / inputs) ** 0.5,
        }
        return self.extra_scale_factor * scales[self.scale_mode] * x
