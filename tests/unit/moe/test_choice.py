"""Which experts are chosen: ties, groups and probabilities by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.moe.balance import compute_balancing_probs, compute_router_weights, compute_selection_scores, select_experts
from megatron.spec.mlps import RouterSpec

SPEC = RouterSpec(4, 2, "softmax", False, 1.0, 1, 1, None, "none", 0.0, 0.0)


def chosen_of(logits: list[float], spec: RouterSpec = SPEC) -> list[int]:
    return select_experts(compute_selection_scores(torch.tensor([logits], dtype=torch.float64), spec), spec)[0].tolist()  # type: ignore[no-any-return]


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    assert chosen_of([1.0, 3.0, 3.0, 2.0]) == [1, 2]
    assert chosen_of([2.0, 1.0, 2.0, 2.0]) == [0, 2]
    assert chosen_of([0.0] * 4) == [0, 1]
    many = replace(SPEC, num_experts=512, top_k=8)
    assert chosen_of([0.0] * 512, many) == list(range(8))
    assert chosen_of([-1.0] * 256 + [0.5] * 256, many) == list(range(256, 264))


def test_groups_close_others() -> None:
    """A group is judged by the sum of its best scores, as many as a token would pass in it; of equal groups the first is open."""
    groups = replace(SPEC, num_experts=6, num_groups=3, top_k_groups=1)
    assert chosen_of([9.0, 0.0, 5.0, 5.0, 1.0, 1.0], groups) == [2, 3]
    assert chosen_of([9.0, 1.0, 5.0, 5.0, 1.0, 1.0], groups) == [0, 1]
    one_each = replace(groups, top_k_groups=2)
    assert chosen_of([9.0, 0.0, 5.0, 5.0, 6.0, 1.0], one_each) == [0, 4]
    assert chosen_of([1.0, 1.0, 5.0, 4.0, 1.0, 9.0], one_each) == [5, 2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [math.exp(2) / (math.exp(2) + math.exp(1)), math.exp(1) / (math.exp(2) + math.exp(1))]),
        ({"pre_softmax": True}, [math.exp(2) / (math.exp(2) + math.exp(1) + 2), math.exp(1) / (math.exp(2) + math.exp(1) + 2)]),
        ({"top_k": 1, "scaling_factor": 3.0}, [3.0]),
        ({"top_k": 1, "score_function": "sigmoid"}, [1 / (1 + math.exp(-2))]),
        ({"score_function": "sigmoid", "scaling_factor": 2.0}, [2 * 0.54645, 2 * 0.45355]),
    ],
)
def test_probabilities(changes: dict[str, object], expected: list[float]) -> None:
    spec, logits = replace(SPEC, **changes), torch.tensor([[0.0, 1.0, 0.0, 2.0]], dtype=torch.float64)  # type: ignore[arg-type]
    scores = compute_selection_scores(logits, spec)
    found = compute_router_weights(logits, scores, select_experts(scores, spec), spec)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-4)
    assert float(compute_balancing_probs(logits, spec).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(("factor", "expected"), [(None, None), (1.0, 4), (1.1, 5), (1.75, 7), (2.0, 8), (1e300, 8)])
def test_an_expert_takes_each_token_once_at_most(factor: float | None, expected: int | None) -> None:
    """Of 8 tokens, each of which chooses 2 of 4 experts; so padding is no more than that."""
    assert replace(SPEC, capacity_factor=factor).get_capacity(8) == expected
