"""The proof for context ranks: however they share sequences, they train as one plain process does.

In float64, with one document a sample or several, whose ends lie at, before and after the places where sequences are cut. Every
pair of settings occurs; `--full` takes every case.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.config.memory import MemoryConfig
from megatron.config.parallel import ContextWay
from megatron.data.samples import DocumentRules
from megatron.model.compiled import BlockCompiler
from megatron.verification.reference.model import Batch
from megatron.verification.reference.rotary import RotaryStretch
from megatron.verification.reference.shape import ReferenceShape, random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import (
    ReferenceRun,
    deepseek_like,
    gpt2_like,
    llama_like,
    loss_of_documents_apart,
    mean_loss,
    random_batches,
    train,
)

SEQ, VOCAB, EOD, LAYERS = 16, 29, 5, 4
RULES = DocumentRules(EOD, True, True, True)
SIZES: dict[str, Any] = {"num_layers": LAYERS, "hidden": 16, "ffn": 24, "vocab": VOCAB, "seq": SEQ, "heads": 8}
# By the second, what a position turns depends on the length of the whole sequence.
YARN = RotaryStretch("yarn", 4.0, 12, 0.05, 1.0, whole=False, enlarged=1.2)
LONGROPE = RotaryStretch("longrope", 1.0, 9, enlarged=0.9, short=(9.0, 9.0), long=(1.0, 4.0))
STYLES: dict[str, ReferenceShape] = {
    "gpt2": gpt2_like(**SIZES, kv_heads=8, head_size=4, tied=True),
    "yarn": llama_like(**SIZES, kv_heads=4, head_size=4, tied=True, stretch=YARN),
    "longrope": llama_like(**SIZES, kv_heads=4, head_size=4, stretch=LONGROPE),
    "latents": deepseek_like(**SIZES, kv_heads=8),
    "windows, sinks": llama_like(**SIZES, kv_heads=4, head_size=4, windows=(5, None) * 2, sink="learned", qkv_bias=True),
    "capped": gpt2_like(**SIZES, kv_heads=4, head_size=4, windows=(None, 2) * 2, score_cap=0.5, score_scale=0.4, sink="one"),
}
MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "selective, host": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm"), cpu_offload_activations=True),
    "loss in chunks": MemoryConfig(loss_chunk_tokens=3),
}
WAYS: dict[str, tuple[ContextWay, ...]] = {
    "all_gather": ("all_gather",),
    "p2p": ("p2p",),
    "a2a": ("a2a",),
    "each": ("a2a", "p2p", "all_gather"),
}
AXES: dict[str, list[Any]] = {
    "sizes": [(1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2), (1, 4, 2, 1), (2, 2, 2, 1), (2, 2, 1, 2)],
    "way": [*WAYS],
    "style": [*STYLES],
    "samples": ["whole", "documents"],
    "schedule": ["1f1b", "interleaved", "zb-h1", "zb-v"],
    "sequence_parallel": [False, True, "overlapping"],
    "memory": [*MEMORIES],
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "micro_batch_size": [1, 2],
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    tp, cp, pp, _ = case["sizes"]
    chunks = pp * (2 if case["schedule"] in ("interleaved", "zb-v") else 1)
    heads = STYLES[case["style"]].kv_heads
    return (
        (tp > 1 or not case["sequence_parallel"])
        and (pp > 1 or case["schedule"] == "1f1b")
        and LAYERS % chunks == 0
        and not (case["style"] == "longrope" and case["samples"] == "documents")  # apart, documents are shorter sequences
        and (heads // tp % cp == 0 or case["way"] not in ("a2a", "each"))
        and not (case["sharding"] == "optim_grads_params" and case["schedule"] in ("zb-h1", "zb-v"))  # refused
    )


def documents(steps: int, samples: int) -> list[Batch]:
    """Batches of samples in which documents end otherwise: nowhere, everywhere, beside each place where two or four ranks cut."""
    generator = torch.Generator().manual_seed(7)
    places: list[list[int]] = [[], list(range(SEQ)), [3], [2, 4], [7, 8], [0, 6, 11], [1, 5, 13], [14], [4, 5, 12]]
    batches = []
    for step in range(steps):
        window = torch.randint(EOD + 1, VOCAB, (samples, SEQ + 1), generator=generator)
        for sample in range(samples):
            window[sample, places[(sample + 4 * step) % len(places)]] = EOD
        batches.append((window[:, :-1], window[:, 1:], torch.ones(samples, SEQ, dtype=torch.float64)))
    return batches


@functools.cache
def recipe(style: str, samples: str) -> Recipe:
    shape = STYLES[style]
    packed = samples == "documents"
    batches = documents(2, 4) if packed else random_batches(shape, 2, 4, 2, seed=2)
    return Recipe(shape, random_weights(shape, seed=5), batches, rules=RULES if packed else None)


@functools.cache
def reference(style: str, samples: str) -> ReferenceRun:
    r = recipe(style, samples)
    loss = functools.partial(loss_of_documents_apart, eod=EOD) if samples == "documents" else mean_loss
    return train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    tp, cp, pp, dp = case["sizes"]
    words = [
        f"tp{tp}-cp{cp}-pp{pp}-dp{dp}",
        *(case[axis] for axis in ("way", "style", "samples", "schedule", "memory", "sharding")),
    ]
    return "-".join([*words, f"b{case['micro_batch_size']}", *(["sequence_parallel"] if case["sequence_parallel"] else [])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 5, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_context_ranks_train_as_one_plain_process(case: dict[str, Any]) -> None:
    tp, cp, pp, dp = case["sizes"]
    layout = Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ways=WAYS[case["way"]],
        sequence_parallel=case["sequence_parallel"],
        schedule=case["schedule"],
        virtual_stages=2 if case["schedule"] == "interleaved" else None,
        sharding=case["sharding"],
        memory=MEMORIES[case["memory"]],
        micro_batch_size=case["micro_batch_size"],
        bucket_size=900,
    )
    key = (case["style"], case["samples"])
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


@pytest.mark.parametrize("way", ["all_gather", "p2p", "a2a"])
def test_compiled_layers_do_the_same(way: ContextWay) -> None:
    layout = Layout(cp=2, ways=(way,), compiler=BlockCompiler("aot_eager"))
    assert_equal_runs(run_layout(recipe("yarn", "documents"), layout), reference("yarn", "documents"))
