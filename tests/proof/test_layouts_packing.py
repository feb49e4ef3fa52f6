"""The proof again for samples of several documents: at every layout they train as the documents apart do.

In float64, through the loader. Every pair of settings occurs; `--full` takes every case.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from megatron.data.samples import DocumentRules
from megatron.verification.reference.model import Batch, Rules
from megatron.verification.reference.shape import ReferenceShape, random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, loss_of_documents_apart, loss_with_rules, train

SEQ, VOCAB, EOD = 10, 29, 5
FLAGS = list(itertools.product((False, True), repeat=3))
ALL_RULES = DocumentRules(EOD, True, True, True)

AXES: dict[str, list[Any]] = {
    "sizes": [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2)],
    "schedule": ["1f1b", "interleaved"],
    "sequence_parallel": [False, True],
    "positions": ["learned", "rope", "none"],
    "kv_heads": [2, 4],
    "tied": [True, False],
    "micro_batch_size": [1, 2],
    "attention": ["auto", "math"],
}


def fits(case: dict[str, Any]) -> bool:
    """Sequence parallelism over several tensor ranks, virtual stages over several stages."""
    tp, pp, _ = case["sizes"]
    return (tp > 1 or not case["sequence_parallel"]) and (pp > 1 or case["schedule"] == "1f1b")


def shape_of(positions: str, kv_heads: int, tied: bool, layers: int) -> ReferenceShape:
    like = llama_like if positions == "rope" else gpt2_like
    return like(
        num_layers=layers, hidden=16, ffn=24, head_size=4, vocab=VOCAB, seq=SEQ, positions=positions, kv_heads=kv_heads, tied=tied
    )


def documents(steps: int, samples: int) -> list[Batch]:
    """Batches of samples in which documents end otherwise: nowhere, everywhere, at the edges, several in a row, at random."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for step in range(steps):
        window = torch.randint(EOD + 1, VOCAB, (samples, SEQ + 1), generator=generator)
        places: list[list[int]] = [[], [0], [SEQ - 1], [3, 4, 5], [0, 1, SEQ - 1], list(range(SEQ)), [6], [2, 9]]
        for sample in range(samples):
            window[sample, places[(sample + 3 * step) % len(places)]] = EOD
        batches.append((window[:, :-1], window[:, 1:], torch.ones(samples, SEQ, dtype=torch.float64)))
    return batches


@functools.cache
def recipe(positions: str, kv_heads: int, tied: bool, layers: int, rules: DocumentRules = ALL_RULES) -> Recipe:
    shape = shape_of(positions, kv_heads, tied, layers)
    return Recipe(shape, random_weights(shape, seed=5), documents(2, 8), rules=rules)


@functools.cache
def reference(positions: str, kv_heads: int, tied: bool, layers: int) -> ReferenceRun:
    r = recipe(positions, kv_heads, tied, layers)
    loss = functools.partial(loss_of_documents_apart, eod=EOD)
    return train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    tp, pp, dp = case["sizes"]
    words = [
        f"tp{tp}-pp{pp}-dp{dp}",
        case["schedule"],
        case["positions"],
        f"kv{case['kv_heads']}",
        f"b{case['micro_batch_size']}",
        case["attention"],
    ]
    return "-".join([*words, *(flag for flag in ("tied", "sequence_parallel") if case[flag])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 3, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_packed_samples_train_as_their_documents_apart(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    interleaved = case["schedule"] == "interleaved"
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        sequence_parallel=case["sequence_parallel"],
        schedule=case["schedule"],
        virtual_stages=2 if interleaved else None,
        micro_batch_size=case["micro_batch_size"],
        bucket_size=700,
        attention=case["attention"],
    )
    key = (case["positions"], case["kv_heads"], case["tied"], 2 * pp if interleaved else pp)
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_each_rule_does_what_it_says(flags: tuple[bool, bool, bool], positions: str) -> None:
    r = recipe(positions, 2, True, 2, DocumentRules(EOD, *flags))
    loss = functools.partial(loss_with_rules, rules=Rules(EOD, *flags))
    expected = train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, Layout()), expected)


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_each_rule_reaches_the_stages_in_the_middle(flags: tuple[bool, bool, bool]) -> None:
    r = recipe("rope", 2, False, 3, DocumentRules(EOD, *flags))
    loss = functools.partial(loss_with_rules, rules=Rules(EOD, *flags))
    expected = train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, Layout(pp=3, micro_batch_size=1)), expected)


def test_the_rules_change_what_is_learned() -> None:
    """So the proofs above compare different things. Rotary positions know distances only: within a document none changes."""
    found = {}
    for positions in ("learned", "rope"):
        shape = shape_of(positions, 2, True, 2)
        weights, batch = random_weights(shape, seed=5), documents(1, 8)[0]
        losses = [loss_with_rules(shape, weights, batch, Rules(EOD, *flags)).item() for flags in FLAGS]
        found[positions] = len({round(loss, 9) for loss in losses})
    assert found == {"learned": 8, "rope": 6}


def test_sharded_parameters_meet_documents_too() -> None:
    key = ("rope", 2, True, 2)
    layout = Layout(dp=2, sharding="optim_grads_params", micro_batch_size=2)
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))
