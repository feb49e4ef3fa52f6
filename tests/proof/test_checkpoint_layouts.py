"""What was saved at one layout is loaded at another, exactly."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.save_folder import read_config, read_state
from tests.support.checkpoint_worlds import (
    PADDING,
    Layout,
    Shapes,
    assert_holds,
    hold,
    load_tensors,
    load_world,
    random_values,
    read_manifest,
    save_checkpoint,
    save_world,
    whole,
)
from tests.support.warm import run_forked_ranks

SHAPES: Shapes = {
    "embedding": ((13, 6), 0),  # padded at every even tensor size
    "layers.0.qkv": ((8, 6), 0),
    "layers.0.proj": ((6, 8), 1),
    "layers.0.up": ((2, 8, 6), 1),
    "norm": ((6,), None),
    "scale": ((), None),
}

layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.floats(0, 1), max_size=3).map(lambda cuts: tuple(sorted(cuts))),
)


@st.composite
def models(draw: st.DrawFn) -> Shapes:
    """A few tensors of 0 to 4 dimensions; tensor ranks split dimension 0 (of any size, so with padding), another, or none."""
    shapes: Shapes = {}
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 6), max_size=4))
        split = draw(st.sampled_from([None, *range(len(shape))]))
        if split:
            shape[split] *= 4  # only dimension 0 may be padded
        shapes[f"t{index}"] = (tuple(shape), split)
    return shapes


def world(shapes: Shapes, layout: Layout, filled: bool) -> list[list[GlobalTensor]]:
    values = random_values(shapes) if filled else None
    return [hold(shapes, layout, rank, values) for rank in range(layout.world_size)]


@given(models(), layouts, layouts)
def test_any_layout_loads_any_other(shapes: Shapes, saved: Layout, loaded: Layout) -> None:
    with TemporaryDirectory() as folder:
        path = save_world(Path(folder), 1, world(shapes, saved, filled=True))
        targets = world(shapes, loaded, filled=False)
        load_world(path, targets)
    for tensors, expected in zip(targets, world(shapes, loaded, filled=True), strict=True):
        assert_holds(tensors, expected, padding=0.0)


def test_stored_boxes_tile_the_unpadded_tensors_once(tmp_path: Path) -> None:
    layout = Layout(tp=4, cuts=(0.3, 0.35))
    manifest = read_manifest(save_world(tmp_path, 1, world(SHAPES, layout, filled=True)))
    assert manifest.tensors.keys() == {f"{kind}.{name}" for kind in ("model", "main") for name in SHAPES}
    for name, tensor in manifest.tensors.items():
        counts = torch.zeros(tensor.shape)
        for stored in tensor.slices:
            counts[tuple(slice(o, o + n) for o, n in zip(stored.tensor_slice.offsets, stored.tensor_slice.sizes, strict=True))] += 1
        assert tensor.shape == SHAPES[name.split(".", 1)[1]][0]
        assert (counts == 1).all(), name


def test_replicas_are_written_once_and_evenly(tmp_path: Path) -> None:
    values = {f"w{index}": torch.randn(40, 8) for index in range(8)}
    path = save_world(tmp_path, 1, [[whole(name, value) for name, value in values.items()] for _ in range(4)])
    sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    assert len(sizes) == 4 and len(set(sizes.values())) == 1
    assert [len(tensor.slices) for tensor in read_manifest(path).tensors.values()] == [1] * 8
    assert sum(sizes.values()) < 1.2 * 8 * 40 * 8 * 4


def test_ranks_that_hold_only_padding_or_nothing(tmp_path: Path) -> None:
    layout = Layout(tp=4)
    shapes: Shapes = {"rows": ((2, 3), 0)}
    saved = world(shapes, layout, filled=True)
    assert [len(tensors[0].slices) for tensors in saved] == [1, 1, 0, 0]
    path = save_world(tmp_path, 1, [*saved, []])
    assert sorted(file.name for file in path.glob("*.safetensors")) == ["rank_00000.safetensors", "rank_00001.safetensors"]
    targets = world(shapes, layout, filled=False)
    load_world(path, [*targets, []])
    assert_holds(targets[1], saved[1], padding=PADDING)


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    path = save_world(tmp_path, 1, [[whole("empty", torch.zeros(0, 3)), whole("a", torch.ones(2))]])
    target = whole("a", torch.zeros(2))
    load_world(path, [[whole("empty", torch.zeros(0, 3)), target]])
    assert target.local.tolist() == [1, 1]


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("here", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floating_dtypes_are_converted_by_rounding(tmp_path: Path, stored: torch.dtype, here: torch.dtype) -> None:
    value = torch.randn(5, 7, dtype=torch.float64).to(stored)
    path = save_checkpoint(tmp_path, 1, [whole("a", value)], {}, {})
    target = whole("a", torch.zeros(5, 7, dtype=here))
    load_tensors(path, [target])
    assert torch.equal(target.local, value.to(here))


def test_integers_and_scalars(tmp_path: Path) -> None:
    values = {"steps": torch.tensor([2**53 + 1, -1]), "step": torch.tensor(2**62), "scale": torch.tensor(0.1)}
    path = save_checkpoint(tmp_path, 1, [whole(name, value) for name, value in values.items()], {}, {})
    targets = [whole(name, torch.zeros_like(value)) for name, value in values.items()]
    load_tensors(path, targets)
    for target in targets:
        assert torch.equal(target.local, values[target.name])


def test_a_parameter_that_needs_gradients_is_filled(tmp_path: Path) -> None:
    value = torch.nn.Parameter(torch.randn(3, 2))
    path = save_checkpoint(tmp_path, 1, [whole("a", value)], {}, {})
    target = torch.nn.Parameter(torch.zeros(3, 2))
    load_tensors(path, [whole("a", target)])
    assert torch.equal(target, value) and target.is_leaf


def test_four_ranks_then_two_then_one(tmp_path: Path) -> None:
    values = random_values(SHAPES)
    at_four, at_two, at_one = Layout(2, (0.37,)), Layout(1, (0.81,)), Layout()
    state = {"iteration": 3, "consumed_samples": 2**40, "loss_scale": 0.1}

    def save(rank: int) -> str:
        path = save_checkpoint(tmp_path, 3, hold(SHAPES, at_four, rank, values), {"tp": 2}, state)
        assert (path / "manifest.json").exists()  # complete when the call returns, on every rank
        return str(path)

    def load_and_save(rank: int) -> None:
        tensors = hold(SHAPES, at_two, rank, None)
        load_tensors(tmp_path / "iter_0000003", tensors)
        assert_holds(tensors, hold(SHAPES, at_two, rank, values), padding=0.0)
        save_checkpoint(tmp_path, 4, tensors, {}, state)

    assert run_forked_ranks(4, save) == [str(tmp_path / "iter_0000003")] * 4
    run_forked_ranks(2, load_and_save)
    tensors = hold(SHAPES, at_one, 0, None)
    load_tensors(tmp_path / "iter_0000004", tensors)
    assert_holds(tensors, hold(SHAPES, at_one, 0, values), padding=0.0)
    assert read_state(tmp_path / "iter_0000004") == state
    assert read_config(tmp_path / "iter_0000003") == {"tp": 2}


def test_a_process_group_of_some_ranks(tmp_path: Path) -> None:
    values = random_values(SHAPES)

    def save_and_load(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank in (1, 2):
            layout = Layout(2)
            path = save_checkpoint(tmp_path, 1, hold(SHAPES, layout, rank - 1, values), {}, {}, process_group=group)
            tensors = hold(SHAPES, layout, rank - 1, None)
            load_tensors(path, tensors, process_group=group)
            assert_holds(tensors, hold(SHAPES, layout, rank - 1, values), padding=0.0)

    run_forked_ranks(3, save_and_load)
    assert (tmp_path / "iter_0000001").is_dir()
