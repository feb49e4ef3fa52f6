"""Checkpoints in an object store: saved, found, loaded and removed by URL, and never half there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.save_folder import (
    Retention,
    apply_retention,
    find_checkpoint,
    get_checkpoint_name,
    read_latest,
    read_state,
)
from megatron.checkpoint.savers import SyncSaver
from megatron.checkpoint.storage_url import open_storage
from tests.support.checkpoint_worlds import group_of, load_tensors, whole
from tests.support.runs import arguments, digest, run

pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem

URL = "memory://bucket/save"


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    """Nothing there before, nothing left behind."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def save(iteration: int, value: float = 1.0) -> str:
    tensors = [whole("a", torch.full((300, 7), value)), whole("b", torch.full((5,), value, dtype=torch.float64))]
    SyncSaver(open_storage(URL), group_of(None)).save(iteration, tensors, {}, {"value": value})
    return f"{URL}/{get_checkpoint_name(iteration)}"


def loaded(url: str) -> float:
    tensors = [torch.zeros(300, 7), torch.zeros(5, dtype=torch.float64)]
    load_tensors(url, [whole("a", tensors[0]), whole("b", tensors[1])])
    value = float(tensors[0][0, 0])
    assert all((tensor == value).all() for tensor in tensors) and read_state(url) == {"value": value}
    return value


def found() -> Any:
    return find_checkpoint(URL, warn=lambda _: None)


def test_saved_found_and_loaded() -> None:
    assert found() is None
    assert save(3, 3.0) == f"{URL}/iter_0000003" == found()
    save(6, 6.0)
    assert found() == f"{URL}/iter_0000006" and read_latest(open_storage(URL)) == 6
    assert (loaded(f"{URL}/iter_0000003"), loaded(found())) == (3.0, 6.0)
    save(6, 7.0)
    assert loaded(found()) == 7.0 and len(open_storage(URL).list_names("iter_0000006")) == 4
    apply_retention(open_storage(URL), Retention(1))
    assert open_storage(URL).list_names() == ["iter_0000006", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_damage_is_found(how: str) -> None:
    save(3, 3.0)
    storage = open_storage(save(6, 6.0))
    (name,) = (name for name in storage.list_names() if name.endswith(".safetensors"))
    data = storage.read(name)
    if how == "delete":
        storage.remove(name)
    else:
        storage.write(name, data[:-1] if how == "truncate" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(DamagedCheckpointError, match=f"{URL}/iter_0000006/{name}"):
        loaded(storage.location)
    if how != "flip":  # which shows only when all is read
        assert found() == f"{URL}/iter_0000003"


def test_a_store_that_fails_leaves_the_old_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever write it does; what is not named by a manifest is no checkpoint."""
    save(3, 3.0)
    opened, broken = MemoryFileSystem._open, 0
    for writes in range(20):
        left = writes

        def fails(self: MemoryFileSystem, path: str, mode: str = "rb", **settings: Any) -> Any:
            nonlocal left
            if mode == "wb":
                if left == 0:
                    raise ConnectionError("the store is gone")
                left -= 1
            return opened(self, path, mode, **settings)

        monkeypatch.setattr(MemoryFileSystem, "_open", fails)
        try:
            save(6, 6.0)
        except CheckpointError as error:
            broken += 1
            assert "the store is gone" in str(error) and URL in str(error)
            # Complete without being named by the latest file is possible: then it was the last write that failed.
            assert loaded(found()) == 3.0
        else:
            assert loaded(found()) == 6.0
            assert broken == writes > 3
            return
    raise AssertionError("it never came through")


def test_a_run_goes_on_from_an_object_store(tmp_path: Path) -> None:
    """Begun at two data ranks, continued at two tensor ranks; `local://` is a folder behind the interface of a store."""
    settings: dict[str, Any] = {"train_iters": 6, "fp64": True, "lr_decay_style": "cosine", "save_interval": 2, "keep_last": 2}
    url = f"local://{tmp_path}/save"
    run(arguments(**settings, save=url, exit_interval=4), 2)
    said = run(arguments(**settings, save=url, load=url, tensor_model_parallel_size=2), 2)
    assert f"resuming from {url}/iter_0000004 at iteration 4" in said
    assert sorted(path.name for path in (tmp_path / "save").glob("iter*")) == ["iter_0000004", "iter_0000006"]
    assert digest(tmp_path / "save", 6) != digest(tmp_path / "save", 4)
