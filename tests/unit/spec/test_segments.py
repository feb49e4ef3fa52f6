"""Which layers run again in backward, in which groups; and what that computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.pipeline_parallel.partition import build_layer_table, describe_offload, describe_recompute, find_recomputed_chunks
from megatron.spec.counts import count_layer_flops, count_recompute_flops
from megatron.spec.segments import Segment

MODEL = ModelConfig(num_layers=11, hidden_size=8, num_attention_heads=2, seq_length=16)
TWO = ParallelConfig(pipeline_model_parallel_size=2)
INTERLEAVED = ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)


def pattern(parallel: ParallelConfig, memory: dict[str, object], model: ModelConfig = MODEL) -> str:
    """Layers of each chunk and depths: in brackets those that run again together, the others as dots."""
    table = build_layer_table(model, parallel, 100, MemoryConfig("full", **memory))  # type: ignore[arg-type]
    words = []
    for chunk in table:
        assert [layer for segment in chunk.segments for layer in segment.layers] == [*chunk.layers, *chunk.depths]
        texts = [f"[{'t' * len(one.layers)}]" if one.is_recomputed else "." * len(one.layers) for one in chunk.segments]
        words.append("".join(texts))
    assert find_recomputed_chunks(table) == [index for index, word in enumerate(words) if "[" in word]
    return " ".join(words)


@pytest.mark.parametrize(
    ("parallel", "memory", "expected"),
    [
        (TWO, {}, "[t][t][t][t][t][t] [t][t][t][t][t]"),
        (TWO, {"recompute_num_layers": 4}, "[tttt][tt] [tttt][t]"),
        (TWO, {"recompute_num_layers": 11}, "[tttttt] [ttttt]"),
        (TWO, {"recompute_method": "block", "recompute_num_layers": 2}, "[t][t].... [t][t]..."),
        (INTERLEAVED, {"recompute_method": "block", "recompute_num_layers": 2}, "[t][t]. [t][t]. [t][t]. [t][t]"),
        (TWO, {"recompute_method": "block", "recompute_layers_per_stage": "3,0"}, "[t][t][t]... ....."),
        (INTERLEAVED, {"recompute_method": "block", "recompute_layers_per_stage": "4 1"}, "[t][t][t] [t].. [t].. .."),
    ],
)
def test_segments(parallel: ParallelConfig, memory: dict[str, object], expected: str) -> None:
    assert pattern(parallel, memory) == expected


LOSS_ALONE = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*11|L")


@pytest.mark.parametrize(
    ("parallel", "memory", "expected"),
    [
        (TWO, {"recompute_num_layers": 4}, "[tttt][tt] [tttt][t][t][t]"),
        (TWO, {"recompute_method": "block", "recompute_num_layers": 4}, "[t][t][t][t].. [t][t][t][t]..."),
        (TWO, {"recompute_method": "block", "recompute_num_layers": 5}, "[t][t][t][t][t]. [t][t][t][t][t][t][t]"),
        (INTERLEAVED, {"recompute_method": "block", "recompute_layers_per_stage": "0 5"}, "... [t][t][t] ... [t][t][t][t]"),
        (LOSS_ALONE, {}, "[t][t][t][t][t][t][t][t][t][t][t] [t][t]"),
        (LOSS_ALONE, {"recompute_method": "block", "recompute_layers_per_stage": "1,0"}, "[t].......... .."),
        (LOSS_ALONE, {"recompute_method": "block", "recompute_layers_per_stage": "0,1"}, "........... [t][t]"),
    ],
)
def test_depths_are_as_the_last_layer_of_their_chunk(parallel: ParallelConfig, memory: dict[str, object], expected: str) -> None:
    """Of multi-token prediction, each by itself; where the chunk has no layer, as one that it had."""
    assert pattern(parallel, memory, replace(MODEL, mtp_num_layers=2)) == expected


def test_what_runs_again_computes() -> None:
    """A forward of each layer, but for the last product: the down projection of the last one. Of a part, its own products."""
    forward, last = count_layer_flops(MODEL), 2 * MODEL.ffn_size * MODEL.hidden_size
    assert count_recompute_flops(MODEL, Segment(range(3, 6), is_recomputed=True)) == sum(forward[3:6]) - last
    gated = replace(MODEL, swiglu=True)
    mlp = Segment(range(3, 6), recomputed_modules=frozenset(("mlp", "layernorm")))
    assert count_recompute_flops(gated, mlp) == 3 * 2 * (2 * gated.ffn_size * gated.hidden_size)
    assert count_recompute_flops(gated, replace(mlp, recomputed_modules=frozenset(("layernorm", "mlp_act", "core_attn")))) == 0


def test_layers_that_are_chosen_for_host_memory() -> None:
    """The first of each chunk; of those that run again together, all if the first one is chosen."""

    def pattern(**memory: object) -> str:
        table = build_layer_table(MODEL, TWO, 100, MemoryConfig(**memory))  # type: ignore[arg-type]
        return " ".join("".join("h" if one.is_offloaded else "." for one in chunk.segments) for chunk in table)

    assert pattern() == "...... ....."
    for flag in ("cpu_offload_activations", "cpu_offloading"):
        assert pattern(**{flag: True}) == "hhhhhh hhhhh"
        assert pattern(**{flag: True}, cpu_offloading_num_layers=2) == "hh.... hh..."
    assert pattern(cpu_offloading_num_layers=11) == "hhhhhh hhhhh"
    told = " of 11 layers are in host memory between forward and backward"
    assert describe_offload(build_layer_table(MODEL, TWO, 100, MemoryConfig())) == []
    assert describe_offload(build_layer_table(MODEL, TWO, 100, MemoryConfig(cpu_offloading_num_layers=2))) == [
        f"saved tensors of 4{told}"
    ]
    both = MemoryConfig("full", cpu_offload_activations=True)
    assert describe_offload(build_layer_table(MODEL, TWO, 100, both)) == [f"inputs of 11{told}"]
    assert pattern(cpu_offloading_num_layers=3, recompute_granularity="full", recompute_num_layers=2) == "hh. hh."


def test_what_runs_again_is_told() -> None:
    def told(memory: MemoryConfig) -> list[str]:
        return describe_recompute(build_layer_table(MODEL, TWO, 100, memory))

    assert told(MemoryConfig()) == []
    parts = MemoryConfig(recompute_activations=True, recompute_modules=("mlp_act", "core_attn", "layernorm"))
    assert told(parts) == [
        "11 of 11 layers compute norms, probabilities of attention (where its kernel keeps them) and activations of the MLP "
        "again in backward"
    ]
    assert told(MemoryConfig("selective", recompute_modules=("mlp",))) == ["11 of 11 layers compute the MLP again in backward"]
    assert told(MemoryConfig("full", recompute_num_layers=3)) == [
        "11 of 11 layers keep only their input and run again in backward, in groups of up to 3; by stage 6,5"
    ]
