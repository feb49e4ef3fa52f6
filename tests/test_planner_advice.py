"""Advice: given where time or memory is wasted, silent elsewhere, and what it proposes is valid and wastes less."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from megatron.config.cli import load
from megatron.metrics.flops import count_parameters
from megatron.pipeline_parallel.schedules.registry import make_schedule
from megatron.pipeline_parallel.simulate import Costs, simulate
from megatron.planner import advice as room
from megatron.planner.advice import advice, bubble_share, num_microbatches

BASE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --lr 1e-4 --train-iters 10 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16 --use-distributed-optimizer "
)
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
VOCABULARY = 32000
PROPOSED = re.compile(r"\. Less with (.*)$")

UNEVEN = f"{PP} 4 --global-batch-size 64 --num-layers 4"
BALANCED = f"{PP} 4 --pipeline-split balanced"
CASES = {
    "bubble": (f"{BALANCED} --global-batch-size 7", 4, VOCABULARY, r"^7 microbatches through 4 pipeline stages .* 30%"),
    "bubble at once": (BALANCED, 4, VOCABULARY, r"^1 microbatches through 4 pipeline stages leave 75%"),
    "tensor groups": (f"{TP} 16 --sequence-parallel", 16, VOCABULARY, r"^--tensor-model-parallel-size 16 .* nodes of 8 GPUs"),
    "microbatch": ("--micro-batch-size 8", 1, VOCABULARY, r"^--micro-batch-size 8 x 4,096 tokens wastes memory"),
    "residual": (f"{TP} 2", 2, VOCABULARY, r"^every tensor rank keeps the activations of norms"),
    "optimizer": ("--no-use-distributed-optimizer", 4, VOCABULARY, r"^each of 4 data ranks keeps the whole optimizer state"),
    "padding": (f"{TP} 8 --sequence-parallel", 8, 1025, r"^the vocabulary of 1,025 is padded by 100% .* x TP 8\)"),
    "uneven": (UNEVEN, 4, 256000, r"^stage 3 is the slowest"),
}
"""Further settings, ranks, vocabulary, and the only advice."""


def told(extra: str, world_size: int, vocab_size: int = VOCABULARY, gpus_per_node: int = 8) -> list[str]:
    return advice(load(shlex.split(BASE + extra), world_size).config, world_size, gpus_per_node, vocab_size)


@pytest.mark.parametrize("case", CASES)
def test_each_waste_is_told_and_nothing_else(case: str) -> None:
    extra, world_size, vocab_size, expected = CASES[case]
    lines = told(extra, world_size, vocab_size)
    assert len(lines) == 1 and re.match(expected, lines[0]), lines


@pytest.mark.parametrize("case", CASES)
def test_what_is_proposed_is_valid_and_removes_the_waste(case: str) -> None:
    extra, world_size, vocab_size, expected = CASES[case]
    (line,) = told(extra, world_size, vocab_size)
    found = PROPOSED.search(line)
    if case in ("uneven",):  # says its flag in a sentence
        assert found is None
        return
    assert found is not None
    for change in found[1].split(" or "):
        after = told(f"{extra} {change.split(' (')[0]}", world_size, vocab_size)
        assert not any(re.match(expected.split(".*")[0], other) for other in after)


@pytest.mark.parametrize(
    ("extra", "world_size"),
    [
        ("", 1),
        (f"{TP} 8 {PP} 4 --sequence-parallel --global-batch-size 128 --pipeline-split balanced", 128),
        (f"{TP} 16 --sequence-parallel", 16),
        ("--micro-batch-size 3", 1),
    ],
)
def test_good_settings_get_no_advice(extra: str, world_size: int) -> None:
    assert told(extra, world_size, gpus_per_node=16 if "16" in extra else 8) == []


def test_the_thresholds_are_those_of_the_text() -> None:
    assert (room.MOST_IDLE, room.MOST_PADDING) == (0.2, 0.05)
    # p - 1 of m + p - 1: 3 of 15 is 20 %, 3 of 14 is more.
    assert not any("idle" in line for line in told(f"{PP} 4 --global-batch-size 12", 4))
    assert any("idle" in line for line in told(f"{PP} 4 --global-batch-size 11", 4))
    # 127 rows more than 2,561 are less than 5 %, as many more than 2,433 are more.
    assert told("", 1, 2561) == [] and len(told("", 1, 2433)) == 1
    assert len(told("--make-vocab-size-divisible-by 1000", 1, 1900)) == 1


@pytest.mark.parametrize(("schedule", "batch"), itertools.product(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"], [1, 3, 4, 9]))
def test_the_bubble_is_that_of_the_simulator(schedule: str, batch: int) -> None:
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    virtual = "--num-virtual-stages-per-pipeline-rank 2" if schedule == "interleaved" else ""
    config = load(shlex.split(f"{BASE} {PP} 4 --pipeline-schedule {schedule} {virtual} --global-batch-size {batch}"), 4).config
    assert num_microbatches(config, 4) == batch
    simulated = simulate(make_schedule(schedule, 4, batch, chunks), Costs().divided(chunks)).bubble_share
    assert bubble_share(config, 4) == pytest.approx(simulated, abs=1e-12)


def test_the_optimizer_state_is_that_of_the_model() -> None:
    (line,) = told("--no-use-distributed-optimizer", 4)
    config = load(shlex.split(BASE), 4).config
    state = 12 * count_parameters(config.model, VOCABULARY) / 1e9
    assert f"about {state:,.0f} GB; shared out it would be {state / 4:,.1f} GB" in line
