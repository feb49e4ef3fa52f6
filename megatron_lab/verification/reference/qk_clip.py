"""The reference's QK-clip: the query and key weights of heads with large scores are scaled down (Kimi K2, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_lab.verification.reference.shape import ReferenceShape


@dataclass(frozen=True)
class ScoreClip:
    """How it is done."""

    shape: ReferenceShape
    threshold: float
    alpha: float

    def apply(self, weights: dict[str, Tensor], largest: Mapping[str, Tensor]) -> None:
        """Replace weights and biases of queries and keys.

        Args:
            largest: the largest score of each head [n] in the batch, by the name of the layer ("layers.3", "mtp.0.layer").
        """
        for layer, scores in largest.items():
            for name in [name for name in weights if name.startswith(f"{layer}.attention.")]:
                weights[name] = self._scaled(name.removeprefix(f"{layer}.attention."), weights[name].clone(), scores.tolist())

    def _scaled(self, name: str, w: Tensor, scores: list[float]) -> Tensor:
        shape, latent, part = self.shape, self.shape.latent, name.split(".")[0]
        gammas = [self.threshold / score if score > self.threshold else 1.0 for score in scores]
        if latent is None and part == "qkv":
            each, d = shape.heads // shape.kv_heads, shape.head_size
            for group in range(shape.kv_heads):
                gamma, first = min(gammas[group * each : (group + 1) * each]), group * (each + 2) * d
                w[first : first + each * d] *= gamma**self.alpha
                w[first + each * d : first + (each + 1) * d] *= gamma ** (1 - self.alpha)
        elif latent is not None and part in ("q", "q_up"):
            for head, gamma in enumerate(gammas):
                first = head * (latent.plain + latent.rotated)
                w[first : first + latent.plain] *= gamma**self.alpha
                w[first + latent.plain : first + latent.plain + latent.rotated] *= gamma
        elif latent is not None and part == "kv_up":
            for head, gamma in enumerate(gammas):
                first = head * (latent.plain + latent.value)
                w[first : first + latent.plain] *= gamma ** (1 - self.alpha)
        return w
