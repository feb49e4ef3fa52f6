"""What a model is built with on a rank."""

from __future__ import annotations

import pytest
import torch

from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.model import build
from megatron.parallel.context import Group
from megatron.parallel.overlap import Overlap, RingOverlap
from megatron.parallel.topology import Topology
from tests.support.lone_rank import lone_rank

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=8)


@pytest.mark.parametrize(("overlap", "chooses"), [(True, True), (False, False)])
def test_tensor_ranks_choose_together_how_products_overlap_with_their_messages(
    monkeypatch: pytest.MonkeyPatch, *, overlap: bool, chooses: bool
) -> None:
    """They ask each other what their devices can do; others are not asked."""
    asked: list[Group] = []

    def choose(group: Group, device: torch.device) -> Overlap:
        asked.append(group)
        return RingOverlap("a CPU")

    monkeypatch.setattr("megatron.parallel.overlap.choose_overlap", choose)
    context = lone_rank(Topology(tp=2, dp=2), 1)
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=overlap)
    build.build_model_from_config(Config(model=MODEL, parallel=parallel), context, 100)
    assert asked == [context.group("tp")] * chooses
