"""The settings of sharding: rules, notes, and the sizes that optim_grads_params divides against the parameters of real models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.checks.each import notes
from megatron.config.checks.sharding import dimensions_divide_by_shards, left_to_buckets, split_dimensions
from megatron.config.cli import parse
from megatron.config.config import Config
from megatron.data_parallel.fsdp_plan import is_fully_sharded
from megatron.model.build import build_model
from megatron.parallel.params import ParamEntry
from megatron.parallel.topology import Topology
from tests.support.lone_rank import lone_rank
from tests.support.rule_cases import (
    SHARDING_RULES,
    Case,
    check_case,
    check_rules_have_cases,
    check_suggestions,
    config_of,
    every,
    reported,
)

STRATEGY, SIZE = "--data-parallel-sharding-strategy", "--fsdp-shard-size"
ALL = f"{STRATEGY} optim_grads_params"
UNTIED, UNIT = "--untie-embeddings-and-output-weights", "--make-vocab-size-divisible-by"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SCHEDULE, COUNT = "--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"
WEAKER = f"{STRATEGY} optim_grads"

CASES: list[Case] = [
    # the base has hidden size 96, 12 heads (288 rows of queries, keys and values), MLP 384, 32 positions
    (f"{ALL} {SIZE} 3", 8, {SIZE}, [f"{SIZE} 3 does not divide the 8 data ranks"], [f"{SIZE} 2", f"{SIZE} 4"]),
    (f"{ALL} {SIZE} 16 {TP} 2", 16, {SIZE, TP}, ["the 8 data ranks (world size 16 / (TP x CP x PP))"], [f"{SIZE} 8", f"{SIZE} 4"]),
    (f"{ALL} {SIZE} 0", 8, {SIZE}, [f"{SIZE} 0 is out of range"], [f"{SIZE} 1"]),
    (
        f"{ALL} --position-embedding-type none",
        36,
        {STRATEGY, SIZE, "--hidden-size", "--ffn-hidden-size"},
        [f"{ALL} cannot divide every parameter evenly over 36 data ranks.", "an equal part of every parameter"],
        [f"{SIZE} 12", f"{SIZE} 6", WEAKER],
    ),
    (f"{ALL} {SIZE} 12", 24, {SIZE}, ["over 12 data ranks (--fsdp-shard-size)."], [f"{SIZE} 8", f"{SIZE} None {WEAKER}"]),
    (
        f"{ALL} {UNTIED} {UNIT} 50",
        8,
        {STRATEGY, UNIT},
        ["over 8 data ranks", f"A vocabulary is padded to a multiple of {UNIT} x TP."],
        [f"{SIZE} 2", f"{UNIT} 48", f"{UNIT} 56", WEAKER],
    ),
    (
        f"{ALL} {UNTIED}",
        3,
        {UNIT, "--max-position-embeddings"},
        ["over 3 data ranks"],
        [f"{UNIT} 129 --max-position-embeddings 33", WEAKER],
    ),
    (f"{ALL} --seq-length 30", 4, {"--max-position-embeddings", "--seq-length"}, ["4 data"], ["--max-position-embeddings 32"]),
    (
        f"{ALL} --ffn-hidden-size 200 {TP} 2",
        16,
        {"--ffn-hidden-size", TP},
        ["over 8 data ranks"],
        ["--ffn-hidden-size 192", "--ffn-hidden-size 208", f"{SIZE} 4"],
    ),
    (
        f"{ALL} --ffn-hidden-size 200 --max-position-embeddings 33 {TP} 2",
        16,
        {"--ffn-hidden-size", "--max-position-embeddings"},
        ["over 8 data ranks"],
        ["--max-position-embeddings 40 --ffn-hidden-size 208", WEAKER],
    ),
    (
        f"{ALL} --group-query-attention --num-query-groups 2 --num-attention-heads 6 {TP} 2",
        64,
        {"--num-query-groups", "--num-attention-heads", "--kv-channels", TP},
        ["over 32 data ranks"],
        [f"{SIZE} 16"],
    ),
    *(
        (
            f"{ALL} {SCHEDULE} {name} {PP} 2",
            4,
            {SCHEDULE, STRATEGY},
            [f"{SCHEDULE} {name} cannot be used with {ALL}.", "puts weight gradients off"],
            [f"{SCHEDULE} 1f1b", f"{SCHEDULE} interleaved {COUNT} 2", WEAKER],
        )
        for name in ("zb-h1", "zb-v")
    ),
    (
        f"{ALL} {SCHEDULE} zb-v {PP} 2 {COUNT} 2 --fsdp-reshard-after-forward never",
        4,
        {SCHEDULE, STRATEGY},
        ["zb-v cannot be used"],
        [f"{SCHEDULE} interleaved", f"{COUNT} None {SCHEDULE} 1f1b", f"--fsdp-reshard-after-forward always {WEAKER}"],
    ),
    (f"{ALL} {SCHEDULE} zb-h1", 1, {SCHEDULE, STRATEGY}, ["zb-h1 cannot be used"], [f"{SCHEDULE} 1f1b"]),
]


def test_a_broken_rule_is_reported() -> None:
    every(CASES, check_case)


def test_each_rule_has_a_case() -> None:
    check_rules_have_cases(SHARDING_RULES, CASES)


def test_the_uneven_dimensions_are_shown() -> None:
    (found,) = reported(f"{ALL} {UNTIED} --ffn-hidden-size 200 {TP} 2 --sequence-parallel", 10)
    assert found.table == (
        "hidden size                     96 = 19 x 5 + 1",
        "vocabulary, a multiple of      128 = 25 x 5 + 3",
        "queries, keys and values / TP  144 = 28 x 5 + 4",
    )


def test_where_nothing_can_be_divided_only_another_strategy_is_suggested() -> None:
    (found,) = reported(ALL, 5)
    assert found.nearest == (WEAKER,)
    assert found.rule == "Each holds an equal part of every parameter, cut along one dimension."


def test_a_shard_size_that_does_not_divide_is_one_problem() -> None:
    (found,) = reported(f"{ALL} {SIZE} 5", 8)
    assert "does not divide the 8 data ranks" in found.message


@pytest.mark.parametrize(
    ("extra", "world_size"),
    [
        *((f"{STRATEGY} {strategy}", ranks) for strategy in ("optim", "optim_grads", "optim_grads_params") for ranks in (1, 2, 32)),
        ("--use-distributed-optimizer --overlap-param-gather", 3),  # slices of flat buckets are always equal
        (f"{WEAKER} --ffn-hidden-size 101", 7),
        (f"{ALL} {SIZE} 8 --fsdp-reshard-after-forward never", 24),
        (f"{ALL} {SIZE} 1", 7),
        (f"{ALL} {UNIT} 50", 8),  # tied
        (f"{ALL} {TP} 2 --sequence-parallel --max-position-embeddings 35 {UNTIED}", 8),  # positions are not divided
        (f"{ALL} --position-embedding-type rope --max-position-embeddings 35", 8),
        (f"{ALL} {PP} 2 {SCHEDULE} gpipe", 4),
        *((f"{WEAKER} {PP} 2 {SCHEDULE} {schedule}", 4) for schedule in ("zb-h1", "zb-v")),
    ],
)
def test_what_can_be_run_is_let_through(extra: str, world_size: int) -> None:
    assert reported(extra, world_size) == []


@given(
    st.integers(1, 60),
    st.integers(1, 9).map(lambda each: 12 * each),
    st.integers(1, 130),
    st.integers(1, 96),
    st.integers(1, 80),
    st.sampled_from(["", UNTIED]),
    st.sampled_from(["", f"{TP} 2", f"{TP} 2 --sequence-parallel"]),
    st.none() | st.integers(1, 12),
)
def test_what_is_suggested_is_valid(
    ranks: int, hidden: int, ffn: int, unit: int, more: int, untied: str, tensor: str, size: int | None
) -> None:
    extra = (
        f"{ALL} --hidden-size {hidden} --ffn-hidden-size {2 * ffn} {UNIT} {unit} --max-position-embeddings {32 + more} {untied} "
        f"{tensor} {f'{SIZE} {size}' if size else ''}"
    )
    check_suggestions(extra, 2 * ranks, reported(extra, 2 * ranks))


# ---- the arithmetic of the rules against parameters

MODELS = {
    "gpt": "--num-layers 2 --hidden-size 60 --num-attention-heads 4 --seq-length 34",
    "gpt, gated, untied": f"--num-layers 2 --hidden-size 60 --num-attention-heads 4 --seq-length 34 --swiglu {UNTIED}",
    "llama": "--num-layers 2 --hidden-size 60 --num-attention-heads 6 --group-query-attention --num-query-groups 2 --seq-length 34 "
    f"--swiglu --ffn-hidden-size 88 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear {UNTIED}",
    "llama, tied, normed heads": "--num-layers 1 --hidden-size 60 --num-attention-heads 6 --kv-channels 14 --seq-length 34 "
    "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --add-qkv-bias --qk-layernorm",
}
LAYOUTS = ["", f"{TP} 2", f"{TP} 2 --sequence-parallel", "--sequence-parallel"]


def entries(config: Config, vocab_size: int) -> tuple[list[ParamEntry], list[ParamEntry]]:
    """The parameters of a tensor rank that holds all layers, and has another data rank beside it: those divided, and the others."""
    context = lone_rank(Topology(tp=config.parallel.tensor_model_parallel_size, dp=2), 0, torch.device("meta"))
    model = build_model(
        config.model,
        context,
        dtype=torch.float32,
        vocab_size=vocab_size,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=1,
    )
    divided = [entry for entry in model.params if is_fully_sharded(entry, context)]
    return divided, [entry for entry in model.params if not is_fully_sharded(entry, context)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout or "one rank")
@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_are_those_of_the_parameters(name: str, layout: str) -> None:
    """A vocabulary of one unit: then the rows of a rank are the unit itself."""
    config = parse(f"{MODELS[name]} {UNIT} 14 {layout}".split())
    divided, others = entries(config, 14 * config.parallel.tensor_model_parallel_size - 3)
    sizes = {entry.param.shape[entry.record.fsdp_dim] for entry in divided}
    named = [part.size for part in split_dimensions(config)]
    assert len(set(named)) == len(named)
    assert set(named) == sizes
    assert bool(left_to_buckets(config)) == bool(others)


@pytest.mark.parametrize(
    "wrong",
    ["--hidden-size 0", "--seq-length 0", "--num-attention-heads 0", "--num-layers 1000000000000", f"{UNIT} 0", "--hidden-size 3"],
)
def test_of_a_shape_that_is_not_valid_nothing_is_said(wrong: str) -> None:
    """What is wrong with it is said by a rule about the setting itself."""
    config = parse(f"{MODELS['gpt']} {UNIT} 14 {ALL} {wrong}".split())
    assert not list(dimensions_divide_by_shards(config, 7))


@pytest.mark.parametrize("vocab_size", [1, 13, 14, 15, 200])
def test_every_vocabulary_is_a_multiple_of_the_unit(vocab_size: int) -> None:
    config = parse(f"{MODELS['llama']} {UNIT} 14 {TP} 2".split())
    found, _ = entries(config, vocab_size)
    rows = [entry.param.shape[0] for entry in found if entry.record.name in ("embedding.word.weight", "output.weight")]
    assert len(rows) == 2 and all(size % 14 == 0 for size in rows)


# ---- notes


@pytest.mark.parametrize(
    ("extra", "world_size", "starts"),
    [
        (f"{STRATEGY} optim", 1, [f"{STRATEGY} optim hardly saves memory: there is one data rank."]),
        ("--use-distributed-optimizer", 1, ["--use-distributed-optimizer hardly saves memory: there is one data rank."]),
        (
            f"--use-distributed-optimizer {ALL} --overlap-param-gather",
            1,
            [
                f"{ALL} hardly saves memory: ",
                "--use-distributed-optimizer has no effect: the strategy shards the optimizer's state too.",
                "--overlap-param-gather has no effect: there is one data rank.",
            ],
        ),
        (f"--use-distributed-optimizer {STRATEGY} optim", 2, ["--use-distributed-optimizer has no effect: "]),
        (
            f"{ALL} {UNTIED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000",
            2,
            [
                "--overlap-grad-reduce has no effect: with optim_grads_params the gradients of a block are always reduced while ",
                "--overlap-param-gather has no effect: with optim_grads_params the parameters of the next block are always ",
                "--ddp-bucket-size 1000 has no effect: with optim_grads_params the parameters of a block are always sent together.",
            ],
        ),
        (
            f"{ALL} --qk-layernorm --sequence-parallel {TP} 2 --overlap-grad-reduce",
            4,
            [
                "--overlap-grad-reduce acts only on the tied word embedding, the norms of queries and keys, what sequence "
                "parallelism leaves whole on each tensor rank: "
            ],
        ),
        (
            f"{ALL} {SIZE} 1 --fsdp-reshard-after-forward never --overlap-grad-reduce --overlap-param-gather",
            2,
            [f"{SIZE} 1 leaves parameters whole: ", "--fsdp-reshard-after-forward never has no effect: "],
        ),
        (f"{ALL} --fsdp-reshard-after-forward never", 1, [f"{ALL} hardly", "--fsdp-reshard-after-forward never has no effect: "]),
        ("--optimizer-cpu-offload --device cpu", 1, ["--optimizer-cpu-offload saves no memory: "]),
        (f"{ALL} {SIZE} 2 --fsdp-reshard-after-forward never", 4, []),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000", 2, []),
        (f"{WEAKER} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000", 2, []),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --device cuda", 1, []),
    ],
)
def test_what_does_less_than_one_might_think_is_noted(extra: str, world_size: int, starts: list[str]) -> None:
    found = notes(config_of(extra), world_size)
    assert len(found) == len(starts), found
    assert all(note.startswith(start) for note, start in zip(found, starts, strict=True)), found
    assert reported(extra, world_size) == []


@pytest.mark.parametrize(
    ("extra", "strategy"),
    [
        ("", "no_shard"),
        ("--use-distributed-optimizer", "optim"),
        (f"{STRATEGY} no_shard --use-distributed-optimizer", "optim"),
        *((f"{STRATEGY} {name} --use-distributed-optimizer", name) for name in ("optim", "optim_grads", "optim_grads_params")),
        *((f"{STRATEGY} {name}", name) for name in ("optim", "optim_grads", "optim_grads_params")),
    ],
)
def test_what_shards_more_counts(extra: str, strategy: str) -> None:
    assert config_of(extra).parallel.sharding == strategy
