"""The settings of sharding: rules, notes, and what optim_grads_params leaves to buckets against the parameters of real models."""

from __future__ import annotations

import pytest
import torch

from megatron.config.checks.sharding import list_bucketed_params
from megatron.config.checks.single_settings import list_idle_settings
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
    config_of,
    every,
    reported,
)

STRATEGY, SIZE = "--data-parallel-sharding-strategy", "--fsdp-shard-size"
ALL = f"{STRATEGY} optim_grads_params"
UNTIED, UNIT = "--untie-embeddings-and-output-weights", "--make-vocab-size-divisible-by"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SCHEDULE, COUNT = "--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"
EP, EXPERTS = "--expert-model-parallel-size", "--num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear"
BATCH = "--global-batch-size 16"
WEAKER = f"{STRATEGY} optim_grads"

CASES: list[Case] = [
    (
        "--bf16 --grad-reduce-in-bf16 --data-parallel-sharding-strategy optim_grads_params",
        2,
        {"--grad-reduce-in-bf16", "--data-parallel-sharding-strategy"},
        ["--grad-reduce-in-bf16 cannot be used with --data-parallel-sharding-strategy optim_grads_params"],
        ["--no-grad-reduce-in-bf16", "--data-parallel-sharding-strategy optim_grads"],
    ),
    (f"{ALL} {SIZE} 3", 8, {SIZE}, [f"{SIZE} 3 does not divide the 8 data ranks"], [f"{SIZE} 2", f"{SIZE} 4"]),
    (f"{ALL} {SIZE} 16 {TP} 2", 16, {SIZE, TP}, ["the 8 data ranks (world size 16 / (TP x CP x PP))"], [f"{SIZE} 8", f"{SIZE} 4"]),
    (f"{ALL} {SIZE} 0", 8, {SIZE}, [f"{SIZE} 0 is out of range"], [f"{SIZE} 1"]),
    *(
        (
            f"{ALL} {SCHEDULE} {name} {PP} 2",
            4,
            {SCHEDULE, STRATEGY},
            [f"{SCHEDULE} {name} cannot be used with {ALL}.", "delays weight gradients"],
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
    (
        f"{ALL} {SIZE} 3 {EXPERTS} {EP} 2",
        6,
        {SIZE, EP},
        ["The 3 ranks of --fsdp-shard-size 3 x TP 1 are not divisible by ETP x EP = 1 x 2 = 2"],
        [f"{SIZE} 2", f"{SIZE} 6"],
    ),
]


def test_a_broken_rule_is_reported() -> None:
    every(CASES, check_case)


def test_each_rule_has_a_case() -> None:
    check_rules_have_cases(SHARDING_RULES, CASES)


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
        # what does not divide is padded, and what has fewer rows than there are ranks too
        (f"{ALL} {UNTIED} {UNIT} 50 --max-position-embeddings 35 --ffn-hidden-size 202 {TP} 2", 14),
        (f"{ALL} {SIZE} 192", 384),
        *((f"{ALL} {SIZE} {size} {EXPERTS} {EP} 4", 12) for size in (2, 3, 4)),  # half a copy of the experts, or one
        (f"{ALL} {PP} 2 {SCHEDULE} gpipe", 4),
        *((f"{WEAKER} {PP} 2 {SCHEDULE} {schedule}", 4) for schedule in ("zb-h1", "zb-v")),
    ],
)
def test_what_can_be_run_is_let_through(extra: str, world_size: int) -> None:
    assert reported(extra, world_size) == []


# ---- what is left to buckets, against parameters

MODELS = {
    "gpt": "--num-layers 2 --hidden-size 60 --num-attention-heads 4 --seq-length 34",
    "gpt, gated, untied": f"--num-layers 2 --hidden-size 60 --num-attention-heads 4 --seq-length 34 --swiglu {UNTIED}",
    "llama": "--num-layers 2 --hidden-size 60 --num-attention-heads 6 --group-query-attention --num-query-groups 2 --seq-length 34 "
    f"--swiglu --ffn-hidden-size 88 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear {UNTIED}",
    "llama, tied, normed heads": "--num-layers 1 --hidden-size 60 --num-attention-heads 6 --kv-channels 14 --seq-length 34 "
    "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --add-qkv-bias --qk-layernorm",
}
LAYOUTS = ["", f"{TP} 2", f"{TP} 2 --sequence-parallel", "--sequence-parallel"]


def outside(config: Config) -> list[ParamEntry]:
    """The parameters that `fully_shard` does not take, of a tensor rank with all layers and another data rank beside it."""
    context = lone_rank(Topology(tp=config.parallel.tensor_model_parallel_size, dp=2), 0, torch.device("meta"))
    model = build_model(
        config.model,
        context,
        dtype=torch.float32,
        vocab_size=100,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=1,
    )
    return [entry for entry in model.params if not is_fully_sharded(entry, context)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout or "one rank")
@pytest.mark.parametrize("name", MODELS)
def test_what_is_named_is_left_to_buckets(name: str, layout: str) -> None:
    config = parse(f"{MODELS[name]} {layout}".split())
    assert bool(list_bucketed_params(config)) == bool(outside(config))


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
                "--overlap-grad-reduce has no effect: with optim_grads_params the gradients of a block are always reduced during ",
                "--overlap-param-gather has no effect: with optim_grads_params the parameters of the next block are always ",
                "--ddp-bucket-size 1000 has no effect: with optim_grads_params the parameters of a block are always communicated "
                "together.",
            ],
        ),
        (
            f"{ALL} --qk-layernorm --sequence-parallel {TP} 2 --overlap-grad-reduce",
            4,
            [
                "--overlap-grad-reduce acts only on the tied word embedding, the norms of queries and keys, the parameters "
                "that sequence parallelism replicates on tensor ranks: "
            ],
        ),
        (
            f"{ALL} {SIZE} 1 --fsdp-reshard-after-forward never --overlap-grad-reduce --overlap-param-gather",
            2,
            [f"{SIZE} 1 does not shard parameters: ", "--fsdp-reshard-after-forward never has no effect: "],
        ),
        (f"{ALL} --fsdp-reshard-after-forward never", 1, [f"{ALL} hardly", "--fsdp-reshard-after-forward never has no effect: "]),
        ("--optimizer-cpu-offload --device cpu", 1, ["--optimizer-cpu-offload saves no memory: "]),
        ("--cpu-offload-activations --device cpu", 1, ["--cpu-offload-activations saves no memory: "]),
        ("--cpu-offload-activations --cpu-offloading --device cuda", 1, ["--cpu-offloading has no effect: "]),
        (
            "--recompute-granularity selective --bf16 --attention-dropout 0.1",
            1,
            ["--recompute-granularity selective frees nothing if the attention kernel stores no probabilities: "],
        ),
        ("--recompute-activations --device cpu --attention-dropout 0", 1, ["--recompute-activations frees nothing if "]),
        ("--recompute-activations --fp16 --attention-dropout 0", 1, ["--recompute-activations frees nothing if "]),
        ("--recompute-activations --device cpu --bf16 --attention-dropout 0.1", 1, []),
        ("--recompute-activations --recompute-modules layernorm --bf16 --attention-dropout 0", 1, []),
        (f"{ALL} {SIZE} 2 --fsdp-reshard-after-forward never", 4, []),
        (f"{ALL} --fsdp-reduce-once", 2, ["--fsdp-reduce-once has no effect: a step has one microbatch on each data rank."]),
        (
            f"{ALL} {SIZE} 1 --fsdp-reduce-once {BATCH}",
            2,
            [f"{SIZE} 1 does not shard", "--fsdp-reduce-once has no effect: every data rank holds"],
        ),
        (f"{ALL} --fsdp-params-cpu --device cpu", 2, ["--fsdp-params-cpu saves no memory: --device cpu has everything"]),
        (f"{ALL} --fsdp-params-cpu --optimizer-cpu-offload", 4, ["--optimizer-cpu-offload acts only on the tied word embedding: "]),
        (f"{ALL} {UNTIED} --fsdp-params-cpu --optimizer-cpu-offload", 4, ["--optimizer-cpu-offload has no effect: "]),
        (f"{ALL} --fsdp-params-cpu --fsdp-reduce-once {BATCH}", 4, []),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000", 2, []),
        (f"{WEAKER} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000", 2, []),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --device cuda", 1, []),
    ],
)
def test_what_does_less_than_one_might_think_is_noted(extra: str, world_size: int, starts: list[str]) -> None:
    found = list_idle_settings(config_of(extra), world_size)
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
