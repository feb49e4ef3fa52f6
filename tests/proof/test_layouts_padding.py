"""Padding behind the documents of a sample is no data: what is learned does not depend on how much of it there is."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatron.config.training import OptimizerConfig
from megatron.data.samples import DocumentRules
from megatron.moe.balance import RouterMetrics
from megatron_lab.verification.reference.model import Batch, EodRules, compute_packed_losses
from megatron_lab.verification.reference.qk_clip import QkClip
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from megatron_lab.verification.reference.training import ReferenceUpdateRule, State, update_weights
from megatron_lab.verification.reference_run import build_rule_options
from tests.layouts.case import KINDS
from tests.support.equality import assert_equal_runs, assert_equal_tensors
from tests.support.layout import Layout, Recipe, build_step, context_of, read_microbatches, run_layout
from tests.support.reference_runs import count_data, llama_like, loss_and_gradients, loss_with_rules
from tests.support.warm import run_warm_ranks

VOCAB, EOD, SHORT, LONG = 29, 5, 8, 16
RULES = DocumentRules(EOD, True, True, True)
LENGTHS = ((8, 3, 5, 2), (4, 8, 6, 7))
"""Numbers of tokens of the samples of each step; at least one token of padding is behind each."""


def shape_of(kind: str, depths: int, seq: int) -> ReferenceShape:
    sizes = {"num_layers": 2, "hidden": 16, "ffn": 24, "head_size": 4, "vocab": VOCAB, "seq": seq, "mtp_depths": depths}
    experts = replace(KINDS[kind]((True, True), (False, True)), micro_batch_size=2)
    return llama_like(**sizes, experts=experts)


def padded(seq: int) -> list[Batch]:
    """The same documents, two in each sample of four tokens or more, in samples of another length."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for lengths in LENGTHS:
        window = torch.full((len(lengths), seq + 1), EOD)
        mask = torch.zeros(len(lengths), seq, dtype=torch.float64)
        for sample, length in enumerate(lengths):
            window[sample, :length] = torch.randint(EOD + 1, VOCAB, (length,), generator=generator)
            window[sample, [length // 2 - 1, length - 1] if length > 3 else [length - 1]] = EOD
            mask[sample, : length - 1] = 1.0
        batches.append((window[:, :-1], window[:, 1:], mask))
    return batches


@functools.cache
def recipe(kind: str, depths: int, seq: int) -> Recipe:
    shape = shape_of(kind, depths, seq)
    return Recipe(shape, build_random_weights(shape, seed=5, std=0.3), padded(seq), rules=RULES, has_padding=True)


@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_does_not_depend_on_the_padding(kind: str, depths: int) -> None:
    """Losses, gradients, weights and biases; with experts that drop tokens too."""
    assert_equal_runs(run_layout(recipe(kind, depths, LONG), Layout()), run_layout(recipe(kind, depths, SHORT), Layout()))


def test_what_is_reported_does_not_depend_on_the_padding() -> None:
    """Losses of routers, dropped tokens and busiest experts, at any layout."""
    kind = "top 4, gated shared, dropped by probability"
    one, many = Layout(), Layout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True)
    found = [
        run_warm_ranks(layout.world_size, _balance, recipe(kind, 1, seq), layout, timeout=120.0)
        for seq, layout in ((SHORT, one), (LONG, one), (LONG, many))
    ]
    first, *_ = found[0]
    for result in (result for results in found for result in results):
        assert result.load_balancing_loss == pytest.approx(first.load_balancing_loss, rel=1e-12)
        assert result.z_loss == pytest.approx(first.z_loss, rel=1e-12)
        assert result.busiest_expert == first.busiest_expert
        assert result.dropped_share == first.dropped_share and 0.0 < first.dropped_share < 0.5


def _balance(rank: int, recipe: Recipe, layout: Layout) -> RouterMetrics | None:
    step = build_step(context_of(layout, rank), recipe, layout)
    batch = read_microbatches(recipe.batches[0], step, layout.micro_batch_size, RULES, has_padding=True)
    return step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0).expert_balance


CLIPPED = llama_like(hidden=16, ffn=28, heads=8, kv_heads=2, head_size=4, vocab=61, seq=LONG, windows=(None, 3), mtp_depths=2)
THRESHOLD = 2.5


@functools.cache
def clipped_recipe() -> Recipe:
    """Large weights, so that scores are large."""
    weights = {name: w * (3.0 if "attention." in name else 1.0) for name, w in build_random_weights(CLIPPED, seed=1).items()}
    update = {"qk_clip": True, "qk_clip_threshold": THRESHOLD, "qk_clip_alpha": 0.3}
    return Recipe(CLIPPED, weights, padded(LONG)[:1], rules=RULES, has_padding=True, optimizer="muon", update=update)


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2, dp=2, micro_batch_size=1), Layout(tp=2, pp=2, sequence_parallel=True)])
def test_heads_are_clipped_by_the_scores_of_data(layout: Layout) -> None:
    r, largest, all_largest = clipped_recipe(), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    rules = EodRules(EOD)
    for lengths, found in ((count_data(r.batches[0]), largest), (None, all_largest)):

        def watch(name: str, values: torch.Tensor, found: dict[str, torch.Tensor] = found) -> None:
            if name.endswith(".scores"):
                found[name.removesuffix(".scores")] = values.amax(dim=(0, 2))

        compute_packed_losses(r.shape, r.weights, r.batches[0], rules, watch, lengths)
    assert any((all_largest[name] > largest[name].clamp(min=THRESHOLD)).any() for name in largest), "padding would clip heads"
    assert min(scores.min() for scores in largest.values()) < THRESHOLD < max(scores.max() for scores in largest.values())
    loss = functools.partial(loss_with_rules, rules=rules, has_padding=True)
    state = State(r.weights)
    value, gradients = loss_and_gradients(r.shape, r.weights, r.batches[0], loss)
    numbers = build_rule_options(OptimizerConfig(), (4, 4))
    rule = ReferenceUpdateRule("muon", r.clip, options=numbers, qk_clip=QkClip(r.shape, THRESHOLD, 0.3))
    update_weights(state, gradients, rule, r.lr, r.weight_decay, max_logits=largest)
    actual = run_layout(r, layout)
    assert actual.losses == pytest.approx([value], rel=1e-10)
    assert_equal_tensors(actual.weights_after, state.weights)
