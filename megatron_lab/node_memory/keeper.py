"""The process of a node that keeps the state in memory when the ranks have ended, and in the end brings it to the storage.

    python -P -m megatron_lab.node_memory.keeper < ORDERS

The first rank of a node starts it (`start_or_find`), and later starts of the job by the same launcher find it again. It gives the
node's files to the ranks of other nodes (`node_link.py`). It ends with the launcher, after it has written the newest checkpoint in
memory to the save folder, unless a newer one is there: so a job that crashes, or is ended, loses no more than one that goes on. A
keeper that was killed leaves its folder, which the next one takes over. Needs no torch.
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
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.owner import process_of
from megatron.checkpoint.save_folder import LATEST, RUN, checkpoint_name, find_checkpoint, iteration_of, latest_in, manifest_in
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, Draft, Storage
from megatron.checkpoint.storage_kinds import LOCATION, open_storage
from megatron.config.launcher import module_start
from megatron_lab.node_memory.node_link import CHUNK_BYTES, serve
from megatron_lab.node_memory.node_storage import FOLDER_VARIABLE, STATE_FOLDER, Nodes, NodeStorage

_MEMORY = Path("/dev/shm")
_KEEPER, _ENDED = "keeper.json", "ended"
_LOOK_EVERY_S = 0.5
_STARTS_WITHIN_S = 60.0
_FLUSH_WITHIN_S = 600.0
"""Seconds for which a keeper waits for what other nodes write of the checkpoint."""
_TELL_EVERY_S = 10.0


@dataclass(frozen=True)
class Keeper:
    """A keeper as its folder shows it, and at once its orders."""

    save: str
    """Location of the save folder."""
    launcher: int
    launcher_process: str
    """The launcher's process, so that no later one of the same number is taken for it (`owner.process_of`)."""
    reachable: bool
    """Whether other nodes must reach it: else it listens nowhere."""
    pid: int = 0
    process: str = ""
    port: int = 0

    @property
    def lives(self) -> bool:
        """Whether the keeper does."""
        return _lives(self.pid, self.process)

    @property
    def launcher_lives(self) -> bool:
        """Whether the job can still be started again."""
        return _lives(self.launcher, self.launcher_process)


def _lives(pid: int, process: str) -> bool:
    return process_of(pid) == process != process_of(0)  # that of no process


def start_or_find(save: str, launcher: int, *, reachable: bool, tell: Callable[[str], None]) -> tuple[Path, int]:
    """The folder and port of this node's keeper, which is started if there is none. One rank of the node calls it.

    A keeper of an earlier launch of the same job may still be writing its state to the save folder: it is waited for.

    Args:
        save: location of the save folder.
        launcher: process that would start the job again.
        reachable: whether there are other nodes.
        tell: called with a line for the log.

    Raises:
        OSError: there is no memory to keep files in, or the keeper does not start.
    """
    wanted = Keeper(save, launcher, process_of(launcher), reachable)
    folder = _folder_of(wanted)
    for path in sorted(_root().glob(f"{_prefix(save)}*")):
        found = _read(path)
        if found is None or found.launcher_process == wanted.launcher_process:
            continue
        if not found.lives and not found.launcher_lives and not folder.exists():
            with contextlib.suppress(FileNotFoundError):  # ranks of another node on this machine were faster
                path.rename(folder)
                tell(f"the state that an ended launch left in the memory of this node ({folder}) is taken over")
        elif found.lives and not found.launcher_lives:
            _wait_for_end(path, found, tell)
    found = _read(folder)
    if found is not None and found.lives:
        if found.port or not reachable:
            return folder, found.port
        with contextlib.suppress(ProcessLookupError):  # the job has got further nodes
            os.kill(found.pid, signal.SIGKILL)
    return folder, _start(folder, wanted)


def end_keeper(folder: Path) -> None:
    """The run has ended as it should, and its last checkpoint is written: nothing need be kept."""
    with contextlib.suppress(OSError):
        (folder / _ENDED).touch()


def _start(folder: Path, keeper: Keeper) -> int:
    folder.mkdir(mode=0o700, exist_ok=True)
    mode = folder.lstat()
    if not stat.S_ISDIR(mode.st_mode) or mode.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user: remove it")
    (folder / STATE_FOLDER).mkdir(exist_ok=True)
    (folder / _KEEPER).unlink(missing_ok=True)
    (folder / _ENDED).unlink(missing_ok=True)
    command, environment = module_start("megatron_lab.node_memory.keeper", folder)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # signals to the job's process group are not for it
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(keeper)).encode())
    until = time.monotonic() + _STARTS_WITHIN_S
    while (found := _read(folder)) is None:
        if process.poll() is not None or time.monotonic() > until:
            raise OSError(f"the process that keeps the state in memory ({folder}) does not start")
        time.sleep(0.01)
    return found.port


def _wait_for_end(folder: Path, keeper: Keeper, tell: Callable[[str], None]) -> None:
    tell_at = time.monotonic()
    while keeper.lives:
        if time.monotonic() >= tell_at:
            tell(f"waiting for the state of an ended launch, which is being written to {keeper.save} (process {keeper.pid})")
            tell_at = time.monotonic() + _TELL_EVERY_S
        time.sleep(0.05)


def _root() -> Path:
    if not _MEMORY.is_dir():
        raise OSError(f"{_MEMORY} is not there: --memory-save-interval keeps files in it, which Linux has in memory")
    return _MEMORY


def _prefix(save: str) -> str:
    return f"megatron-{hashlib.sha256(f'{os.getuid()} {save}'.encode()).hexdigest()[:12]}-"


def _folder_of(keeper: Keeper) -> Path:
    return _root() / (_prefix(keeper.save) + hashlib.sha256(keeper.launcher_process.encode()).hexdigest()[:12])


def _read(folder: Path) -> Keeper | None:
    try:
        return Keeper(**json.loads((folder / _KEEPER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def main() -> None:
    """Keep the files of a folder until the launcher has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the ranks, whose state this is
    folder, keeper = Path(sys.argv[1]), Keeper(**json.load(sys.stdin))
    os.environ[FOLDER_VARIABLE] = str(folder)
    port = 0
    if keeper.reachable:
        listener = socket.create_server(("", 0))
        serve(folder / STATE_FOLDER, listener, lambda: Nodes.read(folder).token)
        port = listener.getsockname()[1]
    keeper = dataclasses.replace(keeper, pid=os.getpid(), process=process_of(os.getpid()), port=port)
    new = folder / f".{_KEEPER}.new"
    new.write_text(json.dumps(dataclasses.asdict(keeper)))
    new.replace(folder / _KEEPER)
    while keeper.launcher_lives and folder.is_dir() and not (folder / _ENDED).exists():
        time.sleep(_LOOK_EVERY_S)
    if folder.is_dir() and not (folder / _ENDED).exists():
        try:
            told = flush(NodeStorage(folder), open_storage(keeper.save))
        except Exception as error:  # noqa: BLE001 - whatever it was, the user must hear of it
            told = f"WARNING: the state in memory could not be written to {keeper.save}: {error}"
        if told is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"state in memory: {told}\n")
                sys.stderr.flush()
    shutil.rmtree(folder, ignore_errors=True)


def flush(memory: NodeStorage, disk: Storage, within_s: float = _FLUSH_WITHIN_S) -> str | None:
    """Write the newest checkpoint in memory to the save folder, unless a newer one is there. The keepers of all nodes do it
    together: each writes the files of which it is the first of those that answer to have them, and the first makes the checkpoint.

    Returns:
        a line for the log; None if there was nothing to do.

    Raises:
        CheckpointError: files are on no node that answers, or other nodes do not write theirs.
        OSError: the folder cannot be written.
    """
    found = find_checkpoint(LOCATION, tell=lambda _: None)
    iteration = None if found is None else iteration_of(found)
    if found is None or iteration is None or (latest_in(disk) or 0) >= iteration:
        return None
    token = _token(memory)
    if _token(disk) != token:
        return f"iteration {iteration} is not written to {disk.location}: another run has begun to save there"
    inside = memory.child(checkpoint_name(iteration))
    manifest, small = manifest_in(inside), {name: inside.read(name) for name in (CONFIG, STATE)}
    draft = disk.draft(checkpoint_name(iteration), token)
    draft.join()
    files = {name: file.num_bytes for name, file in manifest.files.items() if name not in small}
    for name in files:
        if inside.first_holder(name) == memory.nodes.index:
            with inside.open(name) as source, draft.storage.create(draft.file_name(name)) as target:
                for at in range(0, source.size, CHUNK_BYTES):
                    target.write(source.read(at, min(CHUNK_BYTES, source.size - at)))
    leads = inside.first_holder(MANIFEST) == memory.nodes.index
    until = time.monotonic() + within_s
    while missing := [name for name, size in files.items() if draft.storage.size(draft.file_name(name)) != size]:
        if not leads and (latest_in(disk) or 0) >= iteration:
            return None
        if time.monotonic() > until:
            raise CheckpointError(
                f"other nodes have not written {missing[0]}" if leads else "the first node has not ended the checkpoint"
            )
        time.sleep(_LOOK_EVERY_S)
    if not leads:
        return None
    draft.publish({**small, MANIFEST: _renamed(manifest, draft).to_json()})
    disk.write(LATEST, f"{iteration}\n".encode())
    return f"iteration {iteration} is written to {disk.at(checkpoint_name(iteration))}, since its job has ended"


def _token(storage: Storage) -> Any:
    """The token of the run that saves in a folder."""
    try:
        return json.loads(storage.read(RUN))["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _renamed(manifest: Manifest, draft: Draft) -> Manifest:
    """The manifest with the names that files have in a draft."""
    tensors = {
        name: dataclasses.replace(
            tensor, boxes=tuple(dataclasses.replace(box, file=draft.file_name(box.file)) for box in tensor.boxes)
        )
        for name, tensor in manifest.tensors.items()
    }
    small = (CONFIG, STATE)
    files = {name if name in small else draft.file_name(name): file for name, file in manifest.files.items()}
    return Manifest(tensors, files)


if __name__ == "__main__":
    main()
