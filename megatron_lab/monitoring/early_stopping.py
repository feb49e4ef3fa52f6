"""Early end of a run whose validation loss no longer improves (--early-stopping-patience).

The state (lowest loss, and evaluations since then) is part of every checkpoint, so a resumed run ends at the same iteration. All
ranks get the same validation losses and decide equally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron_lab.checkpoints.best_checkpoint import is_finite_loss
from megatron_lab.monitoring.keep_best import VALIDATION_LOSS

STATE_NAME = "early_stopping"
"""Entry of a checkpoint's `config.json` with the state."""


@dataclass
class EarlyStopping:
    """Lowest validation loss of a run, and the number of evaluations without an improvement since then."""

    best_loss: float = math.inf
    best_iteration: int = 0
    num_without_improvement: int = 0

    def add(self, iteration: int, loss: float, min_delta: float) -> None:
        """Add an evaluation. A loss that is not finite is no improvement.

        Args:
            min_delta: smallest decrease of the loss that counts as an improvement (--early-stopping-min-delta).
        """
        if math.isfinite(loss) and (self.best_loss == math.inf or loss < self.best_loss - min_delta):
            self.best_loss, self.best_iteration, self.num_without_improvement = loss, iteration, 0
        else:
            self.num_without_improvement += 1

    def describe(self, min_delta: float) -> str:
        """Return why the run ends, for the log.

        Args:
            min_delta: smallest decrease of the loss that counts as an improvement (--early-stopping-min-delta).
        """
        required = f"lower by more than {min_delta:g} (--early-stopping-min-delta)" if min_delta else "lower"
        compared = "it was never finite"
        if math.isfinite(self.best_loss):
            compared = f"compared with {self.best_loss:.6E} at iteration {self.best_iteration}"
        count = f"{self.num_without_improvement} evaluations (--early-stopping-patience)"
        return f"the validation loss was not {required} in {count}, {compared}"

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values. The best loss is None before the first finite loss."""
        return {**vars(self), "best_loss": self.best_loss if math.isfinite(self.best_loss) else None}

    @classmethod
    def from_json(cls, content: Any) -> EarlyStopping:
        """Build the state from the result of `to_json`. Other values, such as None, give the state of a new run."""
        if not isinstance(content, dict):
            return cls()
        counts = [content.get(name) for name in ("best_iteration", "num_without_improvement")]
        loss = content.get("best_loss")
        if not all(type(count) is int and count >= 0 for count in counts) or not (loss is None or is_finite_loss(loss)):
            return cls()
        return cls(math.inf if loss is None else float(loss), *(count or 0 for count in counts))


class EarlyStoppingCallback(Callback):
    """Callback that ends the run after --early-stopping-patience evaluations without an improvement."""

    def __init__(self, run: RunComponents) -> None:
        training = run.config.training
        assert training.early_stopping_patience is not None, "the flag enables the feature"
        self._patience, self._min_delta = training.early_stopping_patience, training.early_stopping_min_delta
        self._control, self._keeps_best, self._is_closed = run.control, run.config.checkpoint.keep_best, False
        run.control.checkpoint_extras[STATE_NAME] = lambda: self._state.to_json()
        self._load_state()
        if run.control.end_reason is not None:
            reason = run.control.end_reason
            run.reporter.log(
                f"the run has ended early at iteration {run.progress.iteration} and is not trained further: {reason}\n"
                f"  To continue it, raise --early-stopping-patience above {self._state.num_without_improvement}, or leave it out."
            )

    def _load_state(self) -> None:
        """Continue with the state in the checkpoint that was loaded last."""
        self._state = EarlyStopping.from_json(self._control.checkpoint.get(STATE_NAME))
        self._set_end_reason()

    def _set_end_reason(self) -> None:
        has_ended = self._state.num_without_improvement >= self._patience
        self._control.end_reason = f"early stopping: {self._state.describe(self._min_delta)}" if has_ended else None

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Add the validation loss of an evaluation during the run, and end the run if it is time."""
        if VALIDATION_LOSS in values and not self._is_closed:
            self._state.add(progress.iteration, values[VALIDATION_LOSS], self._min_delta)
            self._set_end_reason()

    def after_rewind(self, progress: Progress) -> None:
        """Continue with the state of the checkpoint to which the run has gone back."""
        self._load_state()

    def close(self) -> None:
        """Remember that the last evaluation of the run, which follows, decides nothing."""
        self._is_closed = True


class EarlyStoppingFeature(Feature):
    """Feature of --early-stopping-patience: ends a run whose validation loss no longer improves."""

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that compares the validation losses."""
        return [EarlyStoppingCallback(run)]
