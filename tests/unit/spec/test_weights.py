"""What is counted from the spec is what built models hold, over many shapes and layouts."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.model import ModelConfig
from megatron.model.build import build_model
from megatron.parallel.params import build_global_records
from megatron.parallel.topology import Topology
from megatron.spec.activations import ACTIVATIONS
from megatron.spec.counts import count_parameters
from tests.support.lone_rank import lone_rank

META = torch.device("meta")


def _with_latents(draw: st.DrawFn, heads: int, flag: str | None) -> ModelConfig:
    return ModelConfig(
        num_layers=draw(st.integers(2, 4)),
        hidden_size=2 * draw(st.integers(1, 20)),
        ffn_hidden_size=2 * draw(st.integers(1, 20)),
        num_attention_heads=heads,
        seq_length=8,
        position_embedding_type="rope",
        multi_latent_attention=True,
        q_lora_rank=draw(st.sampled_from([None, 5])),
        kv_lora_rank=draw(st.integers(1, 9)),
        qk_head_dim=draw(st.integers(1, 6)),
        qk_pos_emb_head_dim=2 * draw(st.integers(1, 3)),
        v_head_dim=draw(st.integers(1, 7)),
        qk_layernorm=draw(st.booleans()),
        **({flag: True} if flag else {}),  # type: ignore[arg-type]
    )


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any shape whose heads and widths two tensor ranks can share."""
    groups, queries, size = 2 * draw(st.integers(1, 2)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    flag = draw(st.sampled_from(ACTIVATIONS)).config_field
    if draw(st.integers(0, 3)) == 0:
        return _with_latents(draw, 2 * groups, flag)
    switches = ("untie_embeddings_and_output_weights", "disable_bias_linear", "add_qkv_bias", "qk_layernorm")
    return ModelConfig(
        num_layers=draw(st.integers(2, 4)),
        hidden_size=groups * queries * size,
        ffn_hidden_size=2 * draw(st.integers(1, 20)),
        num_attention_heads=groups * queries,
        kv_channels=draw(st.sampled_from([None, 2, 6])),
        group_query_attention=True,
        num_query_groups=groups,
        seq_length=8,
        max_position_embeddings=draw(st.sampled_from([None, 9])),
        position_embedding_type=draw(st.sampled_from(["learned_absolute", "rope", "none"])),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        make_vocab_size_divisible_by=draw(st.sampled_from([1, 8])),
        **{name: draw(st.booleans()) for name in switches},  # type: ignore[arg-type]
        **({flag: True} if flag else {}),  # type: ignore[arg-type]
    )


@settings(max_examples=40)
@given(models(), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(1, 40), st.booleans())
def test_built_models_hold_what_the_spec_says(model: ModelConfig, layout: tuple[int, int], vocab_size: int, sequence: bool) -> None:
    topology = Topology(tp=layout[0], pp=layout[1])
    found: dict[str, int] = {}
    records = {}
    for rank in range(topology.world_size):
        context = lone_rank(topology, rank, META)
        built = build_model(model, context, dtype=torch.float32, vocab_size=vocab_size, sequence_parallel=sequence, seed=1)
        for entry in built.params:
            record = entry.record
            records[record.name] = record
            split = topology.tp > 1 and bool(record.splits)
            if (split or context.coordinates["tp"] == 0) and built.layer_table[min(record.chunks)].index in built.chunks:
                held = math.prod(record.get_local_slice(context.axis_sizes, context.coordinates).sizes)
                found[record.name] = found.get(record.name, 0) + held
    alone = build_global_records(model, vocab_size)
    assert sum(found.values()) == count_parameters(model, vocab_size)
    assert list(records) == list(alone) or topology.pp * topology.tp > 1
    for name, record in alone.items():
        there = records[name]
        assert found[name] == math.prod(record.shape), name
        same = ("shape", "init", "param_type", "tied")
        assert all(getattr(record, field) == getattr(there, field) for field in same), name
