"""A model without its multi-token prediction, which predicts the next token as before: what is exported and what generates text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from megatron.checkpoint.source import OtherModel, TensorInfo, WeightSource
from megatron.spec.weights import depth_of


def without_depths(source: WeightSource) -> WeightSource:
    """The weights of the model itself; a source without --mtp-num-layers as it is."""
    return _NextToken(source) if source.model.mtp_num_layers else source


class _NextToken(OtherModel):
    """The model alone."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source, dataclasses.replace(source.model, mtp_num_layers=0))
        self.weights: Mapping[str, TensorInfo] = {name: one for name, one in source.weights.items() if depth_of(name) is None}
        left = [math.prod(one.shape) for name, one in source.weights.items() if name not in self.weights]
        self.notes = [
            *source.notes,
            f"the {len(left)} tensors of multi-token prediction (--mtp-num-layers {source.model.mtp_num_layers}; {sum(left):,} "
            "parameters) are left out: they change no logit of the next token",
        ]
