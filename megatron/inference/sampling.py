"""The next token from its scores: the likeliest, or drawn from a distribution that is sharpened and cut.

Shapes: `b` rows, `v` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.parallel.random import stable_seed


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 1.0
    """Scores are divided by it; 0 takes the likeliest token always."""
    top_k: int | None = None
    """Draw among this many likeliest tokens."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability (Holtzman et al. 2020); after --top-k."""
    seed: int = 1234

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: one is out of range.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature must be 0 (the likeliest token always) or more, not {self.temperature:g}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k must be at least 1, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1, not {self.top_p:g}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def draws(self, prompt: int, sample: int, count: int) -> torch.Tensor:
        """The random numbers of one sequence, uniform in [0, 1): float64 [count].

        They follow from the seed and the numbers of prompt and sample alone, so a sequence is the same whatever it is made beside,
        at every layout and on every device (but for rounding of the scores).
        """
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "sample", prompt, sample))
        return torch.rand(count, generator=generator, dtype=torch.float64)


def choose(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [b] from scores [b, v].

    Args:
        uniform: a random number in [0, 1) for each row: float64 [b].
    """
    if sampling.greedy:
        return logits.argmax(-1)
    ids = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, ids = logits.sort(descending=True)
    # In float64: a sum over a large vocabulary must not end before 1.
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    sums = probabilities.cumsum(-1)
    if sampling.top_p < 1:  # up to the token with which the sum reaches top_p
        kept = (sums - probabilities < sampling.top_p).sum(-1, keepdim=True)
    else:
        kept = torch.full_like(sums[:, :1], sums.shape[-1], dtype=torch.long)
    wanted = uniform.unsqueeze(-1) * sums.gather(-1, kept - 1)
    # The first token whose sum is above what was drawn, so never one of probability 0.
    place = torch.minimum(torch.searchsorted(sums, wanted, right=True), kept - 1)
    return (place if ids is None else ids.gather(-1, place)).squeeze(-1)
