"""LayerNorm and RMSNorm. Statistics are computed in at least float32 whatever the dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.model import ModelConfig
from megatron.parallel.accumulate import through
from megatron.parallel.params import Init
from megatron.parallel.scope import Scope


class Norm(nn.Module):
    """Normalise the last dimension, of `size`; gives the model's dtype even when the residual stream is float32.

    Args:
        partial_over_tp: see `Scope.parameter`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, scope: Scope, config: ModelConfig, size: int, *, partial_over_tp: bool) -> None:
        super().__init__()
        self.size, self.epsilon, self.kind = size, config.norm_epsilon, config.normalization
        scope.parameter(self, "weight", (size,), init=Init(constant=1.0), decay=False, partial_over_tp=partial_over_tp)
        self.bias = None
        if self.kind == "LayerNorm":
            del self.bias
            scope.parameter(self, "bias", (size,), decay=False, partial_over_tp=partial_over_tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size] in the parameters' dtype."""
        weight = through(self.weight)
        out_dtype = weight.dtype
        if self.kind == "LayerNorm" and x.device.type == "cpu":
            # There torch sums the gradients of weight and bias over all tokens in the dtype of x: in bfloat16, at 4,096
            # tokens, they came out a third off.
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.dtype != out_dtype:  # a float32 residual stream over 16-bit parameters
            weight = weight.to(x.dtype)
        if self.kind == "RMSNorm":
            return F.rms_norm(x, (self.size,), weight, self.epsilon).to(out_dtype)
        assert self.bias is not None
        return F.layer_norm(x, (self.size,), weight, through(self.bias).to(x.dtype), self.epsilon).to(out_dtype)
