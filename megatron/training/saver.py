"""Saves of a run: what goes into a checkpoint, and when it is written.

Weights are stored once, in their most exact form: the float32 main parameters where the model computes in 16 bits, else the
parameters themselves. So a checkpoint does not depend on the model's dtype. The 16-bit parameters are the main parameters rounded.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, Protocol

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import AVERAGE, WEIGHT, GlobalTensor
from megatron.checkpoint.owner import Heartbeat, refuse_living_owner
from megatron.checkpoint.rank_writer import PATIENCE_S
from megatron.checkpoint.save_folder import RUN, Retention, check_for_strangers, check_writable, checkpoint_name, retain
from megatron.checkpoint.savers import BackgroundSaver, Say, TensorSaver
from megatron.checkpoint.storage import Storage
from megatron.checkpoint.storage_kinds import LOCATION, open_storage
from megatron.config.imports import named
from megatron.config.outputs import CheckpointConfig
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.context import ParallelContext
from megatron.training.failure import together
from megatron.training.progress import LearningSchedule, Progress

_VISIBLE_WITHIN_S = 10.0
"""Seconds within which a file of the first rank must be seen on all: network file systems show new names late."""


class KeptStateInMemory(Protocol):
    """What keeps the state of the run in the memory of this node."""

    def end(self) -> None:
        """The run has ended as it should, and its last checkpoint is on the storage."""


def global_tensors(
    optimizer: ShardedOptimizer, context: ParallelContext, *, state: bool = True, averages: bool = True
) -> list[GlobalTensor]:
    """This rank's shards, and what is frozen, as parts of global tensors: `model.<name>`; the average of the weights, if there is
    one, `ema.<name>`; and with the state moments such as `exp_avg.<name>`."""
    found = []
    for shard in optimizer.held:
        name = shard.record.name
        found.append(GlobalTensor(f"{WEIGHT}.{name}", shard.record.shape, shard.main, shard.boxes(context)))
        if averages and shard.average is not None:
            found.append(GlobalTensor(f"{AVERAGE}.{name}", shard.record.shape, shard.average, shard.boxes(context)))
        for kind, tensor in shard.moments.items() if state else ():
            shape = shard.state_shape(kind).shape(shard.record.shape)
            found.append(GlobalTensor(f"{kind}.{name}", shape, tensor, shard.state_boxes(kind, context)))
    return found


class Saver:
    """Saves a run's state, unless that is written already. It first checks that it can, and that no other run does.

    Args:
        run_record: the resolved settings, versions and command line, kept in each checkpoint, and from the start as `run.json`.
        patience_s: with --async-save, a writer that makes no progress for so many seconds, while training waits for it, is ended.
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
        self._retention = Retention(config.keep_last, config.save_retain_interval)
        self._last: int | None = None
        self._background: BackgroundSaver | None = None
        self._heartbeat: Heartbeat | None = None
        self._kept: KeptStateInMemory | None = None
        self._memory: BackgroundSaver | None = None
        if config.save is None:
            return
        self._storage: Storage = together(context, lambda: open_storage(str(config.save)))
        self._direct = TensorSaver(self._storage, context.world)
        if config.async_save:
            if self._storage.location.startswith("memory://"):
                raise ValueError(f"--save {config.save}: --async-save writes in another process, which does not see this memory")
            self._background = BackgroundSaver(self._storage, context.world, self._retention, patience_s)
        together(context, lambda: self._prepare() if context.rank == 0 else None)
        if config.memory_save_interval is not None:
            self._kept = named("megatron_lab.node_memory.kept_state:keep_state")(
                self._storage.location, config.replicate_state, context
            )
            token = (self._background or self._direct).token
            self._memory = BackgroundSaver(open_storage(LOCATION), context.world, Retention(keep_last=1), patience_s, token)

    @property
    def keeps_in_memory(self) -> bool:
        """Whether the nodes keep state in their memory."""
        return self._kept is not None

    def _prepare(self) -> None:
        check_writable(self._storage)
        check_for_strangers(self._storage)
        if not self._config.take_over:
            refuse_living_owner(self._storage, warnings.warn)
            (self._background or self._direct).sweep()  # what lies there is of dead runs, and must not be taken for checkpoints

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Within the block this run is the one that saves in the folder; behind it another may at once.

        All ranks enter it together, once nothing can refuse the run any more: a refused start leaves the folder to its owner.
        """
        try:
            if self._config.save is not None:
                together(self._context, lambda: self._begin() if self._context.rank == 0 else None)
                together(self._context, self._check_shared)
            yield
            if self._kept is not None:
                self._kept.end()
        finally:
            if self._heartbeat is not None:
                self._heartbeat.end()

    def _begin(self) -> None:
        saver = self._background or self._direct
        saver.begin(self._record)
        if self._memory is not None:
            self._memory.begin(self._record)
        self._heartbeat = Heartbeat(self._storage.location, saver.token)

    def _check_shared(self) -> None:
        until = time.monotonic() + _VISIBLE_WITHIN_S
        while self._storage.size(RUN) is None:
            if time.monotonic() > until:
                raise ValueError(
                    f"--save {self._storage.location}: {RUN}, which the first rank wrote there, is not seen here. "
                    "It must be a folder on a file system that all nodes share."
                )
            time.sleep(0.1)

    def save(
        self,
        progress: Progress,
        optimizer: ShardedOptimizer,
        scaler: GradScaler,
        schedule: LearningSchedule,
        say: Say,
        extras: Mapping[str, Any] = MappingProxyType({}),
    ) -> str | None:
        """Write a checkpoint of this iteration, unless there is no --save or it is written already. All ranks call it together.

        With --async-save it returns when the state is copied.

        Args:
            say: writes a line into the log, on the first rank.
            extras: further entries of `config.json`, beside the record of the run.

        Returns:
            the checkpoint's folder (or its URL), None if there was nothing to do.

        Raises:
            CheckpointError: on all ranks, if one cannot write; with --async-save only where the state cannot be saved at all.
        """
        if self._config.save is None or self._last == progress.iteration:
            return None
        state = self._state(progress, optimizer, scaler, schedule, has_optimizer=self._config.save_optim)
        record = {**self._record, **extras}
        tensors = global_tensors(optimizer, self._context, state=self._config.save_optim)
        self._last = progress.iteration
        location = self.place(progress.iteration)
        if self._background is not None:
            self._background.save(progress.iteration, tensors, record, state, say)
            return location
        began = time.monotonic()
        digest = self._direct.save(progress.iteration, tensors, record, state)
        if self._context.rank == 0:
            say(f"saved {location} in {time.monotonic() - began:.1f} s, digest {digest[:16]}")
            retain(self._storage, self._retention)
        return location

    def place(self, iteration: int) -> str:
        """Where its checkpoint of an iteration lies."""
        return self._storage.at(checkpoint_name(iteration))

    def keep(
        self,
        progress: Progress,
        optimizer: ShardedOptimizer,
        scaler: GradScaler,
        schedule: LearningSchedule,
        say: Say,
        extras: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Copy the whole state into the memory of the nodes; it is there a little later. All ranks call it together.

        Args:
            extras: see `save`.

        Raises:
            CheckpointError: on all ranks, if the state cannot be saved at all. That a copy fails is told in the log.
        """
        if self._memory is not None:
            state = self._state(progress, optimizer, scaler, schedule, has_optimizer=True)
            record = {**self._record, **extras}
            self._memory.save(progress.iteration, global_tensors(optimizer, self._context), record, state, _unless_fine(say))

    @staticmethod
    def _state(
        progress: Progress, optimizer: ShardedOptimizer, scaler: GradScaler, schedule: LearningSchedule, *, has_optimizer: bool
    ) -> dict[str, Any]:
        """What `state.json` holds."""
        return {
            "progress": progress.to_json(),
            "optimizer_updates": optimizer.num_updates,
            "scaler": scaler.state_dict(),
            "schedule": schedule.to_json(),
            "has_optimizer": has_optimizer,
            "ema_decay": schedule.optimizer.ema_decay,
        }

    def poll(self, say: Say) -> None:
        """Called after each step, on every rank: log how a save in the background has ended, if it has. It does not wait.

        Args:
            say: writes a line into the log, on the first rank.

        Raises:
            CheckpointError: on the first rank, when another run has taken the folder over.
        """
        if self._heartbeat is not None and self._heartbeat.taken_by is not None:
            raise CheckpointError(
                f"{self._heartbeat.taken_by} has taken over {self._storage.location} ({RUN}), so this run ends. "
                f"Its last checkpoint there is of iteration {self._last if self._last is not None else 'none'}."
            )
        if self._background is not None:
            self._background.poll(say)
        if self._memory is not None:
            self._memory.poll(_unless_fine(say))

    def settle(self, say: Say) -> None:
        """Wait for the save under way, before a checkpoint is loaded. All ranks call it together.

        Args:
            say: writes a line into the log, on the first rank.
        """
        if self._background is not None:
            self._background.settle(say)

    def went_back(self, iteration: int) -> None:
        """The run went back to its checkpoint of an iteration: what it saved behind that it will save again."""
        self._last = iteration

    def finish(self, say: Say) -> None:
        """Called at the end of the run: wait for the save in the background. All ranks call it together.

        Args:
            say: writes a line into the log, on the first rank.

        Raises:
            CheckpointError: on all ranks, if the last save has failed.
        """
        if self._memory is not None:
            with suppress(CheckpointError):  # which the log has told; the storage is about to get the state
                self._memory.finish(_unless_fine(say))
        if self._background is not None:
            self._background.finish(say)
        if self._config.save is not None and self._context.rank == 0:
            retain(self._storage, self._retention)  # an earlier start may have been killed between its last save and this


def _unless_fine(say: Say) -> Say:
    """Leave out of the log that a copy in memory is begun and made: it is every few steps."""
    return lambda line: None if line.startswith(("saving ", "saved ")) else say(line)
