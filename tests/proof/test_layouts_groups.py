"""Parameter groups, muP and a second course of the learning rate do the same at every layout, in float64, as the plain reference.

The runs are whole: each step's rates come from the loop, one for each course.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.config.cli import load
from megatron_lab.verification.diagnosis import diagnose
from tests.support.covering import covering, product
from tests.support.runs import arguments
from tests.support.verify_observations import prove_warm

GROUPS: dict[str, dict[str, Any]] = {
    "patterns": {
        "param_groups": (
            "layers.*.mlp.* lr-mult=0.5 adam-beta1=0.6 wd-mult=2",
            "layers.0.* lr=2e-2 min-lr=1e-3",
            "*.attention.qkv.weight optimizer=sgd lr-mult=3",
            "*.bias wd-mult=1",
        ),
    },
    "decoupled": {
        "decoupled_lr": 0.03,
        "decoupled_min_lr": 2e-3,
        "decay_embeddings": False,
        "param_groups": ("*norm.* adam-eps=0.1",),
    },
    "mup": {"mup_base_width": 12, "mup_base_kv_channels": 9, "param_groups": ("layers.1.* lr-mult=0.5",)},
}
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "three data ranks": (3, {"global_batch_size": 6}),
    "tensor": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": (4, {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
}
AXES: dict[str, tuple[Any, ...]] = {
    "groups": tuple(GROUPS),
    "split": tuple(SPLITS),
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "optimizer": ("adam", "sgd"),
    "tied": (True, False),
    "offload": (False, True),
}
RUN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "seq_length": 8,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 1,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 2,
    "lr_rewarm_start_iters": 1,
    "lr_rewarm_iters": 1,
    "weight_decay": 0.1,
    "ddp_bucket_size": 1500,
    "eval_iters": 0,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES)
        if not metafunc.config.getoption("--full"):  # pairs of four axes, and the other two take turns
            pairs = covering({name: AXES[name] for name in AXES if name not in ("groups", "split")}, seed=1289)
            turns = zip(pairs, itertools.cycle(GROUPS), itertools.cycle(SPLITS), strict=False)
            cases = [{"groups": groups, "split": split, **pair} for pair, groups, split in turns]
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(str(value) for value in case.values()))


def test_layout_equals_the_plain_reference(case: dict[str, Any]) -> None:
    world_size, split = SPLITS[case["split"]]
    settings: dict[str, Any] = {**RUN, **GROUPS[case["groups"]], **split, "data_parallel_sharding_strategy": case["sharding"]}
    settings |= {
        "optimizer": case["optimizer"],
        "untie_embeddings_and_output_weights": not case["tied"],
        "optimizer_cpu_offload": case["offload"],
    }
    if case["optimizer"] == "sgd":
        settings["param_groups"] = tuple(
            text.replace(" adam-beta1=0.6", "").replace("adam-eps=0.1", "lr-mult=2") for text in settings["param_groups"]
        )
    found = diagnose(prove_warm(load(arguments(**settings), world_size).config, world_size, dropout=False))
    assert found.equal, "\n".join(finding.text for finding in found.findings)
    assert found.num_steps == RUN["train_iters"]
