"""Rewind after a loss spike (--spike-policy rewind): reload the newest checkpoint, and continue with the data after the spike.

The process does not end. docs/spikes.md defines the iterations, samples and learning rates after a rewind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.save_folder import find_checkpoint, parse_iteration, record_damage
from megatron.checkpoint.storage import PathOrUrl
from megatron.checkpoint.storage_url import NODE_MEMORY_URL
from megatron.config.config import Config
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.training.failure import DivergedError
from megatron.training.inputs import RunData
from megatron.training.loop import NoSaver, RewindResult
from megatron.training.progress import BatchSizePlan, LearningSchedule, Progress, ResumePoint
from megatron.training.resume import SelectedCheckpoint, check_checkpoint, load_selected, restore_run
from megatron.training.saver import Saver
from megatron.training.step import TrainStep


class SpikeError(DivergedError):
    """Another loss spike occurred after the allowed number of rewinds to the same checkpoint (--spike-max-rewinds)."""


@dataclass
class Rewinder:
    """Takes a run back to its newest checkpoint after a loss spike (--spike-policy rewind). All ranks must call every method
    together."""

    config: Config
    context: ParallelContext
    step: TrainStep
    schedule: LearningSchedule
    data: RunData
    checkpoint_paths: list[PathOrUrl] = field(default_factory=list)
    """Checkpoints of this run, the newest last: the checkpoint from which the run resumed, and those that it has saved
    since."""
    _last_target: int | None = None
    _num_consecutive: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        context: ParallelContext,
        step: TrainStep,
        schedule: LearningSchedule,
        data: RunData,
        resumed_path: PathOrUrl | None,
    ) -> Rewinder | None:
        """Build the rewinder of a run. Return None unless --spike-policy is rewind.

        Args:
            resumed_path: checkpoint from which the run resumed, if any. If it is in node memory, the newest checkpoint of the save
                folder is used instead: node memory only keeps the newest iteration.
        """
        if config.spikes.spike_policy != "rewind":
            return None
        if resumed_path is not None and str(resumed_path).startswith(NODE_MEMORY_URL):
            resumed_path = broadcast_object(
                _find_newest_checkpoint(config.checkpoint.save) if context.rank == 0 else None, context.world
            )
        can_rewind = resumed_path is not None and config.checkpoint.load_optim
        return cls(config, context, step, schedule, data, [resumed_path] if can_rewind and resumed_path is not None else [])

    def add_checkpoint(self, path: PathOrUrl | None) -> None:
        """Add a checkpoint to which the run may rewind. It may still be written in the background.

        Args:
            path: folder of the checkpoint. None is ignored.
        """
        if path is not None:
            self.checkpoint_paths.append(path)

    def rewind(
        self, progress: Progress, plan: BatchSizePlan, saver: Saver | NoSaver, log: Callable[[str], None]
    ) -> RewindResult | None:
        """Load the newest undamaged checkpoint, and skip the data that the run has read since that checkpoint.

        The batch of the spike is the last of these data. `--spike-batches-beyond` further batches are skipped too.

        Args:
            progress: progress of the run including the spike. It is set to the progress of the checkpoint, except for the position
                in the data.
            plan: batch sizes of the run.
            saver: saver of the run. The function waits for its unfinished save.
            log: writes a log line on the first rank.

        Returns:
            batch sizes and data to continue with. None if the run has no checkpoint: then nothing has changed, and the run
            continues.

        Raises:
            SpikeError: the run has already rewound to this checkpoint --spike-max-rewinds times.
            ValueError: the checkpoint proved to be damaged while it was loaded, and the run has no other.
        """
        spikes, spike_iteration = self.config.spikes, progress.iteration
        saver.wait(log)
        self.step.finish_param_gather()
        resume_point = _load_newest(
            self.config,
            self.context,
            self.step.optimizer,
            self.step.scaler,
            self.schedule,
            self.data.vocab_size,
            self.checkpoint_paths,
        )
        if resume_point is None:
            log("  no rewind, because this run has no checkpoint yet: the update is skipped, and the run continues")
            return None
        loaded = resume_point.progress
        self._num_consecutive = self._num_consecutive + 1 if self._last_target == loaded.iteration else 1
        self._last_target = loaded.iteration
        if self._num_consecutive > spikes.spike_max_rewinds:
            raise SpikeError(
                f"iteration {spike_iteration}: another loss spike after {spikes.spike_max_rewinds} rewinds to {resume_point.path} "
                "(--spike-max-rewinds), so training ends.\n  Inspect the samples of the spike (tools/inspect_data.py --run), "
                "lower --lr, or resume an earlier checkpoint by --ckpt-step."
            )
        consumed_samples = progress.consumed_samples
        for _ in range(spikes.spike_batches_beyond):
            consumed_samples += plan.get_global_batch_size(consumed_samples)
        num_skipped = consumed_samples - loaded.consumed_samples
        for progress_field in dataclasses.fields(Progress):
            setattr(progress, progress_field.name, getattr(loaded, progress_field.name))
        progress.consumed_samples = consumed_samples
        plan = plan.resume_at(progress.iteration, consumed_samples)
        batches = self.data.create_batches(progress, plan, self.context, num_discarded=num_skipped)
        self.step.finish_param_gather()
        saver.on_rewind(progress.iteration)
        self.checkpoint_paths = [path for path in self.checkpoint_paths if path != resume_point.path] + (
            [resume_point.path] if resume_point.path is not None else []
        )
        log(
            f"  rewound to {resume_point.path} (iteration {loaded.iteration}); samples {consumed_samples - num_skipped:,} to "
            f"{consumed_samples - 1:,} are skipped"
        )
        return RewindResult(plan, batches, resume_point.checkpoint)


def _find_newest_checkpoint(save_folder: str | None) -> PathOrUrl | None:
    with suppress(CheckpointError):
        return None if save_folder is None else find_checkpoint(save_folder, warn=lambda _: None)
    return None


def _load_newest(
    config: Config,
    context: ParallelContext,
    optimizer: ShardedOptimizer,
    scaler: GradScaler,
    schedule: LearningSchedule,
    vocab_size: int,
    checkpoint_paths: Sequence[PathOrUrl],
) -> ResumePoint | None:
    """Load weights and training state from the newest undamaged checkpoint of this run. All ranks must call this function together.

    Args:
        checkpoint_paths: checkpoints of the run, the newest last. All ranks use the list of the first rank. Deleted checkpoints are
            skipped.

    Returns:
        the restored state. None if there is no checkpoint: then nothing has changed.

    Raises:
        ValueError: a checkpoint proved to be damaged after weights were loaded from it, and the run has no other.
    """

    def select_sound(damaged: dict[int, str]) -> SelectedCheckpoint | None:
        damaged_loads, unusable = dict(damaged), dict(damaged)
        for path in reversed(checkpoint_paths):
            if parse_iteration(path) in unusable:
                continue
            try:
                return check_checkpoint(config, path, vocab_size, [], continues_run=True)
            except DamagedCheckpointError as error:
                record_damage(path, error, unusable, may_fall_back=True)
        if damaged_loads:
            raise DamagedCheckpointError(
                "every checkpoint to which the run could rewind is damaged:\n  "
                + "\n  ".join(unusable.values())
                + "\n  Copy a checkpoint again, or start from another one by --load."
            )
        return None

    selected = load_selected(config.model, select_sound, context, optimizer, wants_state=True, may_fall_back=True)
    return None if selected is None else restore_run(selected, optimizer, scaler, schedule, wants_state=True)
