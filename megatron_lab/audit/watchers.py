"""The checks that a run makes beside training: --check-replicas-every and --save-trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.config.config import Config
from megatron.config.save import to_dict
from megatron.model.gpt import ModelInputs
from megatron.parallel.params import global_records
from megatron.parallel.products import dtype_name
from megatron.training.failure import together
from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep
from megatron.training.watch import Watcher
from megatron_lab.audit.reductions import OwnGradients, audit
from megatron_lab.audit.replicas import Replicas, copies_held, raise_audit
from megatron_lab.audit.signature import TraceRecorder
from megatron_lab.audit.trace_file import TraceHeader, TraceStep, TraceWriter

_ADVICE = "Training stops before the update. tools/verify_layout.py with the same settings tells where the fault is."


class RunChecks(Watcher):
    """--check-replicas-every: compares copies of the weights at the start, every so many steps and before every save; audits the
    first step that makes an update.

    Args:
        every: steps between comparisons.
        iteration: steps done at the start.
        say: writes a line into the log, on the first rank.
    """

    def __init__(self, step: TrainStep, every: int, iteration: int, say: Callable[[str], None]) -> None:
        self._step, self._every, self._say = step, every, say
        self._replicas = Replicas(copies_held(step.model.params, step.optimizer.shards, step.context), step.context)
        records = global_records(step.model.config, step.model.vocab_size)
        self._records = {name: record for name, record in records.items() if record.by_counts is None and not record.frozen}
        self._compared: int | None = None
        self._own: OwnGradients | None = None
        self._audited = False
        self._compare(iteration)
        often = "every step" if every == 1 else f"every {every} steps"
        say(f"  copies of weights that must be equal, compared {often}: {self._replicas.describe()}")

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Before the step that is audited, run it without sums over ranks: every parameter must get its whole gradient."""
        if self._audited:
            return
        step = self._step
        params = [entry for entry in step.model.params if entry.record.name in self._records]
        self._own = OwnGradients(params, step.optimizer.shards, self._records, step.context)
        recorder, step.executor.recorder = step.executor.recorder, None  # the profile shows the step alone
        step.gradients(batch, inspect=self._own.look)
        step.executor.recorder = recorder
        raise_audit(f"iteration {iteration}: gradients are incomplete.", self._own.missing(len(batch)), _ADVICE)
        self._iteration = iteration
        step.before_update.append(self._audit)

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Compare, if it is time. (A step that made no update leaves the audit to the next one.)"""
        if self._audit in self._step.before_update:
            self._step.before_update.remove(self._audit)
        if progress.iteration % self._every == 0:
            self._compare(progress.iteration)

    def before_save(self, progress: Progress) -> None:
        """Compare, so that what is saved was compared."""
        self._compare(progress.iteration)

    def after_rewind(self, progress: Progress) -> None:
        """Compare, since all weights are others now."""
        self._compared = None
        self._compare(progress.iteration)

    def close(self) -> None:
        """Log it if no step was audited, because every one was skipped or left out."""
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
        problems, all_zero = audit(
            self._own,
            step.counted_shards,
            self._records,
            step.context,
            norm=result.grad_norm * result.loss_scale,
            squares=step.counted_squares,
            dtype=step.model.dtype,
        )
        raise_audit(f"iteration {self._iteration}: the audit of the first step failed.", problems, _ADVICE)
        zeros = f"; all zero: {', '.join(all_zero)}" if all_zero else ""
        self._say(
            f"  audit of the first step: gradients of {len(self._records)} parameters were all written, summed over their ranks"
            f" and counted once in the norm{zeros}"
        )
        self._own, self._audited = None, True


class Tracing(Watcher):
    """--save-trace: writes the results of the first steps of a run, the same at every layout. The first rank writes.

    Args:
        progress: at the start; a run that resumes appends to the file.
    """

    def __init__(self, config: Config, step: TrainStep, progress: Progress) -> None:
        path, context, model = config.debug.save_trace, step.context, step.model
        assert path is not None
        self._step = step
        self._last = progress.iteration + config.debug.trace_steps
        resumes = progress.iteration > 0
        self._writer = together(context, lambda: TraceWriter(path, append=resumes) if context.rank == 0 else None)
        records = {name: one for name, one in global_records(model.config, model.vocab_size).items() if not one.frozen}
        self._recorder = TraceRecorder(step.optimizer.shards, records, context)
        self._look = lambda result: self._recorder.gradients(result.loss_scale)
        step.before_update.append(self._look)
        self._header = TraceHeader(
            settings=to_dict(config),
            layout={axis: context.topology.size(axis) for axis in ("tp", "cp", "dp", "pp")},
            layers=[(chunk.stage, list(chunk.layers)) for chunk in model.layer_table],
            dtype=dtype_name(model.dtype),
            torch=torch.__version__,
            vocab_size=model.vocab_size,
            parameters={name: list(record.shape) for name, record in records.items()},
        )
        self._begin(progress)

    def _begin(self, progress: Progress) -> None:
        weights = self._recorder.collect()[1]
        if self._writer is not None:
            self._writer.header(self._header)
            self._writer.start(progress.iteration, weights)

    @property
    def ended(self) -> bool:
        """Whether all steps that were asked for are written."""
        return self._look not in self._step.before_update

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Write the step."""
        if self.ended:
            return
        gradients, weights = self._recorder.collect()
        if self._writer is not None:
            self._writer.step(
                TraceStep(
                    iteration=progress.iteration,
                    samples=samples,
                    consumed_samples=progress.consumed_samples,
                    loss=result.loss,
                    tokens=result.num_tokens,
                    grad_norm=result.grad_norm,
                    learning_rate=learning_rate,
                    weight_decay=weight_decay,
                    loss_scale=result.loss_scale,
                    skipped=result.skipped,
                    gradients=gradients,
                    weights=weights,
                )
            )
        if progress.iteration >= self._last:
            self.close()

    def after_rewind(self, progress: Progress) -> None:
        """Go on as a start from that checkpoint would."""
        if not self.ended:
            self._begin(progress)

    def close(self) -> None:
        """Stop observing the step, and close the file."""
        if self.ended:
            return
        self._step.before_update.remove(self._look)
        if self._writer is not None:
            self._writer.close()


class TraceFeature(Feature):
    """--save-trace."""

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Write the first steps of the run."""
        return [Tracing(run.config, run.step, run.progress)]


class ChecksFeature(Feature):
    """--check-replicas-every."""

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Compare the copies of weights, and audit the first step."""
        every = run.config.debug.check_replicas_every
        assert every is not None
        return [RunChecks(run.step, every, run.progress.iteration, run.reporter.say)]
