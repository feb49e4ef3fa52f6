"""Generates token after token, for several prompts and several samples of each, at any tensor x pipeline layout.

The next token follows from its logits: the likeliest, or drawn from a distribution that is sharpened and cut.

Shapes: `b` rows, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import stable_seed
from megatron_lab.inference.forward import Decoder


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw among this many likeliest tokens."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability (Holtzman et al. 2020); after --top-k."""
    seed: int = 1234

    def __post_init__(self) -> None:
        """Raise a ValueError for a value that is out of range."""
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

        They depend only on the seed and the indices of prompt and sample. So a sequence is the same whatever other sequences are
        made beside it, at every layout and on every device (but for rounding of the logits).
        """
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "sample", prompt, sample))
        return torch.rand(count, generator=generator, dtype=torch.float64)


def choose(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> torch.Tensor:
    """Choose token ids [b] from logits [b, v].

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
    # The first token whose sum is above the drawn number, so never one of probability 0.
    place = torch.minimum(torch.searchsorted(sums, wanted, right=True), kept - 1)
    return (place if ids is None else ids.gather(-1, place)).squeeze(-1)


@dataclass(frozen=True)
class GenerationRequest:
    """The prompts, and how to continue them."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt; none may be empty."""
    max_new_tokens: int
    sampling: Sampling
    num_samples: int = 1
    """How many sequences to make for each prompt."""
    eod: int | None = None
    """Id of the token that ends a sequence."""
    num_ids: int | None = None
    """Ids from this one on are never chosen: the tokenizer has no text for these rows of the vocabulary."""
    first_prompt: int = 0
    """Index of the first prompt, where prompts are processed in groups."""

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(prompt, sample) of each sequence: prompt by prompt, samples of a prompt side by side."""
        return [(prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.num_samples)]


def generate(model: Model, context: ParallelContext, request: GenerationRequest) -> Iterator[list[int | None]]:
    """Yield the next token of every sequence, in the order of `rows`; None for those that have ended.

    All ranks of the model call it together and get the same. It stops when all sequences have ended.

    Raises:
        ValueError: a prompt is empty, holds an id outside the vocabulary, or leaves no room for the new tokens.
    """
    check_request(model, request)
    capacity = max(map(len, request.prompts)) + request.max_new_tokens
    decoder = Decoder(model, context, capacity)
    numbers = [request.sampling.draws(request.first_prompt + p, sample, request.max_new_tokens) for p, sample in request.rows]
    draws = torch.stack(numbers, dim=1).to(context.device)
    running = [True] * len(numbers)
    logits = decoder.read(request.prompts, request.num_samples)
    for step in range(request.max_new_tokens):
        ids = _next_ids(model, context, request, logits, draws[step])
        chosen = ids.tolist()
        running = [was and id != request.eod for was, id in zip(running, chosen, strict=True)]
        yield [id if goes_on else None for id, goes_on in zip(chosen, running, strict=True)]
        if step + 1 == request.max_new_tokens or not any(running):
            return
        logits = decoder.step(ids)


def _next_ids(
    model: Model, context: ParallelContext, request: GenerationRequest, logits: torch.Tensor | None, uniform: torch.Tensor
) -> torch.Tensor:
    """Choose ids [b] on one rank and send them to every rank: on a GPU, sums on other ranks may differ in the last bit."""
    if logits is None:
        ids = torch.empty(uniform.shape, dtype=torch.long, device=context.device)
    else:
        ids = choose(logits[:, : request.num_ids], request.sampling, uniform)
    world = context.world
    if world.size > 1:
        source = context.topology.rank(pp=model.layer_table[-1].stage)
        dist.broadcast(ids, source, group=world.process_group)
    return ids


def check_request(model: Model, request: GenerationRequest) -> None:
    """Refuse what `generate` would refuse.

    Raises:
        ValueError: as in `generate`.
    """
    for prompt in request.prompts:
        if not prompt:
            raise ValueError("a prompt without a token: begin with the end of a document, or bos")
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise ValueError(f"a prompt holds ids from {min(prompt)} to {max(prompt)}, but the vocabulary has {model.vocab_size}")
    longest, config = max(map(len, request.prompts)), model.config
    if config.position_embedding_type == "learned_absolute" and longest + request.max_new_tokens > config.num_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {request.max_new_tokens} new ones are more than the {config.num_positions} "
            "positions that the model has learned: lower --max-new-tokens, or shorten the prompt"
        )
