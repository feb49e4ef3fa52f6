"""Token generation for several prompts and several samples of each prompt, with tensor, context and pipeline parallelism.

The next token is the most likely one, or a sample from the softmax of the logits with temperature, top-k and top-p.

Shapes: `b` rows (sequences), `v` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.model.build import Model
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import compute_stable_seed
from megatron_lab.inference.forward import Decoder


@dataclass(frozen=True)
class Sampling:
    """Settings that determine how the next token is selected from its logits."""

    temperature: float = 1.0
    """Number by which the logits are divided. 0 always selects the most likely token (greedy decoding)."""
    top_k: int | None = None
    """Sample only from the `top_k` most likely tokens; None for no limit."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose total probability reaches `top_p` (nucleus sampling, Holtzman et
    al. 2020). Applied after `top_k`."""
    seed: int = 1234

    def __post_init__(self) -> None:
        """Check the ranges of all values.

        Raises:
            ValueError: a value is out of range.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"--temperature must be 0 (always the most likely token) or more, not {self.temperature:g}. Correct it"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k must be at least 1, not {self.top_k}. Correct it, or leave it out")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1, not {self.top_p:g}. Correct it, or leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always selected, without random numbers."""
        return self.temperature == 0

    def draw_uniform(self, prompt: int, sample: int, count: int) -> torch.Tensor:
        """Return the random numbers that select the tokens of one sequence: uniform in [0, 1), float64 [count].

        The numbers depend only on the seed, the prompt index and the sample index. So a sequence does not depend on the other
        sequences of the batch, the parallel layout or the device, apart from rounding of the logits.

        Args:
            prompt: index of the prompt.
            sample: index of the sequence among those of this prompt.
            count: number of random numbers, one per generated token.
        """
        generator = torch.Generator().manual_seed(compute_stable_seed(self.seed, "sample", prompt, sample))
        return torch.rand(count, generator=generator, dtype=torch.float64)


def sample_tokens(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> torch.Tensor:
    """Select the next token of each row, by sampling or as the most likely token.

    Args:
        logits: logits [b, v] of b rows (sequences), for v vocabulary ids.
        sampling: temperature, top-k and top-p.
        uniform: one random number in [0, 1) per row: float64 [b]. It is not used for greedy decoding.

    Returns:
        Selected token id of each row [b].
    """
    if sampling.is_greedy:
        return logits.argmax(-1)
    ids = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, ids = logits.sort(descending=True)
    # In float64, so that the cumulative sum over a large vocabulary reaches 1.
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    cumulative = probabilities.cumsum(-1)
    if sampling.top_p < 1:  # tokens up to the one with which the cumulative probability reaches top_p
        last_index = (cumulative - probabilities < sampling.top_p).sum(-1, keepdim=True) - 1
        threshold = uniform.unsqueeze(-1) * cumulative.gather(-1, last_index)
    else:
        last_index = torch.tensor(cumulative.shape[-1] - 1, device=logits.device)
        threshold = uniform.unsqueeze(-1) * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the threshold, so a token of probability 0 is never selected.
    indices = torch.minimum(torch.searchsorted(cumulative, threshold, right=True), last_index)
    return (indices if ids is None else ids.gather(-1, indices)).squeeze(-1)


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts, and the settings for generating text that continues them."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt. A prompt must not be empty."""
    max_new_tokens: int
    sampling: Sampling
    num_samples: int = 1
    """Number of sequences that are generated for each prompt."""
    eod: int | None = None
    """Id of the end-of-document token, which ends a sequence; None to always generate `max_new_tokens` tokens."""
    stop_ids: frozenset[int] = frozenset()
    """Further ids that end a sequence, such as the end of an answer in a conversation."""
    num_ids: int | None = None
    """Number of ids in the tokenizer's vocabulary; None for no limit. Higher ids of the model are never selected, because the
    tokenizer has no text for them."""
    first_prompt: int = 0
    """Index of this request's first prompt among all prompts, if the caller splits the prompts into several requests.

    The random numbers of a sequence depend on the index of its prompt.
    """

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(prompt index in this request, sample index) of each generated sequence. The samples of a prompt are next to each
        other."""
        return [(prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.num_samples)]


def generate(model: Model, context: ParallelContext, request: GenerationRequest) -> Iterator[list[int | None]]:
    """Generate the next token of every sequence, step by step.

    All ranks of the model call this function together and get the same tokens. The generation stops when all sequences have ended
    or have `max_new_tokens` tokens.

    Args:
        request: prompts as token ids, and the settings for generating text.

    Yields:
        In each step, one token id per sequence, in the order of `request.sequences`. It is None for a sequence that has ended.

    Raises:
        ValueError: a prompt is empty or has an id outside the vocabulary, or prompt and new tokens exceed the learned positions.
    """
    check_request(model, request)
    decoder = Decoder(model, context, max(map(len, request.prompts)) + request.max_new_tokens)
    logits = decoder.prefill(request.prompts, request.num_samples)
    yield from continue_sequences(model, context, request, decoder, logits)


def continue_sequences(
    model: Model,
    context: ParallelContext,
    request: GenerationRequest,
    decoder: Decoder,
    logits: torch.Tensor | None,
    should_stop: Callable[[], bool] | None = None,
    *,
    first_sample: int = 0,
) -> Iterator[list[int | None]]:
    """Generate tokens as `generate` does, from a decoder that has already processed the prompts.

    Args:
        logits: logits of the first new token, which the decoder returned for the prompts.
        should_stop: called before each token. If it returns true on any rank, the generation ends on all ranks.
        first_sample: index of the first sample of each prompt. The random numbers of a sequence depend on it.
    """
    sequence_draws = [
        request.sampling.draw_uniform(request.first_prompt + p, first_sample + sample, request.max_new_tokens)
        for p, sample in request.sequences
    ]
    uniform = torch.stack(sequence_draws, dim=1).to(context.device)
    active = [True] * len(sequence_draws)
    end_ids = request.stop_ids if request.eod is None else request.stop_ids | {request.eod}
    for step in range(request.max_new_tokens):
        if should_stop is not None and _is_true_on_any_rank(should_stop(), context):
            return
        ids = _sample_next_ids(model, context, request, logits, uniform[step])
        next_ids = ids.tolist()
        active = [is_active and id not in end_ids for is_active, id in zip(active, next_ids, strict=True)]
        yield [id if is_active else None for id, is_active in zip(next_ids, active, strict=True)]
        if step + 1 == request.max_new_tokens or not any(active):
            return
        logits = decoder.decode(ids)


def _is_true_on_any_rank(value: bool, context: ParallelContext) -> bool:
    if context.world.size == 1:
        return value
    flag = torch.tensor([int(value)], device=context.device)
    return bool(all_reduce(flag, context.world, dist.ReduceOp.MAX).item())


def _sample_next_ids(
    model: Model, context: ParallelContext, request: GenerationRequest, logits: torch.Tensor | None, uniform: torch.Tensor
) -> torch.Tensor:
    """Select the next token id of each sequence on one rank, and broadcast the ids [b] to all ranks.

    If each rank selected the tokens, the ranks could disagree, because cumulative sums on GPUs may differ in the last bit.

    Args:
        logits: logits [b, v] of b sequences, on the pipeline stage with the output layer; None on other stages.
        uniform: one random number in [0, 1) per sequence: float64 [b].
    """
    if logits is None:
        ids = torch.empty(uniform.shape, dtype=torch.long, device=context.device)
    else:
        ids = sample_tokens(logits[:, : request.num_ids], request.sampling, uniform)
    world = context.world
    if world.size > 1:
        source = context.topology.find_rank(pp=model.layer_table[-1].stage)
        dist.broadcast(ids, source, group=world.process_group)
    return ids


def check_request(model: Model, request: GenerationRequest) -> None:
    """Check that the model can process the prompts of a request and the tokens to generate.

    Raises:
        ValueError: a prompt is empty or has an id outside the vocabulary, or prompt and new tokens exceed the learned positions.
    """
    for index, prompt in enumerate(request.prompts, start=request.first_prompt + 1):
        if not prompt:
            raise ValueError("a prompt has no tokens: write some text, or start it with the end-of-document or bos token")
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise ValueError(
                f"prompt {index:,} has token ids from {min(prompt)} to {max(prompt)}, but the model has ids 0 to "
                f"{model.vocab_size - 1}: the tokenizer belongs to another model, or a chat template writes a special token that "
                "the model has no row for. Choose the tokenizer of this model, or another template"
            )
    max_length, config = max(map(len, request.prompts)), model.config
    if config.position_embedding_type == "learned_absolute" and max_length + request.max_new_tokens > config.num_positions:
        raise ValueError(
            f"a prompt of {max_length} tokens and {request.max_new_tokens} new tokens exceed the {config.num_positions} "
            "positions that the model has learned: lower --max-new-tokens, or shorten the prompt"
        )
