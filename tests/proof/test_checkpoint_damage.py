"""Damaged checkpoints are found out: by size before anything is read, by checksum at the latest."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.data_files import DataFileReader, SliceRead
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.manifest import Checksum, Manifest, StoredFile, StoredSlice, StoredTensor
from megatron.checkpoint.save_folder import find_checkpoint, read_config, read_state
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.checkpoint_worlds import (
    Layout,
    Shapes,
    hold,
    load_tensors,
    random_values,
    read_manifest,
    save_checkpoint,
    save_world,
    whole,
)

DATA = "rank_00000.safetensors"


def save(folder: Path, iteration: int = 1) -> Path:
    tensors = [whole("a", torch.arange(40.0)), whole("b", torch.arange(6).view(2, 3))]
    return save_checkpoint(folder, iteration, tensors, {"hidden_size": 8}, {"iteration": iteration})


def load(path: Path) -> None:
    tensors = [whole("a", torch.zeros(40)), whole("b", torch.zeros(2, 3, dtype=torch.int64))]
    load_tensors(path, tensors)
    read_state(path)
    read_config(path)
    assert torch.equal(tensors[0].local, torch.arange(40.0)) and tensors[1].local.sum() == 15


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x01
    path.write_bytes(data)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("example"))


@given(data=st.data(), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_an_error_or_harmless(example: Path, data: st.DataObject, bit: int) -> None:
    """In the header or the manifest a flip may be harmless (a space); then what is loaded is right, as `load` asserts."""
    file = data.draw(st.sampled_from(sorted(example.iterdir())))
    original = file.read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    file.write_bytes(original[:at] + bytes([original[at] ^ 1 << bit]) + original[at + 1 :])
    try:
        load(example)
    except CheckpointError as error:
        assert str(example) in str(error)
    finally:
        file.write_bytes(original)


def damage_data(path: Path) -> None:
    flip(path / DATA, -1)


def damage_header(path: Path) -> None:
    flip(path / DATA, 9)


def truncate(path: Path) -> None:
    (path / DATA).write_bytes((path / DATA).read_bytes()[:-1])


def empty(path: Path) -> None:
    (path / DATA).write_bytes(b"")


def remove(path: Path) -> None:
    (path / DATA).unlink()


def damage_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"sizes":[40]', '"sizes":[39]'))


def truncate_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:-5])


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_data, r"the data of a was altered|the data of b was altered"),
        (damage_header, r"no readable header|holds no readable entry"),
        (truncate, r"has \d+ bytes, but was written with \d+"),
        (empty, r"has 0 bytes"),
        (remove, r"is missing"),
        (damage_manifest, r"manifest\.json was altered"),
        (truncate_manifest, r"manifest\.json is not readable"),
        (remove_manifest, r"has no manifest\.json"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = save(tmp_path)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("damage", [truncate, empty, remove, damage_manifest, truncate_manifest, remove_manifest])
def test_the_last_complete_one_is_taken_and_said(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    damage(second)
    said: list[str] = []
    assert find_checkpoint(tmp_path, warn=said.append) == first
    assert len(said) == 1 and str(first) in said[0] and str(second) in said[0]
    with pytest.raises(DamagedCheckpointError, match="--ckpt-step 2"):
        find_checkpoint(tmp_path, 2)
    load(first)


@pytest.mark.parametrize(("name", "read"), [("state.json", read_state), ("config.json", read_config)])
def test_altered_json_is_refused(tmp_path: Path, name: str, read: Callable[[Path], dict]) -> None:
    path = save(tmp_path)
    read(path)
    flip(path / name, 4)
    with pytest.raises(DamagedCheckpointError, match="was altered"):
        read(path)
    (path / name).unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        read(path)


@pytest.mark.parametrize(
    "header",
    [
        {"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "I64", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}},
        {"a": {"dtype": "F32", "shape": [4]}},
        {"a": [0, 16]},
    ],
)
def test_an_entry_that_is_not_what_the_manifest_says(tmp_path: Path, header: dict) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    box = StoredSlice(TensorSlice((0,), (4,)), "x", "a", Checksum(bytes(16)).text)
    manifest = Manifest({"a": StoredTensor((4,), "float32", (box,))}, {"x": StoredFile(8 + len(text) + 16)})
    files, target = DataFileReader(LocalStorage(tmp_path), manifest), torch.zeros(4)
    with pytest.raises(DamagedCheckpointError, match=r"x(: entry a is| holds no readable entry a| cannot be read to its end)"):
        files.read(box, "float32", [SliceRead(TensorSlice((0,), (4,)), target)])


def rewrite_manifest(path: Path, change: Callable[[dict], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_newer_version_is_refused_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    rewrite_manifest(path, lambda manifest: manifest.update(version=2))
    for use in (load, lambda path: find_checkpoint(path.parent)):
        with pytest.raises(CheckpointError, match=r"newer version .*format version 2; this one reads up to 1") as error:
            use(path)
        assert not isinstance(error.value, DamagedCheckpointError)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    rewrite_manifest(path, lambda manifest: manifest.update(format="other"))
    with pytest.raises(CheckpointError, match="format 'other'"):
        load(path)


def test_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path)

    def add(manifest: dict) -> None:
        manifest["made_by"] = "somebody"
        manifest["tensors"]["a"]["boxes"][0]["note"] = 1

    rewrite_manifest(path, add)
    load(path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "not_listed.safetensors"])
def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)

    def point(manifest: dict) -> None:
        manifest["tensors"]["a"]["boxes"][0]["file"] = name
        if not name.startswith("not"):
            manifest["files"][name] = {"bytes": 1}

    rewrite_manifest(path, point)
    with pytest.raises(DamagedCheckpointError, match="names files"):
        load(path)


def test_damage_that_one_rank_finds_is_everybody_s_error(tmp_path: Path) -> None:
    shapes: Shapes = {"up": ((8, 6), 0)}
    values = random_values(shapes)
    path = save_world(tmp_path, 1, [hold(shapes, Layout(2), rank, values) for rank in range(2)])
    flip(path / "rank_00001.safetensors", -1)

    def read(rank: int) -> str:
        with pytest.raises(DamagedCheckpointError) as error:
            load_tensors(path, hold(shapes, Layout(2), rank, None))
        return str(error.value)

    first, second = run_ranks(2, read)
    assert first == second and "rank 1: " in first and "rank_00001.safetensors" in first and "rank 0" not in first


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_boxes_of_another_tensor_are_not_taken(tmp_path: Path, tensor_ranks: int) -> None:
    """Not even by a manifest whose digests are right: a box says in its file of which tensor it is a part."""
    shapes: Shapes = {"a": ((6, 4), 0), "b": ((6, 4), 0)}
    layout = Layout(tp=tensor_ranks)
    values = random_values(shapes)
    path = save_world(tmp_path, 1, [hold(shapes, layout, rank, values) for rank in range(layout.world_size)])
    manifest = read_manifest(path)
    tensors = dict(manifest.tensors)
    tensors["model.a"], tensors["model.b"] = (dataclasses.replace(tensors[name], content=None) for name in ("model.b", "model.a"))
    (path / "manifest.json").write_bytes(Manifest(tensors, manifest.files).to_json())
    with pytest.raises(DamagedCheckpointError, match="under keys that do not match their tensors"):
        read_manifest(path)
