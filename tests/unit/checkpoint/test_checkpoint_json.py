"""Values of another type or size in the JSON files of a checkpoint, with checksums that fit: refused with the name of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.save_folder import load_manifest, read_config, read_state
from megatron.checkpoint.storage import CONFIG, MANIFEST, PROGRESS_COUNTS, STATE
from megatron.checkpoint.storage_url import open_storage
from megatron.training.resume import check_state
from megatron_lab.checkpoints.verification import verify_checkpoint
from tests.support.checkpoint_worlds import save_checkpoint, whole
from tests.support.damage import sign_checkpoint

_PROGRESS: dict[str, Any] = {**dict.fromkeys(PROGRESS_COUNTS, 1), "iteration": 1}
_DEEP = "deep"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    save_checkpoint(tmp_path, 1, [whole("a", torch.ones(3, 4))], {"optimizer_updates": 1}, {"vocab_size": 3})
    return tmp_path / "iter_0000001"


def change(file: Path, key: str, value: object) -> None:
    """Set the value at a key such as `tensors.a.boxes.0.file`."""
    content = json.loads(file.read_text())
    *parents, last = key.split(".")
    target = content
    for name in parents:
        target = target[int(name) if isinstance(target, list) else name]
    target[int(last) if isinstance(target, list) else last] = value
    file.write_text(json.dumps(content).replace(f'"{_DEEP}"', "[" * 100_000 + "]" * 100_000))
    sign_checkpoint(file.parent)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tensors.a.boxes.0.file", ["x"], 'tensors.a.boxes[0].file is ["x"], but must be a text'),
        ("tensors.a.boxes.0.file", {"x": 1}, "must be a text"),
        ("tensors.a.boxes.0.file", "../x", "names files that are missing"),
        ("tensors.a.boxes.0.checksum", None, "checksum is null, but must be a text"),
        ("tensors.a.boxes.0.sizes", [1 << 40, 4], "manifest.json"),
        ("tensors.a.boxes.0.offsets", [-1, 0], "must be an integer from 0"),
        ("tensors.a.boxes.0.offsets", [0], "same number of dimensions"),
        ("tensors.a.boxes", None, "must be a list"),
        ("tensors.a.shape", [3.0, 4], "must be an integer"),
        ("tensors.a.shape", [True, 4], "must be an integer"),
        ("tensors.a.shape", [1 << 62, 4], "must be an integer from 0 to 2^62 - 1"),
        ("tensors.a.shape", [1] * 40, "dimensions"),
        ("tensors.a.dtype", ["float32"], "must be a text"),
        ("tensors.a.dtype", "float33", "not a known dtype"),
        ("tensors.a.content", 5, "must be a text"),
        ("tensors.a", [], "must be an object"),
        ("tensors", [], "must be an object"),
        ("files", {"x": {"bytes": float("nan")}}, "must be an integer"),
        ("version", None, "version None"),
        ("format", {}, "format"),
        ("tensors.a.shape", _DEEP, "manifest.json"),
    ],
)
def test_manifests_of_other_types(checkpoint: Path, key: str, value: object, reason: str) -> None:
    change(checkpoint / MANIFEST, key, value)
    with pytest.raises(CheckpointError) as caught:
        load_manifest(open_storage(checkpoint))
    assert reason in str(caught.value) and str(checkpoint) in str(caught.value)


@pytest.mark.parametrize(("key", "reason"), [("digest", "digest is null"), ("content_digest", "content_digest is null")])
def test_digests_of_other_types(checkpoint: Path, key: str, reason: str) -> None:
    content = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({**content, key: None}))
    with pytest.raises(DamagedCheckpointError, match=f"manifest.json is not readable .{reason}"):
        load_manifest(open_storage(checkpoint))


def test_a_slice_larger_than_its_file_reserves_no_memory(checkpoint: Path) -> None:
    """The tensor is large too, and slice, shape and key agree."""
    for key, value in (("shape", [1 << 40, 4]), ("boxes.0.sizes", [1 << 40, 4])):
        change(checkpoint / MANIFEST, f"tensors.a.{key}", value)
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is damaged: it lists slices of 17,592,186,044,416 bytes"):
        load_manifest(open_storage(checkpoint))


@pytest.mark.parametrize(
    ("file", "key", "value", "reason"),
    [
        (STATE, "optimizer_updates", [1], "must be an integer"),
        (STATE, "ema_decay", "x", "must be a finite number"),
        (STATE, "scaler", 3, "must be an object"),
        (STATE, "optimizer_updates", _DEEP, ""),
        (CONFIG, "vocab_size", float("nan"), "must be an integer"),
        (CONFIG, "config", [], "must be an object"),
        (CONFIG, "command", {}, "must be a list"),
    ],
)
def test_other_files_of_other_types(checkpoint: Path, file: str, key: str, value: object, reason: str) -> None:
    change(checkpoint / file, key, value)
    with pytest.raises(DamagedCheckpointError) as caught:
        (read_state if file == STATE else read_config)(checkpoint)
    assert reason in str(caught.value) and str(checkpoint / file) in str(caught.value)
    (problem,) = verify_checkpoint(open_storage(checkpoint)).problems
    assert str(checkpoint / file) in problem


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"progress": {**_PROGRESS, "iteration": None}}, "progress.iteration is null"),
        ({"progress": {**_PROGRESS, "recent": [[1.0]]}}, "progress.recent"),
        ({"progress": {**_PROGRESS, "phases": [3]}}, "progress.phases[0] is 3, but must be an object"),
        ({"progress": {}}, "is missing"),
        ({"progress": {**_PROGRESS, "x": 1}}, "progress.x is unknown"),
        ({"schedule": {"lengths": []}}, "schedule.lengths is [], but must be an object"),
        ({"schedule": {"lr": [1]}}, "optimizer.lr must be"),
        ({"schedule": {"x": 1}}, "schedule.x is unknown"),
        ({"schedule": {}}, "schedule.lengths is missing"),
    ],
)
def test_the_state_of_a_run_of_other_types(checkpoint: Path, state: dict[str, Any], reason: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="state.json") as caught:
        check_state(checkpoint, state)
    assert reason in str(caught.value)
