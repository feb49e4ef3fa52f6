"""What the model's state takes on a rank and what a step sends, for the settings of a run: told before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.memory import OptimizerState
from megatron.data_parallel.report import Report, rank_report
from megatron.model.build import Model
from megatron.optimizer.homes import ALIGN
from megatron.optimizer.offload import choose_offloaded
from megatron.optimizer.rules import RULES
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.schedule import Op, OpKind, Schedule


def state_report(
    model: Model, context: ParallelContext, parallel: ParallelConfig, optimizer: OptimizerConfig, schedule: Schedule
) -> Report:
    """Of this rank, by arithmetic: the parameters may be on the meta device.

    Args:
        schedule: of a step.
    """
    rule = RULES[optimizer.optimizer]
    fraction = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    state = OptimizerState(
        num_moments=len(rule.moments(optimizer)),
        align=ALIGN,
        offloaded=lambda sizes: choose_offloaded(sizes, fraction),
        staged=context.device.type != "cpu",
    )
    return rank_report(
        model.params,
        model.chunks,
        context,
        parallel,
        state,
        dtype=model.dtype,
        num_microbatches=schedule.num_microbatches,
        writes=writes(model, schedule.ops[context.group("pp").index]),
        granularity=rule.granularity,
    )


def writes(model: Model, ops: Iterable[Op]) -> Iterator[str]:
    """Names of the parameters in the order in which operations write their gradients: each as often as it is used."""
    written = {(number, kind): list(_writes(model, number, kind)) for number in model.chunks for kind in OpKind}
    return (name for op in ops for name in written[op.chunk, op.kind])


def _writes(model: Model, number: int, kind: OpKind) -> Iterator[str]:
    """Of one operation of a chunk. What a schedule may put off is products: not the gradients of vectors, nor those of tables, in
    which the embedding looks up rows."""
    chunk = model.chunks[number]
    for unit in reversed(chunk.units()):
        modules = set(unit.modules())
        for entry in reversed(list(model.params)):
            is_product = entry.record.matrix_dims is not None and unit is not chunk.embedding
            if kind is OpKind.BACKWARD or kind is (OpKind.WEIGHT_GRAD if is_product else OpKind.INPUT_GRAD):
                yield from (entry.record.name for module, _ in entry.holders if module in modules)
