"""QK-clip in the reference model: it scales down the query and key weights of heads with large attention scores (Kimi K2, section
2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_lab.verification.reference.shape import ReferenceShape


@dataclass(frozen=True)
class QkClip:
    """Threshold and exponent of QK-clip, with a method that applies it to the weights of a model."""

    shape: ReferenceShape
    threshold: float
    alpha: float

    def apply(self, weights: dict[str, Tensor], max_logits: Mapping[str, Tensor]) -> None:
        """Scale down the query and key weights and biases of heads whose largest attention score exceeds the threshold.

        Args:
            weights: weights of the model, by name. The scaled weights replace the old ones in it.
            max_logits: largest attention score of each of the n query heads in the batch [n], by the name of the layer ("layers.3",
                "mtp.0.layer").
        """
        for layer, scores in max_logits.items():
            for name in [name for name in weights if name.startswith(f"{layer}.attention.")]:
                weights[name] = self._scale_weight(name.removeprefix(f"{layer}.attention."), weights[name].clone(), scores.tolist())

    def _scale_weight(self, name: str, weight: Tensor, scores: list[float]) -> Tensor:
        shape, latent_shape, module_name = self.shape, self.shape.latent, name.split(".")[0]
        gammas = [self.threshold / score if score > self.threshold else 1.0 for score in scores]
        if latent_shape is None and module_name == "qkv":
            heads_per_group, d = shape.heads // shape.kv_heads, shape.head_size
            for group in range(shape.kv_heads):
                gamma, start = (
                    min(gammas[group * heads_per_group : (group + 1) * heads_per_group]),
                    group * (heads_per_group + 2) * d,
                )
                weight[start : start + heads_per_group * d] *= gamma**self.alpha
                weight[start + heads_per_group * d : start + (heads_per_group + 1) * d] *= gamma ** (1 - self.alpha)
        elif latent_shape is not None and module_name in ("q", "q_up"):
            for head, gamma in enumerate(gammas):
                start = head * (latent_shape.qk_head_dim + latent_shape.qk_pos_emb_head_dim)
                weight[start : start + latent_shape.qk_head_dim] *= gamma**self.alpha
                weight[start + latent_shape.qk_head_dim : start + latent_shape.qk_head_dim + latent_shape.qk_pos_emb_head_dim] *= (
                    gamma
                )
        elif latent_shape is not None and module_name == "kv_up":
            for head, gamma in enumerate(gammas):
                start = head * (latent_shape.qk_head_dim + latent_shape.v_head_dim)
                weight[start : start + latent_shape.qk_head_dim] *= gamma ** (1 - self.alpha)
        return weight
