"""Removal of muP's output multiplier, for formats without it: the weight of the final norm is divided instead of the logits.

The result is a model that needs no multiplier and computes the same logits. Its attention scale is set explicitly.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.layers import build_norm_spec, build_score_spec
from megatron_lab.foreign.source import DerivedSource, WeightSource


def fold_mup_scaling(source: WeightSource) -> WeightSource:
    """Return a source of a model without --mup-base-width that computes the same logits: the weight of the final norm is divided by
    the muP width multiplier instead of the logits.

    A source of a model without muP scaling is returned unchanged.

    Raises:
        CheckpointError: the final norm has no weight that could be divided.
    """
    if source.model.width_multiplier == 1.0:
        return source
    if not any(name.startswith("final_norm.") for name in source.weights):
        raise CheckpointError(
            f"{source.name}: a model with --mup-base-width divides its logits, which the format of the result cannot express. The "
            "weight of the final norm would have to be divided instead, but the final norm of this model has no weight. This "
            "model cannot be converted. Use it with the tools of this framework, or train it with a norm that has a weight"
        )
    return _FoldedSource(source)


class _FoldedSource(DerivedSource):
    """Weights of another source, with the weight of the final norm divided by the muP width multiplier. The logits are then the
    same without a division by the multiplier."""

    def __init__(self, source: WeightSource) -> None:
        model, self._width_multiplier = source.model, source.model.width_multiplier
        scale = model.softmax_scale if model.mup_base_kv_channels is None else build_score_spec(model, has_window=False).scale
        super().__init__(source, dataclasses.replace(model, mup_base_width=None, mup_base_kv_channels=None, softmax_scale=scale))
        self.notes = [
            *source.notes,
            f"the logits of this model are divided by {self._width_multiplier:g} (--mup-base-width); here the weight of its final "
            "norm is divided instead, which gives the same logits, but different updates in further training",
        ]

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        tensor = super().read(name, tensor_slice)
        if not name.startswith("final_norm."):
            return tensor
        center = float(build_norm_spec(self.model).zero_centered and name.endswith(".weight"))
        return (tensor + center) / self._width_multiplier - center
