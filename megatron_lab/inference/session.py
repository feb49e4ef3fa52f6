"""Generation for texts that follow each other, such as the turns of a conversation. Their common beginning is processed only
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.inference.forward import Decoder
from megatron_lab.inference.generate import GenerationRequest, check_request, continue_sequences

_MIN_CAPACITY = 2048
"""Smallest number of tokens for which a key-value cache is allocated, if the model has so many positions."""
_MAX_SINGLE_TOKENS = 32
"""Maximum number of tokens that are decoded one by one after the tokens in the cache. For more tokens, the prompt is processed
again: a forward pass of a complete prompt is faster than so many single steps."""
_PROMPT_TOKENS_PER_STEP = 16
"""Number of prompt tokens that a forward pass processes in about the time of a step with a single token."""


class GenerationSession:
    """Decoder of one sequence that keeps the key-value cache between calls.

    A call processes only the tokens of its prompt that differ from those in the cache. All ranks of the model make the same calls
    together.
    """

    def __init__(self, model: Model, context: ParallelContext) -> None:
        self._model, self._context = model, context
        self._decoder: Decoder | None = None
        self._cached_ids: list[int] = []
        self.num_computed_tokens = 0
        """Number of tokens that forward passes have processed since the session exists."""

    @property
    def num_positions(self) -> int:
        """Number of tokens of a sequence for which the model was trained (--max-position-embeddings)."""
        return self._model.config.num_positions

    def check(self, request: GenerationRequest) -> None:
        """Check that the model can process a request, as `check_request` does."""
        check_request(self._model, request)

    def generate(
        self, request: GenerationRequest, should_stop: Callable[[], bool] | None = None, *, sample_index: int = 0
    ) -> Iterator[int | None]:
        """Generate the tokens that continue the only prompt of a request.

        Args:
            request: one prompt, and the settings for generating text.
            should_stop: called before each token. If it returns true on any rank, the generation ends on all ranks.
            sample_index: index of this answer among those for the same prompt. Other indices select other random numbers.

        Yields:
            The next token id; None at the end if the model has ended the text.

        Raises:
            ValueError: the prompt is empty or has an id outside the vocabulary, or prompt and new tokens exceed the learned
                positions.
        """
        check_request(self._model, request)
        (prompt,) = request.prompts
        logits = self._process_prompt(list(prompt), len(prompt) + request.max_new_tokens)
        assert self._decoder is not None
        steps = continue_sequences(
            self._model, self._context, request, self._decoder, logits, should_stop, first_sample=sample_index
        )
        pending: int | None = None
        for (id,) in steps:
            if pending is not None:  # the step that computed this token has stored the previous one in the cache
                self._cached_ids.append(pending)
                self.num_computed_tokens += 1
            pending = id
            yield id

    def _process_prompt(self, prompt: list[int], num_tokens: int) -> torch.Tensor | None:
        """Return the logits of the token after a prompt, on the stage with the output layer.

        Args:
            num_tokens: maximum number of tokens of the sequence, prompt and new tokens.
        """
        # At least the last token is processed again, because its logits are needed.
        num_common = min(_count_common(prompt, self._cached_ids), len(prompt) - 1)
        remaining = prompt[num_common:]
        fits = self._decoder is not None and num_tokens <= self._decoder.cache.capacity
        is_short = len(remaining) <= _MAX_SINGLE_TOKENS and len(remaining) * _PROMPT_TOKENS_PER_STEP <= len(prompt)
        if self._decoder is not None and fits and is_short and self._decoder.cache.truncate(num_common):
            del self._cached_ids[num_common:]
            logits = None
            for id in remaining:
                logits = self._decoder.decode(torch.tensor([id], device=self._context.device))
        else:
            capacity = min(max(_MIN_CAPACITY, 1 << (num_tokens - 1).bit_length()), max(num_tokens, self.num_positions))
            self._decoder = None  # frees the memory of the previous cache
            self._cached_ids.clear()
            remaining = prompt
            decoder = Decoder(self._model, self._context, capacity)
            logits = decoder.prefill([prompt])
            self._decoder = decoder
        self._cached_ids += remaining
        self.num_computed_tokens += len(remaining)
        return logits


def _count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading ids that are equal in both sequences."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
