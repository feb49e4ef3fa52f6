"""A model that reads prompts at once and then one token a row. All ranks of its tensor x pipeline layout call it together.

Shapes: `s` the longest prompt, `b` rows, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.inference.chain import last_hidden_states
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.parallel.context import ParallelContext


class Decoder:
    """Keeps keys and values, so that the work for a token does not grow with what it reads again.

    Args:
        capacity: tokens in the longest row, prompt and new ones.
    """

    def __init__(self, model: Model, context: ParallelContext, capacity: int) -> None:
        assert not model.sequence_parallel, "one token cannot be split over tensor ranks"
        self._model, self._context = model, context
        self.cache = KeyValueCache(capacity)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Sequence[int]], copies: int = 1) -> torch.Tensor | None:
        """Read the prompts; each becomes `copies` rows, side by side.

        Returns:
            scores of the next token of each row [b, v], without padding, on the stage with the output layer; None on others.
        """
        device = self._context.device
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.zeros(max(lengths), len(prompts), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[: len(prompt), row] = torch.tensor(prompt)
        positions = torch.arange(max(lengths), device=device).unsqueeze(1).expand(-1, len(prompts)).contiguous()
        hidden = last_hidden_states(self._model, self._context, ModelInputs(positions, tokens.to(device), cache=self.cache))
        self.cache.begin(lengths, device, copies)
        if hidden is None:
            return None
        last = hidden[torch.tensor(lengths, device=device) - 1, torch.arange(len(prompts), device=device)]
        return self._logits(last.unsqueeze(0)).repeat_interleave(copies, 0)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Read one more token a row, [b]; returns scores as `read`."""
        inputs = ModelInputs(self.cache.lengths.unsqueeze(0), ids.unsqueeze(0), cache=self.cache)
        hidden = last_hidden_states(self._model, self._context, inputs)
        self.cache.advance()
        return None if hidden is None else self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.chunks[len(self._model.layer_table) - 1].logits(hidden)[0]
