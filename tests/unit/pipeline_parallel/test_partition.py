"""The layer table: no layer lost, none doubled, sizes as balanced as they can be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.pipeline_layout import LayoutChunk, parse_layout
from megatron.pipeline_parallel.partition import Chunk, format_layer_table, partition_layers
from megatron.spec.operations import assign_chunks_round_robin, assign_chunks_v_shape

PLACES = st.builds(assign_chunks_round_robin, st.integers(1, 16), st.integers(1, 4)) | st.builds(
    assign_chunks_v_shape, st.integers(1, 16)
)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """Layers and stage of each chunk."""
    places = draw(PLACES)
    return draw(st.integers(len(places), 200)), places


def lengths(table: list[Chunk]) -> list[int]:
    return [len(chunk.layers) for chunk in table]


def stage_lengths(table: list[Chunk]) -> list[int]:
    return [sum(len(chunk.layers) for chunk in table if chunk.stage == stage) for stage in sorted({c.stage for c in table})]


def check_complete(table: list[Chunk], num_layers: int, places: tuple[int, ...]) -> None:
    """Every layer once, in order, and the chunks where they belong."""
    assert [layer for chunk in table for layer in chunk.layers] == list(range(num_layers))
    assert tuple(chunk.stage for chunk in table) == places
    assert [chunk.index for chunk in table] == list(range(len(places)))
    assert {chunk.num_chunks for chunk in table} == {len(places)}
    assert [chunk.is_first for chunk in table] == [True] + [False] * (len(places) - 1)
    assert [chunk.is_last for chunk in table] == [False] * (len(places) - 1) + [True]


# ---- even splits


@given(sizes())
def test_every_layer_stands_once_in_order(case: tuple[int, tuple[int, ...]]) -> None:
    num_layers, places = case
    table = partition_layers(num_layers, places)
    check_complete(table, num_layers, places)
    assert min(lengths(table)) >= 1


@given(sizes())
def test_sizes_differ_by_at_most_one_layer_and_the_ends_get_fewer(case: tuple[int, tuple[int, ...]]) -> None:
    """Stages against each other, and the chunks of one stage."""
    num_layers, places = case
    table = partition_layers(num_layers, places)
    stages = stage_lengths(table)
    assert max(stages) - min(stages) <= 1
    for stage in set(places):
        own = [len(chunk.layers) for chunk in table if chunk.stage == stage]
        assert max(own) - min(own) <= 1
        assert table[-1].stage != stage or own[-1] == min(own), "the chunk with the loss is none of the longer ones"
    loaded = {places[0], places[-1]}
    assert all(stages[end] <= stages[inner] for end in loaded for inner in set(places) - loaded)
    assert stages[places[-1]] <= stages[places[0]], "the loss costs more than the embedding"


@pytest.mark.parametrize(
    ("num_layers", "places", "expected"),
    [
        (30, assign_chunks_round_robin(4), [7, 8, 8, 7]),
        (80, assign_chunks_round_robin(16), [5] * 16),
        (10, assign_chunks_round_robin(4), [2, 3, 3, 2]),
        (11, assign_chunks_round_robin(4), [3, 3, 3, 2]),
        (5, assign_chunks_round_robin(4), [1, 2, 1, 1]),
        (3, assign_chunks_round_robin(2), [2, 1]),
        (4, assign_chunks_round_robin(4), [1, 1, 1, 1]),
        (7, assign_chunks_round_robin(1), [7]),
        (80, assign_chunks_round_robin(16, 2), [2] + [3] * 16 + [2] * 15),
        (30, assign_chunks_round_robin(4, 2), [3, 4, 4, 4, 4, 4, 4, 3]),
        (30, assign_chunks_v_shape(4), [4, 4, 4, 4, 4, 4, 3, 3]),
        (7, assign_chunks_v_shape(3), [1, 2, 1, 1, 1, 1]),
        (5, assign_chunks_round_robin(1, 2), [3, 2]),
        (8, assign_chunks_round_robin(3, 2), [1, 2, 1, 2, 1, 1]),
    ],
)
def test_tables_by_hand(num_layers: int, places: tuple[int, ...], expected: list[int]) -> None:
    assert lengths(partition_layers(num_layers, places)) == expected


@pytest.mark.parametrize(
    ("num_layers", "places", "message"),
    [
        (3, assign_chunks_round_robin(4), "3 layers cannot fill 4 pipeline stages: each stage needs at least one layer"),
        (0, assign_chunks_round_robin(1), "0 layers cannot fill 1 pipeline stages: each stage needs at least one layer"),
        (
            3,
            assign_chunks_round_robin(2, 2),
            "3 layers cannot fill 2 pipeline stages with 2 chunks each: each chunk needs at least one layer",
        ),
        (
            5,
            assign_chunks_v_shape(3),
            "5 layers cannot fill 3 pipeline stages with 2 chunks each: each chunk needs at least one layer",
        ),
    ],
)
def test_a_chunk_without_a_layer_is_refused(num_layers: int, places: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_layers(num_layers, places)


# ---- embedding and loss as cost


@given(sizes(), st.integers(0, 3), st.integers(0, 12))
def test_counted_embedding_and_loss_take_the_place_of_layers(case: tuple[int, tuple[int, ...]], embedding: int, loss: int) -> None:
    num_layers, places = case
    table = partition_layers(num_layers, places, embedding_cost=embedding, loss_cost=loss)
    check_complete(table, num_layers, places)
    inner = table[1:-1]
    assert all(len(chunk.layers) for chunk in inner)
    assert embedding or len(table[0].layers)
    assert loss or len(table[-1].layers)
    # No stage that could give a layer is dearer by more than a layer than any other.
    costs = stage_lengths(table)
    costs[places[0]] += embedding
    costs[places[-1]] += loss
    for stage in set(places):
        least = sum(not ((chunk.is_first and embedding) or (chunk.is_last and loss)) for chunk in table if chunk.stage == stage)
        assert stage_lengths(table)[stage] == least or costs[stage] <= min(costs) + 1


@pytest.mark.parametrize(
    ("num_layers", "places", "expected"),
    [
        (30, assign_chunks_round_robin(4), [7, 8, 8, 7]),
        (6, assign_chunks_round_robin(8), [0, 1, 1, 1, 1, 1, 1, 0]),
        (30, assign_chunks_round_robin(4, 2), [3, 4, 4, 4, 4, 4, 4, 3]),
        (30, assign_chunks_round_robin(4, 4), [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]),
        (14, assign_chunks_v_shape(4), [1, 2, 2, 2, 2, 2, 2, 1]),
        (1, assign_chunks_round_robin(1), [1]),
    ],
)
def test_embedding_and_loss_counted_as_a_layer_each(num_layers: int, places: tuple[int, ...], expected: list[int]) -> None:
    assert lengths(partition_layers(num_layers, places, embedding_cost=1, loss_cost=1)) == expected


def test_ends_may_be_empty_but_no_other_chunk() -> None:
    with pytest.raises(ValueError, match="0 layers cannot fill 1 pipeline stages"):
        partition_layers(0, assign_chunks_round_robin(1), embedding_cost=1, loss_cost=1)
    with pytest.raises(ValueError, match="5 layers cannot fill 8 pipeline stages: 6 of these stages need at least one layer"):
        partition_layers(5, assign_chunks_round_robin(8), embedding_cost=1, loss_cost=1)
    with pytest.raises(ValueError, match="6 layers cannot fill 8 pipeline stages: 7 of these stages need at least one layer"):
        partition_layers(6, assign_chunks_round_robin(8), loss_cost=1)
    assert lengths(partition_layers(7, assign_chunks_round_robin(8), loss_cost=1)) == [1, 1, 1, 1, 1, 1, 1, 0]


def test_unequal_layers() -> None:
    """3+1+1+1 | 6 | 2+2+2: any other cut has a dearer stage. With a loss of 3: 3+1+1+1 | 6+2 | 2+2 and 3."""
    costs = [3, 1, 1, 1, 6, 2, 2, 2]
    assert lengths(partition_layers(8, assign_chunks_round_robin(3), layer_costs=costs)) == [4, 1, 3]
    assert lengths(partition_layers(8, assign_chunks_round_robin(3), layer_costs=costs, loss_cost=3)) == [4, 2, 2]
    with pytest.raises(ValueError, match="has 8 values, but the model has 9 layers"):
        partition_layers(9, assign_chunks_round_robin(3), layer_costs=costs)


# ---- sizes of the first and the last stage


@st.composite
def given_ends(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int | None, int | None]:
    """Layers, stage of each chunk, and sizes of the ends that leave enough for the others."""
    stages, chunks = draw(st.integers(2, 8)), draw(st.integers(1, 3))
    places = draw(st.sampled_from([assign_chunks_round_robin(stages, chunks), assign_chunks_v_shape(stages)]))
    chunks = len(places) // stages
    first, last = (draw(st.none() | st.integers(1, 6).map(lambda each: each * chunks)) for _ in range(2))
    free = stages - (first is not None) - (last is not None)
    rest = draw(st.integers(free * chunks, 60)) if free else 0
    return (first or 0) + (last or 0) + rest, places, first, last


@given(given_ends())
def test_given_sizes_of_the_ends_are_kept_and_the_rest_is_even(case: tuple[int, tuple[int, ...], int | None, int | None]) -> None:
    num_layers, places, first, last = case
    table = partition_layers(num_layers, places, first_stage_layers=first, last_stage_layers=last)
    check_complete(table, num_layers, places)
    stages = stage_lengths(table)
    for size, stage in ((first, 0), (last, len(stages) - 1)):
        if size is not None:
            assert stages[stage] == size
            assert len({len(chunk.layers) for chunk in table if chunk.stage == stage}) == 1
    others = stages[first is not None : len(stages) - (last is not None)]
    assert not others or max(others) - min(others) <= 1


@pytest.mark.parametrize(
    ("places", "first", "last", "message"),
    [
        (
            assign_chunks_round_robin(4),
            17,
            None,
            "--decoder-first-pipeline-num-layers 17: the number of layers of the first pipeline stage must be at least 1 and at "
            "most 13. The other stages need at least 3 of the 16 layers. Change this number",
        ),
        (
            assign_chunks_round_robin(4),
            0,
            None,
            "--decoder-first-pipeline-num-layers 0: the number of layers of the first pipeline stage must be at least 1 and at "
            "most 13. The other stages need at least 3 of the 16 layers. Change this number",
        ),
        (
            assign_chunks_round_robin(4),
            None,
            -1,
            "--decoder-last-pipeline-num-layers -1: the number of layers of the last pipeline stage must be at least 1 and at "
            "most 13. The other stages need at least 3 of the 16 layers. Change this number",
        ),
        (
            assign_chunks_round_robin(4),
            8,
            17,
            "--decoder-last-pipeline-num-layers 17: the number of layers of the last pipeline stage must be at least 1 and at "
            "most 6. The other stages need at least 10 of the 16 layers. Change this number",
        ),
        (
            assign_chunks_round_robin(4, 2),
            3,
            None,
            "--decoder-first-pipeline-num-layers 3: the number of layers of the first pipeline stage must be at least 2 and at "
            "most 10, and divisible by the number of its virtual stages (2). The other stages need at least 6 of the 16 layers. "
            "Change this number",
        ),
        (
            assign_chunks_round_robin(4),
            8,
            7,
            "--decoder-first-pipeline-num-layers 8 and --decoder-last-pipeline-num-layers 7 take 15 of 16 layers, "
            "so 1 of the layers remain, but the other stages need at least 2 layers. Lower these numbers",
        ),
        (
            assign_chunks_round_robin(4, 2),
            None,
            12,
            "--decoder-last-pipeline-num-layers 12 takes 12 of 16 layers, so 4 of the layers remain, "
            "but the other stages need at least 6 layers. Lower these numbers",
        ),
        (
            assign_chunks_round_robin(2),
            8,
            7,
            "--decoder-first-pipeline-num-layers 8 and --decoder-last-pipeline-num-layers 7 take 15 of 16 layers, "
            "so 1 of the layers remain, but no other stage can take them. Raise these numbers",
        ),
        (
            assign_chunks_round_robin(1),
            15,
            None,
            "--decoder-first-pipeline-num-layers 15 takes 15 of 16 layers, so 1 of the layers remain, "
            "but no other stage can take them. Raise these numbers",
        ),
        (
            assign_chunks_round_robin(1),
            16,
            15,
            "--decoder-last-pipeline-num-layers 15: the number of layers of the last pipeline stage must be at least 16 and at "
            "most 16. The other stages need at least 0 of the 16 layers. Change this number",
        ),
    ],
)
def test_sizes_that_leave_no_table_are_refused(places: tuple[int, ...], first: int | None, last: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        partition_layers(16, places, first_stage_layers=first, last_stage_layers=last)


# ---- layouts


def test_a_layout_is_taken_as_it_is() -> None:
    table = partition_layers(9, assign_chunks_round_robin(4, 2), layout=parse_layout("E|t*4||(t|)*3,t|tL"))
    check_complete(table, 9, assign_chunks_round_robin(4, 2))
    assert lengths(table) == [0, 4, 0, 1, 1, 1, 1, 1]


def test_a_layout_that_does_not_fit_is_refused() -> None:
    layout = [LayoutChunk(True, 3, False), LayoutChunk(False, 4, True)]
    with pytest.raises(ValueError, match=re.escape("does not match the model: it has 7 layers (t), but the model has 8 layers.")):
        partition_layers(8, assign_chunks_round_robin(2), layout=layout)
    with pytest.raises(ValueError, match=r"it has 2 chunks, but the schedule has 3 chunks\."):
        partition_layers(7, assign_chunks_round_robin(3), layout=layout)
    with pytest.raises(ValueError, match=r"it has 2 chunks, but the schedule has 4 chunks\."):
        partition_layers(7, assign_chunks_round_robin(2, 2), layout=layout)


@pytest.mark.parametrize("wrong", [[2, 3, 2], [3, 4, 2], [2, 2, 2, 2], [4, 4], [9, -1, 0]])
def test_a_table_that_is_wrong_goes_no_further(wrong: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong in the search: one layer too few or too many, a chunk too many or too few, one of less than none."""
    monkeypatch.setattr("megatron.pipeline_parallel.balance.balance", lambda *args, **kwargs: wrong)
    with pytest.raises(RuntimeError, match="the layer table is wrong"):
        partition_layers(8, assign_chunks_round_robin(3))


# ---- what is printed


def test_the_printed_table() -> None:
    assert format_layer_table(partition_layers(10, assign_chunks_round_robin(4))) == [
        "stage  layers",
        "    0  embedding, 0-1 (2)",
        "    1  2-4 (3)",
        "    2  5-7 (3)",
        "    3  8-9 (2), norm, output, loss",
    ]
    assert format_layer_table(partition_layers(1, assign_chunks_round_robin(1))) == [
        "stage  layers",
        "    0  embedding, 0-0 (1), norm, output, loss",
    ]


def test_the_printed_table_of_several_chunks_a_stage() -> None:
    assert format_layer_table(partition_layers(13, assign_chunks_round_robin(3, 2))) == [
        "stage  layers",
        "    0  embedding, 0-1 (2) | 7-8 (2)",
        "    1  2-4 (3)            | 9-10 (2)",
        "    2  5-6 (2)            | 11-12 (2), norm, output, loss",
    ]
    in_a_v = partition_layers(5, assign_chunks_v_shape(2), layout=parse_layout("Ett|tt|t|L"))
    assert format_layer_table(in_a_v) == [
        "stage  layers",
        "    0  embedding, 0-1 (2) | norm, output, loss",
        "    1  2-3 (2)            | 4-4 (1)",
    ]
    assert format_layer_table(partition_layers(2, assign_chunks_round_robin(2, 2), layout=parse_layout("E||tt|L"))) == [
        "stage  layers",
        "    0  embedding | 0-1 (2)",
        "    1  no layer  | norm, output, loss",
    ]
