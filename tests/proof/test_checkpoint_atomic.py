"""A checkpoint is complete or it does not exist, whatever fails and whenever the job is killed."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.checkpoint.local_storage as local_module
import megatron.checkpoint.savers as save_module
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save_folder import LATEST, check_writable, find_checkpoint, read_state
from megatron.checkpoint.storage import Draft
from megatron.checkpoint.storage_url import open_storage
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.checkpoint_worlds import load_tensors, save_checkpoint, whole


def save(folder: Path, iteration: int, value: float = 1.0) -> Path:
    return save_checkpoint(folder, iteration, [whole("a", torch.full((100,), value))], {}, {"value": value})


def loaded(path: Path) -> float:
    tensor = torch.zeros(100)
    load_tensors(path, [whole("a", tensor)])
    assert (tensor == tensor[0]).all() and read_state(path)["value"] == tensor[0]
    return float(tensor[0])


def kill_self(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_be_killed(folder: Path, iteration: int, where: object, name: str) -> None:
    """Save in a child process that dies when it calls `where.name`."""
    pid = os.fork()
    if pid == 0:
        setattr(where, name, kill_self)
        try:
            save(folder, iteration, 3.0)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "fsync"), (save_module, "write_rank_files"), (save_module, "commit"), (local_module, "sync_folder"), (Path, "rename")],
)
def test_killed_before_the_rename(tmp_path: Path, where: object, name: str) -> None:
    first = save(tmp_path, 1)
    save_and_be_killed(tmp_path, 2, where, name)
    (left,) = tmp_path.glob(".iter_0000002.*.saving")
    assert not (tmp_path / "iter_0000002").exists()
    said: list[str] = []
    assert find_checkpoint(tmp_path, warn=said.append) == first and said == []
    assert loaded(first) == 1.0
    (left / "rank_00009.safetensors").write_text("of a larger world")
    second = save(tmp_path, 2, 2.0)  # what the killed save left does not disturb, and is gone
    assert loaded(second) == 2.0 and not (second / "rank_00009.safetensors").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000002", LATEST}


def test_killed_between_the_rename_and_the_latest_file(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    save_and_be_killed(tmp_path, 2, LocalStorage, "write")
    said: list[str] = []
    assert find_checkpoint(tmp_path, warn=said.append) == first
    assert "iter_0000002 is newer" in said[0]
    assert loaded(tmp_path / "iter_0000002") == 3.0
    assert find_checkpoint(tmp_path, 2) == tmp_path / "iter_0000002"


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    path = save(tmp_path, 1, 2.0)
    assert loaded(path) == 2.0
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", LATEST}


def test_what_a_killed_removal_left_does_not_disturb(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0).rename(tmp_path / ".iter_0000001.removing")
    save(tmp_path, 1, 2.0)
    assert loaded(save(tmp_path, 1, 3.0)) == 3.0
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", LATEST}


def test_the_latest_file_is_replaced_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    seen: list[tuple[str, str, bool]] = []
    real = LocalStorage.write

    def write(self: LocalStorage, name: str, data: bytes) -> None:
        seen.append((name, (tmp_path / LATEST).read_text().strip(), (tmp_path / "iter_0000002" / "manifest.json").exists()))
        real(self, name, data)

    monkeypatch.setattr(LocalStorage, "write", write)
    save(tmp_path, 2)
    assert seen == [(LATEST, "1", True)]
    assert (tmp_path / LATEST).read_text().strip() == "2"


def on_a_full_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_write_is_everybody_s_error(tmp_path: Path, failing: int) -> None:
    first = save(tmp_path, 1)

    def save_more(rank: int) -> str:
        if rank == failing:
            on_a_full_disk()
        tensors = [whole(f"t{index}", torch.ones(1000)) for index in range(4)]
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(tmp_path, 2, tensors, {}, {})
        return str(error.value)

    texts = run_ranks(2, save_more)
    assert texts[0] == texts[1]
    assert f"cannot save {tmp_path / 'iter_0000002'}" in texts[0] and f"rank {failing}: [Errno 27] File too large" in texts[0]
    assert "(free space: the file needs 8000 bytes)" in texts[0] and f"rank_0000{failing}.safetensors'" in texts[0]
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", LATEST}
    assert find_checkpoint(tmp_path) == first and loaded(first) == 1.0


def test_failures_of_several_ranks_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_more(rank: int) -> str:
        def fail(*args: object) -> None:
            raise OSError(28 if rank == 0 else 5, "full" if rank == 0 else "broken")

        monkeypatch.setattr(save_module, "write_rank_files", fail)
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(tmp_path, 2, [whole(f"t{index}", torch.ones(10)) for index in range(3)], {}, {})
        return str(error.value)

    texts = run_ranks(3, save_more)
    assert len(set(texts)) == 1
    assert texts[0].splitlines()[1:] == ["  rank 0: [Errno 28] full", "  ranks 1, 2: [Errno 5] broken"]


def test_a_file_that_the_first_rank_sees_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system of a network that lost what another node wrote."""
    write = save_module.write_rank_files

    def write_less(draft: Draft, *args: Any) -> Manifest:
        part = write(draft, *args)
        file = tmp_path / draft.storage.location / "rank_00000.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        return part

    monkeypatch.setattr(save_module, "write_rank_files", write_less)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors was written with \d+ bytes, but the first rank sees \d+"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_program_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(save_module, "write_rank_files", broken)
    with pytest.raises(RuntimeError, match=r"(?s)cannot save .*in broken.*KeyError: 'oops'"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def unwritable(tmp_path: Path) -> Path:
    """A folder that even the superuser cannot make: below a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "checkpoints"


def test_an_unwritable_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--save .*checkpoints: cannot write there \(Not a directory\)"):
        check_writable(open_storage(unwritable(tmp_path)))


def test_a_writable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(open_storage(tmp_path / "a" / "b"))
    check_writable(open_storage(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_unwritable_folder_while_saving(tmp_path: Path) -> None:
    folder = unwritable(tmp_path)

    def save_there(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            save(folder, 1)
        return str(error.value)

    first, second = run_ranks(2, save_there)
    assert first == second and "Not a directory" in first


def test_ranks_that_do_not_see_the_folder(tmp_path: Path) -> None:
    def own_folder(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            save(tmp_path / f"node{rank}", 1)
        return str(error.value)

    first, second = run_ranks(2, own_folder)
    assert "rank 1 does not see" in first and "rank 1 does not see" in second and "all nodes share" in first
    assert not list(tmp_path.glob("node*/iter*"))


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "node0", 1, 1.0)
    save(tmp_path / "node1", 1, 2.0)

    def load(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            load_tensors(tmp_path / f"node{rank}" / "iter_0000001", [whole("a", torch.zeros(100))])
        return str(error.value)

    assert all("rank 1 sees another checkpoint" in text for text in run_ranks(2, load))
