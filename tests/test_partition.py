"""Layers to stages: none lost, none doubled, balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.partition import Chunk, format_layer_table, layer_table


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """Layers and stages."""
    stages = draw(st.integers(1, 64))
    return draw(st.integers(stages, 300)), stages


@given(sizes())
def test_every_layer_stands_on_one_stage_in_order(case: tuple[int, int]) -> None:
    num_layers, num_stages = case
    table = layer_table(num_layers, num_stages)
    assert [layer for chunk in table for layer in chunk.layers] == list(range(num_layers))
    assert [chunk.index for chunk in table] == [chunk.stage for chunk in table] == list(range(num_stages))
    assert {chunk.num_chunks for chunk in table} == {num_stages}
    assert [chunk.first for chunk in table] == [True] + [False] * (num_stages - 1)
    assert [chunk.last for chunk in table] == [False] * (num_stages - 1) + [True]


@given(sizes())
def test_stages_differ_by_at_most_one_layer_and_the_ends_get_fewer(case: tuple[int, int]) -> None:
    lengths = [len(chunk.layers) for chunk in layer_table(*case)]
    assert max(lengths) - min(lengths) <= 1
    inner = lengths[1:-1]
    assert all(end <= length for end in (lengths[0], lengths[-1]) for length in inner)
    assert lengths[-1] <= lengths[0], "the loss costs more than the embedding"


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "lengths"),
    [
        (30, 4, [7, 8, 8, 7]),
        (80, 16, [5] * 16),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (5, 4, [1, 2, 1, 1]),
        (3, 2, [2, 1]),
        (4, 4, [1, 1, 1, 1]),
        (7, 1, [7]),
    ],
)
def test_tables_by_hand(num_layers: int, num_stages: int, lengths: list[int]) -> None:
    assert [len(chunk.layers) for chunk in layer_table(num_layers, num_stages)] == lengths


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 4), (0, 1)])
def test_a_stage_without_a_layer_is_refused(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"{num_layers} layers cannot fill {num_stages} pipeline stages"):
        layer_table(num_layers, num_stages)


def test_the_printed_table() -> None:
    assert format_layer_table(layer_table(10, 4)) == [
        "stage  layers",
        "    0  embedding, 0-1 (2)",
        "    1  2-4 (3)",
        "    2  5-7 (3)",
        "    3  8-9 (2), norm, output, loss",
    ]
    assert format_layer_table(layer_table(1, 1)) == ["stage  layers", "    0  embedding, 0-0 (1), norm, output, loss"]


def test_the_printed_table_of_two_chunks_a_stage() -> None:
    """A V over two stages, with a last chunk that has no layer."""
    layers = [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    chunks = [Chunk(i, 4, stage, part) for i, (stage, part) in enumerate(zip((0, 1, 1, 0), layers, strict=True))]
    assert format_layer_table(chunks) == [
        "stage  layers",
        "    0  embedding, 0-1 (2)",
        "    1  2-3 (2)",
        "    1  4-4 (1)",
        "    0  norm, output, loss",
    ]
