"""What a run does to be checked, beside training: by --check-replicas-every and by --save-trace. Nothing without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.config.config import Config
from megatron.model.inputs import ModelInputs
from megatron.training.progress import Progress
from megatron.training.run_checks import RunChecks
from megatron.training.step import StepResult, TrainStep
from megatron.training.tracing import Tracing


class Watch:
    """The checks and the trace of a run, if there are any. Every rank calls every method, together.

    Args:
        progress: at the start.
        say: writes a line into the log, on the first rank.

    Raises:
        SetupError: the trace cannot be written.
        AuditError: ranks do not begin with the same weights.
    """

    def __init__(self, config: Config, step: TrainStep, progress: Progress, say: Callable[[str], None]) -> None:
        every = config.debug.check_replicas_every
        self._checks = None if every is None else RunChecks(step, every, progress.iteration, say)
        self._tracing = None if config.debug.save_trace is None else Tracing(config, step, progress)

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """The next step is of this batch.

        Raises:
            AuditError: the step would not give every parameter its gradient.
        """
        if self._checks is not None:
            self._checks.before_step(batch, iteration)

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """A step was made.

        Args:
            progress: after it.
            samples: of its global batch.

        Raises:
            AuditError: copies of weights differ.
        """
        if self._tracing is not None and not self._tracing.ended:
            self._tracing.after_step(progress, result, samples, learning_rate, weight_decay)
        if self._checks is not None:
            self._checks.after_step(progress.iteration)

    def before_save(self, progress: Progress) -> None:
        """A checkpoint is about to be written.

        Raises:
            AuditError: copies of weights differ.
        """
        if self._checks is not None:
            self._checks.before_save(progress.iteration)

    def close(self) -> None:
        """The run ends."""
        if self._checks is not None:
            self._checks.close()
        if self._tracing is not None and not self._tracing.ended:
            self._tracing.close()
