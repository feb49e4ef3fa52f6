"""Checkpoints written by one process, one box in memory at a time."""

from __future__ import annotations

import os
import resource
import signal
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import LATEST, read_config, read_state
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.checkpoints.stream import write_checkpoint
from megatron_lab.foreign.source import TensorInfo
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.checkpoint_worlds import load_tensors, read_manifest, save_checkpoint, whole

TENSORS = {
    "model.up": torch.arange(24.0).view(4, 6),
    "model.norm": torch.arange(5).to(torch.bfloat16),
    "exp_avg.up": torch.arange(24.0).view(4, 6).neg(),
    "model.scale": torch.tensor(3.0, dtype=torch.float64),
    "model.none": torch.empty(0, 6),
}
INFOS = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


def read(name: str, box: TensorSlice) -> torch.Tensor:
    return TENSORS[name][box.index]


def write(folder: Path, **more: object) -> Path:
    return Path(write_checkpoint(folder, 7, INFOS, read, {"x": 1}, {"iteration": 7}, **more))  # type: ignore[arg-type]


def assert_complete(path: Path) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load_tensors(path, [whole(name, tensor) for name, tensor in found.items()])
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in found.items())
    assert read_config(path) == {"x": 1} and read_state(path) == {"iteration": 7}
    assert (path.parent / LATEST).read_text() == "7\n"
    assert {file.name for file in path.parent.iterdir()} == {path.name, LATEST}


def test_the_same_as_a_save_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "streamed")
    assert path == tmp_path / "streamed" / "iter_0000007"
    assert_complete(path)
    saved = save_checkpoint(tmp_path / "saved", 7, [whole(name, t) for name, t in TENSORS.items()], {"x": 1}, {"iteration": 7})
    assert read_manifest(path) == read_manifest(saved) and read_manifest(path).content_digest is not None


def test_files_of_a_layout(tmp_path: Path) -> None:
    """A box that two files ask for is written once; tensors without elements are listed."""
    norm = ("model.norm", TensorSlice((0,), (5,)))
    files = [
        [("model.up", TensorSlice((0, 0), (2, 6))), norm, ("model.scale", TensorSlice((), ()))],
        [("model.up", TensorSlice((2, 0), (2, 6))), norm, ("exp_avg.up", TensorSlice((0, 0), (4, 6)))],
    ]
    path = write(tmp_path, rank_slices=files)
    assert_complete(path)
    found = [set(safetensors.torch.load_file(path / f"rank_0000{rank}.safetensors")) for rank in range(2)]
    assert found[0] - {"model.norm"} == {"model.up[0:2,0:6]", "model.scale"}
    assert found[1] - {"model.norm"} == {"model.up[2:4,0:6]", "exp_avg.up"}
    assert ("model.norm" in found[0]) != ("model.norm" in found[1])


def test_a_size_limit(tmp_path: Path) -> None:
    path = write(tmp_path, max_file_bytes=110)
    assert_complete(path)
    sizes = [sum(t.nbytes for t in safetensors.torch.load_file(file).values()) for file in sorted(path.glob("rank_00000_*"))]
    assert sizes == [106, 104]


def test_one_box_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def read_fresh(name: str, box: TensorSlice) -> torch.Tensor:
        assert not [found for found in alive if found() is not None]
        alive.append(weakref.ref(tensor := read(name, box).clone()))
        return tensor

    write_checkpoint(tmp_path, 7, INFOS, read_fresh, {"x": 1}, {"iteration": 7})
    assert len(alive) == 4
    assert_complete(tmp_path / "iter_0000007")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(6, 4), r"model\.up was read as \[6, 4\] float32, not \[4, 6\] float32"),
        (torch.zeros(4, 6).half(), r"model\.up was read as \[4, 6\] float16, not \[4, 6\] float32"),
    ],
)
def test_something_else_than_was_announced(tmp_path: Path, other: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, 7, INFOS, lambda name, box: other if name == "model.up" else read(name, box), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_boxes_and_dtypes_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"do not cover these tensors exactly once: model\.up"):
        write_checkpoint(
            tmp_path, 7, {"model.up": INFOS["model.up"]}, read, {}, {}, rank_slices=[[("model.up", TensorSlice((0, 0), (2, 6)))]]
        )
    with pytest.raises(CheckpointError, match=r"a is int32, but checkpoints support only"):
        write_checkpoint(tmp_path, 7, {"a": TensorInfo((2,), torch.int32)}, read, {}, {})
    with pytest.raises(CheckpointError, match="cannot be encoded as JSON"):
        write_checkpoint(tmp_path, 7, INFOS, read, {}, {"a": {1}})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_replaced(tmp_path: Path) -> None:
    def be_killed(name: str, box: TensorSlice) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return read(name, box)

    pid = os.fork()
    if pid == 0:
        write_checkpoint(tmp_path, 7, INFOS, be_killed, {}, {})
    os.waitpid(pid, 0)
    (tmp_path / ".iter_0000009.0123abcd.saving").mkdir()  # of a run that saves at this moment
    assert len(list(tmp_path.glob(".iter_0000007.*"))) == 1
    write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"iter_0000007", ".iter_0000009.0123abcd.saving", LATEST}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    before = write(tmp_path)

    def fail(name: str, box: TensorSlice) -> torch.Tensor:
        raise CheckpointError("the source is damaged")

    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_checkpoint(tmp_path, 7, INFOS, fail, {}, {})

    def on_a_full_disk(rank: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as error:
            write(tmp_path)
        return str(error.value)

    (text,) = run_ranks(1, on_a_full_disk, init=False)
    assert text.startswith(f"cannot save {before}: [Errno 27] File too large")
    assert_complete(before)
