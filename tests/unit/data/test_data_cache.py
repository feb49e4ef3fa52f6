"""The cache of indexes: made once, complete or absent, checked before use, never needed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data import indexed_writer
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.history import LengthPeriod
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexCache, open_index_cache, write_dataset
from megatron_lab.data_tools.index_builder import build_index

NAMES = ("order", "starts")
LARGE = 1 << 30
_FORK = multiprocessing.get_context("fork")


def arrays() -> tuple[NDArray, ...]:
    """What is kept."""
    return np.arange(1000, dtype=np.int32)[::-1], np.arange(501, dtype=np.int64) ** 2


def get(
    cache: IndexCache, build: Callable[[], tuple[NDArray, ...]] = arrays, key: tuple[object, ...] = (1,)
) -> tuple[NDArray, ...]:
    """Ask for a large index."""
    return cache.get("index", NAMES, lambda: key, LARGE, build)


def check(found: tuple[NDArray, ...]) -> None:
    """It is what was built."""
    for array, expected in zip(found, arrays(), strict=True):
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)


def never() -> tuple[NDArray, ...]:
    """A builder that must not be asked."""
    raise AssertionError("built although it is in the cache")


def files(folder: Path) -> list[str]:
    """Names without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def in_children(work: Callable[[int], None], count: int = 1) -> list[int | None]:
    """Exit codes of forked processes that run `work`: 0 unless it raised."""
    children = [_FORK.Process(target=work, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    return [child.exitcode for child in children]


@pytest.fixture
def notes() -> list[str]:
    """What a cache told."""
    return []


def test_arrays_are_built_once_and_then_mapped(tmp_path: Path, notes: list[str]) -> None:
    first, second = IndexCache(tmp_path / "c", notes.append), IndexCache(tmp_path / "c", notes.append)
    check(get(first))
    found = get(second, never)
    check(found)
    assert not found[0].flags.writeable
    assert (len(first.written_files), len(second.loaded_files), notes) == (2, 2, [])
    assert np.array_equal(np.load(next(file for file in second.loaded_files if "order" in file.name)), arrays()[0])


def test_another_key_is_another_index(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    get(cache)
    other = get(cache, lambda: (np.zeros(3), np.ones(2)), key=(2,))
    assert [array.tolist() for array in other] == [[0, 0, 0], [1, 1]]
    check(get(cache, never))


def test_a_file_under_the_name_of_another_array_is_made_again(tmp_path: Path, notes: list[str]) -> None:
    """Both belong to the same index, and are whole."""
    get(IndexCache(tmp_path))
    one, other = sorted(tmp_path.glob("*.npy"))
    for path, data in ((one, other.read_bytes()), (other, one.read_bytes())):
        path.unlink()
        path.write_bytes(data)
    check(get(IndexCache(tmp_path, notes.append)))
    assert notes and all("belongs to another dataset; the index is computed again" in note for note in notes)


def test_small_indexes_and_a_cache_of_no_folder_touch_no_file(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "c")
    check(
        cache.get(
            "index", NAMES, lambda: pytest.fail("a key needs a digest of the dataset"), indexed_writer.MIN_ENTRIES - 1, arrays
        )
    )
    check(get(IndexCache(None)))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("shared", [True, False])
def test_processes_that_start_at_once_build_once_in_each_folder(tmp_path: Path, shared: bool) -> None:
    barrier: Barrier = _FORK.Barrier(4)

    def work(number: int) -> None:
        folder = tmp_path / ("shared" if shared else f"own{number}")
        folder.mkdir(exist_ok=True)

        def build() -> tuple[NDArray, ...]:
            with (tmp_path / f"{folder.name}.log").open("a") as log:
                log.write("built\n")
            time.sleep(0.3)  # the others come while it builds
            return arrays()

        barrier.wait(30)
        check(get(IndexCache(folder), build))

    assert in_children(work, 4) == [0] * 4
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert logs == ["built\n"] * (1 if shared else 4)


@pytest.mark.parametrize("written", [0, 100, 5000])
@pytest.mark.parametrize("whole_files", [0, 1])
def test_a_process_killed_while_it_writes_leaves_nothing_that_is_taken_for_an_index(
    tmp_path: Path, notes: list[str], written: int, whole_files: int
) -> None:
    def work(_: int) -> None:
        write, count = indexed_writer.write_array, 0

        def write_and_die(file: BinaryIO, digest: bytes, array: NDArray) -> None:
            nonlocal count
            write(file, digest, array)
            count += 1
            if count > whole_files:
                file.flush()
                os.truncate(file.name, min(written, os.path.getsize(file.name)))
                os.kill(os.getpid(), signal.SIGKILL)

        indexed_writer.write_array = write_and_die  # type: ignore[assignment]
        get(IndexCache(tmp_path))

    assert in_children(work) == [-signal.SIGKILL]
    assert len(files(tmp_path)) == whole_files + 1
    assert sum("partial" in name for name in files(tmp_path)) == 1
    built: list[int] = []
    check(get(IndexCache(tmp_path, notes.append), lambda: built.append(1) or arrays()))  # type: ignore[func-returns-value]
    assert (built, notes) == ([1], [])
    assert len(files(tmp_path)) == 2
    assert not any("partial" in name for name in files(tmp_path))
    check(get(IndexCache(tmp_path), never))


def test_partial_files_of_other_machines_are_left_while_they_may_be_in_use(tmp_path: Path) -> None:
    young, old = tmp_path / "a.npy.partial-elsewhere-1", tmp_path / "b.npy.partial-elsewhere-1"
    for path in (young, old):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    get(IndexCache(tmp_path))
    assert young.exists()
    assert not old.exists()


def flip(content: bytes, at: int) -> bytes:
    """With another byte there."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda content, other: b"",
    "cut": lambda content, other: content[:-1],
    "cut to the footer": lambda content, other: content[-40:],
    "head": lambda content, other: flip(content, 60),
    "value": lambda content, other: flip(content, 2000),
    "checksum": lambda content, other: flip(content, len(content) - 1),
    "longer": lambda content, other: content + b"\0",
    "of another dataset": lambda content, other: other,
    "plain .npy": lambda content, other: content[:-40],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_file_is_found_and_made_again(tmp_path: Path, notes: list[str], name: str) -> None:
    cache = IndexCache(tmp_path)
    get(cache)
    get(cache, lambda: tuple(array + 1 for array in arrays()), key=(2,))
    mine, other = cache.written_files[0], cache.written_files[2]
    mine.write_bytes(DAMAGE[name](mine.read_bytes(), other.read_bytes()))
    check(get(IndexCache(tmp_path, notes.append)))
    assert len(notes) == 1
    assert str(mine) in notes[0]
    assert "computed again" in notes[0]
    check(get(IndexCache(tmp_path), never))


def unwritable(folder: Path) -> None:
    """Take the right to write into a folder from this process, root or not."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(65534)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("filled", [False, True])
def test_a_read_only_folder_is_read_but_not_needed(open_folder: Path, filled: bool) -> None:
    cache_folder = open_folder / "c"
    cache_folder.mkdir()
    if filled:
        get(IndexCache(cache_folder))
    there = files(cache_folder)

    def work(_: int) -> None:
        unwritable(cache_folder)
        notes: list[str] = []
        cache = IndexCache(cache_folder, notes.append)
        check(get(cache, never if filled else arrays))
        check(get(cache, never if filled else arrays))
        assert len(notes) == (0 if filled else 1)
        assert all("--data-cache-path" in note and str(cache_folder) in note for note in notes)

    assert in_children(work) == [0]
    assert files(cache_folder) == there


def test_a_full_disk_leaves_nothing_and_the_arrays_are_in_memory(tmp_path: Path) -> None:
    def work(_: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        notes: list[str] = []
        check(get(IndexCache(tmp_path, notes.append)))
        assert len(notes) == 1
        assert os.strerror(errno.EFBIG) in notes[0]

    assert in_children(work) == [0]
    assert files(tmp_path) == []


def test_without_locks_or_without_a_folder_the_arrays_are_in_memory(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    check(get(IndexCache(tmp_path / "file" / "c", notes.append)))

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(indexed_writer.fcntl, "flock", refuse)
    check(get(IndexCache(tmp_path / "c", notes.append)))
    assert ["Not a directory" in notes[0], os.strerror(errno.ENOLCK) in notes[1], len(notes)] == [True, True, 2]
    assert files(tmp_path / "c") == []


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IndexedDataset:
    """A dataset whose indexes count as large."""
    monkeypatch.setattr(indexed_writer, "MIN_ENTRIES", 2)
    with write_dataset(str(tmp_path / "d"), np.uint16) as writer:
        writer.add_documents(np.arange(400), [7, 13] * 20)
    return IndexedDataset(str(tmp_path / "d"))


def gpt(dataset: IndexedDataset, cache: IndexCache | None, **changes: Any) -> GPTDataset:
    """Samples of half of the dataset."""
    settings: dict[str, Any] = {"split": 0, "seed": 5, "seq_length": 9, "vocab_size": 400, **changes}
    return GPTDataset(dataset, settings.pop("documents", range(20)), cache=cache, **settings)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"seed": 6},
    {"split": 1},
    {"seq_length": 8},
    {"documents": range(20, 40)},
    {"earlier": [LengthPeriod(7, 5)]},
    {"earlier": [LengthPeriod(7, 6)]},
    {"order": "megatron"},
    {"order": "megatron", "num_samples": 30},
    {"order": "megatron", "num_samples": 60},
    {"order": "megatron", "seed": 6},
]


def test_every_setting_that_changes_the_order_has_an_index_of_its_own(dataset: IndexedDataset, tmp_path: Path) -> None:
    for _ in range(2):
        cache = open_index_cache(dataset.prefix, None)
        for changes in SETTINGS:
            expected = gpt(dataset, None, **changes).get_samples(0, 20)
            assert np.array_equal(gpt(dataset, cache, **changes).get_samples(0, 20), expected), changes
    assert cache.loaded_files
    assert not cache.written_files
    assert {path.parent for path in cache.loaded_files} == {tmp_path / "cache"}


def test_an_index_that_is_built_ahead_is_what_training_reads(dataset: IndexedDataset, tmp_path: Path) -> None:
    lines = build_index(dataset.prefix, split="50,50,0", seed=5, seq_length=9, epochs=2, data_cache_path=str(tmp_path / "c"))
    assert ["made 10 files" in lines[0], "made 10 files" in lines[1], "test split" in lines[2]] == [True, True, True]
    cache = open_index_cache(dataset.prefix, str(tmp_path / "c"))
    ahead, plain = gpt(dataset, cache), gpt(dataset, None)
    assert np.array_equal(ahead.get_samples(0, 2 * ahead.samples_per_epoch), plain.get_samples(0, 2 * ahead.samples_per_epoch))
    assert (len(cache.loaded_files), cache.written_files) == (10, [])
    again = build_index(dataset.prefix, split="50,50,0", seed=5, seq_length=9, epochs=2, data_cache_path=str(tmp_path / "c"))
    assert "nothing to do, 10 files were there" in again[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        build_index(dataset.prefix, split=None, seed=5, seq_length=9, data_cache_path=str(tmp_path / "file" / "c"))


def test_a_small_dataset_needs_no_index_ahead(tmp_path: Path) -> None:
    with write_dataset(str(tmp_path / "d"), np.uint16) as writer:
        writer.add_documents(np.arange(400), [400])
    (line,) = build_index(str(tmp_path / "d"), split=None, seed=5, seq_length=9)
    assert "no index is cached" in line
    assert not (tmp_path / "cache").exists()
