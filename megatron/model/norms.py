"""LayerNorm and RMSNorm. Statistics are computed in at least float32 whatever the dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.scope import Scope
from megatron.parallel.vectors import VectorUser
from megatron.spec.layers import NormSpec
from megatron.tensor_parallel.linear import Remade


class Norm(VectorUser):
    """Normalises the last dimension. Its result has the model's dtype even when the residual stream is float32."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, scope: Scope, spec: NormSpec) -> None:
        super().__init__()
        self.kind, self.epsilon = spec.kind, spec.epsilon
        self.shape = scope.weight("weight").shape
        scope.parameter(self, "weight")
        scope.optional(self, "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., channels] to the same shape, in the parameters' dtype."""
        return self._normalise(self._kept(x))

    def remade(self, x: torch.Tensor) -> Remade:
        """The same for a linear layer, which then keeps nothing: in backward it normalises again what the norm keeps.

        Sharded parameters are there for that: it happens while backward is in the layer, since schedules that put weight gradients
        off are refused for them (`late_gradients_find_their_block`).
        """
        return Remade.of(self._normalise, self._kept(x))

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """The input in the form in which torch's norm keeps it for backward."""
        # On CPU torch's LayerNorm sums the gradients of weight and bias over all tokens in the dtype of x: in bfloat16, at 4,096
        # tokens, they came out a third off. Its RMSNorm widens x in any case.
        return x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" else x

    def vectors(self) -> tuple[nn.Parameter | None, ...]:
        """See `VectorUser`."""
        return self.weight, self.bias

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.entering()
        assert weight is not None
        out_dtype = weight.dtype
        if x.dtype != out_dtype:  # a float32 residual stream over 16-bit parameters
            weight = weight.to(x.dtype)
        if self.kind == "RMSNorm":
            return F.rms_norm(x, self.shape, weight, self.epsilon).to(out_dtype)
        assert bias is not None
        return F.layer_norm(x, self.shape, weight, bias.to(x.dtype), self.epsilon).to(out_dtype)
