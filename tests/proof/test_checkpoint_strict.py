"""Every tensor asked for is filled and every tensor stored is used, or one error lists all that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.manifest import Manifest, StoredTensor
from megatron.parallel.tensor_slice import BufferSlice, TensorSlice
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.checkpoint_worlds import (
    Layout,
    Shapes,
    hold,
    load_tensors,
    load_world,
    random_values,
    read_manifest,
    save_checkpoint,
    whole,
)

SHAPES: Shapes = {"up": ((8, 6), 0), "norm": ((6,), None)}


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    return save_checkpoint(folder, 1, [whole(name, tensor) for name, tensor in tensors.items()], {}, {})


def test_all_misfits_in_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    path = saved(tmp_path, good=torch.ones(2), extra=torch.ones(1), shape=torch.ones(2, 3), count=torch.tensor([1]))
    targets = [whole("good", torch.zeros(2)), whole("shape", torch.zeros(3, 2)), whole("count", torch.zeros(1))]
    targets.append(whole("missing", torch.zeros(1)))
    with pytest.raises(CheckpointError) as error:
        load_tensors(path, targets)
    assert str(error.value).splitlines() == [
        f"cannot load {path}:",
        "  in the checkpoint, but not used (1): extra",
        "  not in the checkpoint (1): missing",
        "  of a dtype that cannot be converted (1): count (stored torch.int64, in this run torch.float32)",
        "  of another shape (1): shape (stored [2, 3], in this run [3, 2])",
        "  Is it a checkpoint of another model, or of another kind of run? Compare the settings with its config.json.",
    ]
    assert all(not target.local.any() for target in targets)


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, **{f"t{index:02d}": torch.ones(1) for index in range(25)})
    with pytest.raises(CheckpointError, match=r"not used \(25\): t00, .*t09, and 15 more"):
        load_tensors(path, [])


def test_what_may_be_left_unused(tmp_path: Path) -> None:
    path = saved(tmp_path, a=torch.ones(2), b=torch.ones(2))
    target = whole("a", torch.zeros(2))
    load_tensors(path, [target], allow_unused=lambda name: name == "b")
    assert target.local.tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"not used \(1\): b"):
        load_tensors(path, [target], allow_unused=lambda name: name == "a")


def test_use_is_counted_over_the_world_and_by_element(tmp_path: Path) -> None:
    values = random_values(SHAPES)
    path = saved(tmp_path, **values)
    load_world(path, [hold(SHAPES, Layout(2), rank, None) for rank in range(2)])
    with pytest.raises(CheckpointError, match=r"only partly used \(2\): main\.up \(24 of 48 elements\), model\.up"):
        load_world(path, [hold(SHAPES, Layout(2), 0, None)])


def test_a_tensor_of_which_stored_boxes_are_missing(tmp_path: Path) -> None:
    path = saved(tmp_path, a=torch.ones(2, 2))
    manifest = read_manifest(path)
    stored = manifest.tensors["a"]
    first = dataclasses.replace(stored.slices[0], key="a[0:2,0:2]")
    cut = Manifest({"a": StoredTensor((3, 2), stored.dtype, (first,))}, manifest.files)
    (path / "manifest.json").write_bytes(cut.to_json())
    with pytest.raises(CheckpointError, match=r"incomplete in the checkpoint \(1\): a"):
        load_tensors(path, [whole("a", torch.zeros(3, 2))])


def test_one_rank_s_misfit_is_everybody_s_error(tmp_path: Path) -> None:
    path = saved(tmp_path, a=torch.ones(4))

    def load(rank: int) -> str:
        tensor = whole("a", torch.zeros(4))
        tensors = [tensor] if rank == 0 else [tensor, whole("only_on_rank_1", torch.zeros(1))]
        with pytest.raises(CheckpointError) as error:
            load_tensors(path, tensors)
        return str(error.value)

    first, second = run_ranks(2, load)
    assert first == second and "not in the checkpoint (1): only_on_rank_1" in first


def test_impossible_boxes_are_our_own_mistake() -> None:
    for local, box, start in [
        (torch.zeros(4), TensorSlice((0,), (4,)), 1),
        (torch.zeros(4), TensorSlice((1,), (4,)), 0),
        (torch.zeros(4), TensorSlice((0, 0), (2, 2)), 0),
        (torch.zeros(4, 2)[:, 0], TensorSlice((0,), (4,)), 0),
        (torch.zeros(4), TensorSlice((0,), (0,)), 0),
    ]:
        with pytest.raises(AssertionError, match="a: "):
            GlobalTensor("a", (4,), local, [BufferSlice(box, start)])
