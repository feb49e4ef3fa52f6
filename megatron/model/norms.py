"""LayerNorm and RMSNorm. Statistics are computed in at least float32 whatever the dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.handles import VectorUser
from megatron.parallel.params import Scope
from megatron.spec.layers import NormSpec
from megatron.tensor_parallel.linear import Remade


class Norm(VectorUser):
    """Normalises the last dimension. Its result has the model's dtype even when the residual stream is float32.

    Args:
        size: channels that are normalised together, on all ranks.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, scope: Scope, spec: NormSpec, size: int) -> None:
        super().__init__()
        self.kind, self.epsilon, self.zero_centred = spec.kind, spec.epsilon, spec.zero_centred
        self.shape, self.dtype = (size,), scope.dtype
        scope.optional(self, "weight")
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
        # And 1 + weight has too few digits in 16 bits.
        return x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" or self.zero_centred else x

    def vectors(self) -> tuple[nn.Parameter | None, ...]:
        """See `VectorUser`."""
        return self.weight, self.bias

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the normalised channels are multiplied by, and what is added to them, in a dtype; None for nothing."""
        if all(vector is None for vector in self.vectors()):
            return None, None
        weight, bias = (None if vector is None else vector.to(dtype) for vector in self.entering())
        return weight + 1.0 if weight is not None and self.zero_centred else weight, bias

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.factors(x.dtype)  # over a float32 residual stream 16-bit parameters are widened
        if self.kind == "RMSNorm":
            return F.rms_norm(x, self.shape, weight, self.epsilon).to(self.dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.epsilon).to(self.dtype)
