"""Simulated timelines for tests of pictures; costs are those of a whole stage."""

from __future__ import annotations

from dataclasses import replace

from megatron.pipeline_parallel.simulate import OpSpan, Timeline, simulate
from megatron.spec.operations import OpCosts
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.schedule_plots.panel import Panel


def chunks_of(name: str, chunks: int) -> int:
    return SCHEDULES[name].chunks_per_stage or chunks


def timeline(name: str, stages: int, microbatches: int, chunks: int = 2, costs: OpCosts = OpCosts(10, 10, 10)) -> Timeline:  # noqa: B008
    """Simulated, at costs of a whole stage. Where recompute takes time, all chunks have it."""
    chunks = chunks_of(name, chunks)
    recomputed = range(stages * chunks) if costs.recompute else ()
    return simulate(
        build_schedule(name, stages, microbatches, chunks, recomputed_chunks=recomputed), costs.divide_by_chunks(chunks)
    )


def panel(name: str, stages: int, microbatches: int, chunks: int = 2, recompute: float = 0.0) -> Panel:
    return Panel(name, timeline(name, stages, microbatches, chunks, OpCosts(10, 10, 10, recompute=recompute)))


def moved(before: Timeline, by: float) -> Timeline:
    spans = tuple(tuple(OpSpan(span.op, span.start + by, span.end + by) for span in stage) for stage in before.spans)
    return replace(before, spans=spans)
