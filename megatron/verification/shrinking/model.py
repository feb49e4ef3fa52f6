"""A small model of the same kind: what divides among tensor ranks still does, with the same remainders and ratios."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron.config.model import ModelConfig

_MOST_QUERIES = 4
"""Query heads that share a key-value head."""
_SEQUENCE, _WIDTH, _ROWS, _SPARE_POSITIONS = 16, 12, 64, 8


@dataclass(frozen=True)
class Cuts:
    """Into how many parts dimensions are cut."""

    tp: int
    parts: int
    """Data ranks that share a copy of the parameters; 1 where they are not sharded."""
    sequence: bool
    """Whether the tensor ranks cut the sequence too."""


def reduced_vocabulary(rows: int, multiple: int, tp: int, cuts: Cuts) -> tuple[int, int]:
    """Rows of the word embedding, and the multiple to which they are padded: with as little or as much padding on each tensor rank.

    Args:
        rows: before.
        multiple: before.
        tp: tensor size before.

    Returns:
        both after. There is padding where there was, an odd number of rows of it where it was odd, and tensor ranks that hold
        nothing else where there were.
    """
    padding, each = padding_of(rows, multiple, tp), padded(rows, multiple, tp) // tp
    alone, rest = divmod(padding, each)
    if alone and cuts.tp > 1:
        small = _up(_ROWS // 2, cuts.parts)
        whole, missing = small * cuts.tp, min(alone, cuts.tp - 1) * small
    else:
        small = min(multiple, 8) if cuts.parts == 1 else _up(4, cuts.parts)
        whole, missing = _up(_ROWS, small * cuts.tp), 0
    if rest:
        missing += min(2 - rest % 2, small * cuts.tp - 1 - missing)
    return whole - missing, small


def padded(rows: int, multiple: int, tp: int) -> int:
    """Rows with padding."""
    return _up(rows, multiple * tp)


def padding_of(rows: int, multiple: int, tp: int) -> int:
    """Rows of padding."""
    return padded(rows, multiple, tp) - rows


def reduced_model(model: ModelConfig, num_layers: int, multiple: int, tp: int, cuts: Cuts) -> ModelConfig:
    """The model's shape.

    Args:
        model: before.
        num_layers: after.
        multiple: of the vocabulary, after.
        tp: tensor size before.
        cuts: after.
    """
    groups = min(2, model.num_key_value_heads // tp) * cuts.tp
    queries = min(_MOST_QUERIES, model.num_attention_heads // model.num_key_value_heads)
    heads, size = groups * queries, _head_size(model, groups, queries, cuts)
    hidden = heads * size
    wider = model.head_size * model.num_attention_heads
    if model.hidden_size != wider:  # heads that do not make up the hidden size
        hidden = _up(hidden * 3 // 2, 2 * cuts.parts) if model.hidden_size > wider else _up(hidden // 2 + 1, 2 * cuts.parts)
    sequence = _up(_SEQUENCE, math.lcm(cuts.tp if cuts.sequence else 1, cuts.parts))
    positions = None if model.max_position_embeddings is None else sequence
    if model.num_positions > model.seq_length:
        positions = sequence + _up(_SPARE_POSITIONS, cuts.parts)
    return dataclasses.replace(
        model,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=_width(model, tp, cuts),
        num_attention_heads=heads,
        kv_channels=None if hidden == heads * size else size,
        num_query_groups=groups if model.group_query_attention else model.num_query_groups,
        seq_length=sequence,
        max_position_embeddings=positions,
        make_vocab_size_divisible_by=multiple,
    )


def _head_size(model: ModelConfig, groups: int, queries: int, cuts: Cuts) -> int:
    """The smallest from 4 channels on (8 where they are rotated) that can be rotated and cut."""
    rope = model.position_embedding_type == "rope"
    for size in range(8 if rope else 4, 4 * max(model.head_size, 8 * cuts.parts) + 1, 2):
        rotated = int(size * model.rotary_percent)
        rows, hidden = groups // cuts.tp * (queries + 2) * size, groups * queries * size
        if (not rope or (rotated >= 2 and rotated % 2 == 0)) and rows % cuts.parts == 0 and hidden % cuts.parts == 0:
            return size
    raise ValueError(f"no small head can be rotated by --rotary-percent {model.rotary_percent} and cut into {cuts.parts} parts")


def _width(model: ModelConfig, tp: int, cuts: Cuts) -> int:
    """Of the MLP: as odd on each tensor rank as before, where it is not cut further."""
    odd = model.ffn_size // tp % 2 if cuts.parts == 1 else 0
    return (_up(_WIDTH, cuts.parts) + odd) * cuts.tp


def _up(number: int, unit: int) -> int:
    """The next multiple."""
    return -(-number // unit) * unit
