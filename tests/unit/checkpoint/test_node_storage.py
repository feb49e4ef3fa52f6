"""Files in the memory of several nodes, made up in one process: what each sees, what is copied where, and who is let in."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save_folder import LATEST, claim_folder, commit, encode_json_files, get_checkpoint_name, read_latest
from megatron.checkpoint.storage import MANIFEST
from megatron_lab.node_memory import keeper
from megatron_lab.node_memory.node_link import NodeLink, NodeUnreachableError, serve
from megatron_lab.node_memory.node_storage import FOLDER_VARIABLE, STATE_FOLDER, Nodes, NodeStorage


def nodes(folder: Path, count: int, copies: int) -> list[NodeStorage]:
    """The storage as each of several nodes sees it."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    found = []
    for index, listener in enumerate(listeners):
        mine = folder / str(index)
        (mine / STATE_FOLDER).mkdir(parents=True)
        Nodes(addresses, index, copies, "token").write(mine)
        serve(mine / STATE_FOLDER, listener, lambda: "token")
        found.append(NodeStorage(mine))
    return found


def test_every_node_sees_the_files_of_all(tmp_path: Path) -> None:
    first, second, third = nodes(tmp_path, 3, copies=1)
    data = os.urandom(9 << 20)  # several pieces
    second.get_child("a").create_folder()
    with second.get_child("a").create("data") as file:
        file.write(data)
    second.get_child("a").write("small", b"x")
    for storage in (first, second, third):
        assert storage.get_child("a").list_names() == ["data", "small"] and storage.get_file_size("a/data") == len(data)
        assert storage.read("a/small") == b"x" and storage.get_file_size("a/none") is None
        with storage.open("a/data") as found:
            assert found.read(0, len(data)) == data and found.read(len(data) - 3, 3) == data[-3:]
            with pytest.raises(OSError, match="truncated"):
                found.read(len(data) - 3, 4)
        with pytest.raises(FileNotFoundError), storage.open("a/none"):
            pass
    there = [(tmp_path / str(index) / STATE_FOLDER / "a" / "data").exists() for index in range(3)]
    assert there == [False, True, True], "on its own node and the next"
    assert [one.find_first_holder("a/data") for one in (first, second, third)] == [1, 1, 1]
    first.remove("a")
    assert third.list_names() == []


def test_a_checkpoint_gets_its_name_on_all_nodes(tmp_path: Path) -> None:
    storages = nodes(tmp_path, 3, copies=1)
    drafts = [storage.draft("iter_0000004", "ab") for storage in storages]
    drafts[0].create_folder()
    for index, draft in enumerate(drafts):
        draft.ensure_folder()
        with draft.storage.create(f"rank_{index}") as file:
            file.write(bytes(index))
    drafts[0].publish({MANIFEST: b"{}"})
    for storage in storages:
        assert storage.list_names() == ["iter_0000004"]
        assert storage.get_child("iter_0000004").list_names() == [MANIFEST, "rank_0", "rank_1", "rank_2"]
    storages[1].draft("iter_0000006", "ab").ensure_folder()
    storages[0].remove_unfinished("cd")
    assert storages[1].list_names() == ["iter_0000004"], "what killed runs left is removed on all nodes"
    storages[2].remove_checkpoint("iter_0000004")
    assert storages[0].list_names() == []


def test_a_file_that_does_not_come_to_its_end_is_nowhere(tmp_path: Path) -> None:
    first, second = nodes(tmp_path, 2, copies=1)
    with pytest.raises(KeyError), first.create("data") as file:
        file.write(b"x" * 100)
        raise KeyError
    assert first.list_names() == [] == second.list_names()


def test_a_node_that_is_lost_is_passed_over(tmp_path: Path) -> None:
    first, _ = nodes(tmp_path, 2, copies=1)
    gone = Nodes([*first.nodes.addresses, ("127.0.0.1", 9)], 0, 2, "token")
    storage = NodeStorage(tmp_path / "0", nodes=gone)
    with storage.create("data") as file:
        file.write(b"abc")
    assert storage.list_names() == ["data"] and (tmp_path / "1" / STATE_FOLDER / "data").read_bytes() == b"abc"


def test_strangers_are_not_let_in(tmp_path: Path) -> None:
    """Nor does who knows the token leave the folder."""
    (storage,) = nodes(tmp_path, 1, copies=0)
    (tmp_path / "0" / "secret").write_text("x")
    address = storage.nodes.addresses[0]
    with pytest.raises(NodeUnreachableError):
        NodeLink(address, "guess").call("list_names", "")
    for path in ("../secret", "/etc/hostname", "a/../../secret"):
        with pytest.raises(NodeUnreachableError):
            NodeLink(address, "token").call("read", path)
    for call in ("get_child", "__init__", "at"):
        with pytest.raises(NodeUnreachableError):
            NodeLink(address, "token").call(call, "")
    assert NodeLink(address, "token").call("list_names", "") == []


def test_what_a_killed_keeper_left_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_MEMORY_FOLDER", tmp_path)
    said: list[str] = []
    launchers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        folder, _ = keeper.start_or_find("run", launchers[0].pid, reachable=False, log=said.append)
        assert keeper.start_or_find("run", launchers[0].pid, reachable=False, log=said.append) == (folder, 0)
        (folder / STATE_FOLDER / "file").write_bytes(b"state")
        found = keeper._read_keeper(folder)
        assert found is not None and not said
        os.kill(found.pid, 9)
        launchers[0].kill()
        launchers[0].wait()
        while found.is_alive:
            pass
        other, port = keeper.start_or_find("run", launchers[1].pid, reachable=True, log=said.append)
        assert other != folder and port and (other / STATE_FOLDER / "file").read_bytes() == b"state"
        assert len(said) == 1 and "is taken over" in said[0]
        keeper.end_keeper(other)
    finally:
        for one in launchers:
            one.kill()
            one.wait()


@pytest.mark.parametrize(("latest", "written"), [(None, True), (2, True), (4, False), (6, False)])
def test_the_save_folder_gets_only_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latest: int | None, written: bool
) -> None:
    """A keeper with a checkpoint of iteration 4 leaves a folder alone that has that iteration, or a later one."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "0"))
    (memory,) = nodes(tmp_path, 1, copies=0)
    disk = LocalStorage(tmp_path / "save")
    disk.create_folder()
    for storage in (memory, disk):
        claim_folder(storage, {}, "token")
    draft = memory.draft(get_checkpoint_name(4), "token")
    draft.create_folder()
    commit(memory, draft, 4, [Manifest({}, {})], encode_json_files({}, {}))
    if latest is not None:
        disk.write(LATEST, f"{latest}\n".encode())
    before = disk.list_names()
    message = keeper.flush(memory, disk)
    if written:
        assert message is not None and "iteration 4 is written" in message
        assert read_latest(disk) == 4 and disk.get_child(get_checkpoint_name(4)).get_file_size(MANIFEST)
    else:
        assert message is None and read_latest(disk) == latest and disk.list_names() == before


def test_another_user_does_not_choose_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_MEMORY_FOLDER", tmp_path)
    one = keeper.Keeper("run", os.getpid(), keeper.get_process_identity(os.getpid()), False)
    (tmp_path / "elsewhere").mkdir()
    keeper._get_keeper_folder(one).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="remove it"):
        keeper.start_or_find("run", os.getpid(), reachable=False, log=lambda _: None)
