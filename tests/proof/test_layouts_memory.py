"""The proof for what is done with activations: computed again, moved, never held, or made by compiled layers. It trains as one
plain process does, and no bit changes by what is computed again, nor by tracing.

In float64, with one document a sample or several. Every pair of settings occurs; `--full` takes every case.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megatron.config.memory import MemoryConfig
from megatron.model.compiled import BlockCompiler
from megatron.verification.reference.shape import random_weights
from tests.proof.test_layouts_packing import ALL_RULES, EOD, SEQ, VOCAB, documents
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs, assert_same_bits
from tests.support.layout import Layout, LayoutRun, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, loss_of_documents_apart, random_batches, train

MEMORIES = {
    "full": MemoryConfig("full"),
    "full in groups of two": MemoryConfig("full", recompute_num_layers=2),
    "the first of each chunk": MemoryConfig("full", recompute_method="block"),
    "three of the first stage, one of the second": MemoryConfig("full", recompute_method="block", recompute_layers_per_stage="3,1"),
    "norms and activations": MemoryConfig("selective", recompute_modules=("layernorm", "mlp_act")),
    "host memory": MemoryConfig(cpu_offload_activations=True),
    "full, host memory": MemoryConfig("full", cpu_offload_activations=True),
    "norms and the mlp, one layer of each chunk in host memory": MemoryConfig(
        "selective", recompute_modules=("layernorm", "mlp"), cpu_offloading_num_layers=1
    ),
}
"""Settings that change no bit of a run at the same layout."""

AXES: dict[str, list[Any]] = {
    "memory": [*MEMORIES],
    "sizes": [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)],
    "schedule": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"],
    "sequence_parallel": [False, True, "overlapping"],
    "model": [
        ("gpt2", "tied", "samples"),
        ("gpt2", "untied", "documents"),
        ("llama", "tied", "documents"),
        ("llama", "untied", "samples"),
    ],
    "sharding": ["no_shard", "optim_grads", "optim_grads_params"],
    "loss_chunk": [0, 4],  # tokens; 10 are in a microbatch
    "compiled": [False, True],
}

TRACED = BlockCompiler("aot_eager")
"""Traces and differentiates as for generated kernels, and computes by torch's own."""


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    tp, pp, dp = case["sizes"]
    return (
        (tp > 1 or not case["sequence_parallel"])
        and (pp > 1 or "stage" not in case["memory"])
        and (pp > 1 or case["schedule"] in ("1f1b", "zb-h1"))
        and (dp > 1 or case["sharding"] == "no_shard")
        and not (case["sharding"] == "optim_grads_params" and case["schedule"].startswith("zb"))
        and not (case["compiled"] and "norms" in case["memory"])  # refused
        and not (case["compiled"] and case["loss_chunk"] == 0)  # the loss is not traced
    )


def is_quick(case: dict[str, Any]) -> bool:
    """Every rank traces its layers."""
    tp, pp, dp = case["sizes"]
    return fits(case) and not (case["compiled"] and tp * pp * dp > 2)


@functools.cache
def recipe(style: str, tie: str, samples: str, layers: int, batch: int) -> Recipe:
    packed, tied = samples == "documents", tie == "tied"
    like = llama_like if style == "llama" else gpt2_like
    shape = like(num_layers=layers, hidden=16, ffn=24, heads=4, kv_heads=2, head_size=4, vocab=VOCAB, seq=SEQ, tied=tied)
    batches = documents(2, batch) if packed else random_batches(shape, 2, batch, 1, seed=6)
    return Recipe(shape, random_weights(shape, seed=5), batches, rules=ALL_RULES if packed else None)


@functools.cache
def reference(*key: Any) -> ReferenceRun:
    r = recipe(*key)
    settings: dict[str, Any] = {"loss": functools.partial(loss_of_documents_apart, eod=EOD)} if r.rules else {}
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, **settings)


@functools.cache
def without(layout: Layout, *key: Any) -> LayoutRun:
    """The run that keeps all activations."""
    return run_layout(recipe(*key), layout)


def name(case: dict[str, Any]) -> str:
    tp, pp, dp = case["sizes"]
    words = [
        case["memory"],
        f"tp{tp}-pp{pp}-dp{dp}",
        case["schedule"],
        *case["model"],
        case["sharding"],
        f"loss{case['loss_chunk']}",
    ]
    sequence = {False: [], True: ["sequence_parallel"], "overlapping": ["overlapping"]}[case["sequence_parallel"]]
    return "-".join([*words, *sequence, *(["compiled"] if case["compiled"] else [])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 16, is_quick)
        metafunc.parametrize("case", cases, ids=name)


def test_what_is_done_with_activations_changes_nothing(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    chunks = 2 if case["schedule"] in ("interleaved", "zb-v") else 1
    plain = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        virtual_stages=chunks,
        sequence_parallel=case["sequence_parallel"],
        schedule=case["schedule"],
        sharding=case["sharding"],
        micro_batch_size=1,
        bucket_size=1500,
        memory=MemoryConfig(loss_chunk_tokens=case["loss_chunk"]),
    )
    microbatches = 3 if pp > 1 else 2
    key = (*case["model"], 2 * pp * chunks + 1, microbatches * dp)
    memory = replace(MEMORIES[case["memory"]], loss_chunk_tokens=case["loss_chunk"])
    found = run_layout(recipe(*key), replace(plain, memory=memory, compiler=TRACED if case["compiled"] else None))
    assert_equal_runs(found, reference(*key))
    # Attention within documents is not traced. Of a layer cut there the three parts of the residual stream's gradient, two of which
    # are an RMSNorm's, are summed in another order.
    if not (case["compiled"] and case["model"][0] == "llama" and case["model"][2] == "documents"):
        assert_same_bits(found, without(plain, *key))
