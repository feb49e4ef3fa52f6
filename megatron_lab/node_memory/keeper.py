"""Keeper: a process per node that keeps checkpoints in memory while ranks restart, and writes the newest checkpoint to the storage
at the end.

    python -P -m megatron_lab.node_memory.keeper < ORDERS

ORDERS is a `Keeper` as JSON. The first rank of a node starts the keeper (`start_or_find`). When the same launcher restarts the job,
the ranks find the running keeper. The keeper serves the node's files to the ranks of other nodes (`node_link.py`). It ends when the
launcher ends. Before that it writes the newest checkpoint in memory to the save folder, unless the folder has a newer checkpoint.
So a job that crashes or is cancelled loses no more work than a job that is restarted. If a keeper is killed, its folder remains,
and the next keeper of the node takes it over. The module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.heartbeat import get_process_identity
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save_folder import (
    LATEST,
    RUN,
    find_checkpoint,
    get_checkpoint_name,
    load_manifest,
    parse_iteration,
    read_latest,
)
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, Draft, Storage
from megatron.checkpoint.storage_url import NODE_MEMORY_URL, open_storage
from megatron.config.launcher import EXIT_SIGNALS, build_module_command
from megatron_lab.node_memory.node_link import CHUNK_BYTES, serve
from megatron_lab.node_memory.node_storage import FOLDER_VARIABLE, STATE_FOLDER, Nodes, NodeStorage

_MEMORY_FOLDER = Path("/dev/shm")
_KEEPER_FILE, _ENDED_FILE = "keeper.json", "ended"
_POLL_INTERVAL_S = 0.5
_START_TIMEOUT_S = 60.0
_FLUSH_TIMEOUT_S = 600.0
"""Seconds that a keeper waits for the files of the checkpoint that other nodes write."""
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Keeper:
    """Description of a keeper, the process that keeps the checkpoints of a node in memory while the ranks restart.

    The description is passed to the process when it starts, and stored in its folder as `keeper.json`.
    """

    save: str
    """Path or URL of the save folder (--save)."""
    launcher: int
    """PID of the launcher: the process that restarts the ranks of the job. The keeper ends after it."""
    launcher_process: str
    """Identity of the launcher process (`owner.get_process_identity`), to detect a later process with the same PID."""
    reachable: bool
    """Whether the job has other nodes, which must be able to connect to the keeper. If not, the keeper listens on no port."""
    pid: int = 0
    """PID of the keeper. 0 before it has started."""
    process: str = ""
    """Identity of the keeper process (`owner.get_process_identity`), to detect a later process with the same PID."""
    port: int = 0
    """Port on which the keeper listens; 0 if other nodes need not connect."""

    @property
    def is_alive(self) -> bool:
        """Whether the keeper process exists."""
        return _is_alive(self.pid, self.process)

    @property
    def is_launcher_alive(self) -> bool:
        """Whether the launcher process still exists, so that it can restart the job."""
        return _is_alive(self.launcher, self.launcher_process)


def _is_alive(pid: int, process: str) -> bool:
    return get_process_identity(pid) == process != get_process_identity(0)  # the identity of a process that does not exist


def start_or_find(save: str, launcher: int, *, reachable: bool, log: Callable[[str], None]) -> tuple[Path, int]:
    """Return the folder and port of this node's keeper, the process that keeps checkpoints in memory. If no keeper runs, start one.

    One rank of the node calls this. A keeper of an earlier launch of the same job may still be writing its checkpoint to the save
    folder. The function waits until that keeper ends.

    Args:
        save: path or URL of the save folder.
        launcher: PID of the process that restarts the ranks of the job.
        reachable: whether the job has other nodes.
        log: called with a line for the log.

    Raises:
        OSError: there is no folder in memory (/dev/shm), or the keeper does not start.
    """
    new_keeper = Keeper(save, launcher, get_process_identity(launcher), reachable)
    folder = _get_keeper_folder(new_keeper)
    for path in sorted(_get_memory_root().glob(f"{_get_folder_prefix(save)}*")):
        keeper = _read_keeper(path)
        if keeper is None or keeper.launcher_process == new_keeper.launcher_process:
            continue
        if not keeper.is_alive and not keeper.is_launcher_alive and not folder.exists():
            with contextlib.suppress(FileNotFoundError):  # another node on this machine has just taken it
                path.rename(folder)
                log(f"the state that an ended launch left in the memory of this node ({folder}) is taken over")
        elif keeper.is_alive and not keeper.is_launcher_alive:
            _wait_for_end(path, keeper, log)
    keeper = _read_keeper(folder)
    if keeper is not None and keeper.is_alive:
        if keeper.port or not reachable:
            return folder, keeper.port
        with contextlib.suppress(ProcessLookupError):  # the job now has other nodes, and this keeper listens on no port
            os.kill(keeper.pid, signal.SIGKILL)
    return folder, _start_keeper(folder, new_keeper)


def end_keeper(folder: Path) -> None:
    """Make a keeper (the process that keeps checkpoints in memory) end without saving. Called after the run has finished and
    written its last checkpoint.

    Args:
        folder: folder of the keeper.
    """
    with contextlib.suppress(OSError):
        (folder / _ENDED_FILE).touch()


def _start_keeper(folder: Path, config: Keeper) -> int:
    folder.mkdir(mode=0o700, exist_ok=True)
    folder_stat = folder.lstat()
    if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.getuid():
        raise PermissionError(
            f"--memory-save-interval keeps checkpoints in {folder}, but this path is not a folder of the current user: remove it"
        )
    (folder / STATE_FOLDER).mkdir(exist_ok=True)
    (folder / _KEEPER_FILE).unlink(missing_ok=True)
    (folder / _ENDED_FILE).unlink(missing_ok=True)
    command, environment = build_module_command("megatron_lab.node_memory.keeper", folder)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # signals to the job's process group must not reach it
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(config)).encode())
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (started := _read_keeper(folder)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(
                f"the process that keeps checkpoints in memory ({folder}) has ended or did not start in {_START_TIMEOUT_S:g} s: "
                "correct the error that this process has printed above"
            )
        time.sleep(0.01)
    return started.port


def _wait_for_end(folder: Path, keeper: Keeper, log: Callable[[str], None]) -> None:
    log_at = time.monotonic()
    while keeper.is_alive:
        if time.monotonic() >= log_at:
            log(f"waiting for the state of an ended launch, which is being written to {keeper.save} (process {keeper.pid})")
            log_at = time.monotonic() + _LOG_INTERVAL_S
        time.sleep(0.05)


def _get_memory_root() -> Path:
    if not _MEMORY_FOLDER.is_dir():
        raise OSError(
            f"{_MEMORY_FOLDER} does not exist: --memory-save-interval keeps files in this folder, which Linux holds in memory. "
            "Mount a file system in memory (tmpfs) there, or remove --memory-save-interval"
        )
    return _MEMORY_FOLDER


def _get_folder_prefix(save: str) -> str:
    return f"megatron-{hashlib.sha256(f'{os.getuid()} {save}'.encode()).hexdigest()[:12]}-"


def _get_keeper_folder(keeper: Keeper) -> Path:
    return _get_memory_root() / (
        _get_folder_prefix(keeper.save) + hashlib.sha256(keeper.launcher_process.encode()).hexdigest()[:12]
    )


def _read_keeper(folder: Path) -> Keeper | None:
    try:
        return Keeper(**json.loads((folder / _KEEPER_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def main() -> None:
    """Run a keeper: keep the checkpoints in its folder until the launcher of the job has ended, then write the newest to the save
    folder."""
    for signal_number in EXIT_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)  # these signals are for the ranks
    folder, keeper = Path(sys.argv[1]), Keeper(**json.load(sys.stdin))
    os.environ[FOLDER_VARIABLE] = str(folder)
    port = 0
    if keeper.reachable:
        listener = socket.create_server(("", 0))
        serve(folder / STATE_FOLDER, listener, lambda: Nodes.read(folder).token)
        port = listener.getsockname()[1]
    keeper = dataclasses.replace(keeper, pid=os.getpid(), process=get_process_identity(os.getpid()), port=port)
    temporary = folder / f".{_KEEPER_FILE}.new"
    temporary.write_text(json.dumps(dataclasses.asdict(keeper)))
    temporary.replace(folder / _KEEPER_FILE)
    while keeper.is_launcher_alive and folder.is_dir() and not (folder / _ENDED_FILE).exists():
        time.sleep(_POLL_INTERVAL_S)
    if folder.is_dir() and not (folder / _ENDED_FILE).exists():
        try:
            message = flush(NodeStorage(folder), open_storage(keeper.save))
        except Exception as error:  # noqa: BLE001 - the user must see every failure
            message = f"WARNING: the state in memory could not be written to {keeper.save}: {error}"
        if message is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"state in memory: {message}\n")
                sys.stderr.flush()
    shutil.rmtree(folder, ignore_errors=True)


def flush(memory: NodeStorage, disk: Storage, timeout_s: float = _FLUSH_TIMEOUT_S) -> str | None:
    """Write the newest checkpoint in memory to the save folder, unless the save folder has a newer checkpoint.

    The keepers (one process per node) call this together. Each keeper writes those files of which no reachable node with a lower
    index has a copy. The first reachable keeper with the manifest completes the checkpoint.

    Args:
        memory: storage in the memory of the nodes.
        disk: save folder.
        timeout_s: seconds to wait for the keepers of other nodes.

    Returns:
        a line for the log, or None if there was nothing to write.

    Raises:
        CheckpointError: a file is on no reachable node, or other nodes do not write their files in time.
        OSError: the save folder cannot be written.
    """
    path = find_checkpoint(NODE_MEMORY_URL, warn=lambda _: None)
    iteration = None if path is None else parse_iteration(path)
    if path is None or iteration is None or (read_latest(disk) or 0) >= iteration:
        return None
    token = _read_token(memory)
    if _read_token(disk) != token:
        return f"iteration {iteration} is not written to {disk.location}: another run has begun to save there"
    checkpoint = memory.get_child(get_checkpoint_name(iteration))
    manifest, small_files = load_manifest(checkpoint), {name: checkpoint.read(name) for name in (CONFIG, STATE)}
    draft = disk.draft(get_checkpoint_name(iteration), token)
    draft.ensure_folder()
    file_sizes = {name: file.num_bytes for name, file in manifest.files.items() if name not in small_files}
    for name in file_sizes:
        if checkpoint.find_first_holder(name) == memory.nodes.index:
            with checkpoint.open(name) as source, draft.storage.create(draft.get_file_name(name)) as target:
                for offset in range(0, source.size, CHUNK_BYTES):
                    target.write(source.read(offset, min(CHUNK_BYTES, source.size - offset)))
    is_leader = checkpoint.find_first_holder(MANIFEST) == memory.nodes.index
    deadline = time.monotonic() + timeout_s
    while missing := [name for name, size in file_sizes.items() if draft.storage.get_file_size(draft.get_file_name(name)) != size]:
        if not is_leader and (read_latest(disk) or 0) >= iteration:
            return None
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"other nodes have not written {missing[0]} to {disk.location} within {timeout_s:g} s, so the checkpoint of "
                f"iteration {iteration} stays incomplete. Read the output of these nodes"
                if is_leader
                else f"the first node has not completed the checkpoint of iteration {iteration} in {disk.location} within "
                f"{timeout_s:g} s. Read the output of that node"
            )
        time.sleep(_POLL_INTERVAL_S)
    if not is_leader:
        return None
    draft.publish({**small_files, MANIFEST: _rename_files(manifest, draft).to_json()})
    disk.write(LATEST, f"{iteration}\n".encode())
    return f"iteration {iteration} is written to {disk.get_location(get_checkpoint_name(iteration))}, since its job has ended"


def _read_token(storage: Storage) -> Any:
    """Return the token that identifies the run which saves to a storage. Return None if the storage has no readable token."""
    try:
        return json.loads(storage.read(RUN))["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rename_files(manifest: Manifest, draft: Draft) -> Manifest:
    """Return a copy of a manifest in which each file has the name that it has in an unfinished checkpoint (`draft`) of the save
    folder."""
    tensors = {
        name: dataclasses.replace(
            tensor,
            slices=tuple(
                dataclasses.replace(stored_slice, file=draft.get_file_name(stored_slice.file)) for stored_slice in tensor.slices
            ),
        )
        for name, tensor in manifest.tensors.items()
    }
    fixed_names = (CONFIG, STATE)
    stored_files = {name if name in fixed_names else draft.get_file_name(name): file for name, file in manifest.files.items()}
    return Manifest(tensors, stored_files)


if __name__ == "__main__":
    main()
