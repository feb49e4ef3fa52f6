"""Paths that users and other programs name: no read or write waits forever, and memory follows the size of the file."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from megatron.config import regular_file
from megatron.config.regular_file import (
    check_output,
    check_replaceable,
    find_path_problem,
    open_regular,
    parse_json,
    read_regular,
    read_regular_or_pipe,
    read_text,
    shorten_path,
)
from megatron.data.indexed_writer import write_atomically
from megatron_lab.verification.local_ranks import run_ranks


@pytest.fixture
def odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with something of each type that is not a regular file."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    os.symlink("/dev/zero", "device")
    os.symlink("loop", "loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "it is not a regular file, but a pipe"),
        ("socket", "it is not a regular file, but a socket"),
        ("device", "it is not a regular file, but a device"),
        ("folder", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("missing", "No such file or directory"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_only_regular_files_are_read(odd_files: Path, name: str, reason: str) -> None:
    for read in (open_regular, read_regular, lambda path: read_text(Path(path))):
        with pytest.raises(OSError, match=reason):
            read(name)


@pytest.mark.parametrize(("name", "reason"), [("pipe", "no process writes"), ("socket", "a socket"), ("device", "a device")])
def test_a_pipe_without_a_writer_is_refused_at_once(odd_files: Path, name: str, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        read_regular_or_pipe(name)


def test_what_a_process_writes_to_a_pipe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts, and only if the writer comes to an end."""
    reading, writing = os.pipe()
    os.write(writing, b"a" * 5)
    monkeypatch.setattr(regular_file, "_PIPE_TIMEOUT_S", 0.05)
    with pytest.raises(OSError, match="whose writer was not done after 0 s"):
        read_regular_or_pipe(f"/dev/fd/{reading}")
    os.write(writing, b"b" * 50_000)
    os.close(writing)
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_regular_or_pipe(f"/dev/fd/{reading}", 1000)
    os.close(reading)


def test_the_limit_on_the_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100_000)
    assert read_regular(file, 100_000) == read_regular_or_pipe(file, 100_000) == b"x" * 100_000
    for read in (read_regular, read_regular_or_pipe):
        with pytest.raises(OSError, match="more than 99,999 bytes"):
            read(file, 99_999)
    assert read_regular("/proc/self/status").startswith(b"Name:"), "a file whose size the system does not know"


def test_a_small_file_needs_little_memory(tmp_path: Path) -> None:
    """As under `ulimit -v`, with 64 MB of memory left."""
    (tmp_path / "file").write_text("x\r\ny")

    def body(_: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
        assert read_text(tmp_path / "file") == "x\ny"

    run_ranks(1, body, init=False)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("runs/a", None),
        ("s3://bucket/run", None),
        ("größe/東京", None),
        ("x" * 255, None),
        ("x" * 256, "longer than 255 bytes"),
        ("ü" * 128, "longer than 255 bytes"),
        ("x/" * 3000, "longer than 3,841 bytes"),
        ("x/" * 1000, "more than 256 levels"),
        ("a\0b", "NUL"),
        ("\udce9", "not text in UTF-8"),
        (" \t", "blank"),
    ],
)
def test_paths_that_no_file_can_have(path: str, problem: str | None) -> None:
    found = find_path_problem(path)
    assert found is None if problem is None else problem in (found or ""), found


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "[", "", "1" * 5000])
def test_json_that_cannot_be_parsed_is_a_wrong_value(text: str) -> None:
    """Not an overflow of the stack."""
    assert parse_json("[1]") == parse_json(b"[1]") == [1]
    with pytest.raises(ValueError, match="."):
        parse_json(text)


def test_a_path_in_a_message_is_short_and_printable() -> None:
    assert shorten_path("a\0b") == r"a\0b" and shorten_path("\udce9") == r"\udce9"
    assert len(shorten_path("x" * 6000)) < 130 and shorten_path("x" * 100) == "x" * 100


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "cannot be written: it is a pipe, and writing could wait forever"),
        ("socket", "it is a socket"),
        ("device", "it is a device"),
        ("folder", "is a folder"),
        ("pipe/x", "/pipe is not a folder"),
        ("x" * 6000, "a name in it is longer than 255 bytes"),
    ],
)
def test_outputs_that_cannot_be_written(odd_files: Path, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--flag .*{reason}"):
        check_output("--flag", name)


@pytest.mark.parametrize("name", ["pipe", "socket", "folder", "/dev/full"])
def test_only_files_and_links_are_replaced(odd_files: Path, name: str) -> None:
    """A file that is renamed to a device would take its place for all programs."""
    before = os.lstat(name)
    with pytest.raises(OSError, match="it is not a regular file|Is a directory"):
        check_replaceable(name)
    with pytest.raises(OSError, match="it is not a regular file|Is a directory"), write_atomically(name):
        pass
    assert os.lstat(name) == before
    for path in ("device", "loop", "new"):
        check_replaceable(path)


def test_outputs_that_can(odd_files: Path) -> None:
    """A file, with or without its folder; `/dev/null`; and the open pipe of `>(command)`."""
    reading, writing = os.pipe()
    for path in ("new", "deep/er/new", "/dev/null", f"/dev/fd/{writing}"):
        check_output("--flag", path)
    os.close(reading)
    os.close(writing)
