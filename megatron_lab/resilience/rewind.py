"""--spike-policy rewind: a run goes back to its newest checkpoint and on behind the data of a loss spike, in the same process.

docs/spikes.md defines what iterations, samples and learning rate are then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.save_folder import find_checkpoint, iteration_of, note_damaged
from megatron.checkpoint.storage import Place
from megatron.checkpoint.storage_kinds import LOCATION
from megatron.config.config import Config
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.training.failure import DivergedError
from megatron.training.inputs import RunData
from megatron.training.loop import NoSaver, Rewound
from megatron.training.progress import BatchSizePlan, LearningSchedule, Progress, Resumed
from megatron.training.resume import ChosenCheckpoint, continued, fill, fitting
from megatron.training.saver import Saver
from megatron.training.step import TrainStep


class SpikeError(DivergedError):
    """Spikes come again wherever the run goes on."""


@dataclass
class Rewinds:
    """Takes a run back. All ranks call every method together."""

    config: Config
    context: ParallelContext
    step: TrainStep
    schedule: LearningSchedule
    data: RunData
    places: list[Place] = field(default_factory=list)
    """The checkpoints of this run's course, the newest last: the one that it resumed from, and those that it has saved since."""
    _to: int | None = None
    _in_a_row: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        context: ParallelContext,
        step: TrainStep,
        schedule: LearningSchedule,
        data: RunData,
        resumed: Place | None,
    ) -> Rewinds | None:
        """Those of a run; None where no rewind is asked for.

        Args:
            resumed: the checkpoint that the run goes on from, if it does. Where that lies in the memory of the nodes, which keeps
                one, the newest of the save folder takes its place: the run would have gone back to that if it had not stopped.
        """
        if config.spikes.spike_policy != "rewind":
            return None
        if resumed is not None and str(resumed).startswith(LOCATION):
            resumed = broadcast_object(_newest(config.checkpoint.save) if context.rank == 0 else None, context.world)
        begins = resumed is not None and config.checkpoint.load_optim
        return cls(config, context, step, schedule, data, [resumed] if begins and resumed is not None else [])

    def saved(self, place: Place | None) -> None:
        """A checkpoint was saved, or begun in the background; None where nothing was to be saved."""
        if place is not None:
            self.places.append(place)

    def rewind(self, progress: Progress, plan: BatchSizePlan, saver: Saver | NoSaver, say: Callable[[str], None]) -> Rewound | None:
        """Load the newest sound checkpoint, and choose the data behind the step that was made last, which is the spike.

        Args:
            progress: includes the spike; becomes that of the checkpoint, but for the place in the data.
            say: writes a line into the log, on the first rank.

        Returns:
            what to go on with. None if there is no checkpoint: nothing has changed, and the run goes on.

        Raises:
            SpikeError: it is one rewind too many in a row.
            ValueError: the checkpoint turned out to be damaged while it was loaded, and there is no other.
        """
        spikes, at = self.config.spikes, progress.iteration
        saver.settle(say)
        self.step.finish_publishing()
        found = _go_back(
            self.config, self.context, self.step.optimizer, self.step.scaler, self.schedule, self.data.vocab_size, self.places
        )
        if found is None:
            say("  there is no checkpoint of this run to go back to: the update is left out, and the run goes on")
            return None
        there = found.progress
        self._in_a_row = self._in_a_row + 1 if self._to == there.iteration else 1
        self._to = there.iteration
        if self._in_a_row > spikes.spike_max_rewinds:
            raise SpikeError(
                f"iteration {at}: a loss spike again after {spikes.spike_max_rewinds} rewinds to {found.path} "
                "(--spike-max-rewinds), so training ends.\n  Look at the data of these samples (tools/inspect_data.py --run), "
                "lower --lr, or resume an earlier checkpoint by --ckpt-step."
            )
        consumed = progress.consumed_samples
        for _ in range(spikes.spike_batches_beyond):
            consumed += plan.global_batch_size(consumed)
        passed_over = consumed - there.consumed_samples
        for each in dataclasses.fields(Progress):
            setattr(progress, each.name, getattr(there, each.name))
        progress.consumed_samples = consumed
        plan = plan.resumed_at(progress.iteration, consumed)
        batches = self.data.at(progress, plan, self.context, passed_over=passed_over)
        self.step.finish_publishing()
        saver.went_back(progress.iteration)
        self.places = [place for place in self.places if place != found.path] + ([found.path] if found.path is not None else [])
        say(
            f"  rewound to {found.path} (iteration {there.iteration}); samples {consumed - passed_over:,} to {consumed - 1:,} "
            f"are passed over"
        )
        return Rewound(plan, batches, found.checkpoint)


def _newest(save: str | None) -> Place | None:
    with suppress(CheckpointError):
        return None if save is None else find_checkpoint(save, tell=lambda _: None)
    return None


def _go_back(
    config: Config,
    context: ParallelContext,
    optimizer: ShardedOptimizer,
    scaler: GradScaler,
    schedule: LearningSchedule,
    vocab_size: int,
    places: Sequence[Place],
) -> Resumed | None:
    """Fill weights and state from the newest sound one of this run's own checkpoints, as a resume does. All ranks call it together.

    Args:
        places: the checkpoints, the newest last; the first rank's count. Those that are gone are passed over.

    Returns:
        None if there is none, and nothing was changed.

    Raises:
        ValueError: weights were filled from one that turned out to be damaged, and there is no other.
    """

    def look(damaged: dict[int, str]) -> ChosenCheckpoint | None:
        filled, gone = dict(damaged), dict(damaged)
        for path in reversed(places):
            if iteration_of(path) in gone:
                continue
            try:
                return fitting(config, path, vocab_size, [], goes_on=True)
            except DamagedCheckpointError as error:
                note_damaged(path, error, gone, may_fall_back=True)
        if filled:
            raise DamagedCheckpointError("no checkpoint to go back to is sound:\n  " + "\n  ".join(gone.values()))
        return None

    chosen = fill(config.model, look, context, optimizer, wants_state=True, may_fall_back=True)
    return None if chosen is None else continued(chosen, optimizer, scaler, schedule, wants_state=True)
