"""Data parallelism with sharded parameters (ZeRO-3, Rajbhandari et al. 2019, section 5.3), based on torch's `fully_shard`.

A unit (a block; the embedding; the final norm with the output layer) is gathered while the previous unit computes, and freed after
its use. So two units are gathered at a time. There are two kinds of nested units. Multi-token prediction uses the final norm and
the output layer several times: their unit stays gathered around its depths, and each depth is a unit. A block stays gathered around
its experts: they are a separate unit, because they are sharded and reduced over other ranks than the attention. With
--fsdp-reshard-after-forward never, all units of the rank stay gathered from their first use in a step to their last. `traffic.py`
states the communication of each mode. With replicas (hybrid sharding, Zhao et al. 2023, section 3.2.2) each rank's gradient shard
is summed over the replicas once per step.

The sharded parameter is its own main parameter, in float32 or wider. FSDP gathers it in the model's dtype into an unsharded
parameter, which is the same object in every step. Layers pass the gradients of that object to its gradient sink instead of to
autograd. Each gradient gets new memory and becomes the object's `.grad`, which FSDP reads once backward has left the unit. FSDP
sums it over the data ranks, and adds this rank's shard to a buffer that is allocated once. With --fsdp-reduce-once the sink
accumulates the gradients of a step, and `.grad` stays empty until the last microbatch.

With --fsdp-params-cpu this rank's shards of parameters, gradients and moments are in host memory. For an all-gather, a shard is
copied to the device and converted to the model's dtype there. The first reduced gradient of a step is copied to the host while
backward continues, and copied into the buffer at the end. For later gradients FSDP waits on the host to add them; with
--fsdp-reduce-once there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.data_parallel.bucket import FillFunction, main_grad_dtype
from megatron.data_parallel.fsdp_plan import (
    FsdpPolicy,
    UnitPlan,
    build_param_partition,
    compute_owned_range,
    compute_sharded_view_shape,
    order_for_backward,
    plan_units,
)
from megatron.data_parallel.provider import GradInspector, PersistentTensors, ShardProvider
from megatron.parallel.accumulate import GradSink, check_grad_counts
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup
from megatron.parallel.torch_private import foreach_copy_


class FsdpUnit:
    """Modules whose fully sharded parameters are gathered and freed together. Wraps the modules with `fully_shard`, and holds this
    rank's shards, their gradients, and the sinks that receive the gradients of the unsharded parameters.

    Args:
        mesh: ranks that shard the unit: one-dimensional, or with replicas [replicas, ranks of a replica].
        dtype: dtype in which parameters are gathered and used.
        fill: writes initial values of parameters on the meta device; other parameters keep their values.
        ignored_params: parameters of the modules that are not sharded.
    """

    def __init__(
        self,
        plan: UnitPlan,
        mesh: DeviceMesh,
        context: ParallelContext,
        *,
        dtype: torch.dtype,
        fill: FillFunction,
        policy: FsdpPolicy,
        ignored_params: set[nn.Parameter],
    ) -> None:
        self._entries, self._context, self._policy = plan.entries, context, policy
        self._shard_group, self._replica_group = context.get_fsdp_shard_group(plan.axes), context.get_fsdp_replica_group(plan.axes)
        self._uses = [entry.uses_per_microbatch for entry in plan.entries]
        self.num_nested = plan.num_nested
        self._dtype, self._main_dtype = dtype, main_grad_dtype(dtype)
        self._num_microbatches = self._num_backwards = self._num_accumulated = 0
        self._writes = [0] * len(plan.entries)
        self._inspect: GradInspector | None = None

        meta_names = {entry.record.name for entry in plan.entries if entry.param.is_meta}
        self._shapes = [entry.param.shape for entry in plan.entries]
        for entry in plan.entries:
            # FSDP pads only parameters that it shards along the first dimension. Layers flatten leading dimensions themselves.
            rows, row_length = compute_sharded_view_shape(entry)
            shape = (rows,) if entry.record.param_type == "vector" else (rows, row_length)
            entry.replace(nn.Parameter(entry.param.detach().to(self._main_dtype).view(shape)))
        self.module = self._fully_shard(plan, mesh, ignored_params)
        shard_device = torch.device("cpu") if policy.params_cpu else context.device
        for entry in plan.entries:
            if entry.record.name in meta_names:
                entry.replace(nn.Parameter(torch.empty_like(entry.param.detach(), device=shard_device)))
        self.module.unshard()
        self._unsharded_params = [entry.param for entry in plan.entries]
        self._sinks = [self._attach_sink(index, param) for index, param in enumerate(self._unsharded_params)]
        self.module.reshard()
        self._sharded_params = [entry.param for entry in plan.entries]

        sizes = [_get_local_tensor(entry).numel() for entry in plan.entries]
        self.grads = torch.zeros(sum(sizes), dtype=self._main_dtype, device=shard_device)
        grad_views = torch.split(self.grads, sizes)
        shards = [self._build_shard(entry, grad_view) for entry, grad_view in zip(plan.entries, grad_views, strict=True)]
        # After an update, nothing is sent: the next forward gathers the parameters.
        partitions = [build_param_partition(entry, self._shard_group, self._main_dtype) for entry in plan.entries]
        self.group = ShardGroup(shards, self.module.reshard, partitions)
        for shard in shards:
            if shard.record.name in meta_names:
                # Rounded to the model's dtype first, so that values are equal under every sharding strategy.
                values = torch.empty_like(shard.weights, dtype=dtype)
                fill(values, shard.record, shard.get_slices(context))
                shard.weights.copy_(values)

    def iter_grad_sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Yield each parameter's `ParamRecord` (name, shape, split over ranks) and the sink that receives its gradients."""
        return ((entry.record, sink) for entry, sink in zip(self._entries, self._sinks, strict=True))

    def start_step(self, num_microbatches: int, *, inspect: GradInspector | None) -> None:
        """Start a step: discard the gradients of the last step, including those of a step that failed."""
        if inspect is None:
            self.grads.zero_()
        self._num_microbatches, self._num_backwards, self._num_accumulated = num_microbatches, 0, 0
        self._writes = [0] * len(self._entries)
        self._inspect = inspect
        for param, sink in zip(self._unsharded_params, self._sinks, strict=True):
            param.grad = sink.main_grad = None
            sink.is_written = False
        if self._policy.params_cpu:
            for sharded in self._sharded_params:
                sharded.grad = None

    def before_backward(self) -> None:
        """Count the backward passes of this step. Called before each backward through the unit."""
        self._num_backwards += 1

    def write_counts(self) -> list[tuple[str, int, int]]:
        """Return (name, number of gradients received in this step, expected number) for each parameter, to check that no gradient
        is missing."""
        counts = zip(self._entries, self._writes, self._uses, strict=True)
        return [(entry.record.name, num_written, uses * self._num_microbatches) for entry, num_written, uses in counts]

    def finish_gradients(self) -> None:
        """With --fsdp-params-cpu, copy the reduced gradients, which FSDP put in host memory, into the gradient buffer. Otherwise do
        nothing.

        FSDP has already waited for these gradients at the end of the last backward.
        """
        if self._policy.params_cpu:
            reduced_grads = [cast(DTensor, sharded.grad).to_local().view(-1) for sharded in self._sharded_params]
            foreach_copy_([shard.grad for shard in self.group.shards], reduced_grads)
            for sharded in self._sharded_params:
                sharded.grad = None

    def _fully_shard(self, plan: UnitPlan, mesh: DeviceMesh, ignored_params: set[nn.Parameter]) -> FSDPModule:
        cpu_offload = CPUOffloadPolicy(pin_memory=self._context.device.type != "cpu")
        wrapped = fully_shard(
            list(plan.modules),
            mesh=mesh,
            reshard_after_forward=self._policy.reshard == "always",
            mp_policy=MixedPrecisionPolicy(self._dtype, self._main_dtype, cast_forward_inputs=False),
            offload_policy=cpu_offload if self._policy.params_cpu else OffloadPolicy(),
            ignored_params=ignored_params,
        )
        module = wrapped[0]  # the state is shared by modules that are wrapped together
        # Gradients are sums without any division, because the loss is scaled. The two calls affect only this unit.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        return module

    def _attach_sink(self, index: int, param: nn.Parameter) -> GradSink:
        allocate = partial(torch.empty, param.shape, dtype=self._main_dtype, device=self._context.device)
        sink = GradSink(self._main_dtype, partial(self._on_grad_written, index), allocate)
        param.grad_sink = sink  # type: ignore[attr-defined]
        param.grad_dtype = self._main_dtype  # dtype of `.grad`, which may be wider than the parameter's
        return sink

    def _build_shard(self, entry: ParamEntry, grad: torch.Tensor) -> Shard:
        param, local = entry.param, _get_local_tensor(entry)
        assert isinstance(param, DTensor) and local.is_contiguous()
        # FSDP adds in place to an existing gradient. In host memory that, and a hook, would make FSDP wait.
        if not self._policy.params_cpu:
            param.grad = DTensor.from_local(
                grad.view(local.shape),
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
            param.register_post_accumulate_grad_hook(self._on_grad_accumulated)
        local_range, flat_range = range(local.numel()), compute_owned_range(entry, self._shard_group)
        is_counted = entry.record.is_counted_at(self._context) and self._replica_group.rank == 0
        norm_range, duplicate_range = (local_range, range(0)) if is_counted else (range(0), local_range)
        return Shard(
            entry.record,
            flat_range,
            local.view(-1),
            grad,
            norm_range,
            duplicate_range,
            is_fully_sharded=True,
            on_host=self._policy.params_cpu,
        )

    def _on_grad_written(self, index: int) -> None:
        entry = self._entries[index]
        self._writes[index] += 1
        if self._writes[index] > self._num_backwards * self._uses[index]:
            check_grad_counts(
                self._context.rank, [(entry.record.name, self._writes[index], self._num_backwards * self._uses[index])]
            )
        reduces_once = self._policy.reduce_once and self._inspect is None
        if self._writes[index] % (self._uses[index] * (self._num_microbatches if reduces_once else 1)):
            return
        sink = self._sinks[index]
        grad, sink.main_grad, sink.is_written = sink.main_grad, None, False
        assert grad is not None
        if self._inspect is None:
            self._unsharded_params[index].grad = grad
        else:
            self._inspect(entry, grad.view(self._shapes[index]))

    def _on_grad_accumulated(self, param: torch.Tensor) -> None:
        """Hook that FSDP calls when it has added a reduced gradient to a shard's gradient.

        On CUDA the addition has been issued on the current stream, a side stream, but may not have run.
        """
        if self._num_backwards < self._num_microbatches:
            return
        self._num_accumulated += 1
        if self._num_accumulated == len(self._entries) and self.group.on_reduced:
            stream = torch.get_device_module(self._context.device).current_stream()
            self.group.notify_reduced(Pending(self.grads, cast(Any, stream.record_event())))


def _get_local_tensor(entry: ParamEntry) -> torch.Tensor:
    """Return this rank's shard of a sharded parameter."""
    with torch.no_grad():
        return cast(DTensor, entry.param).to_local()


@dataclass
class _ChunkState:
    """Progress of a model chunk in the current step. The units of the chunk (modules whose parameters FSDP gathers together) are in
    forward order."""

    module: FSDPModule
    units: list[FsdpUnit]
    num_backwards: int = 0
    """Number of backwards started in this step."""
    is_last_backward: bool = True
    """Last value passed to FSDP's `set_is_last_backward`: whether the chunk's next backward is its last in the step. After the
    last backward FSDP waits for its reductions."""


class FullyShardedParams(ShardProvider):
    """Shards parameters by torch's `fully_shard`, for the sharding strategy optim_grads_params.

    Args:
        entries: parameters, on the meta device or with values, for which `is_fully_sharded` is true.
        chunks: by index of the model chunk on this rank: the module that holds the parameters, and those of its submodules that are
            each gathered and freed as a unit, in forward order. Other parameters of the module are ignored.
        dtype: dtype in which parameters are gathered and used.
        fill: writes initial values of parameters on the meta device.
        policy: memory and communication options.
    """

    uses_before_backward = True

    def __init__(
        self,
        entries: Iterable[ParamEntry],
        chunks: Mapping[int, tuple[nn.Module, Sequence[nn.Module]]],
        context: ParallelContext,
        *,
        dtype: torch.dtype,
        fill: FillFunction,
        policy: FsdpPolicy,
    ) -> None:
        self._reshards_after_forward = policy.reshard == "always"
        self._rank, self._num_microbatches = context.rank, 0
        self._chunk_states: dict[int, _ChunkState] = {}
        entries = list(entries)
        meshes = {axes: _build_mesh(context, axes) for axes in dict.fromkeys(entry.record.partial_axes for entry in entries)}
        for chunk, (module, submodules) in chunks.items():
            chunk_entries = [entry for entry in entries if entry.chunk == chunk]
            if not chunk_entries:
                continue
            ignored_params = set(module.parameters()) - {entry.param for entry in chunk_entries}
            units = [
                FsdpUnit(plan, meshes[plan.axes], context, dtype=dtype, fill=fill, policy=policy, ignored_params=ignored_params)
                for plan in reversed(plan_units(submodules, chunk_entries))  # nested units first
            ][::-1]
            _configure_prefetch(units)
            root = fully_shard(
                module, mesh=next(iter(meshes.values())), ignored_params=ignored_params | {entry.param for entry in chunk_entries}
            )
            if context.device.type == "cpu":
                root._set_unshard_async_op(True)  # CPU has no streams on which to gather ahead
            self._chunk_states[chunk] = _ChunkState(root, units)
        self._units = [unit for root in self._chunk_states.values() for unit in root.units]
        self.groups: list[ShardGroup] = [unit.group for unit in self._units]

    def start_step(self, num_microbatches: int, *, inspect: GradInspector | None = None) -> None:
        """Start a step of `num_microbatches` microbatches in all units: discard the gradients of the last step.

        Args:
            inspect: receives each gradient as it is written. Nothing is then summed or reduced.
        """
        self._num_microbatches = num_microbatches
        for state in self._chunk_states.values():
            state.num_backwards = 0
        for unit in self._units:
            unit.start_step(num_microbatches, inspect=inspect)

    def before_backward(self, chunk: int) -> None:
        """Count a backward of this model chunk, and tell FSDP whether it is the chunk's last backward of the step."""
        state = self._chunk_states.get(chunk)
        if state is None:
            return
        state.num_backwards += 1
        for unit in state.units:
            unit.before_backward()
        is_last_backward = state.num_backwards == self._num_microbatches
        if is_last_backward != state.is_last_backward:
            state.is_last_backward = is_last_backward
            state.module.set_is_last_backward(is_last_backward)
            state.module.set_requires_all_reduce(is_last_backward)
            state.module.set_reshard_after_backward(is_last_backward or self._reshards_after_forward)

    def before_recompute(self, modules: Sequence[nn.Module]) -> None:
        """Gather the parameters of these modules before they are recomputed. The parameters stay gathered until backward has left
        the modules, so they are gathered only once."""
        for submodule in (submodule for module in modules for submodule in module.modules()):
            if isinstance(submodule, FSDPModule):
                submodule.unshard()

    def iter_grad_sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Yield each parameter's `ParamRecord` (name, shape, split over ranks) and the sink that receives its gradients."""
        return (named_sink for unit in self._units for named_sink in unit.iter_grad_sinks())

    def get_persistent_tensors(self) -> PersistentTensors:
        """Return the local shards and their gradients. Torch owns all temporary buffers and frees them before a step ends."""
        shards = [shard for group in self.groups for shard in group.shards]
        on_host = any(shard.on_host for shard in shards)
        return PersistentTensors([shard.weights for shard in shards], [shard.grad for shard in shards], [], on_host)

    def finish_gradients(self) -> None:
        """Check that each parameter received all its gradients. With --fsdp-params-cpu, also copy the reduced gradients from where
        FSDP left them in host memory into the gradient buffers.

        FSDP waited for its reductions at the end of each chunk's last backward.
        """
        check_grad_counts(self._rank, [count for unit in self._units for count in unit.write_counts()])
        for unit in self._units:
            unit.finish_gradients()

    def finish_evaluation(self) -> None:
        """Free the gathered parameters of all units."""
        for unit in self._units:
            unit.module.reshard()


def _build_mesh(context: ParallelContext, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the ranks along these axes as a device mesh: one-dimensional, or with replicas [replicas, ranks of a replica]."""
    shard_group, replica_group = context.get_fsdp_shard_group(axes), context.get_fsdp_replica_group(axes)
    assert shard_group.process_group is not None, "nobody to shard with"
    if replica_group.process_group is None:
        return DeviceMesh.from_group(shard_group.process_group, context.device.type)
    ranks = torch.tensor(context.group(*axes).ranks).view(replica_group.size, shard_group.size)
    groups = [replica_group.process_group, shard_group.process_group]
    return DeviceMesh.from_group(groups, context.device.type, mesh=ranks, mesh_dim_names=("replica", "shard"))


def _configure_prefetch(units: list[FsdpUnit]) -> None:
    """Configure FSDP so that each unit prefetches the following unit, in forward and in backward."""
    for current, following in pairwise(units):
        current.module.set_modules_to_forward_prefetch([following.module])
    backward_order = order_for_backward(units, [unit.num_nested for unit in units])
    for current, following in pairwise(backward_order):
        current.module.set_modules_to_backward_prefetch([following.module])
    # Without a list, FSDP would prefetch in reverse forward order, which may belong to another microbatch. The last unit lists
    # itself, which is gathered already.
    backward_order[-1].module.set_modules_to_backward_prefetch([backward_order[-1].module])
