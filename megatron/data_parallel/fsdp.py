"""The provider of shards whose parameters are sharded too (ZeRO-3, Rajbhandari et al. 2019, section 5.3), on torch's `fully_shard`.

A unit (a block; the embedding; the final norm with the output layer) is gathered before its use, while the unit before it computes,
and freed afterwards: so two units are gathered at a time. Multi-token prediction uses norm and output layer several times: they
stay gathered around its depths, each a unit of its own. So does a block around its experts, which other ranks hold too than hold
its attention: they are a unit that is gathered, divided and summed over these. With --fsdp-reshard-after-forward never, all units
of the rank stay gathered from their first use in a step to their last. `traffic.py` says what each mode sends. With replicas
(hybrid sharding, Zhao et al. 2023, section 3.2.2) each rank's part of the gradient is summed over them once a step.

The sharded parameter is its own main parameter, in float32 or wider. FSDP gathers it in the model's dtype into an unsharded
parameter, which is the same object in every step. Layers hand gradients to that object's sink, not to autograd. Each gradient gets
new memory and becomes the parameter's `.grad`, where FSDP finds it once backward has left the unit. FSDP sums it over the data
ranks, and adds this rank's part to a buffer that is allocated once. With --fsdp-reduce-once the sink adds up a step's gradients,
and FSDP finds none before the last microbatch.

With --fsdp-params-cpu this rank's parts of parameters, gradients and moments are in host memory. To gather, a part is copied to the
device and rounded there. The first gradient of a step that is reduced crosses to the host while backward goes on, and is taken into
the buffer at the end. For further ones FSDP waits on the host, to add them: there are none with --fsdp-reduce-once.
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

from megatron.data_parallel.bucket import Fill, main_grad_dtype
from megatron.data_parallel.fsdp_plan import FsdpPolicy, UnitPlan, divided, divided_param, in_backward, own_piece, plan_units
from megatron.data_parallel.provider import HeldTensors, Inspect, Provider
from megatron.parallel.accumulate import GradSink, check_writes
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup
from megatron.parallel.torch_private import foreach_copy_


class FsdpUnit:
    """The parameters of a unit on this rank: local shards, their gradients, and sinks.

    Args:
        mesh: the ranks that divide it; with replicas two-dimensional, replicas first.
        dtype: dtype in which parameters are gathered and used.
        fill: initial values of parameters on the meta device; others keep their values.
        outside: parameters of the modules that are not sharded.
    """

    def __init__(
        self,
        plan: UnitPlan,
        mesh: DeviceMesh,
        context: ParallelContext,
        *,
        dtype: torch.dtype,
        fill: Fill,
        policy: FsdpPolicy,
        outside: set[nn.Parameter],
    ) -> None:
        self._entries, self._context, self._policy = plan.entries, context, policy
        self._shard, self._replica = context.fsdp_shard(plan.axes), context.fsdp_replica(plan.axes)
        self._uses = [entry.uses_per_microbatch for entry in plan.entries]
        self.encloses = plan.encloses
        self._dtype, self._main_dtype = dtype, main_grad_dtype(dtype)
        self._microbatches = self._rounds = self._num_added = 0
        self._writes = [0] * len(plan.entries)
        self._inspect: Inspect | None = None

        empty = {entry.record.name for entry in plan.entries if entry.param.is_meta}
        self._shapes = [entry.param.shape for entry in plan.entries]
        for entry in plan.entries:
            # FSDP pads only what it divides along the first dimension. Layers flatten leading dimensions themselves.
            rows, length = divided(entry)
            shape = (rows,) if entry.record.kind == "vector" else (rows, length)
            entry.replace(nn.Parameter(entry.param.detach().to(self._main_dtype).view(shape)))
        self.module = self._wrap(plan, mesh, outside)
        home = torch.device("cpu") if policy.params_cpu else context.device
        for entry in plan.entries:
            if entry.record.name in empty:
                entry.replace(nn.Parameter(torch.empty_like(entry.param.detach(), device=home)))
        self.module.unshard()
        self._gathered = [entry.param for entry in plan.entries]
        self._sinks = [self._attach(number, param) for number, param in enumerate(self._gathered)]
        self.module.reshard()
        self._sharded = [entry.param for entry in plan.entries]

        sizes = [_local(entry).numel() for entry in plan.entries]
        self.grads = torch.zeros(sum(sizes), dtype=self._main_dtype, device=home)
        parts = torch.split(self.grads, sizes)
        shards = [self._make_shard(entry, part) for entry, part in zip(plan.entries, parts, strict=True)]
        # To publish an update nothing is sent: the next forward gathers.
        params = [divided_param(entry, self._shard, self._main_dtype) for entry in plan.entries]
        self.group = ShardGroup(shards, self.module.reshard, params)
        for shard in shards:
            if shard.record.name in empty:  # rounded to the model's dtype first, so as to be the same as under every other strategy
                values = torch.empty_like(shard.weights, dtype=dtype)
                fill(values, shard.record, shard.boxes(context))
                shard.weights.copy_(values)

    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Where the gradient of each parameter is written."""
        return ((entry.record, sink) for entry, sink in zip(self._entries, self._sinks, strict=True))

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None) -> None:
        """Begin a step: forget the last one's gradients, and what a failed step has left."""
        if inspect is None:
            self.grads.zero_()
        self._microbatches, self._rounds, self._num_added = num_microbatches, 0, 0
        self._writes = [0] * len(self._entries)
        self._inspect = inspect
        for param, sink in zip(self._gathered, self._sinks, strict=True):
            param.grad = sink.main_grad = None
            sink.written = False
        if self._policy.params_cpu:
            for sharded in self._sharded:
                sharded.grad = None

    def before_backward(self) -> None:
        """Called before each backward that goes through the unit."""
        self._rounds += 1

    def counts(self) -> list[tuple[str, int, int]]:
        """(name, gradients that reached it in this step, gradients that should have) of each parameter."""
        each = zip(self._entries, self._writes, self._uses, strict=True)
        return [(entry.record.name, found, uses * self._microbatches) for entry, found, uses in each]

    def finish_gradients(self) -> None:
        """Take in the gradients that have come to host memory. FSDP has waited for them at the end of the last backward."""
        if self._policy.params_cpu:
            arrived = [cast(DTensor, sharded.grad).to_local().view(-1) for sharded in self._sharded]
            foreach_copy_([shard.grad for shard in self.group.shards], arrived)
            for sharded in self._sharded:
                sharded.grad = None

    def _wrap(self, plan: UnitPlan, mesh: DeviceMesh, outside: set[nn.Parameter]) -> FSDPModule:
        on_host = CPUOffloadPolicy(pin_memory=self._context.device.type != "cpu")
        wrapped = fully_shard(
            list(plan.modules),
            mesh=mesh,
            reshard_after_forward=self._policy.reshard == "always",
            mp_policy=MixedPrecisionPolicy(self._dtype, self._main_dtype, cast_forward_inputs=False),
            offload_policy=on_host if self._policy.params_cpu else OffloadPolicy(),
            ignored_params=outside,
        )
        module = wrapped[0]  # modules that are wrapped together share it
        # Gradients are sums, without any division: the loss carries the scale. The two calls act on this unit alone.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        return module

    def _attach(self, number: int, param: nn.Parameter) -> GradSink:
        memory = partial(torch.empty, param.shape, dtype=self._main_dtype, device=self._context.device)
        sink = GradSink(self._main_dtype, partial(self._wrote, number), memory)
        param.grad_sink = sink  # type: ignore[attr-defined]
        param.grad_dtype = self._main_dtype  # the dtype of `.grad`, which is wider than a 16-bit parameter
        return sink

    def _make_shard(self, entry: ParamEntry, grad: torch.Tensor) -> Shard:
        param, local = entry.param, _local(entry)
        assert isinstance(param, DTensor) and local.is_contiguous()
        if not self._policy.params_cpu:  # FSDP adds in place to a gradient that exists; on the host that, and a hook, make it wait
            param.grad = DTensor.from_local(
                grad.view(local.shape),
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
            param.register_post_accumulate_grad_hook(self._added)
        here, piece = range(local.numel()), own_piece(entry, self._shard)
        counts = entry.record.counts_at(self._context) and self._replica.index == 0
        counted, copied = (here, range(0)) if counts else (range(0), here)
        return Shard(entry.record, piece, local.view(-1), grad, counted, copied, alone=True, on_host=self._policy.params_cpu)

    def _wrote(self, number: int) -> None:
        entry = self._entries[number]
        self._writes[number] += 1
        if self._writes[number] > self._rounds * self._uses[number]:
            check_writes(self._context.rank, [(entry.record.name, self._writes[number], self._rounds * self._uses[number])])
        once = self._policy.reduce_once and self._inspect is None
        if self._writes[number] % (self._uses[number] * (self._microbatches if once else 1)):
            return
        sink = self._sinks[number]
        grad, sink.main_grad, sink.written = sink.main_grad, None, False
        assert grad is not None
        if self._inspect is None:
            self._gathered[number].grad = grad
        else:
            self._inspect(entry, grad.view(self._shapes[number]))

    def _added(self, param: torch.Tensor) -> None:
        """Called when FSDP has added a sum to a shard's gradient (on CUDA: is about to, on the current, a side stream)."""
        if self._rounds < self._microbatches:
            return
        self._num_added += 1
        if self._num_added == len(self._entries) and self.group.on_reduced:
            stream = torch.get_device_module(self._context.device).current_stream()
            self.group.announce(Pending(self.grads, cast(Any, stream.record_event())))


def _local(entry: ParamEntry) -> torch.Tensor:
    """The memory of a sharded parameter."""
    with torch.no_grad():
        return cast(DTensor, entry.param).to_local()


@dataclass
class _Root:
    """A chunk, its units in the order of the forward, and the progress of its step."""

    module: FSDPModule
    units: list[FsdpUnit]
    rounds: int = 0
    """Number of backwards begun in this step."""
    at_end: bool = True
    """Whether FSDP takes the next backward for the last of a step."""


class FullyShardedParams(Provider):
    """The provider of parameters under `fully_shard`.

    Args:
        entries: the parameters, on the meta device or with values; those that `is_fully_sharded` names.
        chunks: the modules of this rank that hold them, by chunk index, each with its submodules that are gathered and freed as a
            whole, in the order of the forward. Other parameters are left alone.
        dtype: dtype in which parameters are gathered and used.
        fill: initial values of parameters on the meta device.
        policy: what is kept, when and where.
    """

    follows_backward = True

    def __init__(
        self,
        entries: Iterable[ParamEntry],
        chunks: Mapping[int, tuple[nn.Module, Sequence[nn.Module]]],
        context: ParallelContext,
        *,
        dtype: torch.dtype,
        fill: Fill,
        policy: FsdpPolicy,
    ) -> None:
        self._reshards = policy.reshard == "always"
        self._rank, self._microbatches = context.rank, 0
        self._roots: dict[int, _Root] = {}
        entries = list(entries)
        meshes = {axes: _mesh(context, axes) for axes in dict.fromkeys(entry.record.partial_over for entry in entries)}
        for number, (module, submodules) in chunks.items():
            inside = [entry for entry in entries if entry.chunk == number]
            if not inside:
                continue
            outside = set(module.parameters()) - {entry.param for entry in inside}
            units = [
                FsdpUnit(plan, meshes[plan.axes], context, dtype=dtype, fill=fill, policy=policy, outside=outside)
                for plan in reversed(plan_units(submodules, inside))  # what is enclosed first
            ][::-1]
            _prefetch(units)
            root = fully_shard(module, mesh=next(iter(meshes.values())), ignored_params=outside | {entry.param for entry in inside})
            if context.device.type == "cpu":
                root._set_unshard_async_op(True)  # there are no streams there on which to gather ahead
            self._roots[number] = _Root(root, units)
        self._units = [unit for root in self._roots.values() for unit in root.units]
        self.groups: list[ShardGroup] = [unit.group for unit in self._units]

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """See `Provider`."""
        self._microbatches = num_microbatches
        for root in self._roots.values():
            root.rounds = 0
        for unit in self._units:
            unit.start_step(num_microbatches, inspect=inspect)

    def before_backward(self, chunk: int) -> None:
        """See `Provider`."""
        root = self._roots.get(chunk)
        if root is None:
            return
        root.rounds += 1
        for unit in root.units:
            unit.before_backward()
        at_end = root.rounds == self._microbatches
        if at_end != root.at_end:
            root.at_end = at_end
            root.module.set_is_last_backward(at_end)
            root.module.set_requires_all_reduce(at_end)
            root.module.set_reshard_after_backward(at_end or self._reshards)

    def before_remake(self, modules: Sequence[nn.Module]) -> None:
        """See `Provider`. What is gathered here stays until its backward has left it: so nothing is gathered once more."""
        for inside in (one for module in modules for one in module.modules()):
            if isinstance(inside, FSDPModule):
                inside.unshard()

    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """See `Provider`."""
        return (one for unit in self._units for one in unit.sinks())

    def held(self) -> HeldTensors:
        """See `Provider`. What passes through is torch's, and is freed before a step ends."""
        shards = [shard for group in self.groups for shard in group.shards]
        on_host = any(shard.on_host for shard in shards)
        return HeldTensors([shard.weights for shard in shards], [shard.grad for shard in shards], [], on_host)

    def finish_gradients(self) -> None:
        """See `Provider`. FSDP has waited for its reductions at the end of each chunk's last backward."""
        check_writes(self._rank, [count for unit in self._units for count in unit.counts()])
        for unit in self._units:
            unit.finish_gradients()

    def finish_evaluation(self) -> None:
        """See `Provider`."""
        for unit in self._units:
            unit.module.reshard()


def _mesh(context: ParallelContext, axes: tuple[str, ...]) -> DeviceMesh:
    """The ranks along these axes as a device mesh: one-dimensional, or [replicas, ranks]."""
    shard, replica = context.fsdp_shard(axes), context.fsdp_replica(axes)
    assert shard.process_group is not None, "nobody to shard with"
    if replica.process_group is None:
        return DeviceMesh.from_group(shard.process_group, context.device.type)
    ranks = torch.tensor(context.group(*axes).ranks).view(replica.size, shard.size)
    groups = [replica.process_group, shard.process_group]
    return DeviceMesh.from_group(groups, context.device.type, mesh=ranks, mesh_dim_names=("replica", "shard"))


def _prefetch(units: list[FsdpUnit]) -> None:
    """Let each unit gather the next one ahead, in forward and in backward."""
    for before, after in pairwise(units):
        before.module.set_modules_to_forward_prefetch([after.module])
    order = in_backward(units, [unit.encloses for unit in units])
    for before, after in pairwise(order):
        before.module.set_modules_to_backward_prefetch([after.module])
    # Without a list FSDP would guess from the order of the forwards, and fetch for another microbatch. Itself is there already.
    order[-1].module.set_modules_to_backward_prefetch([order[-1].module])
