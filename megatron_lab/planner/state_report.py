"""Memory of the model's state on a rank, and its traffic in a step. A run logs both before its first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.fsdp_plan import find_exclusive_modules
from megatron.data_parallel.traffic import GroupTraffic, format_axes
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import STAGE_AXES, Topology
from megatron.spec.operations import Op, OpType, Schedule
from megatron_lab.planner.state_layout import Bytes, StateLayout, StateMemory, StateReport, build_state_layout
from megatron_lab.planner.state_size import OptimizerState, compute_stage_update_size
from megatron_lab.planner.units import format_bytes


def build_state_report(
    model: Model, context: ParallelContext, parallel: ParallelConfig, optimizer: OptimizerConfig, schedule: Schedule
) -> StateReport:
    """Compute the memory of the state on this rank, and the bytes that the rank sends in a step for the state. Nothing is
    allocated; the parameters may be on the meta device.

    Args:
        schedule: schedule of one step.
    """
    ops = schedule.ops[context.group("pp").rank]
    layout = build_stage_layout(model, context, parallel, optimizer, ops, schedule.num_microbatches)
    state = OptimizerState(optimizer, context.axis_sizes, context.device.type)
    return StateReport(layout.compute_memory(layout.compute_rank_states(context), state.compute_memory), layout.traffic)


def build_stage_layout(
    model: Model,
    context: ParallelContext,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    ops: Iterable[Op],
    num_microbatches: int,
) -> StateLayout:
    """Compute how the ranks of this rank's pipeline stage share the model's state. The parameters may be on the meta device.

    Args:
        ops: operations of the stage in a step.
        num_microbatches: microbatches of one data rank in a step.
    """
    layout = build_state_layout(
        model.params,
        {index: chunk.get_units() for index, chunk in model.chunks.items()},
        {index: chunk.recomputed_modules for index, chunk in model.chunks.items()},
        context,
        parallel,
        dtype=model.dtype,
        num_microbatches=num_microbatches,
        grad_writes=iter_grad_writes(model, ops),
    )
    params = layout.get_param_partitions()
    update_size = compute_stage_update_size(params, optimizer, context)
    stage_group = format_axes(STAGE_AXES, context)
    update_traffic = (
        GroupTraffic(stage_group, "matrices", update_size.max_sent_bytes),
        GroupTraffic(stage_group, "numbers", update_size.statistics_bytes),
        GroupTraffic("pipeline ends", "numbers", update_size.tied_statistics_bytes),
    )
    return replace(
        layout,
        buffers=layout.buffers + Bytes(update_size.buffer_bytes),
        traffic=(*layout.traffic, *(entry for entry in update_traffic if entry.bytes)),
    )


def iter_grad_writes(model: Model, ops: Iterable[Op]) -> Iterator[str]:
    """Yield parameter names in the order in which operations write gradients. A parameter that is used several times is named once
    for each use."""
    names_of_op: dict[tuple[int, OpType], list[str]] = {}
    for op in ops:
        if (op.chunk, op.type) not in names_of_op:
            names_of_op[op.chunk, op.type] = list(_iter_op_grad_writes(model, op.chunk, op.type))
        yield from names_of_op[op.chunk, op.type]


def _iter_op_grad_writes(model: Model, chunk_index: int, op_type: OpType) -> Iterator[str]:
    """Yield parameter names in the order in which one operation on a microbatch writes gradients.

    Of the gradients, only those of matrix products are deferred to a weight-gradient operation. Those of vectors and of embedding
    tables (row lookups) are not. The weight gradient of the output layer is computed in the input-gradient operation.
    """
    chunk, mtp = model.chunks[chunk_index], model.chunks[chunk_index].mtp
    never_deferred = {chunk.embedding, chunk.output, None if mtp is None else mtp.word}
    units: list[nn.Module] = chunk.get_units()
    if mtp is not None:
        units = [*units[: units.index(mtp)], mtp.final_norm, mtp.output]
        for depth in mtp.depths:  # each MTP depth uses the shared embedding, norm and output layer once more
            units += [mtp.word, depth, mtp.final_norm, mtp.output]
    for unit, modules in zip(reversed(units), reversed(find_exclusive_modules(units)), strict=True):
        for entry in reversed(list(model.params)):
            is_deferred = entry.record.param_type != "vector" and unit not in never_deferred
            if op_type is OpType.BACKWARD or op_type is (OpType.WEIGHT_GRAD if is_deferred else OpType.INPUT_GRAD):
                yield from (entry.record.name for module, _ in entry.owners if module in modules)


def format_state_report(
    reports: Sequence[StateReport], parallel: ParallelConfig, topology: Topology, num_microbatches: int
) -> list[str]:
    """Return lines of the start-up log: the state memory of a rank on the pipeline stage that needs most, and the bytes that this
    rank sends in a step.

    Args:
        reports: report of each pipeline stage.
        num_microbatches: microbatches of one data rank in a step.
    """
    stage = max(range(len(reports)), key=lambda stage: reports[stage].memory.total.device)
    memory, location = reports[stage].memory, f"a rank of stage {stage}, the fullest" if len(reports) > 1 else "each rank"
    ranks = f"{topology.cp} context x {topology.dp} data ranks" if topology.cp > 1 else f"{topology.dp} data ranks"
    sharding = "one data rank" if topology.cp * topology.dp == 1 else f"{parallel.sharding} over {ranks}"
    if parallel.sharding == "optim_grads_params" and parallel.fsdp_shard_size is not None:
        sharding += f" in groups of {parallel.fsdp_shard_size}"
    total = memory.total
    lines = [
        f"state of the model, {sharding}: {format_bytes(total.device)} on {location}: {format_device_memory(memory)}"
        + (f"; {format_bytes(total.padding)} of it padding" if total.padding else "")
    ]
    if total.host:
        lines.append(f"and {format_bytes(total.host)} in host memory: {format_host_memory(memory)}")
    groups = dict.fromkeys(entry.over for entry in reports[stage].traffic)
    traffic = [
        _format_traffic(group, {entry.kind: entry.bytes for entry in reports[stage].traffic if entry.over == group})
        for group in groups
    ]
    if traffic:
        step = f"a step of {num_microbatches} microbatch{'es' * (num_microbatches > 1)}"
        lines.append(f"in {step} such a rank sends {', '.join(traffic)}")
    return lines


def format_device_memory(memory: StateMemory) -> str:
    """Format the bytes of device memory for each purpose, as in "parameters 1.2 GB, gradients 2.4 GB". Purposes without device
    memory are omitted."""
    return _format_sizes({name: size.device for name, size in memory.by_purpose.items()})


def format_host_memory(memory: StateMemory) -> str:
    """Format the bytes of host memory for each purpose, as in "moments 1.2 GB". Purposes without host memory are omitted."""
    return _format_sizes({name: size.host for name, size in memory.by_purpose.items()})


def _format_traffic(group: str, bytes_by_purpose: Mapping[str, int]) -> str:
    total = f"{format_bytes(sum(bytes_by_purpose.values()))} over {group}"
    return f"{total} ({_format_sizes(bytes_by_purpose)})" if len(bytes_by_purpose) > 1 else total


def _format_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in sizes.items() if size)
