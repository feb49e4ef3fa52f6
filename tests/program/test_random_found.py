"""Command lines that random testing found to fail, each made as simple as it would still fail, with what was wrong."""

from __future__ import annotations

import shlex

import pytest

from tests.support.random_configs import CommandLine
from tests.support.random_runs import Outcome, judge

_SMALL = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 2 --lr 0.01 --num-workers 0 "
_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 21 "

FOUND = {
    # The first step made is not that of the first samples, and had more of them than was allowed for.
    "skipped-in-a-ramp-up": (1, "--global-batch-size 12 --rampup-batch-size 4 4 2 --train-iters 3 --iterations-to-skip 1"),
    # Without rotary positions the true gradient of a key norm's bias is zero, and Adam divided what rounding made of it.
    "truly-zero-gradient": (
        1,
        "--hidden-size 32 --num-attention-heads 8 --qk-layernorm --ffn-hidden-size 4 --seq-length 8 --position-embedding-type none "
        "--vocab-size 8 --pipeline-model-parallel-layout Et,L --train-samples 11 --clip-grad 0.0 --adam-beta1 0.0",
    ),
    # A step of warm-up counted as a whole batch, which was all that the run had.
    "warm-up-in-a-ramp-up": (1, "--global-batch-size 36 --rampup-batch-size 12 12 24 --train-iters 2 --lr-warmup-iters 1"),
    # A norm over two numbers gives their signs, so its gradient is a billionth of the others' and rounded as those are.
    "tiny-gradient": (
        1,
        "--num-layers 11 --hidden-size 2 --num-attention-heads 1 --ffn-hidden-size 4 --seq-length 16 --vocab-size 70 --swiglu "
        "--position-embedding-type none --make-vocab-size-divisible-by 2 --micro-batch-size 1 --train-samples 2 "
        "--global-batch-size 2",
    ),
    # Norms over all heads took weights for granted.
    "all-heads-without-weights": (
        2,
        "--qk-layernorm --qk-layernorm-all-heads --normalization RMSNorm --no-norm-weight --tensor-model-parallel-size 2 "
        "--global-batch-size 2 --train-iters 1",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_lines_found(name: str, full: bool) -> None:
    world_size, extra = FOUND[name]
    assert judge(CommandLine(tuple(shlex.split(_SMALL + _DATA + extra)), world_size), started=full) is Outcome.EQUAL
