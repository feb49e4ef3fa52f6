"""What --check-replicas-every asks of a run: copies of the weights that are compared, and the audit of its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.audit.reductions import OwnGradients, audit
from megatron.audit.replicas import Replicas, copies_held, raise_audit
from megatron.model.inputs import ModelInputs
from megatron.parallel.params import global_records
from megatron.training.step import StepResult, TrainStep

_ADVICE = "Training stops before the update. tools/verify_layout.py with the same settings tells where the fault is."


class RunChecks:
    """Compares copies at the start, every so many steps and before every save; audits the first step that makes an update.

    Every rank calls every method, together. Whatever is wrong is raised as an AuditError on all of them.

    Args:
        every: steps between comparisons.
        iteration: steps done at the start.
        say: writes a line into the log, on the first rank.
    """

    def __init__(self, step: TrainStep, every: int, iteration: int, say: Callable[[str], None]) -> None:
        self._step, self._every, self._say = step, every, say
        self._replicas = Replicas(copies_held(step.model.params, step.optimizer.shards, step.context), step.context)
        self._records = global_records(step.model.config, step.model.vocab_size)
        self._compared: int | None = None
        self._own: OwnGradients | None = None
        self._audited = False
        self._compare(iteration)
        often = "every step" if every == 1 else f"every {every} steps"
        say(f"  copies of weights that must be equal, compared {often}: {self._replicas.describe()}")

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Run the step that is audited without sums over ranks first.

        Raises:
            AuditError: a parameter gets no gradient, or not all.
        """
        if self._audited:
            return
        step = self._step
        self._own = OwnGradients(step.model.params, step.optimizer.shards, self._records, step.context)
        recorder, step.executor.recorder = step.executor.recorder, None  # what is profiled is the step itself
        step.gradients(batch, inspect=self._own.look)
        step.executor.recorder = recorder
        raise_audit(f"iteration {iteration}: gradients are incomplete.", self._own.missing(len(batch)), _ADVICE)
        self._iteration = iteration
        step.before_update.append(self._audit)

    def after_step(self, iteration: int) -> None:
        """Compare, if it is time. (A step that made no update leaves the audit to the next one.)

        Raises:
            AuditError: copies differ.
        """
        if self._audit in self._step.before_update:
            self._step.before_update.remove(self._audit)
        if iteration % self._every == 0:
            self._compare(iteration)

    def before_save(self, iteration: int) -> None:
        """What is saved was compared.

        Raises:
            AuditError: copies differ.
        """
        self._compare(iteration)

    def close(self) -> None:
        """The run ends. Say so if nothing was audited, because every step was skipped or left out."""
        if not self._audited:
            self._say("  no step made an update: gradients were not audited")

    def _compare(self, iteration: int) -> None:
        if self._compared != iteration:
            self._step.finish_publishing()
            self._replicas.compare(iteration, self._compared)
            self._compared = iteration

    def _audit(self, result: StepResult) -> None:
        assert self._own is not None
        step = self._step
        found = audit(
            self._own,
            step.counted_shards,
            self._records,
            step.context,
            norm=result.grad_norm * result.loss_scale,
            squares=step.counted_squares,
            dtype=step.model.dtype,
        )
        raise_audit(f"iteration {self._iteration}: the audit of the first step failed.", found.problems, _ADVICE)
        zeros = f"; all zero: {', '.join(found.all_zero)}" if found.all_zero else ""
        self._say(
            f"  audit of the first step: gradients of {len(self._records)} parameters were all written, summed over their ranks"
            f" and counted once in the norm{zeros}"
        )
        self._own, self._audited = None, True
