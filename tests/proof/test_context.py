"""Process groups as the topology says, in real worlds and in worlds of thousands that exist only on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.model.build import Model, build_model
from megatron.parallel.context import (
    SELF_GROUP,
    Group,
    ParallelContext,
    choose_device,
    connect,
    connect_fake,
    disconnect,
    make_context,
)
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron.spec.counts import count_parameters
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU, GROUPS
from tests.support.warm import run_warm_ranks

EIGHT = [
    Topology(tp=2, pp=2, dp=2),
    Topology(tp=2, pp=2, dp=2, pp_before_dp=True),
    Topology(tp=2, pp=4),
    Topology(dp=8),
    Topology(tp=8),
]


def members(group: Group) -> list[int]:
    """Who is really in the group, by asking."""
    if group.process_group is None:
        return [dist.get_rank()]
    found = [torch.zeros((), dtype=torch.int64) for _ in group.ranks]
    dist.all_gather(found, torch.tensor(dist.get_rank()), group=group.process_group)
    return [int(rank) for rank in found]


def in_world(rank: int) -> list[dict[str, Any]]:
    found = []
    for topology in EIGHT:
        context = make_context(topology, rank, CPU)
        groups = {"-".join(axes): context.group(*axes) for axes in GROUPS}
        stage, stages = context.group("pp").rank, topology.pp
        channels = (
            {"up": context.get_pipeline_channel(0, stages - 1), "down": context.get_pipeline_channel(stages - 1, 0)}
            if stages > 1
            else {}
        )
        groups |= {"world": context.world, "ends": context.pipeline_ends, **channels}
        found.append(
            {
                "groups": {name: (group.ranks, group.rank, group.size, members(group)) for name, group in groups.items()},
                "processes": {name: id(group.process_group) for name, group in groups.items() if group.process_group},
                "stage": stage,
                "coordinates": context.coordinates,
                "order": context.group("dp", "cp") is context.gradient_group,
            }
        )
    dist.barrier()
    return found


def test_groups_of_eight_ranks_are_those_of_the_topology() -> None:
    ranks = run_warm_ranks(8, in_world, timeout=90.0)
    for number, topology in enumerate(EIGHT):
        for rank in range(8):
            found = ranks[rank][number]
            for axes in GROUPS:
                expected = topology.group(rank, *axes)
                assert found["groups"]["-".join(axes)] == (expected, expected.index(rank), len(expected), list(expected))
            assert found["groups"]["world"][0] == tuple(range(8))
            assert found["coordinates"] == topology.all_coordinates(rank) and found["order"]
            pipeline = topology.group(rank, "pp")
            assert pipeline[found["stage"]] == rank and found["stage"] == topology.get_coordinates(rank)["pp"]
            ends = (pipeline[0], pipeline[-1]) if rank in (pipeline[0], pipeline[-1]) and topology.pp > 1 else (rank,)
            assert found["groups"]["ends"] == (ends, ends.index(rank), len(ends), list(ends))
            if topology.pp > 1:
                assert found["groups"]["up"][0] == found["groups"]["down"][0] == pipeline
                processes = found["processes"]
                assert len({processes["up"], processes["down"], processes["pp"]}) == 3, "a communicator for each direction"


HYBRID = [
    (EIGHT[0], 2),
    (Topology(dp=8), 4),
    (Topology(tp=2, dp=4), 2),
    (Topology(pp=2, dp=4, pp_before_dp=True), 2),
    (EIGHT[0], 1),
]
"""Worlds, and the data ranks of a part."""


def in_hybrid_world(rank: int) -> list[tuple[Any, ...]]:
    found = []
    for topology, size in HYBRID:
        context = make_context(topology, rank, CPU, fsdp_shard_size=size)
        groups = (context.get_fsdp_shard_group(), context.get_fsdp_replica_group())
        found.append(tuple((group.ranks, group.rank, members(group)) for group in groups))
    whole = make_context(Topology(dp=8), rank, CPU)
    assert whole.get_fsdp_shard_group() is whole.gradient_group and whole.get_fsdp_replica_group().ranks == (rank,)
    dist.barrier()
    return found


def test_data_ranks_divide_into_neighbours_that_shard_and_replicas_across() -> None:
    ranks = run_warm_ranks(8, in_hybrid_world, timeout=60.0)
    for number, (topology, size) in enumerate(HYBRID):
        for rank in range(8):
            (shard, index, asked), (replica, place, asked_across) = ranks[rank][number]
            data = topology.group(rank, *GRADIENT_AXES)
            start = data.index(rank) // size * size
            assert shard == data[start : start + size] and replica == data[data.index(rank) % size :: size]
            assert shard[index] == replica[place] == rank
            assert asked == list(shard) and asked_across == list(replica)


def test_data_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 data-parallel ranks cannot be divided into shard groups of 4"):
        Topology(tp=2, dp=6).shard_and_replica_groups(4)


def test_a_world_of_one_needs_no_process_group() -> None:
    context = make_context(Topology(), 0, CPU)
    assert context.backend is None and not dist.is_initialized()
    for axes in GROUPS:
        assert context.group(*axes) == Group("-".join(axes), (0,), 0, None)
    assert context.world.size == SELF_GROUP.size == 1 and context.pipeline_ends.size == 1
    with pytest.raises(KeyError):
        context.group("tp", "pp")


# ---- joining a job


def joined(rank: int) -> tuple[Any, ...]:
    context = connect(ParallelConfig(pipeline_model_parallel_size=2, device="cpu"))
    found = (context.rank, context.topology, context.device.type, context.backend, members(context.group("pp")))
    dist.barrier()
    disconnect()
    assert not dist.is_initialized()
    return found


def test_a_rank_joins_the_job_of_its_environment() -> None:
    found = run_ranks(2, joined, init=False, timeout=60.0)
    assert found == [(rank, Topology(pp=2), "cpu", "gloo", [0, 1]) for rank in range(2)]


def test_without_a_launcher_one_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    context = connect(ParallelConfig(device="cpu"))
    assert (context.rank, context.topology, context.backend) == (0, Topology(), None)
    disconnect()


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == choose_device("cpu", 3) == CPU
    with pytest.raises(ValueError, match="--device cuda, but torch sees no CUDA device"):
        choose_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for wanted in ("auto", "cuda"):
        assert choose_device(wanted, 1) == torch.device("cuda", 1)
        with pytest.raises(ValueError, match="local rank 2 has no GPU, because torch sees only 2 GPUs on this node"):
            choose_device(wanted, 2)
    assert chosen == [torch.device("cuda", 1)] * 2 and choose_device("cpu", 5) == CPU


# ---- worlds that do not exist

LARGE = ModelConfig(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    seq_length=2048,
)
"""GPT-3 (Brown et al. 2020)."""
VOCAB = 50257


def build(context: ParallelContext, config: ModelConfig, vocab: int) -> Model:
    return build_model(config, context, dtype=torch.bfloat16, vocab_size=vocab, sequence_parallel=True, seed=1)


def large_rank(_: int, rank: int) -> dict[str, Any]:
    topology = Topology(tp=8, pp=16, dp=24)
    context = connect_fake(topology, rank)
    model = build(context, LARGE, VOCAB)
    for parameter in model.params:
        assert parameter.param.is_meta
    found = {
        "world": dist.get_world_size(),
        "place": context.coordinates,
        "groups": {axes: context.group(*axes).ranks for axes in GROUPS},
        "shapes": {entry.record.name: tuple(entry.param.shape) for entry in model.params},
        "devices": {context.device.type},
    }
    disconnect()
    return found


def test_rank_1234_of_3072_is_built_on_a_laptop() -> None:
    topology = Topology(tp=8, pp=16, dp=24)
    (found,) = run_ranks(1, large_rank, 1234, init=False, timeout=60.0)
    # 1234 = 2 + 8 x (10 + 24 x 6)
    place = {axis: found["place"][axis] for axis in ("tp", "cp", "dp", "pp")}
    assert (found["world"], place) == (3072, {"tp": 2, "cp": 0, "dp": 10, "pp": 6})
    assert found["groups"] == {axes: topology.group(1234, *axes) for axes in GROUPS}
    h = LARGE.hidden_size
    layer = {
        "attention_norm.weight": (h,),
        "attention_norm.bias": (h,),
        "attention.qkv.weight": (3 * h // 8, h),
        "attention.qkv.bias": (3 * h // 8,),
        "attention.output.weight": (h, h // 8),
        "attention.output.bias": (h,),
        "mlp_norm.weight": (h,),
        "mlp_norm.bias": (h,),
        "mlp.up.weight": (4 * h // 8, h),
        "mlp.up.bias": (4 * h // 8,),
        "mlp.down.weight": (h, 4 * h // 8),
        "mlp.down.bias": (h,),
    }
    assert found["shapes"] == {f"layers.{i}.{name}": shape for i in range(36, 42) for name, shape in layer.items()}


GPT2 = ModelConfig(num_layers=5, hidden_size=16, num_attention_heads=4, seq_length=8, make_vocab_size_divisible_by=8)
LLAMA = ModelConfig(
    num_layers=5,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    add_qkv_bias=True,
    qk_layernorm=True,
    make_vocab_size_divisible_by=8,
)
MODELS = [replace(config, untie_embeddings_and_output_weights=untied) for config in (GPT2, LLAMA) for untied in (False, True)]
SMALL = Topology(tp=2, pp=3, dp=2)


def count_over_stages_and_slices(_: int) -> list[list[tuple[int, ...]]]:
    """For every model, each tensor and pipeline rank's names and elements without padding, and elements with it."""
    counts: list[list[tuple[int, ...]]] = []
    for config in MODELS:
        counts.append([])
        for tp in range(SMALL.tp):
            for pp in range(SMALL.pp):
                context = connect_fake(SMALL, SMALL.find_rank(tp=tp, pp=pp, dp=1))
                params = build(context, config, 61).params
                sizes, place = context.axis_sizes, context.coordinates
                once = [e for e in params if (e.record.splits or tp == 0) and (len(e.record.chunks) == 1 or pp == 0)]
                held = sum(e.record.get_local_slice(sizes, place).numel for e in once)
                counts[-1].append(
                    (held, sum(e.record.get_local_slice(sizes, place).numel for e in params), sum(e.param.numel() for e in params))
                )
                disconnect()
    return counts


def test_all_tensor_and_pipeline_ranks_together_hold_the_whole_model() -> None:
    (counts,) = run_ranks(1, count_over_stages_and_slices, init=False, timeout=60.0)
    for config, ranks in zip(MODELS, counts, strict=True):
        assert sum(held for held, _, _ in ranks) == count_parameters(config, 61)
        assert all(real <= padded for _, real, padded in ranks)
        # 61 tokens are padded to 64 rows, so only the second tensor rank pads: 3 rows on the stages that hold a vocabulary.
        padding = [padded - real for _, real, padded in ranks]
        assert padding == [0, 0, 0, 3 * 16, 0, 3 * 16]
