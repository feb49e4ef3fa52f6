"""Token after token, for several prompts and several samples of each, at any tensor x pipeline layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.inference.decoder import Decoder
from megatron.inference.sampling import Sampling, choose
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext


@dataclass(frozen=True)
class Request:
    """What is to be made."""

    prompts: Sequence[Sequence[int]]
    """Token ids; none empty."""
    max_new_tokens: int
    sampling: Sampling
    num_samples: int = 1
    """Sequences for each prompt."""
    eod: int | None = None
    """Id with which a sequence ends."""
    num_ids: int | None = None
    """Ids from this one on are never chosen: rows of the vocabulary that the tokenizer has no text for."""
    first_prompt: int = 0
    """Number of the first prompt, where prompts are worked off in groups."""


def generate(model: Model, context: ParallelContext, request: Request) -> Iterator[list[int | None]]:
    """Yield the next token of every sequence, prompt by prompt, samples of a prompt side by side; None for those that have ended.

    All ranks of the model call it together and get the same. Ends when all sequences have.

    Raises:
        ValueError: a prompt is empty, holds an id outside the vocabulary, or leaves no room for the new tokens.
    """
    check_request(model, request)
    capacity = max(map(len, request.prompts)) + request.max_new_tokens
    decoder = Decoder(model, context, capacity)
    numbers = [
        (request.first_prompt + prompt, sample) for prompt in range(len(request.prompts)) for sample in range(request.num_samples)
    ]
    draws = torch.stack([request.sampling.draws(*number, request.max_new_tokens) for number in numbers], dim=1).to(context.device)
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


def generate_all(model: Model, context: ParallelContext, request: Request) -> list[list[int]]:
    """The new tokens of every sequence, without the end of document, in the order of `generate`."""
    found: list[list[int]] = [[] for _ in range(len(request.prompts) * request.num_samples)]
    for ids in generate(model, context, request):
        for sequence, id in zip(found, ids, strict=True):
            if id is not None:
                sequence.append(id)
    return found


def _next_ids(
    model: Model, context: ParallelContext, request: Request, logits: torch.Tensor | None, uniform: torch.Tensor
) -> torch.Tensor:
    """Ids [b] on every rank, chosen by one: on a GPU, sums of other ranks may differ in the last bit."""
    if logits is None:
        ids = torch.empty(uniform.shape, dtype=torch.long, device=context.device)
    else:
        ids = choose(logits[:, : request.num_ids], request.sampling, uniform)
    world = context.world
    if world.size > 1:
        source = context.topology.rank(pp=model.layer_table[-1].stage)
        dist.broadcast(ids, source, group=world.process_group)
    return ids


def check_request(model: Model, request: Request) -> None:
    """Refuse what `generate` would refuse.

    Raises:
        ValueError: see there.
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
