"""Proves the layout of a user's settings: makes it small, runs and compares it, and if it differs, runs parts of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILES, DataConfig, tokenizer_settings
from megatron.config.save import to_dict
from megatron.data.tokenizer import build_tokenizer, embedding_rows
from megatron.pipeline_parallel.partition import table_of
from megatron_lab.audit.signature import named, signature_of
from megatron_lab.audit.trace_file import Signature, TraceHeader, TraceRun, TraceStep, TraceWriter
from megatron_lab.proofs.isolation import isolate
from megatron_lab.proofs.report import Proof
from megatron_lab.proofs.shrink import Reduced, shrink
from megatron_lab.proofs.small_layout import sizes_of
from megatron_lab.proofs.traces import compare, format_traces, read_whole
from megatron_lab.verification.comparison import Comparison
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.findings import layer_findings
from megatron_lab.verification.joined import JoinedTensor
from megatron_lab.verification.local_ranks import RanksError
from megatron_lab.verification.observation import Observation
from megatron_lab.verification.prove import ReferenceKind, prove, refuse_unknown_parts


@dataclass(frozen=True)
class Effort:
    """How much is run."""

    steps: int = 4
    max_ranks: int = 8
    """The most ranks that run at once."""
    isolates: bool = True
    """Whether to look for the settings with which a difference comes and goes."""
    reference: ReferenceKind = "plain"
    """What a run is compared with."""
    isolation_s: float = 60.0
    """No further run is begun for that after so many seconds."""


def verify_layout(config: Config, world_size: int, vocab_size: int, effort: Effort, *, trace: str | None = None) -> list[Proof]:
    """One proof for each of the small layouts that stand for the given one.

    Args:
        config: settings that are valid with this many ranks, of any size.
        vocab_size: rows of the word embedding, without padding.
        trace: file of an earlier proof's trace, with which the first proof is compared. If the settings save a trace, the first
            proof saves it.

    Raises:
        ValueError: the trace cannot be read, or is of another model; or the plain reference does not know a part of this one.
    """
    if effort.reference == "plain":
        refuse_unknown_parts(config)
    lost = list(layer_findings(table_of(config.model, config.parallel, vocab_size), config.model.num_layers))
    if lost:
        return [Proof(title_of(config, world_size), None, "nothing was run: the layer table of the settings is wrong", lost)]
    reduced = shrink(config, world_size, vocab_size, max_ranks=effort.max_ranks, steps=effort.steps)
    earlier = None if trace is None else read_whole(trace)
    first = _proof(reduced[0], effort, config.debug.save_trace, earlier, trace or "")
    return [first, *(_proof(each, effort) for each in reduced[1:])]


def _proof(reduced: Reduced, effort: Effort, saved: str | None = None, earlier: TraceRun | None = None, trace: str = "") -> Proof:
    started, hangs = time.monotonic(), False
    proof = Proof(title_of(reduced.config, reduced.world_size), None, kept=reduced.kept, changed=reduced.changed)
    try:
        observation = prove(reduced.config, reduced.world_size, reference=effort.reference)
        proof = replace(proof, diagnosis=diagnose(observation), changed=[*reduced.changed, *observation.replaced])
        if saved is not None:
            write_trace(trace_of(observation), saved)
        if earlier is not None:
            found = compare(trace_of(observation), earlier)
            proof = replace(proof, trace=format_traces(found, "this run", trace), parts_from_trace=found.parts)
    except RanksError as error:
        proof, hangs = replace(proof, failure=str(error)), error.timed_out
    if not proof.equal and effort.isolates and not hangs:  # a run that hangs takes all the time that there is
        again = partial(prove, reference=effort.reference)
        proof = replace(proof, alone=isolate(reduced.config, reduced.world_size, again, seconds=effort.isolation_s))
    return replace(proof, seconds=time.monotonic() - started)


def vocabulary_of(data: DataConfig) -> int:
    """Rows of the word embedding: by --vocab-size, else by the tokenizer, whose files are then needed.

    Raises:
        ValueError: neither is known, or a file is damaged. The message says which flag to give.
    """
    assert data.tokenizer_type is not None, "a rule asks for it"
    files = [name for name in tokenizer_settings(data.tokenizer_type) if name in TOKENIZER_FILES]
    if files and data.vocab_size is not None:
        return data.vocab_size  # with files it is the number of rows
    missing = [name for name in files if not Path(getattr(data, name) or "").exists()]
    if not missing:
        return embedding_rows(build_tokenizer(data), data)
    told = ", ".join(f"--{name.replace('_', '-')} {getattr(data, name)}" for name in missing)
    raise ValueError(
        f"the size of the vocabulary is not known: there is no {told}.\n"
        "  Give --vocab-size N (the rows of the word embedding), or the file."
    )


def title_of(config: Config, world_size: int) -> str:
    """The layout in words: `tensor 2 x pipeline 2 x data 1`."""
    return str(sizes_of(config, world_size))


def trace_of(observation: Observation) -> TraceRun:
    """The trace of the layout's run, not of the reference's."""
    runs = Comparison(observation)
    config = observation.config
    header = TraceHeader(
        settings=to_dict(config),
        layout=runs.sizes,
        layers=[(chunk.stage, list(chunk.layers)) for chunk in runs.table],
        dtype="float64",
        torch=torch.__version__,
        vocab_size=observation.vocab_size,
        parameters={name: list(tensor.shape) for name, tensor in observation.start.items()},
    )
    trace = TraceRun(header, 0, _signatures(runs.start.joined))
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
                gradients=_signatures(runs.gradients[index].joined),
                weights=_signatures(runs.weights[index].joined),
            )
        )
    return trace


def write_trace(trace: TraceRun, path: str) -> None:
    """Write a trace to a new file.

    Raises:
        ValueError: it cannot be written.
    """
    writer = TraceWriter(path, append=False)
    writer.header(trace.header)
    writer.start(trace.iteration, trace.weights)
    for step in trace.steps:
        writer.step(step)
    writer.close()


def _signatures(joined: Mapping[str, JoinedTensor]) -> dict[str, Signature]:
    return {name: named(signature_of(name, each.tensor)) for name, each in joined.items()}
