"""The files of a checkpoint: readable by other tools, described completely by the manifest, and no pickle."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.manifest import digest_entries
from megatron.checkpoint.safetensors_file import Header, TensorEntry
from megatron.checkpoint.save_folder import read_state
from megatron.checkpoint.storage_url import open_storage
from megatron_lab.checkpoints.stream import write_checkpoint
from megatron_lab.foreign.source import TensorInfo
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

SHAPES: Shapes = {"up": ((2, 8, 6), 1), "norm": ((6,), None), "scale": ((), None)}
LAYOUT = Layout(2, (0.4,))


def save_example(folder: Path, state: dict | None = None, max_file_bytes: int | None = None) -> Path:
    values = random_values(SHAPES)
    world = [hold(SHAPES, LAYOUT, rank, values) for rank in range(4)]
    return save_world(folder, 100, world, state, max_file_bytes)


def read_by_the_manifest(path: Path) -> dict[str, torch.Tensor]:
    """A reader written from the description, with nothing of the program but the safetensors library."""
    manifest = json.loads((path / "manifest.json").read_text())
    tensors = {}
    for name, tensor in manifest["tensors"].items():
        tensors[name] = torch.full(tensor["shape"], float("nan"), dtype=getattr(torch, tensor["dtype"]))
        for box in tensor["boxes"]:
            part = safetensors.torch.load_file(path / box["file"])[box["key"]]
            assert list(part.shape) == box["sizes"]
            assert box["checksum"] == f"xxh3:{xxhash.xxh3_64_hexdigest(part.reshape(-1).view(torch.uint8).numpy().tobytes())}"
            tensors[name][tuple(slice(o, o + n) for o, n in zip(box["offsets"], box["sizes"], strict=True))] = part
    return tensors


def test_a_reader_written_from_the_description(tmp_path: Path) -> None:
    tensors = read_by_the_manifest(save_example(tmp_path))
    values = random_values(SHAPES)
    assert tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(tensors[name], value), name


def test_only_safetensors_and_json_and_every_file_in_the_list(tmp_path: Path) -> None:
    path = save_example(tmp_path)
    files = {file.name: file for file in path.iterdir()}
    assert {file.suffix for file in files.values()} == {".safetensors", ".json"}
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert listed.keys() == files.keys() - {"manifest.json"}
    for name, entry in listed.items():
        assert entry["bytes"] == files[name].stat().st_size
        if name.endswith(".json"):
            json.loads(files[name].read_text())
            assert entry["checksum"] == f"xxh3:{xxhash.xxh3_64_hexdigest(files[name].read_bytes())}"
        else:
            assert safetensors.torch.load_file(files[name])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "100"


def test_keys_say_which_part_they_are(tmp_path: Path) -> None:
    manifest = read_manifest(save_example(tmp_path))
    keys = {stored.key for tensor in manifest.tensors.values() for stored in tensor.slices}
    assert {"model.norm", "model.scale", "model.up[0:2,0:4,0:6]", "model.up[0:2,4:8,0:6]"} <= keys


def test_a_size_limit_cuts_files_between_boxes(tmp_path: Path) -> None:
    one = {file.name for file in save_example(tmp_path / "one").glob("*.safetensors")}
    path = save_example(tmp_path / "many", max_file_bytes=60)
    many = sorted(file.name for file in path.glob("*.safetensors"))
    assert "rank_00000.safetensors" in one and "rank_00000_00000.safetensors" in many and "rank_00000_00001.safetensors" in many
    for file in path.glob("*.safetensors"):
        parts = safetensors.torch.load_file(file)
        assert len(parts) == 1 or sum(part.nbytes for part in parts.values()) <= 60
    values = random_values(SHAPES)
    assert all(torch.equal(tensor, values[name]) for name, tensor in read_by_the_manifest(path).items())


def test_digest_follows_content_and_state_but_not_files(tmp_path: Path) -> None:
    digests = [
        read_manifest(save_example(tmp_path / "a")).digest,
        read_manifest(save_example(tmp_path / "b", max_file_bytes=60)).digest,
        read_manifest(save_example(tmp_path / "c", state={"iteration": 1})).digest,
    ]
    assert digests[0] == digests[1] != digests[2]
    values = {"a": torch.zeros(3)}
    first = save_checkpoint(tmp_path, 1, [whole("a", values["a"])], {"x": 1}, {})
    values["a"][1] = -0.0  # equal, but not the same bits
    second = save_checkpoint(tmp_path, 2, [whole("a", values["a"])], {"x": 1}, {})
    assert read_manifest(first).digest != read_manifest(second).digest


def test_digest_does_not_depend_on_order() -> None:
    assert digest_entries(["b", "a"]) == digest_entries(["a", "b"]) != digest_entries(["ab"])


def test_every_dtype_is_aligned_and_read_back(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3).to(torch.float16),
        "single": torch.randn(5, 1),
        "brain": torch.randn(3).to(torch.bfloat16),
        "double": torch.tensor(4.0, dtype=torch.float64),
        "long": torch.arange(3),
    }
    path = save_checkpoint(tmp_path, 1, [whole(name, tensor) for name, tensor in tensors.items()], {}, {})
    manifest = read_manifest(path)
    assert {name: tensor.dtype for name, tensor in manifest.tensors.items()} == {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()
    }
    data = (path / "rank_00000.safetensors").read_bytes()
    with open_storage(path).open("rank_00000.safetensors") as file:
        header = Header(file, "x")
    library = safetensors.torch.load(data)
    for name, tensor in tensors.items():
        at = header.get_data_offset(TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        assert at % tensor.element_size() == 0
        read = torch.frombuffer(bytearray(data[at : at + tensor.nbytes]), dtype=tensor.dtype).view(tensor.shape)
        assert torch.equal(read, tensor) and torch.equal(library[name], tensor)


def test_a_part_that_is_not_contiguous_is_written_row_major(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4).t()
    path = write_checkpoint(tmp_path, 1, {"a": TensorInfo((4, 3), torch.float32)}, lambda name, box: value, {}, {})
    assert torch.equal(safetensors.torch.load_file(Path(path) / "rank_00000.safetensors")["a"], value)


def test_state_keeps_every_digit(tmp_path: Path) -> None:
    state = {"samples": 2**61 + 1, "scale": math.pi, "tiny": 5e-324, "names": ["ä", None, True]}
    assert read_state(save_checkpoint(tmp_path, 1, [], {}, state)) == state


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json cannot be encoded as JSON"):
        save_checkpoint(tmp_path, 1, [whole("a", torch.ones(2))], {}, {"bad": {1, 2}})
    assert list(tmp_path.iterdir()) == []


def test_boxes_that_are_not_whole_tensors_are_not_saved(tmp_path: Path) -> None:
    values = random_values(SHAPES)
    with pytest.raises(CheckpointError, match=r"do not cover these tensors exactly once: model\.up, main\.up"):
        save_checkpoint(tmp_path, 1, hold(SHAPES, Layout(2), 0, values), {}, {})
    with pytest.raises(CheckpointError, match=r"a is int32, but checkpoints support only"):
        save_checkpoint(tmp_path, 1, [whole("a", torch.ones(2, dtype=torch.int32))], {}, {})
    with pytest.raises(CheckpointError, match=r"a is \(3,\) float32 on rank 1, but \(2,\) float32 on a lower rank"):
        save_world(tmp_path, 1, [[whole("a", torch.ones(2))], [whole("a", torch.ones(3))]])
    assert list(tmp_path.iterdir()) == []


def test_one_process_says_nothing_about_process_groups(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_checkpoint(tmp_path, 1, [whole("a", torch.ones(2))], {}, {})
        load_tensors(path, [whole("a", torch.ones(2))])


def test_a_manifest_of_the_first_programs(tmp_path: Path) -> None:
    """Without content hashes: read as before, with no digest to compare."""
    path = save_example(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["content_digest"]
    for tensor in manifest["tensors"].values():
        del tensor["content"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    old = read_manifest(path)
    assert old.content_digest is None and {tensor.content for tensor in old.tensors.values()} == {None}
    assert json.loads(old.to_json()) == manifest


def header_of(path: Path, data: bytes) -> Header:
    path.write_bytes(data)
    with open_storage(path.parent).open(path.name) as file:
        return Header(file, path.name)


@pytest.mark.parametrize("data", [b"", b"8", (9).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", b"\xff" * 20])
def test_a_file_without_a_header_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="x (has no readable header|is damaged: )"):
        header_of(tmp_path / "x", data)


def test_brackets_without_end_are_refused(tmp_path: Path) -> None:
    path = save_example(tmp_path)
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DamagedCheckpointError, match="is not readable"):
        read_manifest(path)
    with pytest.raises(DamagedCheckpointError, match="x has no readable header"):
        header_of(tmp_path / "x", (100_000).to_bytes(8, "little") + b"[" * 100_000)


def test_altered_content_sums_are_refused(tmp_path: Path) -> None:
    path = save_example(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tensors"]["model.up"]["content"] = "0" * 16
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match="was altered"):
        read_manifest(path)
