"""From files into tensors: in small pieces, from one box to many targets, and at last compared in memory with what was saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint import data_files, load
from megatron.checkpoint.data_files import DataFileReader, SliceRead
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.manifest import Manifest, StoredSlice, StoredTensor
from megatron.checkpoint.save_folder import find_checkpoint, read_state
from megatron.parallel.tensor_slice import BufferSlice, TensorSlice
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.checkpoint_worlds import (
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

SHAPES: Shapes = {"embedding": ((13, 6), 0), "up": ((2, 8, 6), 1), "norm": ((6,), None)}


@st.composite
def boxes_in(draw: st.DrawFn, sizes: tuple[int, ...]) -> TensorSlice:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    return TensorSlice(offsets, tuple(draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True)))


@given(
    st.lists(st.integers(1, 7), max_size=4)
    .map(tuple)
    .flatmap(lambda sizes: st.tuples(st.just(sizes), st.lists(boxes_in(sizes), min_size=1, max_size=3))),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(1, 80),
)
def test_parts_of_a_box_in_pieces_of_any_size(
    drawn: tuple[tuple[int, ...], list[TensorSlice]], dtype: torch.dtype, piece: int
) -> None:
    """Read twice: the second time only the stretch that is needed, for the box has been checked."""
    sizes, inners = drawn
    value = torch.randn(sizes)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_files, "_READ_BYTES", {True: piece, False: piece})
        path = save_checkpoint(Path(folder), 1, [whole("a", value)], {}, {})
        manifest = read_manifest(Path(path))
        (stored,) = manifest.tensors["a"].slices
        with DataFileReader(LocalStorage(Path(path)), manifest) as files:
            for _ in range(2):
                parts = [SliceRead(inner, torch.zeros(inner.sizes, dtype=dtype)) for inner in inners]
                files.read(stored, "float32", parts)
                for inner, target in parts:
                    assert torch.equal(target, value[inner.index].to(dtype))


@given(st.lists(st.floats(0, 1), max_size=3).map(lambda cuts: tuple(sorted(cuts))), st.sampled_from([1, 2, 4]), st.integers(1, 50))
def test_any_layout_in_pieces_of_any_size(cuts: tuple[float, ...], tp: int, piece: int) -> None:
    values, saved, loaded = random_values(SHAPES), Layout(2, (0.4,)), Layout(tp, cuts)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_files, "_READ_BYTES", {True: piece, False: piece})
        path = save_world(Path(folder), 1, [hold(SHAPES, saved, rank, values) for rank in range(saved.world_size)])
        targets = [hold(SHAPES, loaded, rank, None) for rank in range(loaded.world_size)]
        load_world(path, targets)
    for rank, tensors in enumerate(targets):
        assert_holds(tensors, hold(SHAPES, loaded, rank, values), padding=0.0)


@pytest.mark.parametrize("strided", [False, True])
def test_a_file_that_is_truncated_meanwhile(tmp_path: Path, strided: bool) -> None:
    """An error, where a memory map would have killed the process."""
    path = save_checkpoint(tmp_path, 1, [whole("a", torch.ones(100_000))], {}, {})
    manifest = read_manifest(Path(path))
    (stored,) = manifest.tensors["a"].slices
    with DataFileReader(LocalStorage(Path(path)), manifest) as files:
        files.get_data_offset(stored, "float32")  # opened, and its size is right
        os.truncate(Path(path) / stored.file, 200_000)
        target = torch.zeros(100_000, 2)[:, 0] if strided else torch.zeros(100_000)
        with pytest.raises(DamagedCheckpointError, match=r"rank_00000.safetensors cannot be read to its end"):
            files.read(stored, "float32", [SliceRead(stored.tensor_slice, target)])


def spoiled(change: Callable[[list[GlobalTensor]], None], patch: pytest.MonkeyPatch) -> None:
    """Let every load change what it has read."""
    original = load.compare_content

    def compare(tensors: list[GlobalTensor], *others: Any) -> Any:
        change(tensors)
        return original(tensors, *others)

    patch.setattr(load, "compare_content", compare)


def _exchange_rows(tensor: torch.Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]]


def _exchange_columns(tensor: torch.Tensor) -> None:
    tensor[:, [0, 1]] = tensor[:, [1, 0]]


def _negate_two(tensor: torch.Tensor) -> None:
    tensor[1, 2:4].neg_()


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[2, 3] ^= 1


def in_columns(name: str) -> GlobalTensor:
    """A 5 x 7 matrix of which a rank holds two blocks of columns: what is stored is cut for it."""
    boxes = [BufferSlice(TensorSlice((0, 0), (5, 3)), 0), BufferSlice(TensorSlice((0, 3), (5, 4)), 15)]
    return GlobalTensor(name, (5, 7), torch.zeros(35), boxes)


@pytest.mark.parametrize("change", [_flip, _exchange_rows, _exchange_columns, _negate_two, torch.Tensor.zero_])
def test_what_lies_in_memory_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    path = save_checkpoint(tmp_path, 1, [whole("a", torch.randn(5, 7)), whole("b", torch.randn(3))], {}, {})
    targets = [in_columns("a"), whole("b", torch.zeros(3))]
    loaded = load_tensors(path, targets)
    assert loaded.num_equal == 2 and loaded.content_digest == read_manifest(Path(path)).content_digest
    spoiled(lambda tensors: change(tensors[0].get_local_view(tensors[0].slices[1])), monkeypatch)
    with pytest.raises(
        DamagedCheckpointError, match=r"(?s)cannot load .*differs from the saved content, by the content hashes: a \(stored"
    ):
        load_tensors(path, targets)


def test_a_read_that_is_not_made_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where everything else goes whole into its place."""
    path = save_checkpoint(tmp_path, 1, [whole("a", torch.randn(5, 7)), whole("b", torch.randn(3))], {}, {})
    original = load.plan_reads
    monkeypatch.setattr(load, "plan_reads", lambda tensor, stored: original(tensor, stored) if tensor.name == "a" else [])
    with pytest.raises(DamagedCheckpointError, match="content hashes: b"):
        load_tensors(path, [whole("a", torch.zeros(5, 7)), whole("b", torch.zeros(3))])


def test_a_read_to_another_place_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two boxes of the same sizes, each whole, exchanged."""
    value = torch.randn(4, 3)
    halves = [
        GlobalTensor("a", (4, 3), value[at : at + 2].clone(), [BufferSlice(TensorSlice((at, 0), (2, 3)), 0)]) for at in (0, 2)
    ]
    path = save_world(tmp_path, 1, [[half] for half in halves])
    original, of = load.plan_reads, load.ReadItem.to_slice_read

    def exchanged(tensor: GlobalTensor, stored: StoredTensor) -> list[tuple[StoredSlice, load.ReadItem]]:
        (first, one), (second, other) = original(tensor, stored)
        return [(first, other), (second, one)]

    def into_the_other(self: load.ReadItem, stored: StoredSlice) -> data_files.SliceRead:
        return of(self, stored)._replace(source=TensorSlice((0, 0), (2, 3)))

    target = whole("a", torch.zeros(4, 3))
    load_tensors(path, [target])
    assert torch.equal(target.local, value)
    for change in ("plan_reads", exchanged), ("ReadItem.to_slice_read", into_the_other):  # the second hides what the first has done
        monkeypatch.setattr(f"megatron.checkpoint.load.{change[0]}", change[1])
        target.local.zero_()
        with pytest.raises(DamagedCheckpointError, match="content hashes: a"):
            load_tensors(path, [target])


def test_one_rank_s_difference_is_everybody_s_error(tmp_path: Path) -> None:
    """Of what a rank holds alone, and of what it holds as others do; in another dtype, so that all is summed up."""
    values = random_values(SHAPES)

    def save_and_load(rank: int) -> list[str]:
        layout, found = Layout(2), []
        path = save_checkpoint(tmp_path, 1, hold(SHAPES, layout, rank, values), {}, {})
        for name in ("model.up", "model.norm"):

            def negate(tensors: list[GlobalTensor], name: str = name) -> None:
                next(tensor for tensor in tensors if tensor.name == name).local.neg_()

            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    spoiled(negate, patch)
                with pytest.raises(DamagedCheckpointError) as error:
                    load_tensors(path, hold(SHAPES, layout, rank, None, torch.float64))
            found.append(str(error.value))
        return found

    first, second = run_ranks(2, save_and_load)
    assert first == second
    assert "model.up (stored" in first[0]
    assert "model.norm (rank 1 differs from lower ranks that hold the same slice)" in first[1]


def test_content_of_wider_and_narrower_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wider dtype it is compared, in parts; rounded it cannot be, and older checkpoints have nothing to compare with."""
    monkeypatch.setattr(load, "_HASH_NUMEL", 16)
    value = torch.randn(9, 7).bfloat16()
    path = Path(save_checkpoint(tmp_path, 1, [whole("a", value)], {}, {}))
    compared = load_tensors(path, [whole("a", torch.zeros(9, 7))])
    assert (compared.num_equal, compared.num_narrowed, compared.num_unverified) == (1, 0, 0)
    compared = load_tensors(path, [whole("a", torch.zeros(9, 7, dtype=torch.float16))])
    assert (compared.num_equal, compared.num_narrowed, compared.num_unverified) == (0, 1, 0)
    with pytest.MonkeyPatch.context() as patch:
        spoiled(lambda tensors: _flip(tensors[0].local), patch)
        load_tensors(path, [whole("a", torch.zeros(9, 7))])  # float32 has bits that bfloat16 has not
        spoiled(lambda tensors: _exchange_rows(tensors[0].local), patch)
        with pytest.raises(DamagedCheckpointError, match="content hashes"):
            load_tensors(path, [whole("a", torch.zeros(9, 7))])
    manifest = read_manifest(path)
    older = {name: StoredTensor(t.shape, t.dtype, t.slices) for name, t in manifest.tensors.items()}
    (path / "manifest.json").write_bytes(Manifest(older, manifest.files).to_json())
    loaded = load_tensors(path, [whole("a", torch.zeros(9, 7))])
    assert (loaded.content_digest, loaded.num_equal, loaded.num_unverified) == (None, 0, 1)


def test_a_checkpoint_behind_a_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url: Any = f"local://{tmp_path}/run"
    values = random_values(SHAPES)
    for iteration in (1, 2):
        save_checkpoint(url, iteration, hold(SHAPES, Layout(), 0, values), {}, {"iteration": iteration})
    found = find_checkpoint(url)
    assert found == f"{url}/iter_0000002" and read_state(found)["iteration"] == 2

    def load(rank: int) -> None:
        tensors = hold(SHAPES, Layout(2), rank, None)
        load_tensors(found, tensors)
        assert_holds(tensors, hold(SHAPES, Layout(2), rank, values), padding=0.0)

    run_ranks(2, load)
    (tmp_path / "run" / "iter_0000002" / "manifest.json").unlink()
    said: list[str] = []
    assert find_checkpoint(url, warn=said.append) == f"{url}/iter_0000001"
    assert said == [
        f"taking {url}/iter_0000001, because {url}/iter_0000002 is not a complete checkpoint: "
        "it has no manifest.json; copy the checkpoint again"
    ]
