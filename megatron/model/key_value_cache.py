"""Keeps keys and values of the tokens so far, so that a new token costs one token's work.

Shapes: `b` rows, `g` this rank's key-value heads, `r` query heads of each, `d` head size, `L` room for tokens. A layer with a
window has room for its window and the own token, and then begins again at the front: a token at position p lies at place p
modulo L.

The first forward brings the prompts, aligned at the left and padded at the right: causal attention never looks right, so padding
needs no mask there. Each later forward brings one token a row. It takes the place after the row's last token, over padding or over
what has left the window. So only rows of different lengths need a mask, and only until the room of each is full.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron.attention.backends import without_cudnn
from megatron.attention.blocks import attention_of_a_token
from megatron.parallel.products import slow_half
from megatron.spec.layers import PLAIN, ScoreSpec


class KeyValueCache:
    """What one rank's layers keep. Layers call `append` and `attend`, the driver calls `expect`, `begin` and `advance`.

    Args:
        capacity: tokens in the longest row, prompt and new ones.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.empty = True
        """Whether the prompts are still to come, or are being read."""
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._lengths = self._rows = torch.empty(0)
        self._shortest = self._longest = 0
        self._masks: dict[int, torch.Tensor] = {}

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of each row, [b], which is also the position of its next one."""
        assert not self.empty, "the prompts come first"
        return self._lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest row so far."""
        return self._longest

    def expect(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Called before the forward that reads the prompts.

        Args:
            prompt_lengths: number of tokens of each prompt, without padding.
            device: where the model computes.
        """
        self._lengths = torch.tensor(prompt_lengths, device=device)
        self._shortest, self._longest = min(prompt_lengths), max(prompt_lengths)
        assert self._longest <= self.capacity, f"{self._longest} tokens, room for {self.capacity}"

    def begin(self, copies: int = 1) -> None:
        """Called after the forward that read the prompts. Each prompt becomes `copies` rows, side by side."""
        self.empty = False
        if copies > 1:
            self._lengths = self._lengths.repeat_interleave(copies)
            for layer, stored in self._layers.items():
                self._layers[layer] = tuple(one.repeat_interleave(copies, 0) for one in stored)
        self._rows = torch.arange(len(self._lengths), device=self._lengths.device)

    def advance(self) -> None:
        """Called after a forward that read one token a row."""
        self._lengths = self.lengths + 1
        self._shortest, self._longest = self._shortest + 1, self._longest + 1
        self._masks.clear()

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, window: int | None = None) -> None:
        """Store a layer's keys and values, [s, b, g, d] each: those of the prompts, or with s = 1 of the next token.

        Args:
            v: None where the values are channels of the keys (see `attend`).
            window: tokens before its own to which a token attends; None for all.
        """
        if self.empty:
            room = self.capacity if window is None else min(self.capacity, window + 1)
            self._layers[layer] = tuple(self._with_room(new, room) for new in (k, v) if new is not None)
            return
        assert len(k) == 1, "after the prompts comes one token at a time"
        assert self._longest < self.capacity, f"no room for more than {self.capacity} tokens"
        for stored, new in zip(self._layers[layer], (k, v), strict=False):
            assert new is not None, "as much as for the prompts"
            room = stored.shape[2]
            if self._shortest == self._longest:
                stored[:, :, self._longest % room] = new[0]
            else:
                stored[self._rows, :, self._lengths % room] = new[0]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scores: ScoreSpec = PLAIN,
        sinks: torch.Tensor | None = None,
        *,
        value_size: int | None = None,
    ) -> torch.Tensor:
        """softmax(score(q k^T)) v over everything stored: q [1, b, g, r, d] to [1, b, g * r * d].

        Args:
            sinks: [g * r], where the softmax has learnable ones.
            value_size: where no values are stored, how many leading channels of the keys are the values.
        """
        filled = min(self._longest + 1, self._layers[layer][0].shape[2])
        k, *values = (stored[:, :, :filled] for stored in self._layers[layer])
        v = values[0] if values else k[..., :value_size]
        mask, dtype = self._mask(filled), q.dtype
        q = q[0]  # [b, g, r, d]: r query heads share the keys, as r positions would
        if slow_half(q):
            q, k, v = q.float(), k.float(), v.float()
        if scores.softcap is None and scores.softmax == "vanilla":
            with without_cudnn():
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)
        else:
            out = attention_of_a_token(q, k, v, mask, scores, sinks)
        return out.flatten(1)[None].to(dtype)

    def _mask(self, filled: int) -> torch.Tensor | None:
        """Mask [b, 1, 1, filled]: True where a row has a token, its next one included. None where all have."""
        if self._shortest + 1 >= filled:
            return None
        if filled not in self._masks:
            places = torch.arange(filled, device=self._lengths.device)
            self._masks[filled] = (places <= self._lengths[:, None])[:, None, None]
        return self._masks[filled]

    def _with_room(self, x: torch.Tensor, room: int) -> torch.Tensor:
        """The last tokens of each prompt, of x [s, b, g, d], in a tensor with room for L of them, [b, g, L, d]."""
        s, b, g, d = x.shape
        stored = x.new_zeros((b, g, room, d))  # what memory held before might be NaN, which no mask takes away
        if s <= room:
            stored[:, :, :s] = x.permute(1, 2, 0, 3)
            return stored
        places = torch.arange(room, device=x.device)
        last = self._lengths[:, None] - 1
        positions = last - (last - places) % room  # [b, L]: of each place the last token that lies there
        found = x.transpose(0, 1).gather(1, positions.clamp(min=0)[..., None, None].expand(-1, -1, g, d))
        return stored.copy_(found.transpose(1, 2))
