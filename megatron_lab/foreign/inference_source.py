"""Conversion of a trained model to the form that inference and export need: without the parts and limits that only training
uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.spec.weights import iter_weights, parse_mtp_depth
from megatron.training.progress import Progress
from megatron_lab.foreign.adapters import merge_adapters
from megatron_lab.foreign.source import DerivedSource, StoredCheckpoint, TensorInfo, WeightSource

_TRAINING_FIELDS = (
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
    "moe_input_jitter_eps",
)


def build_inference_source(source: WeightSource) -> WeightSource:
    """Return a source of the same model in the form for inference, without the parts that only training uses.

    The returned model has no multi-token-prediction layers; its prediction of the next token does not change. Its experts have no
    capacity, so they process all tokens assigned to them and drop none. LoRA adapters are merged into the weights. The number of
    positions is that of the longest sequences that the run has read. A source that needs none of these changes is returned
    unchanged.
    """
    num_positions = max(source.model.num_positions, _find_longest_sequence(source))
    source = merge_adapters(source)
    overrides: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name in _TRAINING_FIELDS
    }
    if source.model.moe_router_load_balancing_type == "global_aux_loss":  # this type stores the load of the experts
        overrides["moe_router_load_balancing_type"] = "aux_loss"
    if num_positions > source.model.num_positions:  # the run was continued with shorter sequences
        overrides["max_position_embeddings"] = num_positions
    model = dataclasses.replace(source.model, mtp_num_layers=0, **overrides)
    return source if model == source.model else _InferenceSource(source, model)


def _find_longest_sequence(source: WeightSource) -> int:
    """Return the largest sequence length in tokens with which the run of a training checkpoint has read data since its start; 0 for
    other sources."""
    if not isinstance(source, StoredCheckpoint) or "progress" not in source.state:
        return 0
    return max((phase.seq_length for phase in Progress.from_json(source.state["progress"]).phases), default=0)


class _InferenceSource(DerivedSource):
    """Weights of another source without those that only training uses, such as multi-token-prediction layers. In `notes` (messages
    for the user), the source names the layers and limits that were removed."""

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        super().__init__(source, model)
        names = {weight.name for weight in iter_weights(model, source.vocab_size)}
        self.weights: Mapping[str, TensorInfo] = {name: info for name, info in source.weights.items() if name in names}
        self.notes = [*source.notes]
        mtp_numels = [math.prod(info.shape) for name, info in source.weights.items() if parse_mtp_depth(name) is not None]
        if mtp_numels:
            self.notes.append(
                f"the {len(mtp_numels)} tensors of multi-token prediction (--mtp-num-layers {source.model.mtp_num_layers}; "
                f"{sum(mtp_numels):,} parameters) are left out: they change no logit of the next token"
            )
        if source.model.moe_expert_capacity_factor is not None:
            self.notes.append(
                f"experts accept all tokens; in training their capacity was --moe-expert-capacity-factor "
                f"{source.model.moe_expert_capacity_factor:g} x the mean number of tokens"
            )
