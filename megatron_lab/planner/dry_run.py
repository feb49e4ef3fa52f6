"""Planner of a job of any size. It needs none of the job's devices.

The planner builds the model on the meta device, with fake process groups, for one rank at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.attention.backends import backend_in_use
from megatron.config.checks.memory import check_attention_backend_on_device
from megatron.config.config import Config
from megatron.config.parsed_flags import DryRun
from megatron.data_parallel.traffic import NUM_SCALARS, count_noise_traffic
from megatron.model.build import Model, build_model_from_config, get_model_dtype, overlaps_tp_communication
from megatron.parallel.context import ParallelContext, connect_fake, disconnect
from megatron.parallel.overlap import Overlap, RingOverlap, SymmetricMemoryOverlap
from megatron.parallel.sequence_split import compute_token_costs, split_balanced
from megatron.parallel.topology import DATA_AXES, Topology
from megatron.pipeline_parallel.exchange import ReceivePlan
from megatron.pipeline_parallel.partition import build_layer_table, find_recomputed_chunks
from megatron.pipeline_parallel.simulate import Timeline, simulate
from megatron.spec.counts import check_parameter_count, compute_window_shares, count_active_parameters
from megatron.spec.layers import group_equal, resolve_cp_comm_types
from megatron.spec.operations import Op, OpCosts, OpType, Schedule
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron.spec.weights import pad_vocab_size
from megatron_lab.planner import advice
from megatron_lab.planner.allowances import Allowance, estimate_symmetric_memory, estimate_tensor_ring
from megatron_lab.planner.attention_notes import format_kernel_notes
from megatron_lab.planner.chunk_trace import ChunkTrace, TraceCache, build_chunk_key, build_layer_keys, trace_chunks
from megatron_lab.planner.context_cost import count_max_buffer_bytes
from megatron_lab.planner.costs import compute_chunk_costs, recomputes_logits
from megatron_lab.planner.experts import build_experts_plan, get_worst_imbalance
from megatron_lab.planner.peak import (
    OpMemory,
    build_receive_plans,
    compute_peak_activations,
    count_message_bytes,
    iter_op_memory,
    sum_transfers,
)
from megatron_lab.planner.plan import ExpertsPlan, Job, Plan, RankProfile, RankRange, count_step_flops
from megatron_lab.planner.rank_profiles import (
    Links,
    RankContent,
    StagePlan,
    StageSend,
    build_group_table,
    build_rank_profiles,
    convert_transfer,
    count_stage_params,
    find_shared_communicators,
    group_ranks_by_content,
)
from megatron_lab.planner.state_layout import Bytes
from megatron_lab.planner.state_report import build_stage_layout
from megatron_lab.planner.state_size import OptimizerState, count_checkpoint_bytes
from megatron_lab.planner.step_work import StepWork, estimate_ranks_per_node
from megatron_lab.planner.storages import MemorySpan
from megatron_lab.planner.units import format_bytes

MAX_FORWARDS = 300_000
"""Largest number of forwards in a step, over all chunks, that is planned. A larger schedule would take minutes and
gigabytes."""
_BUFFERED_GRAD_STRATEGIES = ("optim_grads", "optim_grads_params")
"""Sharding strategies under which gradients pass through buffers before they are reduced."""

_EXCLUDED_NOTES = {
    "cpu": "not in it: Python, the libraries, and what the allocator keeps for itself",
    "cuda": "not in it: gaps between the allocator's blocks (few with PYTORCH_ALLOC_CONF=expandable_segments:True)",
}
_ASSUMPTION_NOTES = (
    "idle time is simulated with FLOPs for time and messages that take none; traffic is counted as in a ring, to experts in pairs",
)


def limit_microbatches(schedule: str, num_stages: int, num_microbatches: int) -> int:
    """Return how many microbatches have to be planned to find the memory peak of a schedule. More of them would not change the
    peak.

    With this number, each stage has been in the steady state long enough to use all gradient buffers. All microbatches are needed
    in two cases: GPipe has no steady state, and an interleaved schedule changes with the number of microbatches if that is not a
    multiple of the number of stages.
    """
    remainder = num_microbatches % num_stages
    if schedule == "gpipe" or (schedule == "interleaved" and remainder):
        return num_microbatches
    return min(num_microbatches, 3 * num_stages + remainder)


def build_plan(config: Config, dry_run: DryRun, vocab_size: int) -> Plan:
    """Predict the memory and traffic of the ranks of a job, and the FLOPs of a step.

    Args:
        config: settings that `load` accepted for this number of ranks.
        dry_run: number of ranks of the job and of a node.
        vocab_size: rows of the word embedding, without padding.

    Raises:
        ValueError: the layout is impossible, a step has too many operations to be planned, or GPUs do not support the attention
            backend.
        RuntimeError: the stages together do not hold the model's parameters: a layer is missing or duplicated.
    """
    return Planner(config, dry_run, vocab_size).plan()


@functools.lru_cache(maxsize=4)
def _build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    chunks_per_stage: int,
    recomputed_chunks: tuple[int, ...],
    overlap: bool,
    device_type: str,
) -> tuple[Schedule, list[ReceivePlan]]:
    """Build a schedule and, for each stage, the plan of when it posts its receives. Both are cached, because a search needs the
    same schedules repeatedly."""
    schedule = build_schedule(name, num_stages, num_microbatches, chunks_per_stage, recomputed_chunks=recomputed_chunks)
    return schedule, build_receive_plans(schedule, overlap=overlap, device_type=device_type)


def _choose_overlap(device_type: str, tensor_size: int, gpus_per_node: int) -> Overlap:
    """Return the method by which --tp-comm-overlap overlaps tensor-parallel communication with matrix products. The GPUs of a node
    are assumed to be able to access each other's memory."""
    if device_type != "cuda":
        return RingOverlap(f"the device is {device_type}")
    return RingOverlap("tensor groups cross nodes") if gpus_per_node % tensor_size else SymmetricMemoryOverlap()


class StageStep(NamedTuple):
    """Timeline of a step, and the memory of a rank of one stage during each of its operations."""

    timeline: Timeline
    """Simulated start and end of the operations of all stages. The unit of time is FLOPs per token; messages take no time."""
    op_memory: list[OpMemory]
    """Activation memory during and after each operation of the stage. The model's state and the step's inputs are not included."""


class Planner:
    """Planner of one job: predicts memory, traffic and work (FLOPs, memory traffic, communication) of its ranks.

    Args:
        shortened: plan only as many microbatches as the schedule needs to reach its memory peak. This suffices for
            `compute_step_work`.
        trace_cache: traces (memory and communication of a chunk's operations) of earlier planners. Jobs with equal chunks may share
            it.
        expert_imbalance: assumed number of token assignments to the experts of each rank, as a multiple of the mean over the ranks.
    """

    def __init__(
        self,
        config: Config,
        dry_run: DryRun,
        vocab_size: int,
        *,
        shortened: bool = False,
        trace_cache: TraceCache | None = None,
        expert_imbalance: float = 1.0,
    ) -> None:
        self._config, self._dry_run, self._vocab_size = config, dry_run, vocab_size
        parallel = config.parallel
        self._topology = Topology.of(parallel, dry_run.world_size)
        self._links = Links(self._topology, dry_run.gpus_per_node)
        self._layer_table = build_layer_table(config.model, parallel, vocab_size, config.memory)
        self._stage_chunks = [[chunk for chunk in self._layer_table if chunk.stage == stage] for stage in range(self._topology.pp)]
        num_microbatches = advice.count_microbatches(config, dry_run.world_size)
        if num_microbatches * len(self._layer_table) > MAX_FORWARDS:
            chunks = f"{len(self._layer_table)} chunk{'s' * (len(self._layer_table) > 1)}"
            raise ValueError(
                f"a step of {num_microbatches:,} microbatches through {chunks} of the model has too many forward passes to be "
                f"planned: more than {MAX_FORWARDS:,}. Use a smaller --global-batch-size or a larger --micro-batch-size."
            )
        self._global_batch_size = num_microbatches * config.training.micro_batch_size * self._topology.get_size(*DATA_AXES)
        chunks_per_stage = len(self._layer_table) // self._topology.pp
        self._device_type = "cpu" if parallel.device == "cpu" else "cuda"
        check_attention_backend_on_device(config, on_cuda=self._device_type == "cuda")
        self._num_microbatches = num_microbatches
        num_planned = limit_microbatches(parallel.schedule, self._topology.pp, num_microbatches) if shortened else num_microbatches
        self._schedule, self._receive_plans = _build_schedule(
            parallel.schedule,
            self._topology.pp,
            num_planned,
            chunks_per_stage,
            tuple(find_recomputed_chunks(self._layer_table)),
            parallel.overlap_p2p_communication,
            self._device_type,
        )
        self._overlap = _choose_overlap(self._device_type, self._topology.tp, dry_run.gpus_per_node)
        self._trace_cache = {} if trace_cache is None else trace_cache
        self._expert_imbalance = expert_imbalance

    def plan(self) -> Plan:
        """Predict the memory and traffic of the ranks of the job, and the FLOPs of a step. Raises the errors of `build_plan`."""
        return self.plan_and_work()[0]

    def plan_and_work(self) -> tuple[Plan, StepWork]:
        """Return the plan of the job, and the work of a step (FLOPs, memory traffic, communication). From the work,
        `predict_from_work` predicts the step's duration. Raises the errors of `build_plan`."""
        config, stages = self._config, range(self._topology.pp)
        step_work, params_by_stage = self._compute_step_work(stages)
        profiles = step_work.profiles
        num_params = sum(params_by_stage.values())
        check_parameter_count(config.model, self._vocab_size, num_params, "the stages")
        kernels = sorted({trace.attention_kernel for trace in self._trace_cache.values() if trace.attention_kernel})
        step_flops = count_step_flops(
            config.model,
            self._vocab_size,
            self._layer_table,
            self._schedule,
            self._global_batch_size,
            recomputes_logits=recomputes_logits(config, self._vocab_size),
            precision=config.precision,
        )
        sizes = self._dry_run.world_size, self._dry_run.gpus_per_node, self._vocab_size
        plan = Plan(
            job=self._build_job(),
            layer_table=self._layer_table,
            parameters=num_params,
            active_parameters=count_active_parameters(config.model, self._vocab_size),
            parameters_by_stage=tuple(params_by_stage[stage] for stage in stages),
            profiles=profiles,
            work=step_flops,
            notes=(
                _EXCLUDED_NOTES[self._device_type],
                f"attention is taken to be computed by {' and '.join(kernels)}",
                *format_kernel_notes(config, on_cuda=self._device_type == "cuda"),
                *([f"tensor communication is assumed to overlap by {self._overlap}"] * overlaps_tp_communication(config.parallel)),
                *self._format_context_notes(),
                *self._format_checkpoint_note(),
                *(["layers are planned as without --compile: compiled, they keep as much or less"] * config.speed.compile),
                *_ASSUMPTION_NOTES,
            ),
            advice=tuple(advice.build_advice(config, *sizes, step_flops.bubble_share)),
            experts=self._plan_experts(profiles),
        )
        return plan, step_work

    def _plan_experts(self, profiles: Sequence[RankProfile]) -> ExpertsPlan | None:
        model, requested = self._config.model, self._dry_run.expert_imbalance
        imbalance = get_worst_imbalance(model, requested)
        if model.num_experts is None:
            return None
        unbalanced_profiles: Sequence[RankProfile] = ()
        if imbalance != 1.0:
            unbalanced_planner = Planner(self._config, self._dry_run, self._vocab_size, expert_imbalance=imbalance)
            unbalanced_profiles, _ = unbalanced_planner._build_profiles(range(self._topology.pp))
        context = self._connect_as_stage(0)
        try:
            return build_experts_plan(model, self._layer_table, profiles, context, requested, unbalanced_profiles)
        finally:
            disconnect()

    def _format_context_notes(self) -> Iterator[str]:
        """Yield notes on context parallelism: the buffers for other ranks' keys and values, and how evenly attention is divided
        among the ranks."""
        if self._topology.cp == 1:
            return
        buffer_bytes = format_bytes(count_max_buffer_bytes(self._config, self._config.precision.itemsize))
        yield (
            f"of other context ranks a rank holds at most {buffer_bytes} of keys, values and their gradients at once "
            "(in activations)"
        )
        if self._config.data.reset_attention_mask:
            yield "how evenly context ranks share attention depends on the documents: the log tells (context imbalance)"
        else:
            shares = compute_window_shares(self._config.model)
            split = split_balanced(compute_token_costs(self._config.model.seq_length, shares), self._topology.cp)
            yield f"context ranks share attention evenly: the busiest computes {split.imbalance:.3f} x the mean"

    def _format_checkpoint_note(self) -> Iterator[str]:
        """Yield a note with the bytes of a checkpoint, and with the host memory of a node that holds copies of it."""
        checkpoint = self._config.checkpoint
        if checkpoint.save is None:
            return
        total_bytes = count_checkpoint_bytes(self._config, self._vocab_size, get_model_dtype(self._config.precision))
        num_nodes = max(1, self._dry_run.world_size // self._dry_run.gpus_per_node)
        num_copies = int(checkpoint.async_save)
        if checkpoint.memory_save_interval is not None:
            num_copies += 1 + 2 * (1 + checkpoint.replicate_state)
        node_memory = (
            f"; a node holds {format_bytes(num_copies * total_bytes / num_nodes)} for copies in its memory" if num_copies else ""
        )
        yield f"a checkpoint has {format_bytes(total_bytes)} of tensors{node_memory}"

    def compute_step_work(self) -> StepWork:
        """Return the work of a step: FLOPs, memory traffic and communication, from which the step's duration is predicted.

        Of several stages with equal layers, only the first and the last get the memory and traffic of each rank (`RankProfile`).
        The rank with the largest memory is on one of these two stages.
        """
        work, _ = self._compute_step_work(
            {stage for equal_stages in self._group_equal_stages() for stage in (equal_stages[0], equal_stages[-1])}
        )
        return work

    def _compute_step_work(self, stages: Collection[int]) -> tuple[StepWork, dict[int, int]]:
        """Return the work of a step, and the number of parameters of each stage.

        Args:
            stages: stages for which the memory and traffic of each rank are planned (`StepWork.profiles`).
        """
        spans_by_chunk: dict[int, Mapping[OpType, MemorySpan]] = {}
        message_bytes, groups = 0, dict[str, tuple[int, float]]()

        def on_stages(equal_stages: Sequence[int], model: Model, context: ParallelContext) -> None:
            nonlocal message_bytes
            message_bytes = count_message_bytes(model, self._config.training.micro_batch_size, context)
            for name, (size, crosses) in build_group_table(context, self._links).items():
                groups[name] = size, estimate_ranks_per_node(size, crosses(0))
            traces = self._trace_chunks(model, context)
            for stage in equal_stages:
                for chunk, traced_index in zip(self._stage_chunks[stage], traces, strict=True):
                    spans_by_chunk[chunk.index] = traces[traced_index].ops

        profiles, params_by_stage = self._build_profiles(stages, on_stages)
        all_stages = range(self._topology.pp)
        work = StepWork(
            self._schedule,
            self._num_microbatches,
            tuple(spans_by_chunk[chunk] for chunk in range(len(self._layer_table))),
            message_bytes,
            tuple(bool(self._links.find_stage_crossings(stage, (stage + 1) % self._topology.pp).any()) for stage in all_stages),
            profiles,
            self._schedule.num_microbatches / self._num_microbatches,
            groups,
        )
        return work, params_by_stage

    def plan_stage(self, stage: int) -> StageStep:
        """Return the timeline of a step, and the activation memory of a rank of `stage` during each operation."""
        context = self._connect_as_stage(stage)
        try:
            model = build_model_from_config(self._config, context, self._vocab_size, overlap=self._overlap)
            args = self._trace_chunks(model, context), model, self._config, context, self._schedule, self._receive_plans
            op_memory = list(iter_op_memory(*args, device_type=self._device_type))
        finally:
            disconnect()
        op_costs = self._compute_op_costs()
        return StageStep(simulate(self._schedule, lambda op: op_costs[op.chunk].get_duration(op)), op_memory)

    def _connect_as_stage(self, stage: int) -> ParallelContext:
        """Create fake process groups as they are on one rank of a stage, and return their context.

        The rank is the last of the context ranks. Its two sequence segments are adjacent, so its attention has the largest matrix
        products and the highest memory peak.
        """
        rank = self._topology.find_rank(cp=self._topology.cp - 1, pp=stage)
        return connect_fake(self._topology, rank, self._config.parallel.fsdp_shard_size)

    def _compute_op_costs(self) -> list[OpCosts]:
        recomputes = recomputes_logits(self._config, self._vocab_size)
        return compute_chunk_costs(self._config.model, self._vocab_size, self._layer_table, recomputes_logits=recomputes)

    def compute_fullest_device_bytes(self) -> list[int]:
        """Return, for each stage, the device memory in bytes of the rank that needs most."""
        profiles, _ = self._build_profiles(range(self._topology.pp))
        return [
            max(profile.memory.total.device for profile in profiles if stage in profile.stages)
            for stage in range(self._topology.pp)
        ]

    def _build_profiles(
        self, stages: Collection[int], on_stages: Callable[[Sequence[int], Model, ParallelContext], None] | None = None
    ) -> tuple[tuple[RankProfile, ...], dict[int, int]]:
        """Return the memory and traffic of the ranks of `stages`, and the number of parameters of each stage.

        Args:
            on_stages: called for each group of stages with equal layers, with the model and the parallel context of a rank of the
                first of them.
        """
        plan_of_stage: dict[int, StagePlan] = {}
        params_by_stage: dict[int, int] = {}
        for equal_stages in self._group_equal_stages():
            context = self._connect_as_stage(equal_stages[0])
            try:
                groups, shared = build_group_table(context, self._links), find_shared_communicators(context)
                model = build_model_from_config(self._config, context, self._vocab_size, overlap=self._overlap)
                params_by_stage |= dict.fromkeys(equal_stages, count_stage_params(model, context))
                plan_of_stage |= self._plan_stages([stage for stage in equal_stages if stage in stages], model, context)
                if on_stages is not None:
                    on_stages(equal_stages, model, context)
            finally:
                disconnect()
        stage_plans, on_cuda = [plan_of_stage[stage] for stage in sorted(plan_of_stage)], self._device_type == "cuda"
        profiles = build_rank_profiles(
            stage_plans, groups, shared, self._links, on_cuda=on_cuda, overlap_allowances=self._estimate_overlap_allowances()
        )
        return profiles, params_by_stage

    def _estimate_overlap_allowances(self) -> list[Allowance]:
        if not overlaps_tp_communication(self._config.parallel):
            return []
        if isinstance(self._overlap, RingOverlap):
            return [estimate_tensor_ring()]
        model, batch_size = self._config.model, self._config.training.micro_batch_size
        hidden_bytes = (
            self._config.tokens_per_rank * batch_size * model.hidden_size * get_model_dtype(self._config.precision).itemsize
        )
        return [estimate_symmetric_memory(hidden_bytes // self._topology.tp)]

    def _trace_chunks(self, model: Model, context: ParallelContext) -> dict[int, ChunkTrace]:
        with backend_in_use(self._config.speed.attention_backend):
            return trace_chunks(
                model,
                self._config.data,
                self._config.training.micro_batch_size,
                context,
                splits_backward=SCHEDULES[self._config.parallel.schedule].splits_backward,
                device_type=self._device_type,
                cache=self._trace_cache,
                expert_imbalance=self._expert_imbalance,
            )

    def _group_equal_stages(self) -> Iterable[list[int]]:
        """Group stages whose chunks have equal layers. Models built for the stages of a group differ only in the names of their
        parameters."""
        comm_types = resolve_cp_comm_types(self._config.model, self._config.parallel.cp_comm_type)
        layer_keys = build_layer_keys(self._config.model, self._config.precision, comm_types)
        return group_equal(tuple(build_chunk_key(chunk, layer_keys) for chunk in chunks) for chunks in self._stage_chunks).values()

    def _plan_stages(self, stages: Sequence[int], model: Model, context: ParallelContext) -> Iterator[tuple[int, StagePlan]]:
        """Yield each stage with the memory and traffic of its ranks, for several stages with equal chunks.

        Such stages differ only in the order of their backwards. The order decides how many gradient buffers the sharding strategies
        optim_grads and optim_grads_params need.
        """
        config, world_size = self._config, self._topology.world_size
        parallel, micro_batch_size = config.parallel, config.training.micro_batch_size
        state = OptimizerState(config.optimizer, context.axis_sizes, self._device_type)
        traces = self._trace_chunks(model, context)
        logit_bytes = 0 if model.logit_tracker is None else model.logit_tracker.max_logits.nbytes
        router_bytes = (
            0 if model.router_tracker is None else model.router_tracker.totals.nbytes + 8 * model.router_tracker.num_values
        )
        scalar_bytes = 2 * (world_size - 1) * (NUM_SCALARS * 8 + logit_bytes + router_bytes) // world_size
        world_sends = [StageSend("world", "scalars", scalar_bytes)] if world_size > 1 else []
        if config.logging.log_gradient_noise and context.topology.cp > 1:
            noise_traffic = count_noise_traffic(model.params, context, model.dtype)
            world_sends.append(StageSend(noise_traffic.over, noise_traffic.kind, noise_traffic.bytes))
        layouts: dict[object, tuple[dict[RankContent, list[RankRange]], list[StageSend]]] = {}
        for stage in stages:
            # Operations of this stage, with the chunk indices of the stage for which the model was built.
            traced = {stage_chunk.index: index for stage_chunk, index in zip(self._stage_chunks[stage], traces, strict=True)}
            buffers_grads = parallel.sharding in _BUFFERED_GRAD_STRATEGIES
            ops = (
                [Op(op_type, traced[chunk], microbatch) for op_type, chunk, microbatch in self._schedule.ops[stage]]
                if buffers_grads or not layouts
                else []
            )
            grad_order = tuple(op for op in ops if op.type is not OpType.FORWARD) if buffers_grads else None
            if grad_order not in layouts:
                layout = build_stage_layout(model, context, parallel, config.optimizer, ops, self._num_microbatches)
                state_sends = [StageSend(entry.over, entry.kind, entry.bytes) for entry in layout.traffic]
                layouts[grad_order] = group_ranks_by_content(model, layout, context, state), state_sends
            contents, state_sends = layouts[grad_order]
            stage_context = context.at_stage(stage)
            stage_traces = {chunk: traces[traced_index] for chunk, traced_index in traced.items()}
            activations = compute_peak_activations(
                stage_traces,
                model,
                config,
                stage_context,
                self._schedule,
                self._receive_plans,
                device_type=self._device_type,
                num_microbatches=self._num_microbatches,
            )
            transfers = sum_transfers(stage_traces, model, micro_batch_size, stage_context, self._schedule)
            op_sends = [convert_transfer(transfer, context) for transfer in transfers]
            yield (
                stage,
                StagePlan(
                    stage,
                    contents,
                    Bytes(activations.device_bytes, activations.host_bytes),
                    activations.offloaded_bytes,
                    [*state_sends, *op_sends, *world_sends],
                ),
            )

    def _build_job(self) -> Job:
        config, topology = self._config, self._topology
        parallel, model = config.parallel, config.model
        return Job(
            world_size=topology.world_size,
            gpus_per_node=self._dry_run.gpus_per_node,
            nodes=-(-topology.world_size // self._dry_run.gpus_per_node),
            tensor=topology.tp,
            context=topology.cp,
            pipeline=topology.pp,
            data=topology.get_size(*DATA_AXES),
            sequence_parallel=parallel.sequence_parallel and topology.tp > 1,
            device=self._device_type,
            dtype=str(get_model_dtype(config.precision)).removeprefix("torch."),
            sharding=parallel.sharding,
            schedule=self._schedule.name,
            chunks_per_stage=len(self._layer_table) // topology.pp,
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=self._global_batch_size,
            num_microbatches=self._num_microbatches,
            seq_length=model.seq_length,
            vocab_size=self._vocab_size,
            padded_vocab_size=pad_vocab_size(self._vocab_size, model.make_vocab_size_divisible_by, topology.tp),
        )
