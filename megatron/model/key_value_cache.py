"""Keeps keys and values of the tokens so far, so that a new token costs one token's work.

Shapes: `b` rows, `g` this rank's key-value heads, `r` query heads of each, `d` head size, `L` room for tokens.

The first forward brings the prompts, aligned at the left and padded at the right: causal attention never looks right, so padding
needs no mask there. Each later forward brings one token a row. It takes the place after the row's last token, over padding. So only
rows of different lengths need a mask, and only then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron.parallel.products import slow_half


class KeyValueCache:
    """What one rank's layers keep. Layers call `append` and `attend`, the driver calls `begin` and `advance`.

    Args:
        capacity: L: tokens in the longest row, prompt and new ones.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: torch.Tensor | None = None
        self._longest = 0
        self._mask: torch.Tensor | None = None
        self._rows = torch.empty(0)

    @property
    def empty(self) -> bool:
        """Whether the prompts are still to come, or are being read."""
        return self._lengths is None

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of each row, [b], which is also the position of its next one."""
        assert self._lengths is not None, "the prompts come first"
        return self._lengths

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a layer's keys and values, [s, b, g, d] each: those of the prompts, or with s = 1 of the next token."""
        if self._lengths is None:
            self._layers[layer] = (self._with_room(k), self._with_room(v))
            return
        assert len(k) == 1, "after the prompts comes one token at a time"
        assert self._longest < self.capacity, f"no room for more than {self.capacity} tokens"
        for stored, new in zip(self._layers[layer], (k, v), strict=True):
            if self._mask is None:
                stored[:, :, self._longest] = new[0]
            else:
                stored[self._rows, :, self._lengths] = new[0]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """softmax(q k^T / sqrt(d)) v over everything stored: q [1, b, g, r, d] to [1, b, g * r * d]."""
        k, v = (stored[:, :, : self._longest + 1] for stored in self._layers[layer])
        dtype = q.dtype
        q = q[0]  # [b, g, r, d]: r query heads share the keys, as r positions would
        if slow_half(q):
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        return out.flatten(1)[None].to(dtype)

    def begin(self, prompt_lengths: Sequence[int], device: torch.device, copies: int = 1) -> None:
        """Called after the forward that read the prompts. Each prompt becomes `copies` rows, side by side.

        Args:
            prompt_lengths: number of tokens of each prompt, without padding.
            device: where the model computes.
        """
        self._longest = max(prompt_lengths)
        self._lengths = torch.tensor(prompt_lengths, device=device).repeat_interleave(copies)
        if copies > 1:
            for layer, (k, v) in self._layers.items():
                self._layers[layer] = (k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0))
        if min(prompt_lengths) < self._longest:
            self._rows = torch.arange(len(self._lengths), device=device)
            self._mask = self._visible()

    def advance(self) -> None:
        """Called after a forward that read one token a row."""
        self._lengths = self.lengths + 1
        self._longest += 1
        if self._mask is not None:
            self._mask = self._visible()

    def _visible(self) -> torch.Tensor:
        """Mask [b, 1, 1, longest + 1]: True where a row may look, the place of its next token included."""
        places = torch.arange(self._longest + 1, device=self.lengths.device)
        return (places <= self.lengths[:, None])[:, None, None]

    def _with_room(self, x: torch.Tensor) -> torch.Tensor:
        """Copy x [s, b, g, d] into a tensor with room for L tokens, [b, g, L, d]."""
        s, b, g, d = x.shape
        assert s <= self.capacity, f"{s} tokens, room for {self.capacity}"
        room = x.new_zeros((b, g, self.capacity, d))  # what memory held before might be NaN, which no mask takes away
        room[:, :, :s] = x.permute(1, 2, 0, 3)
        return room
