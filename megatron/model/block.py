"""One transformer layer (norm, attention, residual; norm, MLP, residual) and its dropout."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.memory import RecomputeModule
from megatron.config.model import ModelConfig
from megatron.memory.recompute import recomputed
from megatron.model.attention import Attention
from megatron.model.document_attention import Documents
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.mlp import MLP
from megatron.model.norms import Norm
from megatron.parallel.random import DropoutKey, seed_device
from megatron.parallel.scope import Scope
from megatron.spec.layers import LayerSpec
from megatron.tensor_parallel.linear import Remade


def dropout(x: torch.Tensor, probability: float, key: DropoutKey | None, layer: int, site: str, coordinate: int) -> torch.Tensor:
    """Zero elements with a probability and scale up the rest; without a key, do nothing.

    Args:
        coordinate: the tensor rank where x is split over the tensor group, else 0, so that replicas draw the same mask.
    """
    if key is None or probability == 0.0:
        return x
    seed_device(x.device, key.site(layer, site, coordinate))
    return F.dropout(x, probability)


class Block(nn.Module):
    """A pre-norm layer. The residual stream keeps its dtype: the model's, or float32 with --fp32-residual-connection.

    Args:
        selective: parts that are computed again in backward instead of being kept.
    """

    def __init__(
        self, scope: Scope, config: ModelConfig, spec: LayerSpec, layer: int, selective: Collection[RecomputeModule] = ()
    ) -> None:
        super().__init__()
        self.layer, self.probability = layer, config.hidden_dropout
        self.remakes_norms, self.recomputes_mlp = "layernorm" in selective, "mlp" in selective
        self.coordinate = scope.tp.index if scope.sequence_parallel else 0
        self.attention_norm = Norm(scope.child("attention_norm"), spec.norm)
        self.attention = Attention(
            scope.child("attention"),
            spec.attention,
            spec.norm,
            layer,
            config.attention_dropout,
            recomputes_core="core_attn" in selective,
        )
        self.mlp_norm = Norm(scope.child("mlp_norm"), spec.norm)
        self.mlp = MLP(scope.child("mlp"), spec.mlp, remakes_activation="mlp_act" in selective)

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h] under sequence parallelism) to the same shape."""
        normed = self._normed(self.attention_norm, x)
        x = x + self._drop(self.attention(normed, rotary, key, documents, cache), key, "attention_output")
        added = recomputed(self._norm_and_mlp, x) if self.recomputes_mlp else self.mlp(self._normed(self.mlp_norm, x))
        return x + self._drop(added, key, "mlp_output")

    def _norm_and_mlp(self, x: torch.Tensor, *, again: bool) -> torch.Tensor:
        return self.mlp(self.mlp_norm(x))

    def _normed(self, norm: Norm, x: torch.Tensor) -> torch.Tensor | Remade:
        return norm.remade(x) if self.remakes_norms else norm(x)

    def _drop(self, x: torch.Tensor, key: DropoutKey | None, site: str) -> torch.Tensor:
        return dropout(x, self.probability, key, self.layer, site, self.coordinate)
