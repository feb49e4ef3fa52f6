"""A model trained with muP as one that needs no multiplier: the division of the logits goes into the final norm."""

from __future__ import annotations

import dataclasses

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.parallel.boxes import Box
from megatron.spec.layers import norm_of, scores_of
from megatron_lab.foreign.source import OtherModel, WeightSource


def folded(source: WeightSource) -> WeightSource:
    """The weights of a model that computes the same without --mup-base-width; a source without it as it is.

    Raises:
        CheckpointError: the final norm has no weight.
    """
    if source.model.mup_width == 1.0:
        return source
    if not any(name.startswith("final_norm.") for name in source.weights):
        raise CheckpointError(
            f"{source.name}: its logits are divided (--mup-base-width), and its final norm has no weight to take that"
        )
    return _Folded(source)


class _Folded(OtherModel):
    """The model with another final norm."""

    def __init__(self, source: WeightSource) -> None:
        model, self._width = source.model, source.model.mup_width
        scale = model.softmax_scale if model.mup_base_kv_channels is None else scores_of(model, window=False).scale
        super().__init__(source, dataclasses.replace(model, mup_base_width=None, mup_base_kv_channels=None, softmax_scale=scale))
        self.notes = [
            *source.notes,
            f"the logits of this model are divided by {self._width:g} (--mup-base-width); here its final norm is, which gives the "
            "same logits, but trains otherwise",
        ]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        found = super().read(name, box)
        if not name.startswith("final_norm."):
            return found
        centre = float(norm_of(self.model).zero_centred and name.endswith(".weight"))
        return (found + centre) / self._width - centre
