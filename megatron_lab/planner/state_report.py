"""What the model's state takes on a rank, and what a step sends. A run logs it before its first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.fsdp_plan import own_modules
from megatron.data_parallel.traffic import Sent, axes_in_words
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import STAGE_AXES, Topology
from megatron.spec.operations import Op, OpKind, Schedule
from megatron_lab.planner.state_layout import Bytes, StateLayout, StateMemory, StateReport, state_layout
from megatron_lab.planner.state_size import OptimizerState, stage_size


def state_report(
    model: Model, context: ParallelContext, parallel: ParallelConfig, optimizer: OptimizerConfig, schedule: Schedule
) -> StateReport:
    """State and traffic of this rank, by arithmetic: the parameters may be on the meta device.

    Args:
        schedule: that of one step.
    """
    ops = schedule.ops[context.group("pp").index]
    layout = layout_of(model, context, parallel, optimizer, ops, schedule.num_microbatches)
    state = OptimizerState(optimizer, context.axis_sizes, context.device.type)
    return StateReport(layout.memory(layout.kept(context), state.memory), layout.sent)


def layout_of(
    model: Model,
    context: ParallelContext,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    ops: Iterable[Op],
    num_microbatches: int,
) -> StateLayout:
    """How the state of this rank's pipeline stage is cut, by arithmetic.

    Args:
        ops: operations of the stage in a step.
        num_microbatches: microbatches of one data rank in a step.
    """
    layout = state_layout(
        model.params,
        {number: chunk.units() for number, chunk in model.chunks.items()},
        {number: chunk.recomputed for number, chunk in model.chunks.items()},
        context,
        parallel,
        dtype=model.dtype,
        num_microbatches=num_microbatches,
        writes=writes(model, ops),
    )
    params = layout.params()
    work = stage_size(params, optimizer, context)
    stage = axes_in_words(STAGE_AXES, context)
    sent = (
        Sent(stage, "matrices", work.sent),
        Sent(stage, "numbers", work.numbers),
        Sent("pipeline ends", "numbers", work.numbers_of_tied),
    )
    return replace(layout, buffers=layout.buffers + Bytes(work.buffers), sent=(*layout.sent, *(one for one in sent if one.bytes)))


def writes(model: Model, ops: Iterable[Op]) -> Iterator[str]:
    """Names of the parameters in the order in which operations write their gradients, each as often as it is used."""
    written: dict[tuple[int, OpKind], list[str]] = {}
    for op in ops:
        if (op.chunk, op.kind) not in written:
            written[op.chunk, op.kind] = list(_writes(model, op.chunk, op.kind))
        yield from written[op.chunk, op.kind]


def _writes(model: Model, number: int, kind: OpKind) -> Iterator[str]:
    """The same for one operation. Only matrix products are deferred: not the gradients of vectors, nor those of embedding tables,
    which only look up rows; and that of the output layer is made with the input gradient."""
    chunk, mtp = model.chunks[number], model.chunks[number].mtp
    never_deferred = {chunk.embedding, chunk.output, None if mtp is None else mtp.word}
    units: list[nn.Module] = chunk.units()
    if mtp is not None:
        units = [*units[: units.index(mtp)], mtp.final_norm, mtp.output]
        for depth in mtp.depths:  # each uses what others hold once more
            units += [mtp.word, depth, mtp.final_norm, mtp.output]
    for unit, modules in zip(reversed(units), reversed(own_modules(units)), strict=True):
        for entry in reversed(list(model.params)):
            is_deferred = entry.record.kind != "vector" and unit not in never_deferred
            if kind is OpKind.BACKWARD or kind is (OpKind.WEIGHT_GRAD if is_deferred else OpKind.INPUT_GRAD):
                yield from (entry.record.name for module, _ in entry.holders if module in modules)


def describe_state(
    reports: Sequence[StateReport], parallel: ParallelConfig, topology: Topology, num_microbatches: int
) -> list[str]:
    """Lines of the start-up log: the state of the fullest stage, and what a step sends there.

    Args:
        reports: one for each pipeline stage.
        num_microbatches: microbatches of one data rank in a step.
    """
    stage = max(range(len(reports)), key=lambda stage: reports[stage].memory.total.device)
    memory, where = reports[stage].memory, f"a rank of stage {stage}, the fullest" if len(reports) > 1 else "each rank"
    sharers = f"{topology.cp} context x {topology.dp} data ranks" if topology.cp > 1 else f"{topology.dp} data ranks"
    among = "one data rank" if topology.cp * topology.dp == 1 else f"{parallel.sharding} over {sharers}"
    if parallel.sharding == "optim_grads_params" and parallel.fsdp_shard_size is not None:
        among += f" in groups of {parallel.fsdp_shard_size}"
    total = memory.total
    lines = [
        f"state of the model, {among}: {amount(total.device)} on {where}: {device_parts(memory)}"
        + (f"; {amount(total.padding)} of it padding" if total.padding else "")
    ]
    if total.host:
        lines.append(f"and {amount(total.host)} in host memory: {host_parts(memory)}")
    groups = dict.fromkeys(one.over for one in reports[stage].sent)
    sent = [_sent(over, {one.kind: one.bytes for one in reports[stage].sent if one.over == over}) for over in groups]
    if sent:
        step = f"a step of {num_microbatches} microbatch{'es' * (num_microbatches > 1)}"
        lines.append(f"in {step} such a rank sends {', '.join(sent)}")
    return lines


def device_parts(memory: StateMemory) -> str:
    """What the parts of a rank's memory take on the device; those that take nothing are left out."""
    return _listed({name: part.device for name, part in memory.parts.items()})


def host_parts(memory: StateMemory) -> str:
    """The same for host memory."""
    return _listed({name: part.host for name, part in memory.parts.items()})


def amount(num_bytes: float) -> str:
    """Bytes in three digits, in powers of 1,000."""
    return in_units(num_bytes, [" bytes", " kB", " MB", " GB", " TB"])


def in_units(number: float, units: Sequence[str]) -> str:
    """A number in three digits, with a unit for each power of 1,000."""
    *smaller, largest = units
    for unit in smaller:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{largest}"


def _sent(over: str, kinds: Mapping[str, int]) -> str:
    total = f"{amount(sum(kinds.values()))} over {over}"
    return f"{total} ({_listed(kinds)})" if len(kinds) > 1 else total


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {amount(part)}" for name, part in parts.items() if part)
