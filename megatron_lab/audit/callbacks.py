"""Callbacks that check a run: comparison of weight copies and audit of the gradient sums (--check-replicas-every), and a trace of
the run's results (--save-trace)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.config.config import Config
from megatron.config.save import to_dict
from megatron.model.gpt import ModelInputs
from megatron.parallel.matmul import get_dtype_name
from megatron.parallel.params import build_global_records
from megatron.training.callbacks import Callback
from megatron.training.failure import run_on_all_ranks
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep
from megatron_lab.audit.reductions import LocalGradients, audit
from megatron_lab.audit.replicas import Replicas, find_replicated_tensors, raise_audit
from megatron_lab.audit.signature import TraceRecorder
from megatron_lab.audit.trace_file import TraceHeader, TraceStep, TraceWriter

_ADVICE = "Training stops before the update. tools/verify_layout.py with the same settings locates the fault."


class ReplicaChecks(Callback):
    """Callback of --check-replicas-every: compares the copies of weights that several ranks hold. It compares them at the start,
    every N steps and before every save.

    In the first step that updates the weights, the callback also audits the gradients. It computes the local gradients in an
    additional pass, and checks that the optimizer uses their sum over ranks.

    Args:
        interval: number of steps between two comparisons.
        iteration: number of completed iterations at the start.
        log: function that writes a log line on the first rank.
    """

    def __init__(self, step: TrainStep, interval: int, iteration: int, log: Callable[[str], None]) -> None:
        self._step, self._interval, self._log = step, interval, log
        self._replicas = Replicas(find_replicated_tensors(step.model.params, step.optimizer.shards, step.context), step.context)
        records = build_global_records(step.model.config, step.model.vocab_size)
        self._records = {name: record for name, record in records.items() if record.count_update is None and not record.frozen}
        self._last_compared: int | None = None
        self._local_gradients: LocalGradients | None = None
        self._audited = False
        self._compare(iteration)
        interval_text = "every step" if interval == 1 else f"every {interval} steps"
        log(f"  copies of weights that must be equal, compared {interval_text}: {self._replicas.describe()}")

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """If no step has been audited yet, compute the gradients of this batch in an additional pass without sums over ranks. Check
        that every parameter receives all its gradients. A check of the sums follows before the update."""
        if self._audited:
            return
        step = self._step
        params = [entry for entry in step.model.params if entry.record.name in self._records]
        self._local_gradients = LocalGradients(params, step.optimizer.shards, self._records, step.context)
        recorder, step.executor.recorder = step.executor.recorder, None  # additional passes do not belong in the profile
        step.compute_gradients(batch, inspect=self._local_gradients.add_grad)
        step.executor.recorder = recorder
        raise_audit(
            f"iteration {iteration}: gradients are incomplete.", self._local_gradients.find_missing_grads(len(batch)), _ADVICE
        )
        self._iteration = iteration
        step.before_update_hooks.append(self._audit)

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Compare the copies of weights if a comparison is due. If this step made no update, its gradients were not audited, and
        the next step is audited instead."""
        if self._audit in self._step.before_update_hooks:
            self._step.before_update_hooks.remove(self._audit)
        if progress.iteration % self._interval == 0:
            self._compare(progress.iteration)

    def before_save(self, progress: Progress) -> None:
        """Compare the copies of weights. If copies differ, the error prevents the save."""
        self._compare(progress.iteration)

    def after_rewind(self, progress: Progress) -> None:
        """Compare the copies of weights, because all weights have been reloaded from a checkpoint."""
        self._last_compared = None
        self._compare(progress.iteration)

    def close(self) -> None:
        """Log that the gradients were not audited, if no step of the run updated the weights."""
        if not self._audited:
            self._log("  no step made an update: gradients were not audited")

    def _compare(self, iteration: int) -> None:
        if self._last_compared != iteration:
            self._step.finish_param_gather()
            self._replicas.compare(iteration, self._last_compared)
            self._last_compared = iteration

    def _audit(self, result: StepResult) -> None:
        assert self._local_gradients is not None
        step = self._step
        problems, all_zero = audit(
            self._local_gradients,
            step.norm_shards,
            self._records,
            step.context,
            norm=result.grad_norm * result.loss_scale,
            squared_norms=step.shard_squared_norms,
            dtype=step.model.dtype,
        )
        raise_audit(f"iteration {self._iteration}: the audit of the first step failed.", problems, _ADVICE)
        zeros = f"; all zero: {', '.join(all_zero)}" if all_zero else ""
        self._log(
            f"  audit of the first step: gradients of {len(self._records)} parameters were all written, summed over their ranks"
            f" and counted once in the norm{zeros}"
        )
        self._local_gradients, self._audited = None, True


class TraceCallback(Callback):
    """Callback of --save-trace: writes the results of the first --trace-steps steps to a file, so that runs with different layouts
    can be compared. The results are the loss, and a signature (five numbers) of every gradient and weight. Only the first rank
    writes.

    Args:
        progress: progress at the start. A run that resumes appends to the file.
    """

    def __init__(self, config: Config, step: TrainStep, progress: Progress) -> None:
        path, context, model = config.debug.save_trace, step.context, step.model
        assert path is not None
        self._step = step
        self._last_iteration = progress.iteration + config.debug.trace_steps
        resumes = progress.iteration > 0
        self._writer = run_on_all_ranks(context, lambda: TraceWriter(path, append=resumes) if context.rank == 0 else None)
        records = {
            name: param_record
            for name, param_record in build_global_records(model.config, model.vocab_size).items()
            if not param_record.frozen
        }
        self._recorder = TraceRecorder(step.optimizer.shards, records, context)
        self._record_gradients = lambda result: self._recorder.record_gradients(result.loss_scale)
        step.before_update_hooks.append(self._record_gradients)
        self._header = TraceHeader(
            settings=to_dict(config),
            layout={axis: context.topology.get_size(axis) for axis in ("tp", "cp", "dp", "pp")},
            layers=[(chunk.stage, list(chunk.layers)) for chunk in model.layer_table],
            dtype=get_dtype_name(model.dtype),
            torch=torch.__version__,
            vocab_size=model.vocab_size,
            parameters={name: list(record.shape) for name, record in records.items()},
        )
        self._write_start(progress)

    def _write_start(self, progress: Progress) -> None:
        weights = self._recorder.collect()[1]
        if self._writer is not None:
            self._writer.write_header(self._header)
            self._writer.write_start(progress.iteration, weights)

    @property
    def is_finished(self) -> bool:
        """Whether the callback has stopped recording: all --trace-steps steps are written, or the run has ended."""
        return self._record_gradients not in self._step.before_update_hooks

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Write the results of the step as one line of the trace file. Close the file after the last step that the trace must
        contain."""
        if self.is_finished:
            return
        gradients, weights = self._recorder.collect()
        if self._writer is not None:
            self._writer.write_step(
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
        if progress.iteration >= self._last_iteration:
            self.close()

    def after_rewind(self, progress: Progress) -> None:
        """Write a new header line, and a line with the reloaded weights, as a run does that resumes from this checkpoint."""
        if not self.is_finished:
            self._write_start(progress)

    def close(self) -> None:
        """Stop recording, and close the trace file."""
        if self.is_finished:
            return
        self._step.before_update_hooks.remove(self._record_gradients)
        if self._writer is not None:
            self._writer.close()


class TraceFeature(Feature):
    """Optional part of a run that writes a trace file (--save-trace)."""

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that writes the trace file."""
        return [TraceCallback(run.config, run.step, run.progress)]


class ChecksFeature(Feature):
    """Optional part of a run that compares the copies of replicated weights every N steps, and once checks that the optimizer uses
    the sums of all ranks' local gradients (--check-replicas-every)."""

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that compares copies of weights and audits the gradients of the first step with an update."""
        interval = run.config.debug.check_replicas_every
        assert interval is not None
        return [ReplicaChecks(run.step, interval, run.progress.iteration, run.reporter.log)]
