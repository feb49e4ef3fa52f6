"""The proof for samples of several documents, through the loader: each rule of documents does what it says.

Layouts of every kind are in `test_layouts.py`.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from megatron.data.samples import DocumentRules
from megatron_lab.verification.reference.model import Batch, EodRules
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import gpt2_like, llama_like, loss_with_rules, train

SEQ, VOCAB, EOD = 10, 29, 5
FLAGS = list(itertools.product((False, True), repeat=3))
ALL_RULES = DocumentRules(EOD, True, True, True)


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
    return Recipe(shape, build_random_weights(shape, seed=5), documents(2, 8), rules=rules)


@pytest.mark.parametrize(
    ("flags", "positions"),
    [
        pytest.param(flags, positions, marks=() if sum(flags) % 2 == number else pytest.mark.full("each flag with both positions"))
        for flags in FLAGS
        for number, positions in enumerate(("learned", "rope"))
    ],
    ids=str,
)
def test_each_rule_does_what_it_says(flags: tuple[bool, bool, bool], positions: str) -> None:
    r = recipe(positions, 2, True, 2, DocumentRules(EOD, *flags))
    loss = functools.partial(loss_with_rules, rules=EodRules(EOD, *flags))
    expected = train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, Layout()), expected)


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, False)], ids=str)
def test_each_rule_reaches_the_stages_in_the_middle(flags: tuple[bool, bool, bool]) -> None:
    r = recipe("rope", 2, False, 3, DocumentRules(EOD, *flags))
    loss = functools.partial(loss_with_rules, rules=EodRules(EOD, *flags))
    expected = train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, Layout(pp=3, micro_batch_size=1)), expected)


def test_the_rules_change_what_is_learned() -> None:
    """So the proofs above compare different things. Rotary positions know distances only: within a document none changes."""
    found = {}
    for positions in ("learned", "rope"):
        shape = shape_of(positions, 2, True, 2)
        weights, batch = build_random_weights(shape, seed=5), documents(1, 8)[0]
        losses = [loss_with_rules(shape, weights, batch, EodRules(EOD, *flags)).item() for flags in FLAGS]
        found[positions] = len({round(loss, 9) for loss in losses})
    assert found == {"learned": 8, "rope": 6}
