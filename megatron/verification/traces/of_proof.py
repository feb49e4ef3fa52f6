"""The trace of a proof's run at its layout, as --save-trace writes that of a run: to be compared with that of another day."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megatron.audit.signature import named, signature_of
from megatron.audit.trace_file import Signature, TraceHeader, TraceRun, TraceStep, TraceWriter
from megatron.config.save import to_dict
from megatron.verification.diagnosis.comparison import Comparison
from megatron.verification.diagnosis.join import Joined
from megatron.verification.observing.observation import Observation


def trace_of(observation: Observation) -> TraceRun:
    """Of the layout's run, not of the reference's."""
    runs = Comparison(observation)
    config = observation.config
    header = TraceHeader(
        settings=to_dict(config),
        layout={"cp": 1, **runs.sizes},
        layers=[(chunk.stage, list(chunk.layers)) for chunk in runs.table],
        dtype="float64",
        torch=torch.__version__,
        vocab_size=observation.vocab_size,
        parameters={name: list(tensor.shape) for name, tensor in observation.start.items()},
    )
    trace = TraceRun(header, 0, _signatures(runs.start().joined))
    consumed = 0
    for index in range(runs.num_steps):
        step = runs.ranks[0].steps[index]
        samples = step.num_microbatches * config.training.micro_batch_size * runs.sizes["dp"]
        consumed += samples
        trace.steps.append(
            TraceStep(
                iteration=step.iteration,
                samples=samples,
                consumed_samples=consumed,
                loss=step.loss,
                tokens=math.fsum(rank.steps[index].token_count for rank in runs.ranks),
                grad_norm=step.grad_norm,
                learning_rate=step.learning_rate,
                weight_decay=step.weight_decay,
                loss_scale=1.0,
                skipped=step.skipped,
                gradients=_signatures(runs.gradients(index).joined),
                weights=_signatures(runs.weights(index).joined),
            )
        )
    return trace


def write_trace(trace: TraceRun, path: str) -> None:
    """To a new file.

    Raises:
        ValueError: it cannot be written.
    """
    writer = TraceWriter(path, append=False)
    writer.header(trace.header)
    writer.start(trace.iteration, trace.weights)
    for step in trace.steps:
        writer.step(step)
    writer.close()


def _signatures(joined: Mapping[str, Joined]) -> dict[str, Signature]:
    return {name: named(signature_of(name, each.tensor)) for name, each in joined.items()}
