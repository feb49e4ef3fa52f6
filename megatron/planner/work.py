"""How much a step computes, and how long ranks wait in the pipeline if time is what they compute."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.pipeline_parallel.partition import Chunk
from megatron.pipeline_parallel.simulate import simulate
from megatron.planner.plan import Work
from megatron.spec.counts import attention_flops, flops_per_step, flops_per_token, layer_flops, output_flops
from megatron.spec.operations import Op, Schedule
from megatron.spec.schedule_spec import Costs


def step_work(model: ModelConfig, vocab_size: int, table: Sequence[Chunk], schedule: Schedule, global_batch_size: int) -> Work:
    """Of a step of `global_batch_size` sequences, each of them one document."""
    return Work(
        tokens=model.seq_length * global_batch_size,
        flops_per_token=flops_per_token(model, vocab_size),
        flops=flops_per_step(model, vocab_size, global_batch_size),
        bubble=idle_share(model, vocab_size, table, schedule),
    )


def idle_share(model: ModelConfig, vocab_size: int, table: Sequence[Chunk], schedule: Schedule) -> float:
    """The part of their time in which stages wait, for each other and for the slowest of them."""
    return simulate(schedule, _Durations(model, vocab_size, table)).bubble_share


class _Durations:
    """Of operations, in FLOPs for a token."""

    def __init__(self, model: ModelConfig, vocab_size: int, table: Sequence[Chunk]) -> None:
        self._costs = [chunk_costs(model, vocab_size, chunk) for chunk in table]

    def __call__(self, op: Op) -> float:
        return self._costs[op.chunk].of(op)


def chunk_costs(model: ModelConfig, vocab_size: int, chunk: Chunk) -> Costs:
    """FLOPs of the operations on a chunk for a token. Of the two products in attention, which have no weights, both gradients are
    input gradients."""
    attention, whole = (sum(flops(model)[layer] for layer in chunk.layers) for flops in (attention_flops, layer_flops))
    products = whole - attention + chunk.last * output_flops(model, vocab_size)
    return Costs(products + attention, products + 2 * attention, products)
