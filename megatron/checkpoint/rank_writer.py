"""Asynchronous save of one rank, on the side of training: it starts the writer process, fills the shared memory, and handles the
replies of the writer process."""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO

import torch

from megatron.checkpoint.global_tensor import GlobalTensor, get_torch_dtype
from megatron.checkpoint.save_folder import Retention
from megatron.checkpoint.save_plan import SavePlan
from megatron.checkpoint.storage import Storage
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
)
from megatron.config.launcher import build_module_command
from megatron.parallel.tensor_slice import TensorSlice

_KILL_TIMEOUT_S = 2.0


class WriterDied(Exception):
    """Error for a writer process that has ended unexpectedly."""


class WriterProcess:
    """Process that writes this rank's files of each checkpoint (`writer_main.py`), and the memory that it shares with the training
    process.

    The shared memory has no name in the file system, so the system frees it when both processes have ended, for whatever reason.
    All pages are touched once at the start, because the first copy into fresh pages takes several times as long as later copies.

    Args:
        setup: first message to the process: the files that it writes in each save.
        pinned: pin the shared memory, if the system allows it. Copies from a CUDA device then run at the speed of the bus.

    Raises:
        OSError: there is not enough host memory, or the process cannot be started.
    """

    def __init__(self, setup: WriterSetup, *, pinned: bool) -> None:
        self.setup = setup
        num_bytes = max(sum(file.num_data_bytes for file in setup.plan.file_plans), 1)
        with _open_anonymous_file() as file:
            try:
                file.truncate(num_bytes)
                shared = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            except OSError as error:
                reason = f"not enough host memory for the copy that --async-save needs ({num_bytes:,} bytes): {error.strerror}"
                raise OSError(error.errno, reason) from error
            self._connection, child_connection = multiprocessing.Pipe()
            arguments = (file.fileno(), num_bytes, child_connection.fileno(), os.getpid())
            command, environment = build_module_command("megatron.checkpoint.writer_main", *arguments)
            with child_connection:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=environment,
                    pass_fds=(file.fileno(), child_connection.fileno()),
                    start_new_session=True,  # signals to the job's process group must not reach it
                )
        self._memory = torch.frombuffer(shared, dtype=torch.uint8)
        self.pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)) == 0
        self.targets = {
            (item.name, item.tensor_slice): self._memory[byte_range].view(get_torch_dtype(item.dtype)).view(item.tensor_slice.sizes)
            for item, byte_range in setup.plan.get_buffer_ranges().items()
        }
        """View of each slice in the shared memory, by (tensor name, slice)."""
        self.send(setup)

    @property
    def pid(self) -> int:
        """PID of the writer process, for log messages."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message to the writer process. If the process has ended, the message is dropped, and `receive` reports the end."""
        with contextlib.suppress(ConnectionError):
            self._connection.send(message)

    def receive(self, timeout: float = 0.0) -> list[Reply]:
        """Return the replies of the writer process that have arrived. If no reply has arrived, wait up to `timeout` seconds for the
        first.

        Raises:
            WriterDied: all replies have been read, and the writer process has ended.
        """
        replies: list[Reply] = []
        try:
            while self._connection.poll(0.0 if replies else timeout):
                replies.append(self._connection.recv())
        except (EOFError, OSError):
            if not replies:
                code = self._process.wait()
                outcome = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise WriterDied(
                    f"the writer process {outcome}, so this checkpoint is incomplete. Check the memory of the node"
                ) from None
        return replies

    def stop(self) -> None:
        """Kill the writer process. The shared memory is freed when this object is deleted."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a file system cannot be killed
            self._process.wait(_KILL_TIMEOUT_S)
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())


def _open_anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("checkpoint", os.MFD_CLOEXEC), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


_log = logging.getLogger(__name__)

PATIENCE_S = 300.0
STALL_WARNING_S = 60.0
"""Seconds without progress after which an asynchronous save is reported as stalled, and between two reports."""
_FIRST_WARNING_S = 10.0
_WARNING_INTERVAL_S = 60.0


class RankWriter:
    """Asynchronous writer of one rank's files. Its writer process writes one save at a time.

    No method raises an error for a failed write. The failure is stored until `wait_for_rank_result` returns it.

    Args:
        storage: save folder.
        rank: rank in the group that saves. The writer process of rank 0 commits the checkpoint of all ranks.
        num_ranks: number of ranks that save.
        retention: which checkpoints are kept.
        patience_s: while training waits for the writer process, kill the process after this many seconds without a reply.
    """

    def __init__(self, storage: Storage, rank: int, num_ranks: int, retention: Retention, patience_s: float = PATIENCE_S) -> None:
        self._storage, self._rank, self._num_ranks = storage, rank, num_ranks
        self._retention, self._patience_s = retention, patience_s
        self._process: WriterProcess | None = None
        self.iteration: int | None = None
        """Iteration of the last save that was started."""
        self._token = ""
        self.rank_result: RankResult | None = None
        """Result of the write of this rank's files in that save. None while it is running."""
        self.commit_result: CommitResult | None = None
        """On the first rank: result of that save. None while it is running."""
        self.log_lines: list[str] = []
        """Messages of the writer process for the log."""
        self._activity, self._advanced_at, self._warned_at = "", 0.0, 0.0

    def start(
        self,
        iteration: int,
        token: str,
        plan: SavePlan,
        tensors: list[GlobalTensor],
        small_files: dict[str, bytes] | None,
        failed_iterations: tuple[int, ...] = (),
    ) -> None:
        """Copy the slices that this rank writes into the shared memory, and let the writer process write them. The previous save
        must have ended.

        Args:
            iteration: iteration of the checkpoint.
            token: hexadecimal digits that identify the run.
            plan: files that this rank writes.
            tensors: local slices of this rank. They may change as soon as this returns.
            small_files: on rank 0, contents of `config.json` and `state.json` by name.
            failed_iterations: iterations of failed saves, whose files the writer process of rank 0 removes.
        """
        self.iteration, self._token = iteration, token
        self.rank_result = self.commit_result = None
        self.receive()  # the process may have died since the last call
        setup = WriterSetup(self._storage.location, plan, self._num_ranks, self._retention)
        if self._process is None or self._process.setup != setup:
            self.close()
            try:
                self._process = WriterProcess(setup, pinned=any(tensor.local.is_cuda for tensor in tensors))
            except OSError as error:
                self._fail(f"rank {self._rank}: {error}")
                return
        _copy_slices(tensors, self._process.targets)
        self._activity, self._advanced_at, self._warned_at = "the writer process", time.monotonic(), 0.0
        self._process.send(
            SaveRequest(iteration, token, small_files if self._rank == 0 else None, failed_iterations if self._rank == 0 else ())
        )

    def receive(self, timeout: float = 0.0) -> bool:
        """Store the replies of the writer process that have arrived. If no reply has arrived, wait up to `timeout` seconds for the
        first.

        Returns:
            whether a reply arrived.
        """
        if self._process is None:
            return False
        try:
            replies = self._process.receive(timeout)
        except WriterDied as error:
            self._fail_and_mark(f"rank {self._rank}: {error}")
            return False
        for reply in replies:
            if isinstance(reply, SaveProgress) and (reply.has_advanced or reply.activity != self._activity):
                self._activity, self._advanced_at = reply.activity, time.monotonic()
            if isinstance(reply, RankResult):
                self.rank_result = reply
            elif isinstance(reply, CommitResult):
                self.commit_result = reply
            elif isinstance(reply, LogLine):
                self.log_lines.append(reply.text)
        return bool(replies)

    def get_stall_warning(self) -> str | None:
        """Return a warning for the log if the running save has made no progress for `STALL_WARNING_S` seconds, otherwise None.

        The warning is repeated after every further `STALL_WARNING_S` seconds. Used on rank 0.
        """
        now_s = time.monotonic()
        if (
            self.iteration is None
            or self.commit_result is not None
            or now_s - max(self._advanced_at, self._warned_at) < STALL_WARNING_S
        ):
            return None
        self._warned_at = now_s
        return (
            f"save of iteration {self.iteration} has waited {now_s - self._advanced_at:.0f} s for {self._activity} on "
            f"{self._storage.location}; training goes on until the next save is due"
        )

    def wait_for_rank_result(self) -> str | None:
        """Wait until this rank has written its files of the last save. Returns None, or the reason why the files could not be
        written."""
        self._wait_until(lambda: self.rank_result is not None)
        return None if self.rank_result is None else self.rank_result.failure

    def wait_for_commit(self, failures: list[str]) -> None:
        """Wait until the checkpoint of the last save is complete or has failed. Rank 0 calls this when all ranks have reported
        their results.

        Args:
            failures: reasons why ranks could not write their files.
        """
        if self.iteration is not None and self.commit_result is None and self._process is not None:
            self._process.send(RanksFinished("\n  ".join(dict.fromkeys(failures)) or None))
        self._wait_until(lambda: self.commit_result is not None)

    def shut_down(self, failed_iterations: tuple[int, ...] = ()) -> None:
        """End the writer process after its current work, and free the memory shared with it. On rank 0 it may still be removing old
        checkpoints.

        Args:
            failed_iterations: iterations of failed saves, whose files the writer process of rank 0 removes.
        """
        if self._process is not None:
            self._process.send(Shutdown(failed_iterations if self._rank == 0 else (), self._token))
        self._wait_until(lambda: self._process is None)

    def close(self) -> None:
        """Kill the writer process immediately, also in the middle of a save, and free the memory shared with it."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Handle replies of the writer process until `is_done` returns True. If there is no reply for `patience_s`, kill the
        process and record the save as failed."""
        start = last_reply = time.monotonic()
        warn_at = start + _FIRST_WARNING_S
        while self.iteration is not None and not is_done():
            if self._process is None:
                self._fail(f"rank {self._rank}: the writer process has ended")
                return
            pid = self._process.pid
            has_replied = self.receive(min(1.0, self._patience_s))
            now_s = time.monotonic()
            last_reply = now_s if has_replied else last_reply
            if now_s - last_reply > self._patience_s:
                reason = f"made no progress for {now_s - last_reply:.0f} s and was ended"
                self._fail_and_mark(f"rank {self._rank}: the writer process {reason}")
            elif now_s > warn_at and not is_done():
                _log.error(
                    f"rank {self._rank}: still waiting for the save of iteration {self.iteration} "
                    f"(process {pid}, {now_s - start:.0f} s, last sign of life {now_s - last_reply:.0f} s ago)"
                )
                warn_at = now_s + _WARNING_INTERVAL_S

    def _fail_and_mark(self, reason: str) -> None:
        """Kill the writer process, record that the save has failed, and report the failure to rank 0.

        Training itself never accesses the storage. On ranks other than 0 a new writer process therefore writes a failure mark: a
        file that tells the writer process of rank 0 that the files of this rank will be missing.
        """
        assert self._process is not None
        setup, pinned, needs_mark = (
            self._process.setup,
            self._process.pinned,
            self.rank_result is None and self.iteration is not None,
        )
        self.close()
        self._fail(reason)
        if needs_mark and self._rank > 0:
            assert self.iteration is not None
            with contextlib.suppress(OSError):
                self._process = WriterProcess(setup, pinned=pinned)
                self._process.send(FailureMark(self.iteration, self._token, reason))

    def _fail(self, reason: str) -> None:
        """Record that the save has failed on this rank. On rank 0 this also means that there will be no checkpoint.

        Args:
            reason: part of the error message.
        """
        if self.iteration is None:
            return
        if self.rank_result is None:
            self.rank_result = RankResult(reason)
        if self._rank == 0 and self.commit_result is None:
            self.commit_result = CommitResult(self.iteration, reason, "", 0.0)


def _copy_slices(tensors: list[GlobalTensor], targets: Mapping[tuple[str, TensorSlice], torch.Tensor]) -> None:
    """Copy slices into the shared memory, and wait until copies from CUDA devices have finished.

    Args:
        targets: views of the shared memory by (tensor name, slice). Other slices are not copied.
    """
    devices = set()
    for tensor in tensors:
        for local_slice in tensor.slices:
            target = targets.get((tensor.name, local_slice.slice))
            if target is not None:
                target.copy_(tensor.get_local_view(local_slice), non_blocking=True)
                devices.add(tensor.local.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
