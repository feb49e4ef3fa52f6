"""How a token is chosen: the distribution that is drawn from, and that a draw follows from the seed."""

from __future__ import annotations

import pytest
import torch

from megatron_lab.inference.generate import Sampling, sample_tokens

SCORES = torch.tensor([[2.0, -1.0, 0.5, 1.5, -3.0, 0.0]], dtype=torch.float64)


def shares(sampling: Sampling, scores: torch.Tensor = SCORES, count: int = 100_000) -> torch.Tensor:
    """How often each token is chosen, over evenly spread random numbers."""
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids = sample_tokens(scores.expand(count, -1), sampling, uniform)
    return torch.bincount(ids, minlength=scores.shape[-1]) / count


def kept_only(scores: torch.Tensor, kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The distribution over some tokens."""
    probabilities = torch.zeros_like(scores[0])
    probabilities[kept] = torch.softmax(scores[0, kept] / temperature, -1)
    return probabilities


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=3.0), [0, 1, 2, 3, 4, 5]),
        (Sampling(top_k=3), [0, 2, 3]),
        (Sampling(top_k=1), [0]),
        (Sampling(top_k=100), [0, 1, 2, 3, 4, 5]),
        # Sums of the probabilities, the largest first: 0.495, 0.795, 0.905, 0.972, 0.997, 1.
        (Sampling(top_p=0.4), [0]),
        (Sampling(top_p=0.6), [0, 3]),
        (Sampling(top_p=0.9), [0, 2, 3]),
        (Sampling(top_p=0.91), [0, 2, 3, 5]),
        (Sampling(top_p=1e-9), [0]),
        (Sampling(top_k=2, top_p=0.99), [0, 3]),
        (Sampling(temperature=0.25, top_p=0.9), [0, 3]),
    ],
)
def test_the_distribution(sampling: Sampling, kept: list[int]) -> None:
    expected = kept_only(SCORES, kept, sampling.temperature)
    torch.testing.assert_close(shares(sampling).double(), expected, rtol=0, atol=2e-5)


def test_top_p_takes_the_token_with_which_the_sum_is_reached() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in ((0.5, 1), (0.500001, 2), (0.75, 2), (0.76, 3), (1.0, 4)):
        assert (shares(Sampling(top_p=top_p), scores) > 0).sum() == kept


def test_rows_are_chosen_apart() -> None:
    scores = torch.tensor([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    uniform = torch.tensor([0.5, 0.5, 0.999999], dtype=torch.float64)
    assert sample_tokens(scores, Sampling(), uniform).tolist() == [1, 0, 2]
    assert sample_tokens(scores, Sampling(top_k=2), uniform)[:2].tolist() == [1, 0]
    assert sample_tokens(scores, Sampling(temperature=0), uniform)[:2].tolist() == [1, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.999), Sampling(top_k=3)])
def test_a_token_of_probability_0_is_never_drawn(sampling: Sampling) -> None:
    """At either end of what a random number can be."""
    scores = torch.tensor([[-1e6, 0.0, 0.0, -1e6]], dtype=torch.float32).expand(2, -1)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert set(sample_tokens(scores, sampling, ends).tolist()) == {1, 2}


def test_draws_follow_from_the_seed_and_the_numbers() -> None:
    draws = Sampling(seed=7).draw_uniform(2, 5, 100)
    assert draws.dtype == torch.float64 and bool(((draws >= 0) & (draws < 1)).all())
    assert torch.equal(draws, Sampling(seed=7, temperature=0.1).draw_uniform(2, 5, 200)[:100])
    for other in (
        Sampling(seed=8).draw_uniform(2, 5, 100),
        Sampling(seed=7).draw_uniform(5, 2, 100),
        Sampling(seed=7).draw_uniform(2, 4, 100),
    ):
        assert not torch.equal(draws, other)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_k": 0}, "top-k")]
    + [({"top_p": value}, "top-p") for value in (0.0, 1.1)],
)
def test_settings_out_of_range(settings: dict[str, float], flag: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} must be"):
        Sampling(**settings)  # type: ignore[arg-type]
