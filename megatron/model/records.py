"""The parameters of a whole model: what every complete source of weights holds."""

from __future__ import annotations

import torch

from megatron.config.model import ModelConfig
from megatron.model.build import build_model
from megatron.parallel.context import make_context
from megatron.parallel.params import ParamRecord
from megatron.parallel.topology import Topology


def global_records(model: ModelConfig, vocab_size: int) -> dict[str, ParamRecord]:
    """The record of every parameter by its global name, in the order of the forward. Needs no memory for the weights.

    Args:
        model: shape and parts.
        vocab_size: rows of the word embedding, without padding.
    """
    alone = make_context(Topology(), 0, torch.device("meta"))
    built = build_model(model, alone, dtype=torch.float32, vocab_size=vocab_size, sequence_parallel=False, seed=0)
    return {entry.record.name: entry.record for entry in built.params}
