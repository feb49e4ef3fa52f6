"""Plans a job of any size without its devices: its real model lies on the meta device, and groups exist for one rank at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.attention.backends import backend_in_use
from megatron.config.checks.memory import check_backend
from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.data_parallel.traffic import NUM_SCALARS, noise_traffic
from megatron.model.build import Model, model_dtype, model_of, overlaps
from megatron.parallel.context import ParallelContext, connect_fake, disconnect
from megatron.parallel.cut import balanced, token_costs
from megatron.parallel.overlap import Overlap, Pieces, SymmetricMemory
from megatron.parallel.topology import DATA_AXES, Topology
from megatron.pipeline_parallel.exchange import ReceivePlan
from megatron.pipeline_parallel.partition import recomputed_chunks, table_of
from megatron.pipeline_parallel.simulate import Timeline, simulate
from megatron.spec.counts import attention_shares, check_count, count_active
from megatron.spec.layers import alike, context_ways
from megatron.spec.operations import Costs, Op, OpKind, Schedule
from megatron.spec.schedules import SCHEDULES, make_schedule
from megatron.spec.weights import padded_vocab_size
from megatron_lab.planner import advice
from megatron_lab.planner.allowances import Allowance, of_symmetric_memory, of_tensor_ring
from megatron_lab.planner.attention_notes import describe_kernel
from megatron_lab.planner.chunk_trace import ChunkTrace, Traces, kind_of, layer_kinds, trace_chunks
from megatron_lab.planner.context_cost import most_held
from megatron_lab.planner.costs import chunk_costs, loss_again
from megatron_lab.planner.experts import experts_plan, worst_factor
from megatron_lab.planner.kinds import (
    Links,
    RankContent,
    Sending,
    StagePlan,
    make_kinds,
    named_groups,
    parameters_of_stage,
    places_by_content,
    sending_of,
    shared_communicators,
)
from megatron_lab.planner.peak import Held, held_over_step, message_bytes, peak_activations, receive_plans, step_transfers
from megatron_lab.planner.plan import ExpertsPlan, Job, Places, Plan, RankKind, step_work
from megatron_lab.planner.state_layout import Bytes
from megatron_lab.planner.state_report import amount, layout_of
from megatron_lab.planner.state_size import OptimizerState, saved_bytes
from megatron_lab.planner.step_work import StepWork, per_node
from megatron_lab.planner.storages import MemorySpan

MOST_OPERATIONS = 300_000
"""A schedule with more forwards, over all chunks, is not made: it would take minutes and gigabytes."""
_PASSING = ("optim_grads", "optim_grads_params")
"""Sharding strategies under which gradients pass through buffers that are not kept."""

_NOT_COUNTED = {
    "cpu": "not in it: Python, the libraries, and what the allocator keeps for itself",
    "cuda": "not in it: gaps between the allocator's blocks (few with PYTORCH_ALLOC_CONF=expandable_segments:True)",
}
_NOTES = (
    "idle time is simulated with FLOPs for time and messages that take none; traffic is counted as in a ring, to experts in pairs",
)


def enough_microbatches(schedule: str, num_stages: int, num_microbatches: int) -> int:
    """How many of a step's microbatches make a schedule that reaches its peak of memory: each stage is then in the steady state,
    and has been for long enough to borrow all buffers that gradients pass through.

    GPipe has none, and the rounds of an interleaved schedule depend on the number where that does not divide by the stages.
    """
    remainder = num_microbatches % num_stages
    if schedule == "gpipe" or (schedule == "interleaved" and remainder):
        return num_microbatches
    return min(num_microbatches, 3 * num_stages + remainder)


def make_plan(config: Config, dry_run: DryRun, vocab_size: int) -> Plan:
    """What a job with these settings takes, for every kind of rank.

    Args:
        config: settings that `load` accepted for this number of ranks.
        vocab_size: rows of the word embedding, without padding.

    Raises:
        ValueError: the layout is impossible, a step has too many operations to be laid out, or GPUs have no such attention.
        RuntimeError: the ranks together do not hold the model's parameters: a layer is lost or doubled.
    """
    return Planner(config, dry_run, vocab_size).plan()


@functools.lru_cache(maxsize=4)
def _scheduled(
    name: str,
    num_stages: int,
    num_microbatches: int,
    chunks_per_stage: int,
    recomputed: tuple[int, ...],
    overlap: bool,
    device_type: str,
) -> tuple[Schedule, list[ReceivePlan]]:
    """A schedule with its receives. A search asks for the same ones again and again."""
    schedule = make_schedule(name, num_stages, num_microbatches, chunks_per_stage, recomputed=recomputed)
    return schedule, receive_plans(schedule, overlap=overlap, device_type=device_type)


def _likely_overlap(device_type: str, tensor_size: int, gpus_per_node: int) -> Overlap:
    """The way that --tp-comm-overlap will take, if the GPUs of a node reach each other's memory."""
    if device_type != "cuda":
        return Pieces(f"the device is {device_type}")
    return Pieces("tensor groups cross nodes") if gpus_per_node % tensor_size else SymmetricMemory()


class PlannedStep(NamedTuple):
    """What a rank of one stage does in a step, and what it holds meanwhile."""

    timeline: Timeline
    """All stages. Its times are FLOPs for one token; messages take none."""
    held: list[Held]
    """Beside the model's state and the step's inputs, for each operation of the stage."""


class Planner:
    """Plans one job.

    Args:
        few: lay out only as many microbatches as the schedule needs to reach its peak of memory, for `work`.
        traces: those made before for jobs whose chunks do the same.
        expert_imbalance: how many times the mean of choices the experts of each rank are taken to get.
    """

    def __init__(
        self,
        config: Config,
        dry_run: DryRun,
        vocab_size: int,
        *,
        few: bool = False,
        traces: Traces | None = None,
        expert_imbalance: float = 1.0,
    ) -> None:
        self._config, self._dry_run, self._vocab_size = config, dry_run, vocab_size
        parallel = config.parallel
        self._topology = Topology.of(parallel, dry_run.world_size)
        self._links = Links(self._topology, dry_run.gpus_per_node)
        self._table = table_of(config.model, parallel, vocab_size, config.memory)
        self._chunks = [[chunk for chunk in self._table if chunk.stage == stage] for stage in range(self._topology.pp)]
        num_microbatches = advice.num_microbatches(config, dry_run.world_size)
        if num_microbatches * len(self._table) > MOST_OPERATIONS:
            chunks = f"{len(self._table)} chunk{'s' * (len(self._table) > 1)}"
            raise ValueError(
                f"a step of {num_microbatches:,} microbatches through {chunks} of the model is more than can be laid out "
                f"({MOST_OPERATIONS:,} forwards). A smaller --global-batch-size or a larger --micro-batch-size makes it less."
            )
        self._global_batch_size = num_microbatches * config.training.micro_batch_size * self._topology.size(*DATA_AXES)
        chunks_per_stage = len(self._table) // self._topology.pp
        self._device_type = "cpu" if parallel.device == "cpu" else "cuda"
        check_backend(config, on_cuda=self._device_type == "cuda")
        self._num_microbatches = num_microbatches
        laid_out = enough_microbatches(parallel.schedule, self._topology.pp, num_microbatches) if few else num_microbatches
        self._schedule, self._receives = _scheduled(
            parallel.schedule,
            self._topology.pp,
            laid_out,
            chunks_per_stage,
            tuple(recomputed_chunks(self._table)),
            parallel.overlap_p2p_communication,
            self._device_type,
        )
        self._overlap = _likely_overlap(self._device_type, self._topology.tp, dry_run.gpus_per_node)
        self._traces = {} if traces is None else traces
        self._expert_imbalance = expert_imbalance

    def plan(self) -> Plan:
        """See `make_plan`."""
        return self.plan_and_work()[0]

    def plan_and_work(self) -> tuple[Plan, StepWork]:
        """See `make_plan`; and what operations do and send, of which `step_time.time_of` says how long it takes."""
        config, stages = self._config, range(self._topology.pp)
        step, counted = self._step_work(stages)
        kinds = step.kinds
        parameters = sum(counted.values())
        check_count(config.model, self._vocab_size, parameters, "the stages")
        attention = sorted({trace.attention for trace in self._traces.values() if trace.attention})
        work = step_work(
            config.model,
            self._vocab_size,
            self._table,
            self._schedule,
            self._global_batch_size,
            loss_again=loss_again(config, self._vocab_size),
            precision=config.precision,
        )
        sizes = self._dry_run.world_size, self._dry_run.gpus_per_node, self._vocab_size
        plan = Plan(
            job=self._job(),
            layers=self._table,
            parameters=parameters,
            active_parameters=count_active(config.model, self._vocab_size),
            parameters_by_stage=tuple(counted[stage] for stage in stages),
            kinds=kinds,
            work=work,
            notes=(
                _NOT_COUNTED[self._device_type],
                f"attention is taken to be computed by {' and '.join(attention)}",
                *describe_kernel(config, on_cuda=self._device_type == "cuda"),
                *([f"tensor ranks are taken to communicate beside products by {self._overlap}"] * overlaps(config.parallel)),
                *self._of_context_ranks(),
                *self._of_saves(),
                *(["layers are planned as without --compile: compiled, they keep as much or less"] * config.speed.compile),
                *_NOTES,
            ),
            advice=tuple(advice.advice(config, *sizes, work.bubble)),
            experts=self._of_experts(kinds),
        )
        return plan, step

    def _of_experts(self, kinds: Sequence[RankKind]) -> ExpertsPlan | None:
        model, asked = self._config.model, self._dry_run.expert_imbalance
        factor = worst_factor(model, asked)
        if model.num_experts is None:
            return None
        unbalanced: Sequence[RankKind] = ()
        if factor != 1.0:
            worst = Planner(self._config, self._dry_run, self._vocab_size, expert_imbalance=factor)
            unbalanced, _ = worst._kinds(range(self._topology.pp))
        context = self._rank_of(0)
        try:
            return experts_plan(model, self._table, kinds, context, asked, unbalanced)
        finally:
            disconnect()

    def _of_context_ranks(self) -> Iterator[str]:
        """What they hold of each other, and how evenly they share attention."""
        if self._topology.cp == 1:
            return
        held = amount(most_held(self._config, self._config.precision.itemsize))
        yield f"of other context ranks a rank holds at most {held} of keys, values and their gradients at once (in activations)"
        if self._config.data.reset_attention_mask:
            yield "how evenly context ranks share attention depends on the documents: the log tells (context imbalance)"
        else:
            shares = attention_shares(self._config.model)
            cut = balanced(token_costs(self._config.model.seq_length, shares), self._topology.cp)
            yield f"context ranks share attention evenly: the busiest computes {cut.imbalance:.3f} x the mean"

    def _of_saves(self) -> Iterator[str]:
        """What a checkpoint takes, on the storage and in host memory."""
        saves = self._config.checkpoint
        if saves.save is None:
            return
        total = saved_bytes(self._config, self._vocab_size, model_dtype(self._config.precision))
        nodes = max(1, self._dry_run.world_size // self._dry_run.gpus_per_node)
        copies = int(saves.async_save)
        if saves.memory_save_interval is not None:
            copies += 1 + 2 * (1 + saves.replicate_state)
        held = f"; a node holds {amount(copies * total / nodes)} for copies in its memory" if copies else ""
        yield f"a checkpoint has {amount(total)} of tensors{held}"

    def work(self) -> StepWork:
        """What operations do and send. Its kinds are those of the first and last of stages that look alike, the fullest among
        them."""
        work, _ = self._step_work({stage for same in self._stages_alike() for stage in (same[0], same[-1])})
        return work

    def _step_work(self, stages: Collection[int]) -> tuple[StepWork, dict[int, int]]:
        """What operations do and send, with the kinds of ranks of some stages; and the parameters of each of these."""
        ops: dict[int, Mapping[OpKind, MemorySpan]] = {}
        message, groups = 0, dict[str, tuple[int, float]]()

        def note(same: Sequence[int], model: Model, context: ParallelContext) -> None:
            nonlocal message
            message = message_bytes(model, self._config.training.micro_batch_size, context)
            for name, (size, crosses) in named_groups(context, self._links).items():
                groups[name] = size, per_node(size, crosses(0))
            traces = self._trace(model, context)
            for stage in same:
                for mine, its in zip(self._chunks[stage], traces, strict=True):
                    ops[mine.index] = traces[its].ops

        kinds, counted = self._kinds(stages, note)
        all_stages = range(self._topology.pp)
        work = StepWork(
            self._schedule,
            self._num_microbatches,
            tuple(ops[chunk] for chunk in range(len(self._table))),
            message,
            tuple(bool(self._links.between(stage, (stage + 1) % self._topology.pp).any()) for stage in all_stages),
            kinds,
            self._schedule.num_microbatches / self._num_microbatches,
            groups,
        )
        return work, counted

    def step(self, stage: int) -> PlannedStep:
        """How the activations of a stage come and go."""
        context = self._rank_of(stage)
        try:
            model = model_of(self._config, context, self._vocab_size, overlap=self._overlap)
            walked = self._trace(model, context), model, self._config, context, self._schedule, self._receives
            held = list(held_over_step(*walked, device_type=self._device_type))
        finally:
            disconnect()
        costs = self._costs()
        return PlannedStep(simulate(self._schedule, lambda op: costs[op.chunk].of(op)), held)

    def _rank_of(self, stage: int) -> ParallelContext:
        """Take the place of a rank of a stage. Of the context ranks it is the last, whose pieces lie side by side: its attention
        has the largest products, and so the highest peak."""
        rank = self._topology.rank(cp=self._topology.cp - 1, pp=stage)
        return connect_fake(self._topology, rank, self._config.parallel.fsdp_shard_size)

    def _costs(self) -> list[Costs]:
        again = loss_again(self._config, self._vocab_size)
        return chunk_costs(self._config.model, self._vocab_size, self._table, loss_again=again)

    def device_bytes(self) -> list[int]:
        """For each stage, what its fullest rank takes of its device."""
        kinds, _ = self._kinds(range(self._topology.pp))
        return [max(kind.memory.total.device for kind in kinds if stage in kind.stages) for stage in range(self._topology.pp)]

    def _kinds(
        self, stages: Collection[int], note: Callable[[Sequence[int], Model, ParallelContext], None] | None = None
    ) -> tuple[tuple[RankKind, ...], dict[int, int]]:
        """The kinds of ranks of some stages, and the parameters of each.

        Args:
            note: is called for stages that look alike, with the model that is built for them, in the place of a rank of the first.
        """
        found: dict[int, StagePlan] = {}
        counted: dict[int, int] = {}
        for same in self._stages_alike():
            context = self._rank_of(same[0])
            try:
                groups, shared = named_groups(context, self._links), shared_communicators(context)
                model = model_of(self._config, context, self._vocab_size, overlap=self._overlap)
                counted |= dict.fromkeys(same, parameters_of_stage(model, context))
                found |= self._lay_out([stage for stage in same if stage in stages], model, context)
                if note is not None:
                    note(same, model, context)
            finally:
                disconnect()
        stage_plans, on_cuda = [found[stage] for stage in sorted(found)], self._device_type == "cuda"
        kinds = make_kinds(stage_plans, groups, shared, self._links, on_cuda=on_cuda, of_tensor_ranks=self._of_tensor_ranks())
        return kinds, counted

    def _of_tensor_ranks(self) -> list[Allowance]:
        if not overlaps(self._config.parallel):
            return []
        if isinstance(self._overlap, Pieces):
            return [of_tensor_ring()]
        model, size = self._config.model, self._config.training.micro_batch_size
        whole = self._config.tokens_per_rank * size * model.hidden_size * model_dtype(self._config.precision).itemsize
        return [of_symmetric_memory(whole // self._topology.tp)]

    def _trace(self, model: Model, context: ParallelContext) -> dict[int, ChunkTrace]:
        with backend_in_use(self._config.speed.attention_backend):
            return trace_chunks(
                model,
                self._config.data,
                self._config.training.micro_batch_size,
                context,
                splits_backward=SCHEDULES[self._config.parallel.schedule].splits_backward,
                device_type=self._device_type,
                cache=self._traces,
                expert_imbalance=self._expert_imbalance,
            )

    def _stages_alike(self) -> Iterable[list[int]]:
        """Groups of stages whose chunks have the same parts. A model built for one stage is that of all but for names."""
        ways = context_ways(self._config.model, self._config.parallel.cp_comm_type)
        kinds = layer_kinds(self._config.model, self._config.precision, ways)
        return alike(tuple(kind_of(chunk, kinds) for chunk in chunks) for chunks in self._chunks).values()

    def _lay_out(self, stages: Sequence[int], model: Model, context: ParallelContext) -> Iterator[tuple[int, StagePlan]]:
        """Plan stages that look alike. They differ in the order of their backwards, which decides how many gradients pass under
        optim_grads."""
        config, ranks = self._config, self._topology.world_size
        parallel, micro_batch_size = config.parallel, config.training.micro_batch_size
        state = OptimizerState(config.optimizer, context.axis_sizes, self._device_type)
        traces = self._trace(model, context)
        largest = 0 if model.largest is None else model.largest.found.nbytes
        of_experts = 0 if model.balance is None else model.balance.found.nbytes + 8 * model.balance.num_results
        scalars = 2 * (ranks - 1) * (NUM_SCALARS * 8 + largest + of_experts) // ranks
        summed = [Sending("world", "scalars", scalars)] if ranks > 1 else []
        if config.logging.log_gradient_noise and context.topology.cp > 1:
            first = noise_traffic(model.params, context, model.dtype)
            summed.append(Sending(first.over, first.kind, first.bytes))
        layouts: dict[object, tuple[dict[RankContent, list[Places]], list[Sending]]] = {}
        for stage in stages:
            # The operations of the stage, on the chunks of the one that the model is built for.
            chunk_of = {mine.index: its for mine, its in zip(self._chunks[stage], traces, strict=True)}
            passing = parallel.sharding in _PASSING
            ops = [Op(kind, chunk_of[chunk], m) for kind, chunk, m in self._schedule.ops[stage]] if passing or not layouts else []
            order = tuple(op for op in ops if op.kind is not OpKind.FORWARD) if passing else None
            if order not in layouts:
                layout = layout_of(model, context, parallel, config.optimizer, ops, self._num_microbatches)
                sent = [Sending(one.over, one.kind, one.bytes) for one in layout.sent]
                layouts[order] = places_by_content(model, layout, context, state), sent
            places, sent = layouts[order]
            here = context.at_stage(stage)
            its = {chunk: traces[other] for chunk, other in chunk_of.items()}
            activations = peak_activations(
                its,
                model,
                config,
                here,
                self._schedule,
                self._receives,
                device_type=self._device_type,
                num_microbatches=self._num_microbatches,
            )
            transfers = step_transfers(its, model, micro_batch_size, here, self._schedule)
            passed_on = [sending_of(transfer, context) for transfer in transfers]
            yield (
                stage,
                StagePlan(
                    stage, places, Bytes(activations.total, activations.host), activations.to_host, [*sent, *passed_on, *summed]
                ),
            )

    def _job(self) -> Job:
        config, topology = self._config, self._topology
        parallel, model = config.parallel, config.model
        return Job(
            world_size=topology.world_size,
            gpus_per_node=self._dry_run.gpus_per_node,
            nodes=-(-topology.world_size // self._dry_run.gpus_per_node),
            tensor=topology.tp,
            context=topology.cp,
            pipeline=topology.pp,
            data=topology.size(*DATA_AXES),
            sequence_parallel=parallel.sequence_parallel and topology.tp > 1,
            device=self._device_type,
            dtype=str(model_dtype(config.precision)).removeprefix("torch."),
            sharding=parallel.sharding,
            schedule=self._schedule.name,
            chunks_per_stage=len(self._table) // topology.pp,
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=self._global_batch_size,
            num_microbatches=self._num_microbatches,
            seq_length=model.seq_length,
            vocab_size=self._vocab_size,
            padded_vocab_size=padded_vocab_size(self._vocab_size, model.make_vocab_size_divisible_by, topology.tp),
        )
