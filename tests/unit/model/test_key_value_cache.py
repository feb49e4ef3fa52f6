"""The cache of keys and values: what a layer with a window keeps of prompts that are longer than it."""

from __future__ import annotations

import torch

from megatron.model.key_value_cache import KeyValueCache

LENGTHS = [9, 5, 3]
"""Tokens of the prompts."""


def test_a_window_keeps_the_last_tokens_each_at_its_position_modulo_the_room() -> None:
    room, heads, size = 4, 3, 2
    keys = torch.arange(9.0 * len(LENGTHS) * heads * size).view(9, len(LENGTHS), heads, size)  # [s, b, g, d]
    cache = KeyValueCache(12)
    cache.prepare_prefill(LENGTHS, keys.device)
    cache.append(0, keys, -keys, window=room - 1)
    stored, values = cache._layers[0]
    assert stored.shape == (len(LENGTHS), heads, room, size) and torch.equal(values, -stored)
    for row, length in enumerate(LENGTHS):
        for position in range(max(0, length - room), length):
            assert torch.equal(stored[row, :, position % room], keys[position, row]), (row, position)
