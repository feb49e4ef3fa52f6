"""Saving of the checkpoint with the lowest validation loss (--keep-best)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.checkpoint.save_folder import Retention, apply_retention, get_checkpoint_name
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.collectives import broadcast_object
from megatron.training.callbacks import Callback
from megatron.training.failure import run_on_all_ranks
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron_lab.checkpoints.best_checkpoint import EVALUATION, Evaluation, find_best, update_best

VALIDATION_LOSS = "validation_loss"
"""Name of the loss that is compared, in the values of an evaluation."""


class KeepBestCallback(Callback):
    """Callback that requests a checkpoint after each evaluation with a new lowest validation loss, and records the last
    evaluation in all checkpoints.

    `update_best` marks the checkpoint when it is complete. The first rank reads which checkpoint is the best, and tells the others.
    """

    def __init__(self, run: RunComponents) -> None:
        checkpoint = run.config.checkpoint
        self._run, self._is_closed = run, False
        self._retention = Retention(checkpoint.keep_last, checkpoint.save_retain_interval, keeps_best=True)
        self._save = open_storage(str(checkpoint.save))
        self._evaluation: Evaluation | None = None
        """Last evaluation of the run with a finite loss."""
        self._pending: Evaluation | None = None
        """Last evaluation for which a checkpoint was requested. It may still be written in the background."""
        run.control.checkpoint_extras[EVALUATION] = self._get_record
        self._on_first_rank(
            lambda: update_best(self._save, keeps_all=self._retention.keeps_all)
        )  # a killed run may not have done it

    def _get_record(self) -> dict[str, Any] | None:
        return None if self._evaluation is None else self._evaluation.to_json()

    def _on_first_rank(self, action: Callable[[], Evaluation | None]) -> Evaluation | None:
        """Run an action on the first rank, and return its result on all ranks."""
        context = self._run.context
        result = run_on_all_ranks(context, lambda: action() if context.rank == 0 else None)
        return broadcast_object(result, context.world)

    def _find_best(self) -> Evaluation | None:
        """Return the best checkpoint, which may still be written in the background."""
        best = self._on_first_rank(lambda: find_best(self._save))
        if self._pending is None or (best is not None and best.loss <= self._pending.loss):
            return best
        return self._pending

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """If the validation loss is the lowest so far, request a checkpoint. After the last save of the run, mark that
        checkpoint."""
        loss = values.get(VALIDATION_LOSS)
        if loss is None:
            return
        checkpoint, plan = self._run.config.checkpoint, self._run.plan
        is_due = progress.is_multiple_of(checkpoint.save_interval) or progress.iteration >= plan.total_iterations
        self._evaluation = Evaluation(progress.iteration, loss, is_extra=not is_due) if math.isfinite(loss) else None
        if self._evaluation is None:
            return
        if self._is_closed:
            self._mark_last_checkpoint(self._evaluation)
            return
        best = self._find_best()
        if best is None or loss < best.loss:
            self._pending = self._evaluation
            self._run.control.save_requested = True
            self._run.reporter.log(
                f"  lowest validation loss so far: the checkpoint of iteration {progress.iteration} is the best one"
            )

    def _mark_last_checkpoint(self, evaluation: Evaluation) -> None:
        def mark() -> None:
            update_best(self._save, evaluation, keeps_all=self._retention.keeps_all)
            apply_retention(self._save, self._retention)

        self._on_first_rank(mark)

    def after_save(self, progress: Progress, place: str) -> None:
        """Forget an earlier requested checkpoint. If it is complete, the save folder names it; otherwise its save has failed."""
        if self._pending is not None and self._pending.iteration != progress.iteration:
            self._pending = None

    def after_rewind(self, progress: Progress) -> None:
        """Forget the evaluation of an iteration to which the run has not come yet."""
        self._evaluation = self._pending = None

    def close(self) -> None:
        """Remember that no checkpoint will be saved any more."""
        self._is_closed, self._pending = True, None

    def on_end(self) -> None:
        """Log which checkpoint is the best."""
        if (best := self._find_best()) is not None:
            location = self._save.get_location(get_checkpoint_name(best.iteration))
            self._run.reporter.log(f"best checkpoint: {location}, validation loss {best.loss:.6E} (--ckpt-step best loads it)")


class KeepBestFeature(Feature):
    """Feature of --keep-best: saves and keeps the checkpoint with the lowest validation loss."""

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that requests the checkpoints."""
        return [KeepBestCallback(run)]
