"""--save-trace: a file that tells, for the first steps of a run, what came of them; the same at every layout."""

from __future__ import annotations

import torch

from megatron.audit.signature import TraceRecorder
from megatron.audit.trace_file import TraceHeader, TraceStep, TraceWriter
from megatron.config.config import Config
from megatron.config.save import to_dict
from megatron.parallel.params import global_records
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep
from megatron.training.together import together


class Tracing:
    """Writes the trace of a run, from the first rank. Every rank calls every method, together.

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
        records = global_records(model.config, model.vocab_size)
        self._recorder = TraceRecorder(step.optimizer.shards, records, context)
        self._look = lambda result: self._recorder.gradients(result.loss_scale)
        step.before_update.append(self._look)
        weights = self._recorder.collect()[1]
        if self._writer is not None:
            self._writer.header(
                TraceHeader(
                    settings=to_dict(config),
                    layout={axis: context.topology.size(axis) for axis in ("tp", "cp", "dp", "pp")},
                    layers=[(chunk.stage, list(chunk.layers)) for chunk in model.layer_table],
                    dtype=str(model.dtype).removeprefix("torch."),
                    torch=torch.__version__,
                    vocab_size=model.vocab_size,
                    parameters={name: list(record.shape) for name, record in records.items()},
                )
            )
            self._writer.start(progress.iteration, weights)

    @property
    def ended(self) -> bool:
        """Whether all steps that were asked for are written."""
        return self._look not in self._step.before_update

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Write a step.

        Args:
            progress: after it.
            samples: of its global batch.
        """
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

    def close(self) -> None:
        """Leave the step alone from now on, and close the file."""
        if not self.ended:
            self._step.before_update.remove(self._look)
        if self._writer is not None:
            self._writer.close()
