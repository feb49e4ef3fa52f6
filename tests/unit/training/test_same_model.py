"""Which settings make another model of the one that a checkpoint holds."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.checkpoint.errors import CheckpointError
from megatron.config.cli import load
from megatron.config.save import to_dict
from megatron.training.resume import check_model

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --disable-bias-linear"
)
EXPERTS = "--num-experts 4"


def problems(saved: str, here: str) -> str:
    """What is said against going on with other words than those of the checkpoint."""
    record = {"config": to_dict(load(shlex.split(f"{BASE} {saved}"), 1).config), "vocab_size": 61}
    try:
        check_model(load(shlex.split(f"{BASE} {here}"), 1).config, record, 61, Path("saved"), continues_run=True)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "spelt_out",
    [
        "--moe-ffn-hidden-size 64",
        "--moe-layer-freq [1,1]",
        "--moe-router-topk 2 --moe-router-topk-scaling-factor 1",
        "--moe-router-num-groups 1",
        "--moe-router-num-groups 2 --moe-router-group-topk 2",
        "--ffn-hidden-size 32 --moe-ffn-hidden-size 64",
    ],
)
def test_what_is_spelt_out_is_the_same_model(spelt_out: str) -> None:
    assert not problems(EXPERTS, f"{EXPERTS} {spelt_out}")
    assert not problems(f"{EXPERTS} {spelt_out}", EXPERTS)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("--moe-ffn-hidden-size 32", "--moe-ffn-hidden-size 64 there, 32 here"),
        ("--moe-layer-freq 2", "--moe-layer-freq [1,1] there, [1,0] here"),
        ("--moe-router-topk-scaling-factor 2", "--moe-router-topk-scaling-factor 1.0 there, 2.0 here"),
        ("--moe-router-num-groups 2", "--moe-router-num-groups 1 there, 2 here"),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax False there, True here"),
        ("--moe-router-topk 4", "--moe-router-topk 2 there, 4 here"),
    ],
)
def test_what_computes_something_else_is_another(other: str, told: str) -> None:
    assert told in problems(EXPERTS, f"{EXPERTS} {other}")
