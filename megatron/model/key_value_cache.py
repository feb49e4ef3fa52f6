"""Cache of the keys and values of earlier tokens for text generation, so that each new token costs the work of one token.

Shapes: `b` rows, `g` local key-value heads, `r` query heads per key-value head, `d` head size, `L` slots for tokens per row. A
layer with an attention window has a slot per token of the window and one for the current token. Its slots form a ring: the token at
position p is stored in slot p modulo L.

The first forward (prefill) reads the prompts, aligned at the left and padded at the right. Causal attention does not look to the
right, so the padding needs no mask there. Each later forward reads one token per row. It is stored in the slot after the row's last
token, and overwrites padding or a token that has left the window. So a mask is needed only for rows of different lengths, until
every row has filled its slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron.attention.backends import without_cudnn
from megatron.attention.blocks import single_token_attention
from megatron.parallel.matmul import is_slow_half
from megatron.spec.layers import DEFAULT_SCORES, ScoreSpec


class KeyValueCache:
    """Cache of keys and values for text generation, for the layers of one rank. A row is one sequence of the batch.

    Layers call `append` and `attend`. The generation loop calls `prepare_prefill`, `finish_prefill` and `advance`.

    Args:
        capacity: maximum number of tokens in a row, prompt and generated tokens together.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.is_prefill = True
        """Whether the prompts are not yet read completely."""
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._lengths = self._row_indices = torch.empty(0)
        self._min_length = self._max_length = 0
        self._masks: dict[int, torch.Tensor] = {}

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens read in each row, [b]. This is also the position of the row's next token."""
        assert not self.is_prefill, "lengths are known only after the prefill: call `finish_prefill` first"
        return self._lengths

    @property
    def max_length(self) -> int:
        """Number of tokens read so far in the longest row."""
        return self._max_length

    def prepare_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Record the prompt lengths. Call this before the forward that reads the prompts.

        Args:
            prompt_lengths: number of tokens of each prompt, without padding.
            device: device of the model.
        """
        self._lengths = torch.tensor(prompt_lengths, device=device)
        self._min_length, self._max_length = min(prompt_lengths), max(prompt_lengths)
        assert self._max_length <= self.capacity, (
            f"a prompt has {self._max_length} tokens, but the cache only {self.capacity} slots per row"
        )

    def finish_prefill(self, num_copies: int = 1) -> None:
        """End the prefill, and repeat each prompt `num_copies` times in adjacent rows. Call this after the forward that read the
        prompts."""
        self.is_prefill = False
        if num_copies > 1:
            self._lengths = self._lengths.repeat_interleave(num_copies)
            for layer, tensors in self._layers.items():
                self._layers[layer] = tuple(tensor.repeat_interleave(num_copies, 0) for tensor in tensors)
        self._row_indices = torch.arange(len(self._lengths), device=self._lengths.device)

    def advance(self) -> None:
        """Count one more token in each row. Call this after each forward that read one token per row."""
        self._lengths = self.lengths + 1
        self._min_length, self._max_length = self._min_length + 1, self._max_length + 1
        self._masks.clear()

    def truncate(self, length: int) -> bool:
        """Forget the tokens from position `length` on. All rows must have the same length.

        Returns:
            False if a layer with a window has already overwritten earlier tokens; the cache then stays unchanged.
        """
        assert not self.is_prefill and 0 < length <= self._min_length == self._max_length, (
            f"the cache has no {length} tokens per row"
        )
        if length < self._max_length and any(tensors[0].shape[2] < self._max_length for tensors in self._layers.values()):
            return False
        self._lengths = torch.full_like(self._lengths, length)
        self._min_length = self._max_length = length
        self._masks.clear()
        return True

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, window: int | None = None) -> None:
        """Store the keys and values of one layer: those of the prompts or, with s = 1, those of the next token.

        Args:
            layer: index of the layer.
            k: keys [s, b, g, d] of the g key-value heads of this rank.
            v: values [s, b, g, d]; None if the values are channels of the keys (see `attend`).
            window: number of earlier tokens that a token attends to; None for all.
        """
        if self.is_prefill:
            num_slots = self.capacity if window is None else min(self.capacity, window + 1)
            self._layers[layer] = tuple(self._store_prompts(new, num_slots) for new in (k, v) if new is not None)
            return
        assert len(k) == 1, "after the prefill, each forward reads one token per row"
        assert self._max_length < self.capacity, f"the cache is full: it has {self.capacity} slots per row"
        for cached, new in zip(self._layers[layer], (k, v), strict=False):
            assert new is not None, "the next token needs the same tensors as the prompts"
            num_slots = cached.shape[2]
            if self._min_length == self._max_length:
                cached[:, :, self._max_length % num_slots] = new[0]
            else:
                cached[self._row_indices, :, self._lengths % num_slots] = new[0]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        score_spec: ScoreSpec = DEFAULT_SCORES,
        sinks: torch.Tensor | None = None,
        *,
        value_size: int | None = None,
    ) -> torch.Tensor:
        """Compute the attention of one token per row to all tokens stored for a layer: softmax(score(q k^T)) v.

        Args:
            layer: index of the layer.
            q: queries of the token, [1, b, g, r, d], with r query heads for each of the g key-value heads of this rank.
            sinks: learnable attention sinks [g * r], if the softmax has them.
            value_size: number of leading key channels that are the values, if no values are stored.

        Returns:
            [1, b, g * r * channels of a value].
        """
        num_filled = min(self._max_length + 1, self._layers[layer][0].shape[2])
        k, *values = (cached[:, :, :num_filled] for cached in self._layers[layer])
        v = values[0] if values else k[..., :value_size]
        mask, dtype = self._mask(num_filled), q.dtype
        q = q[0]  # [b, g, r, d]: the kernel treats the r query heads that share keys as r positions
        if is_slow_half(q):
            q, k, v = q.float(), k.float(), v.float()
        if score_spec.softcap is None and score_spec.softmax == "vanilla":
            with without_cudnn():
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=score_spec.scale)
        else:
            out = single_token_attention(q, k, v, mask, score_spec, sinks)
        return out.flatten(1)[None].to(dtype)

    def _mask(self, num_filled: int) -> torch.Tensor | None:
        """Return which of the first `num_filled` slots each row has filled, the slot of the row's current token included.

        Returns:
            bool [b, 1, 1, num_filled], or None if all rows have filled all of these slots.
        """
        if self._min_length + 1 >= num_filled:
            return None
        if num_filled not in self._masks:
            slots = torch.arange(num_filled, device=self._lengths.device)
            self._masks[num_filled] = (slots <= self._lengths[:, None])[:, None, None]
        return self._masks[num_filled]

    def _store_prompts(self, x: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Copy the last tokens of each prompt to a new tensor with `num_slots` slots for tokens.

        Args:
            x: keys or values of the prompts, [s, b, g, d].

        Returns:
            [b, g, num_slots, d]. The token at position p is in slot p modulo num_slots.
        """
        s, b, g, d = x.shape
        cached = x.new_zeros((b, g, num_slots, d))  # zeros: uninitialized memory may hold NaN, which no mask removes
        if s <= num_slots:
            cached[:, :, :s] = x.permute(1, 2, 0, 3)
            return cached
        slots = torch.arange(num_slots, device=x.device)
        last_position = self._lengths[:, None] - 1
        positions = last_position - (last_position - slots) % num_slots  # [b, L]: position of the latest token of each slot
        last_tokens = x.transpose(0, 1).gather(1, positions.clamp(min=0)[..., None, None].expand(-1, -1, g, d))
        return cached.copy_(last_tokens.transpose(1, 2))
