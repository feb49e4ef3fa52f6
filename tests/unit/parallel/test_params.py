"""Parameter records and their table: what a rank holds of a tensor, and parameters that are shared."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.parallel.params import ParamRecord, ParamTable, Split, materialize
from megatron.parallel.tensor_slice import TensorSlice


def test_local_shapes() -> None:
    column = ParamRecord("up", (2, 48, 32), (Split(1, "tp"),))
    assert column.get_local_shape({"tp": 4}) == (2, 12, 32)
    assert column.get_local_shape({"tp": 4, "dp": 3}) == (2, 12, 32), "an axis that does not split it"
    assert column.get_local_shape({}) == (2, 48, 32)
    vocabulary = ParamRecord("word", (50, 8), (Split(0, "tp", padded_size=64),))
    assert vocabulary.get_local_shape({"tp": 4}) == (16, 8)
    assert vocabulary.get_local_shape({}) == (64, 8)
    experts = ParamRecord("experts", (8, 16, 32), (Split(0, "ep"), Split(2, "etp")))
    assert experts.get_local_shape({"ep": 4, "etp": 2}) == (2, 16, 16)


def test_held_boxes_by_hand() -> None:
    column = ParamRecord("up", (2, 48, 32), (Split(1, "tp"),))
    assert column.get_local_slice({"tp": 4}, {"tp": 2, "dp": 1}) == TensorSlice((0, 24, 0), (2, 12, 32))
    vocabulary = ParamRecord("word", (50, 8), (Split(0, "tp", padded_size=80),))
    boxes = [vocabulary.get_local_slice({"tp": 4}, {"tp": rank}) for rank in range(4)]
    assert boxes == [
        TensorSlice((0, 0), (20, 8)),
        TensorSlice((20, 0), (20, 8)),
        TensorSlice((40, 0), (10, 8)),
        TensorSlice((50, 0), (0, 8)),
    ]
    assert ParamRecord("norm", (8,)).get_local_slice({"tp": 4}, {"tp": 3}) == TensorSlice((0,), (8,)), "replicated"


@st.composite
def split_records(draw: st.DrawFn) -> tuple[ParamRecord, dict[str, int]]:
    """A record whose dimension 0 is perhaps padded, and sizes of the axes that split it."""
    sizes = {"ep": draw(st.integers(1, 4)), "tp": draw(st.integers(1, 4)), "dp": 2}
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 3)) * sizes["tp"]
    padded = (math.ceil(rows / sizes["ep"]) + draw(st.integers(0, 2))) * sizes["ep"]
    splits = (Split(0, "ep", padded_size=padded), Split(2, "tp"))
    return ParamRecord("w", (rows, 3, columns), draw(st.permutations(splits).map(tuple))), sizes


@given(split_records())
def test_held_boxes_partition_the_tensor(case: tuple[ParamRecord, dict[str, int]]) -> None:
    """Each element lies on one place of the splitting axes, where cutting the padded tensor into equal parts puts it."""
    record, sizes = case
    padded_rows = next(split.padded_size for split in record.splits if split.dim == 0)
    assert padded_rows is not None
    whole = torch.arange(math.prod(record.shape)).reshape(record.shape)
    padded = torch.full((padded_rows, *record.shape[1:]), -1)
    padded[: record.shape[0]] = whole

    seen: list[int] = []
    for ep, tp in itertools.product(range(sizes["ep"]), range(sizes["tp"])):
        box = record.get_local_slice(sizes, {"ep": ep, "tp": tp, "dp": 1})
        held = whole[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]
        local = padded.chunk(sizes["ep"], 0)[ep].chunk(sizes["tp"], 2)[tp]
        assert tuple(local.shape) == record.get_local_shape(sizes)
        assert torch.equal(local[: box.sizes[0]], held) and (local[box.sizes[0] :] == -1).all()
        seen += held.flatten().tolist()
    assert sorted(seen) == list(range(whole.numel()))


def test_a_split_that_does_not_divide_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match=r"up: dimension 1 \(48\) does not divide by tp 5"):
        ParamRecord("up", (2, 48, 32), (Split(1, "tp"),)).get_local_shape({"tp": 5})


def test_replicated_axes() -> None:
    assert ParamRecord("norm", (8,)).replicated_axes == ("tp",)
    assert ParamRecord("up", (8, 8), (Split(0, "tp"),)).replicated_axes == ()
    assert ParamRecord("experts", (8, 8), (Split(0, "ep"),)).replicated_axes == ("etp",)
    assert ParamRecord("experts", (8, 8), (Split(0, "ep"), Split(1, "etp"))).replicated_axes == ()


class Tied(nn.Module):
    """Two modules on the meta device that share a weight, and one with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, bias=False, device="meta") for _ in range(3))
        self.table = ParamTable()
        self.table.add(ParamRecord("word", (3, 3)), self.first, "weight")
        self.second.weight = self.table.share("word", self.second, "weight")
        self.table.add(ParamRecord("third", (3, 3)), self.third, "weight")


def test_a_table_keeps_the_order_and_counts_shared_parameters_once() -> None:
    model = Tied()
    assert [entry.record.name for entry in model.table] == ["word", "third"]
    assert len(model.table) == 2
    assert "word" in model.table and "second" not in model.table
    assert model.table["word"].param is model.first.weight is model.second.weight
    assert [entry.uses_per_microbatch for entry in model.table] == [2, 1]


def test_replacing_a_shared_parameter_reaches_every_holder() -> None:
    model = Tied()
    new = nn.Parameter(torch.ones(3, 3))
    model.table["word"].replace(new)
    assert model.first.weight is new and model.second.weight is new and model.table["word"].param is new
    assert model.third.weight is not new
    assert len(list(model.parameters())) == 2


def test_materialize_keeps_parameters_shared() -> None:
    model = Tied()
    materialize(model, model.table, torch.device("cpu"))
    assert model.first.weight is model.second.weight
    assert all(p.device.type == "cpu" and p.shape == (3, 3) for p in model.parameters())
    kept = model.first.weight
    materialize(model, model.table, torch.device("cpu"))
    assert model.first.weight is kept, "what has memory stays"


def test_a_parameter_outside_the_table_is_our_mistake() -> None:
    model = Tied()
    model.stray = nn.Linear(2, 2, device="meta")
    with pytest.raises(AssertionError, match="without an entry in the table"):
        materialize(model, model.table, torch.device("cpu"))


def test_a_name_is_declared_once() -> None:
    model = Tied()
    with pytest.raises(AssertionError, match="word declared twice"):
        model.table.add(ParamRecord("word", (3, 3)), model.third, "weight")
