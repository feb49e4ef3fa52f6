"""Proof that a user's layout trains as one process does: the settings are reduced to small runs, which are compared with reference
runs. If they differ, the cause is searched for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILE_SETTINGS, DataConfig, get_tokenizer_settings
from megatron.config.save import to_dict
from megatron.data.tokenizer import build_tokenizer, compute_embedding_rows
from megatron.pipeline_parallel.partition import build_layer_table
from megatron_lab.audit.signature import compute_signature, to_trace_signature
from megatron_lab.audit.trace_file import Signature, TraceHeader, TraceRun, TraceStep, TraceWriter
from megatron_lab.proofs.isolation import isolate
from megatron_lab.proofs.report import Proof
from megatron_lab.proofs.shrink import ReducedRun, shrink
from megatron_lab.proofs.small_layout import get_axis_sizes
from megatron_lab.proofs.traces import compare, format_traces, read_run
from megatron_lab.verification.comparison import Comparison
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.findings import check_layer_table
from megatron_lab.verification.gathered_tensors import GatheredTensor
from megatron_lab.verification.local_ranks import RanksError
from megatron_lab.verification.observation import Observation
from megatron_lab.verification.prove import ReferenceType, check_reference_support, prove


@dataclass(frozen=True)
class Effort:
    """Options of a proof that determine how long the proof takes."""

    steps: int = 4
    max_ranks: int = 8
    """Maximum number of ranks in a small run."""
    finds_cause: bool = True
    """Whether to search, if a small run differs from the reference run, for the settings that must be on to make it differ."""
    reference: ReferenceType = "plain"
    """Run with which a small run is compared: "plain" for a reference model that shares no code with the framework, "self" for
    a run of the framework in one process."""
    max_isolation_s: float = 60.0
    """Seconds after which the search for the cause starts no further run."""


def verify_layout(config: Config, world_size: int, vocab_size: int, effort: Effort, *, trace: str | None = None) -> list[Proof]:
    """Run the small layouts that together represent a layout, and compare each with a reference run.

    Args:
        config: settings of any size that are valid for `world_size` ranks.
        vocab_size: rows of the word embedding, without padding.
        effort: options that determine how long the proof takes.
        trace: trace file of an earlier proof, to compare with the first small run. With --save-trace, the first small run also
            writes a trace file.

    Returns:
        the result for each small layout.

    Raises:
        ValueError: the trace cannot be read or has another model, or the reference model does not support a module of the model.
    """
    if effort.reference == "plain":
        check_reference_support(config)
    layout_findings = list(check_layer_table(build_layer_table(config.model, config.parallel, vocab_size), config.model.num_layers))
    if layout_findings:
        return [
            Proof(
                format_layout(config, world_size),
                None,
                "nothing was run: the layer table of the settings is wrong",
                layout_findings,
            )
        ]
    reduced = shrink(config, world_size, vocab_size, max_ranks=effort.max_ranks, steps=effort.steps)
    earlier_trace = None if trace is None else read_run(trace)
    first = _prove_reduced(reduced[0], effort, config.debug.save_trace, earlier_trace, trace or "")
    return [first, *(_prove_reduced(reduced_run, effort) for reduced_run in reduced[1:])]


def _prove_reduced(
    run: ReducedRun, effort: Effort, trace_path: str | None = None, earlier_trace: TraceRun | None = None, earlier_path: str = ""
) -> Proof:
    started, has_timed_out = time.monotonic(), False
    proof = Proof(format_layout(run.config, run.world_size), None, preserved=run.preserved, reduced=run.reduced)
    try:
        observation = prove(run.config, run.world_size, reference=effort.reference)
        proof = replace(proof, diagnosis=diagnose(observation), reduced=[*run.reduced, *observation.replaced_settings])
        if trace_path is not None:
            write_trace(build_trace(observation), trace_path)
        if earlier_trace is not None:
            comparison = compare(build_trace(observation), earlier_trace)
            proof = replace(proof, trace=format_traces(comparison, "this run", earlier_path), differs_from_trace=comparison.differs)
    except RanksError as error:
        proof, has_timed_out = replace(proof, failure=str(error)), error.timed_out
    if not proof.equal and effort.finds_cause and not has_timed_out:  # a hanging run would use up all the time
        prove_again = partial(prove, reference=effort.reference)
        proof = replace(proof, isolation=isolate(run.config, run.world_size, prove_again, max_seconds=effort.max_isolation_s))
    return replace(proof, seconds=time.monotonic() - started)


def get_vocab_size(data: DataConfig) -> int:
    """Return the number of rows of the word embedding: --vocab-size, or the size of the tokenizer, whose files must exist.

    Raises:
        ValueError: --vocab-size is not set, and a file of the tokenizer is missing or damaged. The message names the flag to set.
    """
    assert data.tokenizer_type is not None, "a rule asks for it"
    file_fields = [name for name in get_tokenizer_settings(data.tokenizer_type) if name in TOKENIZER_FILE_SETTINGS]
    if file_fields and data.vocab_size is not None:
        return data.vocab_size  # with tokenizer files, --vocab-size is the number of rows
    missing_files = [name for name in file_fields if not Path(getattr(data, name) or "").exists()]
    if not missing_files:
        return compute_embedding_rows(build_tokenizer(data), data)
    missing_flags = ", ".join(f"--{name.replace('_', '-')} {getattr(data, name)}" for name in missing_files)
    raise ValueError(
        f"the vocabulary size is not known, because a file is missing: {missing_flags}.\n"
        "  Set --vocab-size N (the rows of the word embedding), or provide the file."
    )


def format_layout(config: Config, world_size: int) -> str:
    """Format the number of ranks along each axis as text, such as `tensor 2 x pipeline 2 x data 1`."""
    return str(get_axis_sizes(config, world_size))


def build_trace(observation: Observation) -> TraceRun:
    """Build a trace (losses, and signatures of gradients and weights) of the layout's run from the recorded values. The reference
    run is not included."""
    comparison = Comparison(observation)
    config = observation.config
    header = TraceHeader(
        settings=to_dict(config),
        layout=comparison.sizes,
        layers=[(chunk.stage, list(chunk.layers)) for chunk in comparison.layer_table],
        dtype="float64",
        torch=torch.__version__,
        vocab_size=observation.vocab_size,
        parameters={name: list(tensor.shape) for name, tensor in observation.start.items()},
    )
    trace = TraceRun(header, 0, _build_signatures(comparison.start.actual))
    consumed = 0
    for index in range(comparison.num_steps):
        step = comparison.ranks[0].steps[index]
        samples = step.num_microbatches * config.training.micro_batch_size * comparison.sizes["dp"]
        consumed += samples
        trace.steps.append(
            TraceStep(
                iteration=step.iteration,
                samples=samples,
                consumed_samples=consumed,
                loss=step.loss,
                tokens=math.fsum(rank.steps[index].token_count for rank in comparison.ranks),
                grad_norm=step.grad_norm,
                learning_rate=step.learning_rate,
                weight_decay=step.weight_decay,
                loss_scale=1.0,
                skipped=step.skipped,
                gradients=_build_signatures(comparison.gradients[index].actual),
                weights=_build_signatures(comparison.weights[index].actual),
            )
        )
    return trace


def write_trace(trace: TraceRun, path: str) -> None:
    """Write a trace to a new file, in the format of --save-trace.

    Raises:
        ValueError: the file cannot be written.
    """
    writer = TraceWriter(path, append=False)
    writer.write_header(trace.header)
    writer.write_start(trace.iteration, trace.weights)
    for step in trace.steps:
        writer.write_step(step)
    writer.close()


def _build_signatures(tensors: Mapping[str, GatheredTensor]) -> dict[str, Signature]:
    return {name: to_trace_signature(compute_signature(name, tensor.tensor)) for name, tensor in tensors.items()}
