"""Local folders and object stores behind one interface: the same answers, and nothing half done that could be taken for done."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint import local_storage, object_storage
from megatron.checkpoint.errors import CheckpointError, TruncatedError
from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.object_storage import ObjectStorage
from megatron.checkpoint.save_folder import check_writable
from megatron.checkpoint.storage import Storage, is_url
from megatron.checkpoint.storage_url import open_storage

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from fsspec.spec import AbstractBufferedFile  # noqa: E402

KINDS = ("path", "file", "local", "memory")
FILES = {"config.json": b"{}", "state.json": b"[]", "manifest.json": b"all"}


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """An empty storage of each kind. `local://` is fsspec's: a local folder treated as an object store."""
    yield open_storage(tmp_path if request.param == "path" else f"{request.param}://{tmp_path}")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[ObjectStorage]:
    """An empty object store."""
    yield on(MemoryFileSystem(skip_instance_cache=True))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def on(files: Any) -> ObjectStorage:
    return ObjectStorage("memory://a", files, "/a")


def put(storage: Storage, name: str, data: bytes = b"x") -> None:
    with storage.create(name) as file:
        file.write(data)


# ---- files


def test_what_is_written_is_read(storage: Storage) -> None:
    storage.create_folder()
    data = bytes(range(256)) * 9
    with storage.create("one.bin") as file:
        file.write(data[:1000])
        file.write(b"")
        file.write(memoryview(data)[1000:])
        assert file.num_bytes == len(data)
    assert storage.get_file_size("one.bin") == len(data) and storage.read("one.bin") == data
    with storage.open("one.bin") as opened:
        assert opened.size == len(data)
        assert opened.read(5, 7) == data[5:12] and opened.read(len(data), 0) == b""
        buffer = bytearray(300)
        opened.read_into(100, memoryview(buffer))
        assert buffer == data[100:400]
        with pytest.raises(TruncatedError, match=rf"one\.bin ends before byte {len(data)}: it was truncated"):
            opened.read(len(data) - 3, 4)
    put(storage, "one.bin", b"new")
    assert storage.read("one.bin") == b"new"


def test_small_files_are_replaced(storage: Storage) -> None:
    storage.create_folder()
    storage.write("latest", b"1")
    storage.write("latest", b"22")
    assert storage.read("latest") == b"22" and storage.list_names() == ["latest"]


def test_names_and_removal(storage: Storage) -> None:
    assert storage.list_names() == [] == storage.list_names("none")
    storage.create_folder()
    storage.get_child("b").create_folder()
    put(storage, "b/.hidden")
    put(storage, "b/two")
    put(storage.get_child("b"), "three", b"333")
    put(storage, "a")
    assert (
        storage.list_names() == ["a", "b"]
        and storage.list_names("b") == [".hidden", "three", "two"] == storage.get_child("b").list_names()
    )
    assert storage.list_names("a") == []
    assert (
        storage.get_file_size("b") is None
        and storage.get_file_size("b/three") == 3
        and storage.get_file_size("none") is None is storage.get_file_size("a/below")
    )
    storage.remove("b/two")
    storage.remove("none")
    assert storage.list_names("b") == [".hidden", "three"]
    storage.remove("b")
    assert storage.list_names() == ["a"] and storage.list_names("b") == []


def test_what_is_not_there(storage: Storage) -> None:
    storage.create_folder()
    put(storage, "file")
    storage.get_child("folder").create_folder()
    put(storage, "folder/file")
    for name in ("none", "none/below", "file/below", "folder"):
        for use in (storage.read, lambda name: storage.open(name).__enter__()):
            with pytest.raises(FileNotFoundError) as error:
                use(name)
            assert name.split("/")[0] in str(error.value)
    with pytest.raises(FileNotFoundError):
        storage.remove_checkpoint("none")


def test_a_file_that_could_not_be_finished_is_gone(storage: Storage) -> None:
    storage.create_folder()
    with pytest.raises(KeyError, match="oops"), storage.create("half") as file:
        file.write(b"x" * 100)
        raise KeyError("oops")
    assert storage.list_names() == []


def test_another_process_opens_the_same(storage: Storage, tmp_path: Path) -> None:
    storage.create_folder()
    put(storage, "a")
    again = open_storage(storage.location)
    assert again.list_names() == ["a"] and type(again) is type(storage)
    assert (
        again.get_location("a") == storage.get_location("a") == f"{storage.location}/a"
        and again.get_location("") == storage.location
    )
    assert storage.get_child("b").location == storage.get_location("b")
    assert (storage.local == tmp_path) == isinstance(storage, LocalStorage)


def test_a_path_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("save")
    check_writable(storage)
    storage.write("latest", b"1")
    storage.get_child("below").create_folder()
    storage.write("below/small", b"2")
    draft = storage.draft("iter_0000001", "a1")
    draft.create_folder()
    draft.publish(FILES)
    assert storage.list_names() == ["below", "iter_0000001", "latest"] == sorted(os.listdir(tmp_path / "save"))
    assert storage.list_names("below") == ["small"]


def test_check_writable_leaves_nothing(storage: Storage) -> None:
    deep = storage.get_child("x").get_child("y")
    check_writable(deep)
    assert deep.list_names() == []
    storage.write("file", b"")
    for inside in (storage.get_child("file"), storage.get_child("file/below")):
        with pytest.raises(CheckpointError, match="Not a directory" if storage.local else "file"):
            check_writable(inside)


@given(st.integers(0, 90), st.integers(0, 90), st.integers(1, 12), st.integers(1, 4))
def test_large_reads_are_cut_into_ranges(start: int, length: int, piece: int, at_once: int) -> None:
    data = bytes(range(100))
    files = MemoryFileSystem(skip_instance_cache=True)
    files.pipe_file("/a/x", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_storage, "RANGE_BYTES", piece)
        patch.setattr(object_storage, "CONCURRENT_RANGES", at_once)
        with on(files).open("x") as file:
            if start + length > len(data):
                with pytest.raises(TruncatedError, match="ends before byte 100"):
                    file.read(start, length)
            else:
                assert file.read(start, length) == data[start : start + length]
    files.rm("/a", recursive=True)


# ---- checkpoints


def test_a_draft_is_no_checkpoint_before_it_is_published(storage: Storage) -> None:
    draft = storage.draft("iter_0000009", "ab12")
    draft.create_folder()
    put(draft.storage, draft.get_file_name("rank_00000.safetensors"), b"data")
    assert storage.get_file_size("iter_0000009/manifest.json") is None
    assert (storage.local is None) == (draft.storage.location == storage.get_location("iter_0000009"))
    draft.publish(FILES)
    final = storage.get_child("iter_0000009")
    assert storage.list_names() == ["iter_0000009"]
    assert final.list_names() == sorted([*FILES, draft.get_file_name("rank_00000.safetensors")])
    assert final.read(draft.get_file_name("rank_00000.safetensors")) == b"data"
    assert {name: final.read(name) for name in FILES} == FILES


def test_a_draft_replaces_a_checkpoint(storage: Storage) -> None:
    for token, data in (("a1", b"one"), ("b2", b"two"), ("b2", b"three")):
        draft = storage.draft("iter_0000009", token)
        draft.create_folder()
        put(draft.storage, draft.get_file_name("rank_00000.safetensors"), data)
        if token == "a1":
            put(draft.storage, draft.get_file_name("rank_00001.safetensors"))
        draft.publish(FILES)
    assert storage.list_names() == ["iter_0000009"] and len(storage.list_names("iter_0000009")) == 4
    assert storage.get_child("iter_0000009").read(draft.get_file_name("rank_00000.safetensors")) == b"three"


def test_a_draft_that_is_given_up_leaves_the_old_one(storage: Storage) -> None:
    old, new = storage.draft("iter_0000009", "a1"), storage.draft("iter_0000009", "b2")
    old.create_folder()
    put(old.storage, old.get_file_name("rank_00000.safetensors"), b"old")
    old.publish(FILES)
    before = {name: storage.get_child("iter_0000009").read(name) for name in storage.list_names("iter_0000009")}
    new.discard()  # not even begun
    new.create_folder()
    put(new.storage, new.get_file_name("rank_00000.safetensors"), b"new")
    new.discard()
    assert {name: storage.get_child("iter_0000009").read(name) for name in storage.list_names("iter_0000009")} == before
    storage.remove_checkpoint("iter_0000009")
    new.create_folder()
    put(new.storage, new.get_file_name("rank_00000.safetensors"))
    new.discard()
    assert storage.list_names() == []


def test_a_draft_begins_empty(storage: Storage) -> None:
    for _ in range(2):
        draft = storage.draft("iter_0000009", "a1")
        draft.create_folder()
        assert draft.storage.list_names() == []
        put(draft.storage, draft.get_file_name("rank_00000.part.json"))


def test_a_late_writer_does_not_touch_its_successor(storage: Storage) -> None:
    late, draft = storage.draft("iter_0000009", "a1"), storage.draft("iter_0000009", "b2")
    for each in (late, draft):
        each.create_folder()
    for each, data in ((draft, b"mine"), (late, b"late")):
        put(each.storage, each.get_file_name("rank_00000.safetensors"), data)
    draft.publish(FILES)
    final = storage.get_child("iter_0000009")
    assert final.read(draft.get_file_name("rank_00000.safetensors")) == b"mine" and len(final.list_names()) == 4


def test_a_checkpoint_is_retired(storage: Storage) -> None:
    for name in ("iter_0000003", "iter_0000006"):
        draft = storage.draft(name, "a1")
        draft.create_folder()
        draft.publish(FILES)
    storage.remove_checkpoint("iter_0000003")
    assert storage.list_names() == ["iter_0000006"]


def test_leftovers_are_swept(storage: Storage) -> None:
    """But not the drafts of the run that asks, complete checkpoints, or what other programs keep under such names."""
    for name, token in (("iter_0000003", "a1"), ("iter_0000006", "b2"), ("iter_0000009", "c3")):
        draft = storage.draft(name, token)
        draft.create_folder()
        put(draft.storage, draft.get_file_name("rank_00000.part.json"))
        if token == "a1":
            draft.publish(FILES)
    for name in ("iter_0000012/mp_rank_00", ".other.saving"):
        storage.get_child(name).create_folder()
        put(storage, f"{name}/model_optim_rng.pt")
    mine = storage.draft("iter_0000009", "c3")
    for keep, left in (("c3", [mine.get_file_name("rank_00000.part.json")]), ("d4", [])):
        storage.remove_unfinished(keep)
        assert mine.storage.list_names() == left
    assert storage.list_names() == [".other.saving", "iter_0000003", "iter_0000012"]
    assert len(storage.list_names("iter_0000003")) == 4 and storage.list_names("iter_0000012/mp_rank_00") == ["model_optim_rng.pt"]


# ---- local folders: what is on the disk when


def trace(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is synced and renamed."""
    calls: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(handle: int) -> None:
        calls.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        calls.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    def replaced(self: Path, target: Path) -> Path:
        calls.append(f"{self.name} -> {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", replaced)
    return calls


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for names")
def test_data_is_on_the_disk_before_its_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path / "new" / "save")
    calls = trace(monkeypatch)
    storage.create_folder()
    assert calls == [f"sync {tmp_path.name}", "sync new"]
    calls.clear()
    storage.write("latest", b"1")
    calls[:] = [re.sub(r"\.[0-9a-f]{16}\.", ".RANDOM.", call) for call in calls]
    assert calls == ["sync .latest.RANDOM.new", ".latest.RANDOM.new -> latest", "sync save"]
    calls.clear()
    draft = storage.draft("iter_0000001", "a1")
    saving = ".iter_0000001.a1.saving"
    draft.create_folder()
    assert calls == []  # training waits for it
    put(draft.storage, "rank_00000")
    assert calls == ["sync rank_00000"]
    calls.clear()
    draft.publish(FILES)
    written = [*(f"sync {name}" for name in FILES), f"sync {saving}"]
    assert calls == [*written, f"{saving} -> iter_0000001", "sync save"]
    calls.clear()
    draft.create_folder()
    draft.publish(FILES)  # the two change names in one step, which is no rename
    assert calls == [*written, "sync save"] and storage.list_names() == ["iter_0000001", "latest"]
    calls.clear()
    monkeypatch.setattr(local_storage, "exchange_names", lambda one, other: False)  # as on many file systems of a network
    draft.create_folder()
    draft.publish(FILES)
    assert calls[-3:] == ["iter_0000001 -> .iter_0000001.replaced", f"{saving} -> iter_0000001", "sync save"]
    assert storage.list_names() == ["iter_0000001", "latest"]


def published(storage: Storage, name: str, token: str, data: bytes) -> None:
    draft = storage.draft(name, token)
    draft.create_folder()
    put(draft.storage, draft.get_file_name("rank_00000.safetensors"), data)
    draft.publish(FILES)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_that_is_replaced_is_never_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """Killed wherever, the next start finds the old one or the new one under its name, or gives the old one its name back."""
    storage = open_storage(tmp_path)
    found = set()
    for steps in range(5):
        published(storage, "iter_0000001", "a1", b"old")
        pid = os.fork()
        if pid == 0:
            try:
                dies_after(steps, can_exchange)
                published(storage, "iter_0000001", "b2", b"new")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        storage.remove_unfinished("c3")
        assert storage.list_names() == ["iter_0000001"]
        found.add(storage.read("iter_0000001/rank_00000.safetensors"))
    assert found == {b"old", b"new"}


def dies_after(steps: int, can_exchange: bool) -> None:
    """Have this process be killed instead of making a further change of names or removing a folder."""
    patch, left = pytest.MonkeyPatch(), steps

    def counted(function: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **settings)

        return call

    patch.setattr(
        local_storage, "exchange_names", counted(local_storage.exchange_names if can_exchange else lambda one, other: False)
    )
    patch.setattr(os, "rename", counted(os.rename))
    patch.setattr(shutil, "rmtree", counted(shutil.rmtree))


def test_a_checkpoint_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.get_child("iter_0000001/mp_rank_00").create_folder()
    with pytest.raises(OSError, match=f"{tmp_path}/iter_0000001 already exists, but is not a checkpoint of this program"):
        published(storage, "iter_0000001", "a1", b"")
    assert storage.list_names("iter_0000001") == ["mp_rank_00"]
    published(storage, "iter_0000002", "a1", b"old")
    storage.remove("iter_0000002/manifest.json")  # but one of this program that lost its manifest is
    published(storage, "iter_0000002", "b2", b"new")
    assert storage.read("iter_0000002/rank_00000.safetensors") == b"new"


def test_files_of_another_program_stay_beside_a_checkpoint(memory: ObjectStorage) -> None:
    for name in ("mp_rank_00/model_optim_rng.pt", "notes-1.txt"):
        put(memory.get_child("iter_1"), name)
    write(memory, "a1").publish(FILES)
    write(memory, "b2").publish(FILES)
    assert memory.list_names("iter_1") == sorted([*FILES, "mp_rank_00", "notes-1.txt", "rank_00000-b2.safetensors"])


def test_a_removal_that_fails_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path)
    draft = storage.draft("iter_0000001", "a1")
    draft.create_folder()
    draft.publish(FILES)
    monkeypatch.setattr("shutil.rmtree", fails)
    with pytest.raises(OSError, match="broken"):
        storage.remove_checkpoint("iter_0000001")
    assert storage.list_names() == [".iter_0000001.removing"]
    monkeypatch.undo()
    draft.create_folder()
    draft.publish(FILES)
    storage.remove_checkpoint("iter_0000001")  # what the other removal left is in the way
    assert storage.list_names() == []
    storage.get_child(".iter_0000001.removing").create_folder()
    storage.remove_unfinished("b2")
    assert storage.list_names() == []


def test_a_removal_that_another_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes over the folder sweeps away what this one is removing."""
    storage, rmtree = open_storage(tmp_path), shutil.rmtree
    storage.get_child("iter_0000001").create_folder()

    def twice(path: Path) -> None:
        rmtree(path)
        rmtree(path)

    monkeypatch.setattr("shutil.rmtree", twice)
    storage.remove_checkpoint("iter_0000001")
    assert storage.list_names() == []


def test_large_data_in_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take less than it is given; the disk is asked for each stretch once."""
    begun: list[tuple[int, int]] = []
    write, data = os.write, bytes(range(100))
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    monkeypatch.setattr(local_storage, "FLUSH_BYTES", 10)
    monkeypatch.setattr(local_storage, "start_writeback", lambda handle, start, length: begun.append((start, length)))
    storage = open_storage(tmp_path)
    with storage.create("x") as file:
        for start in range(0, 100, 25):
            file.write(data[start : start + 25])
    assert storage.read("x") == data and file.num_bytes == 100
    assert begun[0] == (0, 14) and all(start + length == after for (start, length), (after, _) in itertools.pairwise(begun))
    assert 90 <= sum(length for _, length in begun) <= 100


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path)
    storage.write("latest", b"1")
    write = os.write
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr(os, "write", lambda handle, data: write(full.fileno(), data))
        for use in (put, lambda storage, name: storage.write(name, b"22")):
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/.*latest"):
                use(storage, "latest2" if use is put else "latest")
    monkeypatch.undo()
    assert storage.list_names() == ["latest"] and storage.read("latest") == b"1"


def fails(*args: Any, **settings: Any) -> None:
    raise OSError(5, "broken")


# ---- object stores


class Failing(MemoryFileSystem):
    """Fails after some changes, as when the process is killed there."""

    cachable = False
    left = 1_000_000

    def _count(self) -> None:
        if self.left == 0:
            raise RuntimeError("killed")  # not an OSError, as many stores have errors of their own
        self.left -= 1

    def pipe_file(self, *args: Any, **settings: Any) -> None:
        self._count()
        super().pipe_file(*args, **settings)

    def _rm(self, path: str) -> None:
        self._count()
        super()._rm(path)


@pytest.mark.parametrize("doing", ["publish", "replace", "retire"])
def test_without_a_manifest_there_is_no_checkpoint(memory: ObjectStorage, doing: str) -> None:
    """Whenever it is cut off: as long as there is a manifest, all that it goes with is there too."""
    files = Failing()
    storage = on(files)

    def complete(token: str) -> set[str]:
        return {*FILES, f"rank_00000-{token}.safetensors"}

    seen: set[bool] = set()
    for steps in range(12):
        files.left = 1_000_000
        storage.remove("iter_1")
        if doing != "publish":
            write(storage, "a1").publish(dict.fromkeys(FILES, b"a1"))
        draft = write(storage, "b2")
        files.left = steps
        try:
            if doing == "retire":
                storage.remove_checkpoint("iter_1")
            else:
                draft.publish(dict.fromkeys(FILES, b"b2"))
        except OSError as error:
            assert "memory://a/iter_1" in str(error) and "RuntimeError: killed" in str(error)
        files.left = 1_000_000
        there = set(storage.list_names("iter_1"))
        if "manifest.json" in there:
            token = storage.read("iter_1/manifest.json")
            assert there >= complete(token.decode()) and {storage.read(f"iter_1/{name}") for name in FILES} == {token}
        seen.add("manifest.json" in there)
    assert there == (set() if doing == "retire" else complete("b2"))
    assert seen == {True, False}


def write(storage: Storage, token: str) -> Any:
    draft = storage.draft("iter_1", token)
    draft.create_folder()
    put(draft.storage, draft.get_file_name("rank_00000.safetensors"))
    return draft


class Forgetful(MemoryFileSystem):
    """Remembers listings, as most stores' clients do, until it is told to forget."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Any] = {}

    def ls(self, path: str, detail: bool = True, **settings: Any) -> Any:
        return self.known.setdefault(f"{path} {detail}", super().ls(path, detail, **settings))

    def info(self, path: str, **settings: Any) -> Any:
        found = {entry["name"]: entry for entry in self.ls(self._parent(path))}
        return found[path] if path in found else super().info("/not/there")

    def invalidate_cache(self, path: str | None = None) -> None:
        self.known = {key: found for key, found in self.known.items() if path is not None and key.split()[0] != path}


def test_what_other_processes_write_is_seen(memory: ObjectStorage) -> None:
    storage = on(Forgetful())
    put(memory, "one")
    assert storage.list_names() == ["one"] and storage.get_file_size("two") is None
    put(memory, "two")
    assert storage.get_file_size("two") == 1 and storage.list_names() == ["one", "two"]
    put(memory, "three")
    assert storage.list_names() == ["one", "three", "two"]


class Uploading(MemoryFileSystem):
    """Files are there when they are closed, as with an upload in parts."""

    cachable = False
    discarded = 0

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **settings: Any) -> Any:
        return Upload(self, path, mode, block_size=block_size) if mode == "wb" else super()._open(path, mode, **settings)


class Upload(AbstractBufferedFile):
    parts = b""

    def _upload_chunk(self, final: bool = False) -> None:
        self.parts += self.buffer.getvalue()
        if final:
            MemoryFileSystem.pipe_file(self.fs, self.path, self.parts)

    def discard(self) -> None:
        self.fs.discarded += 1


def test_an_upload_is_finished_or_given_up(monkeypatch: pytest.MonkeyPatch, memory: ObjectStorage) -> None:
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_quickly)
    monkeypatch.setattr(object_storage, "BLOCK_BYTES", 10)
    files = Uploading()
    storage = on(files)
    with storage.create("whole") as file:
        file.write(bytes(range(95)))
        assert storage.get_file_size("whole") is None
    assert storage.read("whole") == bytes(range(95))
    with pytest.raises(KeyError), storage.create("half") as file:
        file.write(bytes(range(95)))
        raise KeyError
    del file  # an object that goes must not finish the upload
    assert storage.list_names() == ["whole"] and files.discarded == 1


def pipe_quickly(self: MemoryFileSystem, path: str, value: bytes) -> None:
    """As `pipe_file`, but not by way of `open`, which is another one here."""
    MemoryFileSystem._open(self, path, "wb", data=value)


# ---- opening


@pytest.mark.parametrize(
    ("location", "url"), [("/a/b/", False), ("file:///a/b", False), ("s3://bucket/a/b", True), ("memory://a/b/", True)]
)
def test_paths_and_urls(location: str, url: bool) -> None:
    assert is_url(location) == url


def test_a_url_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"s3://a/b: .*pip install -e '.*\[fsspec\]'"):
        open_storage("s3://a/b")


@pytest.mark.parametrize("url", ["nowhere://a/b", "oci://a/b"])
def test_a_url_that_nobody_knows_or_whose_package_is_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ocifs", None)
    with pytest.raises(ValueError, match=url):
        open_storage(url)


def test_no_bucket_is_made(memory: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt one must be an error, not a new bucket."""
    monkeypatch.setattr(MemoryFileSystem, "makedirs", fails)
    check_writable(memory)


def test_storages_load_neither_torch_nor_numpy_nor_fsspec() -> None:
    code = (
        "import sys\n"
        "from megatron.checkpoint.storage_url import open_storage\n"
        "open_storage('/a').list_names()\n"
        "assert not {'torch', 'numpy', 'fsspec'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
