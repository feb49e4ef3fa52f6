"""Saving of a run: which tensors and values a checkpoint contains, and when it is written.

Weights are stored once, in their most precise form: the float32 main parameters if the model computes in 16 bits, else the
parameters themselves. So a checkpoint does not depend on the dtype of the model. A load gets the 16-bit parameters by rounding the
main parameters.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, Protocol

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import EMA, WEIGHT, GlobalTensor
from megatron.checkpoint.heartbeat import Heartbeat, check_no_live_owner
from megatron.checkpoint.rank_writer import PATIENCE_S
from megatron.checkpoint.save_folder import (
    RUN,
    Retention,
    apply_retention,
    check_no_foreign_checkpoints,
    check_still_owner,
    check_writable,
    get_checkpoint_name,
    read_best,
)
from megatron.checkpoint.savers import AsyncSaver, LogFunction, SyncSaver
from megatron.checkpoint.storage import MANIFEST, Storage
from megatron.checkpoint.storage_url import NODE_MEMORY_URL, open_storage
from megatron.config.imports import import_object
from megatron.config.outputs import CheckpointConfig
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.context import ParallelContext
from megatron.training.failure import run_on_all_ranks
from megatron.training.progress import LearningSchedule, Progress

_VISIBILITY_TIMEOUT_S = 10.0
"""Seconds within which all nodes must see a file that the first rank has written. Network file systems show new files late."""


class NodeMemoryKeeper(Protocol):
    """Handle of the keeper, which is a process on this node that keeps copies of the run's state in host memory."""

    def end(self) -> None:
        """End the keeper process after a successful run. Its copies are not needed any more, because the last checkpoint is in
        storage."""


def build_global_tensors(
    optimizer: ShardedOptimizer, context: ParallelContext, *, state: bool = True, averages: bool = True
) -> list[GlobalTensor]:
    """Return this rank's parts of the tensors of a checkpoint. Each part is a slice of a global tensor. Frozen parameters are
    included.

    The tensors are named `model.<name>` for weights, `ema.<name>` for the average of the weights, and for example `exp_avg.<name>`
    for optimizer state.

    Args:
        state: include optimizer state.
        averages: include the average of the weights, if there is one.
    """
    tensors = []
    for shard in optimizer.checkpoint_shards:
        name = shard.record.name
        tensors.append(GlobalTensor(f"{WEIGHT}.{name}", shard.record.shape, shard.main_param, shard.get_slices(context)))
        if averages and shard.average is not None:
            tensors.append(GlobalTensor(f"{EMA}.{name}", shard.record.shape, shard.average, shard.get_slices(context)))
        for moment_name, moment in shard.moments.items() if state else ():
            shape = shard.get_state_shape(moment_name).get_shape(shard.record.shape)
            tensors.append(GlobalTensor(f"{moment_name}.{name}", shape, moment, shard.get_state_slices(moment_name, context)))
    return tensors


class Saver:
    """Saver of the state of a run: builds the content of a checkpoint, and writes it to the save folder and to the memory of the
    nodes.

    The constructor checks that the folder is writable and that no other run saves in it.

    Args:
        run_record: resolved settings, versions and command line. They are stored in each checkpoint, and as `run.json` at the
            start.
        patience_s: maximum time in seconds for which training waits for a background writer (--async-save) that makes no progress.
            Then the writer is stopped.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: ParallelContext,
        run_record: dict[str, Any],
        vocab_size: int,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._config, self._context = config, context
        self._record = {**run_record, "vocab_size": vocab_size}
        self._retention = Retention(config.keep_last, config.save_retain_interval, config.keep_best)
        self._last_iteration: int | None = None
        self._timed_iterations: set[int] = set()
        """On the first rank: iterations of the checkpoints that are removed when a newer checkpoint is complete."""
        self._async_saver: AsyncSaver | None = None
        self._heartbeat: Heartbeat | None = None
        self._node_memory: NodeMemoryKeeper | None = None
        self._node_memory_saver: AsyncSaver | None = None
        if config.save is None:
            return
        self._storage: Storage = run_on_all_ranks(context, lambda: open_storage(str(config.save)))
        self._sync_saver = SyncSaver(self._storage, context.world)
        if config.async_save:
            if self._storage.location.startswith("memory://"):
                raise ValueError(
                    f"--save {config.save}: --async-save writes in another process, which cannot access the memory of "
                    "the training process. Leave out --async-save, or set --save to a folder."
                )
            self._async_saver = AsyncSaver(self._storage, context.world, self._retention, patience_s)
        run_on_all_ranks(context, lambda: self._prepare() if context.rank == 0 else None)
        if config.memory_save_interval is not None:
            self._node_memory = import_object("megatron_lab.node_memory.node_memory:start_keepers")(
                self._storage.location, config.replicate_state, context
            )
            token = (self._async_saver or self._sync_saver).token
            self._node_memory_saver = AsyncSaver(
                open_storage(NODE_MEMORY_URL), context.world, Retention(keep_last=1), patience_s, token
            )

    @property
    def saves_to_node_memory(self) -> bool:
        """Whether the state of the run is regularly copied to the host memory of the nodes (--memory-save-interval)."""
        return self._node_memory is not None

    def _prepare(self) -> None:
        check_writable(self._storage)
        check_no_foreign_checkpoints(self._storage)
        if not self._config.take_over:
            check_no_live_owner(self._storage, warnings.warn)
            # Without a live owner, unfinished folders belong to dead runs. They must not be mistaken for checkpoints.
            (self._async_saver or self._sync_saver).remove_unfinished()

    @contextmanager
    def claim_folder(self) -> Iterator[None]:
        """Own the save folder while the block is active. After the block another run may save into the folder.

        All ranks enter the block together, after all checks of the start. Otherwise a run that then refuses to start would have
        taken the folder from its owner.
        """
        try:
            if self._config.save is not None:
                run_on_all_ranks(self._context, lambda: self._start_ownership() if self._context.rank == 0 else None)
                run_on_all_ranks(self._context, self._check_folder_is_shared)
            yield
            if self._node_memory is not None:
                self._node_memory.end()
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()

    def _start_ownership(self) -> None:
        saver = self._async_saver or self._sync_saver
        saver.claim_folder(self._record)
        if self._node_memory_saver is not None:
            self._node_memory_saver.claim_folder(self._record)
        self._heartbeat = Heartbeat(self._storage.location, saver.token)

    def _check_folder_is_shared(self) -> None:
        deadline = time.monotonic() + _VISIBILITY_TIMEOUT_S
        while self._storage.get_file_size(RUN) is None:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"--save {self._storage.location}: this node does not see {RUN}, which the first rank has written there. "
                    "Set --save to a folder on a file system that all nodes share."
                )
            time.sleep(0.1)

    def save(
        self,
        progress: Progress,
        optimizer: ShardedOptimizer,
        scaler: GradScaler,
        schedule: LearningSchedule,
        log: LogFunction,
        extras: Mapping[str, Any] = MappingProxyType({}),
        *,
        is_timed: bool = False,
    ) -> str | None:
        """Write a checkpoint of the current iteration. All ranks call this function together.

        Nothing is written without --save, or if the checkpoint of the iteration exists already. With --async-save, the function
        returns after the state is copied.

        Args:
            log: function that writes a line to the log on the first rank.
            extras: additional entries of `config.json`, besides the settings, versions and command line of the run.
            is_timed: whether the checkpoint is removed when a newer one is complete. This does not apply if --keep-last or
                --save-retain-interval says which checkpoints are kept.

        Returns:
            path or URL of the checkpoint; None if nothing is written.

        Raises:
            CheckpointError: on all ranks, if any rank cannot write. The failure of a timed save is only logged. With --async-save
                only if the state cannot be saved at all.
        """
        if not is_timed:
            self._timed_iterations.discard(progress.iteration)
        if self._config.save is None or self._last_iteration == progress.iteration:
            return None
        state = self._build_state(progress, optimizer, scaler, schedule, has_optimizer=self._config.save_optim)
        record = {**self._record, **extras}
        tensors = build_global_tensors(optimizer, self._context, state=self._config.save_optim)
        previous_iteration, self._last_iteration = self._last_iteration, progress.iteration
        if is_timed and self._retention.keeps_all and self._context.rank == 0 and not self._exists(progress.iteration):
            self._timed_iterations.add(progress.iteration)
        location = self.build_checkpoint_path(progress.iteration)
        if self._async_saver is not None:
            self._async_saver.save(progress.iteration, tensors, record, state, log)
            return location
        start_time = time.monotonic()
        try:
            digest = self._sync_saver.save(progress.iteration, tensors, record, state)
        except CheckpointError as error:
            if not is_timed:
                raise
            self._last_iteration = previous_iteration
            self._timed_iterations.discard(progress.iteration)
            log(f"SAVE FAILED: {error}\n  Training goes on. The run tries again at the next save.")
            return None
        if self._context.rank == 0:
            log(f"saved {location} in {time.monotonic() - start_time:.1f} s, digest {digest[:16]}")
            apply_retention(self._storage, self._retention)
            self._remove_timed_checkpoints(log)
        return location

    def _exists(self, iteration: int) -> bool:
        return self._storage.get_file_size(f"{get_checkpoint_name(iteration)}/{MANIFEST}") is not None

    def _remove_timed_checkpoints(self, log: LogFunction) -> None:
        """Remove the checkpoints of timed saves that are older than the last checkpoint that this run has completed. Called on the
        first rank. A failure is only logged, because the newer checkpoint is complete."""
        saver = self._async_saver or self._sync_saver
        for iteration in sorted(self._timed_iterations):
            if saver.last_saved is None or iteration >= saver.last_saved:
                return
            self._timed_iterations.remove(iteration)
            try:
                check_still_owner(self._storage, saver.token)
                if self._exists(iteration) and iteration != read_best(self._storage):  # the user may have moved it away
                    self._storage.remove_checkpoint(get_checkpoint_name(iteration))
            except (OSError, CheckpointError) as error:
                log(f"the older checkpoint {self.build_checkpoint_path(iteration)} could not be removed: {error}")

    def build_checkpoint_path(self, iteration: int) -> str:
        """Return the path or URL of the checkpoint of an iteration."""
        return self._storage.get_location(get_checkpoint_name(iteration))

    def save_to_node_memory(
        self,
        progress: Progress,
        optimizer: ShardedOptimizer,
        scaler: GradScaler,
        schedule: LearningSchedule,
        log: LogFunction,
        extras: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start to copy the complete state to the memory of the nodes. All ranks call this function together.

        Args:
            log: function that writes a line to the log on the first rank.
            extras: additional entries of `config.json`, besides the settings, versions and command line of the run.

        Raises:
            CheckpointError: on all ranks, if the state cannot be saved at all. The failure of a copy is only logged.
        """
        if self._node_memory_saver is not None:
            state = self._build_state(progress, optimizer, scaler, schedule, has_optimizer=True)
            record = {**self._record, **extras}
            self._node_memory_saver.save(
                progress.iteration, build_global_tensors(optimizer, self._context), record, state, _log_only_problems(log)
            )

    @staticmethod
    def _build_state(
        progress: Progress, optimizer: ShardedOptimizer, scaler: GradScaler, schedule: LearningSchedule, *, has_optimizer: bool
    ) -> dict[str, Any]:
        """Return the content of `state.json` in a checkpoint: the progress, the learning-rate and weight-decay schedules, and the
        state of the loss scaler."""
        return {
            "progress": progress.to_json(),
            "optimizer_updates": optimizer.num_steps,
            "scaler": scaler.state_dict(),
            "schedule": schedule.to_json(),
            "has_optimizer": has_optimizer,
            "ema_decay": schedule.optimizer.ema_decay,
        }

    def poll(self, log: LogFunction) -> None:
        """Log the result of a background save that has finished, without waiting for one. Called after each step, on every rank.

        Args:
            log: function that writes a line to the log on the first rank.

        Raises:
            CheckpointError: on the first rank, if another run has taken over the folder.
        """
        if self._heartbeat is not None and self._heartbeat.successor is not None:
            raise CheckpointError(
                f"{self._heartbeat.successor} has taken over {self._storage.location} (see {RUN} there), so this run ends. "
                "Continue with that run, or start this run again with another --save folder. "
                + (
                    "This run has saved no checkpoint in the folder."
                    if self._last_iteration is None
                    else f"The last checkpoint of this run in the folder is that of iteration {self._last_iteration}."
                )
            )
        if self._async_saver is not None:
            self._async_saver.poll(log)
            if self._timed_iterations:
                self._remove_timed_checkpoints(log)
        if self._node_memory_saver is not None:
            self._node_memory_saver.poll(_log_only_problems(log))

    def wait(self, log: LogFunction) -> None:
        """Wait for the pending background save, before a checkpoint is loaded. All ranks call this function together.

        Args:
            log: function that writes a line to the log on the first rank.
        """
        if self._async_saver is not None:
            self._async_saver.wait(log)

    def on_rewind(self, iteration: int) -> None:
        """Note that the run has gone back to the checkpoint of `iteration`, so that the checkpoints of later iterations are written
        again."""
        self._last_iteration = iteration

    def finish(self, log: LogFunction) -> None:
        """Wait for the background save at the end of the run. All ranks call this function together.

        Args:
            log: function that writes a line to the log on the first rank.

        Raises:
            CheckpointError: on all ranks, if the last save has failed.
        """
        if self._node_memory_saver is not None:
            with suppress(CheckpointError):  # already logged; the state is about to be saved to storage
                self._node_memory_saver.finish(_log_only_problems(log))
        if self._async_saver is not None:
            self._async_saver.finish(log)
        if self._config.save is not None and self._context.rank == 0:
            self._remove_timed_checkpoints(log)
            apply_retention(self._storage, self._retention)  # an earlier start may have been killed between save and cleanup


def _log_only_problems(log: LogFunction) -> LogFunction:
    """Return a log function for copies to node memory. It omits messages about the start and success of a copy, because copies are
    frequent."""
    return lambda line: None if line.startswith(("saving ", "saved ")) else log(line)
