"""A microbatch from its samples: inputs and labels, and what the end of a document changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.samples import DocumentRules, compute_cu_seqlens, read_microbatch
from tests.support.windows import Windows

EOD = 0


def test_a_microbatch_is_inputs_and_the_ids_that_follow() -> None:
    source = Windows([[n, n + 1, n + 2, n + 3] for n in range(10)])
    batch = read_microbatch(source, 5, 2, DocumentRules(eod=6))
    assert batch.tokens.tolist() == [[5, 6, 7], [6, 7, 8]]
    assert batch.labels.tolist() == [[6, 7, 8], [7, 8, 9]]
    assert batch.loss_mask.all() and batch.positions is None and batch.cu_seqlens is None
    assert batch.first_sample == 5
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (np.int64, np.int64, np.float32)
    assert batch.tokens.flags.c_contiguous
    assert batch.labels.flags.c_contiguous


SAMPLES = [[1, 0, 2, 2, 0, 3, 3], [0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
POSITIONS = [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
MASK = [[1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
BOUNDS = [0, 2, 5, 6, 7, 8, 12, 18]


@pytest.mark.parametrize("reset_positions", [False, True])
@pytest.mark.parametrize("reset_attention", [False, True])
@pytest.mark.parametrize("mask_loss", [False, True])
def test_each_rule_alone_and_together(reset_positions: bool, reset_attention: bool, mask_loss: bool) -> None:
    """The end of a document belongs to it, wherever it lies; the last label is no input."""
    batch = read_microbatch(Windows(SAMPLES), 0, 3, DocumentRules(EOD, reset_positions, reset_attention, mask_loss))
    assert batch.loss_mask.tolist() == (MASK if mask_loss else np.ones((3, 6)).tolist())
    assert (None if batch.positions is None else batch.positions.tolist()) == (POSITIONS if reset_positions else None)
    assert (None if batch.cu_seqlens is None else batch.cu_seqlens.tolist()) == (BOUNDS if reset_attention else None)
    assert batch.positions is None or batch.positions.dtype == np.int64
    assert batch.cu_seqlens is None or batch.cu_seqlens.dtype == np.int32


def as_megatron(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Positions and the first token that each may see, as Megatron-LM makes them: from the places of the ends, one by one."""
    positions, first_seen, before = list(range(len(tokens))), [0] * len(tokens), 0
    for end in [i for i, token in enumerate(tokens) if token == EOD]:
        for i in range(end + 1, len(tokens)):
            positions[i] -= end + 1 - before
            first_seen[i] = end + 1
        before = end + 1
    return positions, first_seen


@given(
    st.integers(1, 30).flatmap(
        lambda s: st.lists(st.lists(st.integers(0, 2), min_size=s + 1, max_size=s + 1), min_size=1, max_size=4)
    )
)
def test_any_samples_are_cut_as_megatron_cuts_them(rows: list[list[int]]) -> None:
    batch = read_microbatch(Windows(rows), 0, len(rows), DocumentRules(EOD, True, True, True))
    assert batch.positions is not None and batch.cu_seqlens is not None
    expected = [as_megatron(row[:-1]) for row in rows]
    assert batch.positions.tolist() == [positions for positions, _ in expected]
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)).reshape(len(rows), -1)
    assert [(row - i * len(row)).tolist() for i, row in enumerate(starts)] == [first_seen for _, first_seen in expected]
    assert np.array_equal(batch.cu_seqlens, np.unique(batch.cu_seqlens)) and batch.cu_seqlens[-1] == batch.tokens.size


def test_the_tokens_stay_as_they_are() -> None:
    tokens = np.array(SAMPLES)
    compute_cu_seqlens(tokens == EOD)
    assert tokens.tolist() == SAMPLES


def test_which_rules_concern_every_layer() -> None:
    assert DocumentRules(EOD, reset_position_ids=True).needed_by_all_stages
    assert DocumentRules(EOD, reset_attention_mask=True).needed_by_all_stages
    assert not DocumentRules(EOD, eod_mask_loss=True).needed_by_all_stages
