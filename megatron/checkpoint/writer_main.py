"""Writer process of a rank. It writes the rank's files during training; on the first rank it also commits the checkpoint.

    python -m megatron.checkpoint.writer_main MEMORY NUM_BYTES CONNECTION PARENT

`rank_writer.py` starts it as a separate program. A fork would be dangerous in a process with a CUDA device, and slow in a process
with many gigabytes. It imports no torch. MEMORY is the file descriptor of the shared memory with the data, CONNECTION that of the
pipe for messages and replies. PARENT is the PID of the training process. The writer ends immediately when the training process
ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.manifest import Manifest, parse_manifest
from megatron.checkpoint.save_folder import apply_retention, commit, get_checkpoint_name
from megatron.checkpoint.save_plan import write_rank_files
from megatron.checkpoint.storage import Draft
from megatron.checkpoint.storage_url import open_storage
from megatron.checkpoint.writer_messages import (
    CommitResult,
    FailureMark,
    LogLine,
    Message,
    RankResult,
    RanksFinished,
    Reply,
    SaveProgress,
    SaveRequest,
    Shutdown,
    WriterSetup,
    get_failure_mark_name,
    get_rank_manifest_name,
)
from megatron.config.launcher import EXIT_SIGNALS

_PR_SET_PDEATHSIG = 1
_NICE = 10
"""Niceness of the process: training has priority if there is no free core for both."""
MAX_PAUSE_S = 0.5
"""Maximum number of seconds between two checks for the manifests of all ranks."""
PROGRESS_INTERVAL_S = 2.0
VISIBILITY_TIMEOUT_S = 60.0
"""Seconds within which the files of another rank must become visible. Network file systems show new names with a delay."""
_MANIFEST_TIMEOUT_S = 10.0


class BackgroundWriter:
    """Writer of one rank's files, which runs in a process of its own. It does what the messages of the training process request.

    Args:
        data: memory shared with the training process, which holds the rank's slices.
        inbox: messages of the training process after `WriterSetup`.
        setup: files that each save writes.
        reply: function that sends a reply to the training process.
    """

    def __init__(self, data: memoryview, inbox: queue.Queue[Message], setup: WriterSetup, reply: Callable[[Reply], None]) -> None:
        self._inbox, self._setup, self._reply = inbox, setup, reply
        self._storage = open_storage(setup.location)
        self._reported_at = -PROGRESS_INTERVAL_S
        self._activity = ""
        self._data = {item: data[byte_range] for item, byte_range in setup.plan.get_buffer_ranges().items()}

    def run(self) -> None:
        """Handle the messages of the training process until the message `Shutdown`: write the files of a save, or a failure mark (a
        file that tells the writer process of rank 0 not to wait for this rank)."""
        while not isinstance(message := self._inbox.get(), Shutdown):
            if isinstance(message, SaveRequest):
                self._save(message)
            elif isinstance(message, FailureMark):
                self._write_failure_mark(self._draft(message.iteration, message.token), message.failure)
        self._discard_failed(message)

    def _save(self, message: SaveRequest) -> None:
        start = time.monotonic()
        rank = self._setup.plan.rank
        draft = self._draft(message.iteration, message.token)
        try:
            self._report_activity("the removal of files of failed saves" if message.failed_iterations else "its folder")
            self._discard_failed(message)
            draft.ensure_folder()
            self._report_activity("the write of its files")
            rank_manifest = write_rank_files(draft, self._setup.plan, self._data.__getitem__, self._report_progress)
            draft.storage.write(draft.get_file_name(get_rank_manifest_name(rank)), rank_manifest.to_json())
            failure = None
        except Exception as error:  # noqa: BLE001 - training continues and logs the failure
            failure = _format_reason(error, rank)
            self._write_failure_mark(draft, failure)
        self._reply(RankResult(failure))
        if message.small_files is None:
            return
        digest = ""
        try:
            digest = str(self._commit(draft, message, failure).content_digest)
            failure = None
        except Exception as error:  # noqa: BLE001 - as above
            failure = str(error) if isinstance(error, CheckpointError) else _format_reason(error, rank)
            draft.discard()
        self._reply(CommitResult(message.iteration, failure, digest, time.monotonic() - start))
        if failure is None:
            self._report_activity("the removal of old checkpoints")
            self._apply_retention()

    def _discard_failed(self, message: SaveRequest | Shutdown) -> None:
        for iteration in message.failed_iterations:
            self._draft(iteration, message.token).discard()

    def _draft(self, iteration: int, token: str) -> Draft:
        return self._storage.draft(get_checkpoint_name(iteration), token)

    def _write_failure_mark(self, draft: Draft, failure: str) -> None:
        with contextlib.suppress(Exception):
            draft.storage.write(draft.get_file_name(get_failure_mark_name(self._setup.plan.rank)), failure.encode())

    def _commit(self, draft: Draft, message: SaveRequest, failure: str | None) -> Manifest:
        if failure is not None:
            raise CheckpointError(failure)
        self._wait_for_rank_manifests(draft)
        self._report_activity("the files that make it a checkpoint")
        rank_manifests = []
        for rank in range(self._setup.num_ranks):
            name = draft.get_file_name(get_rank_manifest_name(rank))
            rank_manifests.append(_read_rank_manifest(draft, name))
            draft.storage.remove(name)
        assert message.small_files is not None
        return commit(self._storage, draft, message.iteration, rank_manifests, message.small_files, token=message.token)

    def _wait_for_rank_manifests(self, draft: Draft) -> None:
        """Wait until all ranks have written their files.

        Raises:
            CheckpointError: a rank could not write its files, or training reports that a rank will not write them.
        """
        missing = set(range(self._setup.num_ranks))
        pause, deadline = 0.002, float("inf")
        while True:
            file_names = set(draft.storage.list_names())
            failed = [rank for rank in sorted(missing) if draft.get_file_name(get_failure_mark_name(rank)) in file_names]
            if failed:
                reasons = dict.fromkeys(
                    draft.storage.read(draft.get_file_name(get_failure_mark_name(rank))).decode(errors="replace") for rank in failed
                )
                raise CheckpointError(format_list(list(reasons), "\n  "))
            missing = {rank for rank in missing if draft.get_file_name(get_rank_manifest_name(rank)) not in file_names}
            if not missing:
                return
            self._report_activity(f"the files of other ranks ({format_list([str(rank) for rank in sorted(missing)])})")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {min(missing)} has written its files, but the first rank does not see them in {draft.storage.location}: "
                    f"set --save to a folder on a file system that all nodes share"
                )
            with contextlib.suppress(queue.Empty):
                message = self._inbox.get(timeout=pause)
                if isinstance(message, Shutdown):
                    self._inbox.put(message)
                    raise CheckpointError(
                        "training has ended before all ranks had written their files, so this checkpoint is incomplete and will "
                        "not be loaded. Continue from the previous checkpoint"
                    )
                if isinstance(message, RanksFinished):
                    if message.failure is not None:
                        raise CheckpointError(message.failure)
                    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
            pause = min(2 * pause, MAX_PAUSE_S)
            self._report_progress(has_advanced=False)

    def _report_activity(self, activity: str) -> None:
        """Tell the training process what this writer does next, for its log. Call this before the activity starts, because the
        storage may hang during the activity."""
        if activity != self._activity:
            self._activity = activity
            self._reply(SaveProgress(activity, True))

    def _report_progress(self, *, has_advanced: bool = True) -> None:
        """Tell the training process that this writer is still working on the save. At most one report is sent per
        `PROGRESS_INTERVAL_S` seconds, because the training process sometimes reads no replies for a long time, and unread reports
        would accumulate in the pipe.

        Args:
            has_advanced: whether more data is on the disk; False while the writer waits for other ranks.
        """
        if (time_s := time.monotonic()) - self._reported_at >= PROGRESS_INTERVAL_S:
            self._reported_at = time_s
            self._reply(SaveProgress(self._activity, has_advanced))

    def _apply_retention(self) -> None:
        try:
            apply_retention(self._storage, self._setup.retention)
        except Exception as error:  # noqa: BLE001 - the checkpoint is complete nevertheless
            self._reply(LogLine(f"old checkpoints in {self._storage.location} could not be removed: {error}"))


def _read_rank_manifest(draft: Draft, name: str) -> Manifest:
    """Read the manifest that a rank has written for its files. If the manifest is incomplete, read it again: some remote file
    systems show a file while it is being written."""
    deadline = time.monotonic() + _MANIFEST_TIMEOUT_S
    while True:
        try:
            return parse_manifest(draft.storage.read(name), draft.storage.location, name)
        except DamagedCheckpointError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _format_reason(error: Exception, rank: int) -> str:
    """Return a message for the user about a failed write. An error that indicates a bug is shown with its type."""
    text = str(error) if isinstance(error, (CheckpointError, OSError)) else repr(error)
    return f"rank {rank}: {text}"


def _die_with_parent(parent: int) -> None:
    """Let the system kill this process when the training process ends, even in the middle of a write."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def _forward_messages(connection: Connection, inbox: queue.Queue[Message]) -> None:
    """Put all messages of the training process into the inbox. End this writer process when the connection closes, because training
    has then ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    os._exit(0)


def main() -> None:
    """Run the writer process: map the memory shared with the training process, then write saves on request."""
    memory_fd, num_bytes, message_fd, parent = (int(text) for text in sys.argv[1:])
    _die_with_parent(parent)
    for signal_number in EXIT_SIGNALS:
        # These signals are for the training process, which decides whether a save is finished.
        signal.signal(signal_number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    data = memoryview(mmap.mmap(memory_fd, num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))
    os.close(memory_fd)
    connection, inbox = Connection(message_fd), queue.Queue[Message]()
    threading.Thread(target=_forward_messages, args=(connection, inbox), daemon=True).start()
    setup = inbox.get()
    assert isinstance(setup, WriterSetup)
    BackgroundWriter(data, inbox, setup, connection.send).run()
    os._exit(0)  # without waiting for the thread that receives messages


if __name__ == "__main__":
    main()
