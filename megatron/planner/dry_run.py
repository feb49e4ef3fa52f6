"""Plans a job of any size without its devices: its real model lies on the meta device, and groups exist for one rank at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.model.build import Model, build_model, model_dtype
from megatron.optimizer.state_size import OptimizerState
from megatron.parallel.context import ParallelContext, connect_fake, disconnect
from megatron.parallel.topology import DATA_AXES, GRADIENT_AXES, Topology
from megatron.pipeline_parallel.partition import Chunk, table_of
from megatron.planner import advice
from megatron.planner.chunk_trace import ChunkTrace, trace_chunks
from megatron.planner.kinds import (
    Groups,
    Links,
    RankContent,
    Sending,
    StagePlan,
    make_kinds,
    parameters_of_stage,
    places_by_content,
)
from megatron.planner.peak import peak_activations, receive_plans, step_transfers
from megatron.planner.plan import Job, Places, Plan, step_work
from megatron.planner.state_report import layout_of
from megatron.planner.storages import Transfer
from megatron.spec.counts import count_parameters
from megatron.spec.layers import layers
from megatron.spec.operations import Op, OpKind
from megatron.spec.schedules import SCHEDULES, make_schedule
from megatron.spec.weights import padded_vocab_size

MOST_OPERATIONS = 300_000
"""A schedule with more forwards, over all chunks, is not made: it would take minutes and gigabytes."""
_SCALARS = 8
"""Numbers that a step sums over the world: the mask; then loss, mask, squares, zeros, two votes and attended sequences."""

_PASSING = ("optim_grads", "optim_grads_params")
"""Sharding strategies under which gradients pass through buffers that are not kept."""

_NOTES = (
    "not in it: what the driver, the communication library and the allocator keep for themselves",
    "idle time is simulated with FLOPs for time and messages that take none; traffic is counted as in a ring",
)


def make_plan(config: Config, dry_run: DryRun, vocab_size: int) -> Plan:
    """What a job with these settings takes, for every kind of rank.

    Args:
        config: settings that `load` accepted for this number of ranks.
        vocab_size: rows of the word embedding, without padding.

    Raises:
        ValueError: the layout is impossible, or a step has too many operations to be laid out.
        RuntimeError: the ranks together do not hold the model's parameters: a layer is lost or doubled.
    """
    return _Planner(config, dry_run, vocab_size).plan()


class _Planner:
    def __init__(self, config: Config, dry_run: DryRun, vocab_size: int) -> None:
        self._config, self._dry_run, self._vocab_size = config, dry_run, vocab_size
        parallel, training = config.parallel, config.training
        self._topology = Topology.from_world(
            dry_run.world_size,
            tp=parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            pp_before_dp=parallel.use_tp_pp_dp_mapping,
        )
        self._table = table_of(config.model, parallel, vocab_size)
        num_microbatches = advice.num_microbatches(config, dry_run.world_size)
        self._global_batch_size = num_microbatches * training.micro_batch_size * self._topology.size(*DATA_AXES)
        _check_operations(num_microbatches, len(self._table))
        stages = self._topology.pp
        self._schedule = make_schedule(parallel.schedule, stages, num_microbatches, len(self._table) // stages)
        self._receives = receive_plans(self._schedule, overlap=parallel.overlap_p2p_communication)
        self._device_type = "cpu" if parallel.device == "cpu" else "cuda"
        self._traces: dict[object, ChunkTrace] = {}
        self._attention: set[str] = set()

    def plan(self) -> Plan:
        """See `make_plan`."""
        links = Links(self._topology, self._dry_run.gpus_per_node)
        found: dict[int, StagePlan] = {}
        counted: dict[int, int] = {}
        for stages in self._stages_alike():
            context = self._connect(stages[0])
            try:
                groups = Groups(context, links)
                model = self._build(context)
                for stage in stages:
                    counted[stage] = parameters_of_stage(model, context)
                found |= self._lay_out(stages, model, context)
            finally:
                disconnect()
        parameters = count_parameters(self._config.model, self._vocab_size)
        if sum(counted.values()) != parameters:
            raise RuntimeError(
                f"the stages together hold {sum(counted.values()):,} parameters, but the settings describe {parameters:,}: "
                "a layer is lost or doubled"
            )
        in_order = [found[stage] for stage in range(self._topology.pp)]
        return Plan(
            job=self._job(),
            layers=self._table,
            parameters=parameters,
            parameters_by_stage=tuple(counted[stage] for stage in range(self._topology.pp)),
            kinds=make_kinds(in_order, groups, links),
            work=step_work(self._config.model, self._vocab_size, self._table, self._schedule, self._global_batch_size),
            notes=(f"attention is taken to be computed by {' and '.join(sorted(self._attention))}", *_NOTES),
            advice=tuple(advice.advice(self._config, self._dry_run.world_size, self._dry_run.gpus_per_node, self._vocab_size)),
        )

    def _connect(self, stage: int) -> ParallelContext:
        return connect_fake(self._topology, self._topology.rank(pp=stage), self._config.parallel.fsdp_shard_size)

    def _build(self, context: ParallelContext) -> Model:
        config = self._config
        return build_model(
            config.model,
            context,
            dtype=model_dtype(config.precision),
            vocab_size=self._vocab_size,
            sequence_parallel=config.parallel.sequence_parallel,
            seed=config.training.seed,
            table=self._table,
            materialized=False,
        )

    def _stages_alike(self) -> list[list[int]]:
        """Groups of stages whose chunks have the same parts. A model built for one stage is that of all but for names."""
        alike: dict[object, list[int]] = {}
        specs = layers(self._config.model)
        for stage in range(self._topology.pp):
            parts = tuple((tuple(specs[layer] for layer in chunk.layers), chunk.first, chunk.last) for chunk in self._chunks(stage))
            alike.setdefault(parts, []).append(stage)
        return list(alike.values())

    def _chunks(self, stage: int) -> list[Chunk]:
        return [chunk for chunk in self._table if chunk.stage == stage]

    def _lay_out(self, stages: Sequence[int], model: Model, context: ParallelContext) -> dict[int, StagePlan]:
        """Plan stages that look alike. They differ in the order of their backwards, which decides how many gradients pass under
        optim_grads."""
        config, found = self._config, {}
        state = OptimizerState(config.optimizer, self._device_type)
        traces = trace_chunks(
            model,
            config.data,
            config.training.micro_batch_size,
            context,
            splits_backward=SCHEDULES[config.parallel.schedule].splits_backward,
            device_type=self._device_type,
            cache=self._traces,
        )
        self._attention.update(trace.attention for trace in traces.values() if trace.attention)
        contents: dict[object, tuple[dict[RankContent, list[Places]], tuple[Sending, ...]]] = {}
        for stage in stages:
            ops = self._ops_as_if(stage, stages[0])
            order = tuple(op for op in ops if op.kind is not OpKind.FORWARD) if config.parallel.sharding in _PASSING else None
            if order not in contents:
                layout = layout_of(model, context, config.parallel, config.optimizer, ops, self._schedule.num_microbatches)
                sent = tuple(Sending(one.over, one.kind, one.bytes) for one in layout.sent)
                contents[order] = places_by_content(model, layout, context, state), sent
            places, sent = contents[order]
            here = context.elsewhere(stage=stage)
            its = dict(zip((chunk.index for chunk in self._chunks(stage)), traces.values(), strict=True))
            activations = peak_activations(its, model, config, here, self._schedule, self._receives)
            transfers = step_transfers(its, model, config.training.micro_batch_size, here, self._schedule)
            found[stage] = StagePlan(stage, places, activations, (*sent, *_sendings(transfers), *self._scalars()))
        return found

    def _ops_as_if(self, stage: int, other: int) -> tuple[Op, ...]:
        """Operations of a stage on the chunks of another that looks alike."""
        chunks = {mine.index: its.index for mine, its in zip(self._chunks(stage), self._chunks(other), strict=True)}
        return tuple(op._replace(chunk=chunks[op.chunk]) for op in self._schedule.ops[stage])

    def _scalars(self) -> list[Sending]:
        ranks = self._topology.world_size
        return [Sending("world", "scalars", 2 * (ranks - 1) * _SCALARS * 8 // ranks)] if ranks > 1 else []

    def _job(self) -> Job:
        config, topology = self._config, self._topology
        parallel, model = config.parallel, config.model
        return Job(
            world_size=topology.world_size,
            gpus_per_node=self._dry_run.gpus_per_node,
            nodes=-(-topology.world_size // self._dry_run.gpus_per_node),
            tensor=topology.tp,
            pipeline=topology.pp,
            data=topology.size(*GRADIENT_AXES),
            sequence_parallel=parallel.sequence_parallel and topology.tp > 1,
            device=self._device_type,
            dtype=str(model_dtype(config.precision)).removeprefix("torch."),
            sharding=parallel.sharding,
            schedule=self._schedule.name,
            chunks_per_stage=len(self._table) // topology.pp,
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=self._global_batch_size,
            num_microbatches=self._schedule.num_microbatches,
            seq_length=model.seq_length,
            vocab_size=self._vocab_size,
            padded_vocab_size=padded_vocab_size(self._vocab_size, model.make_vocab_size_divisible_by, topology.tp),
        )


def _sendings(transfers: Iterable[Transfer]) -> Iterator[Sending]:
    """Add up what all kinds of operation send: over a tensor group, to the next stage and to the one before."""
    for one in transfers:
        yield Sending("pipeline" if one.over == "pp" else one.over, "activations", one.bytes, one.peer)


def _check_operations(num_microbatches: int, num_chunks: int) -> None:
    if num_microbatches * num_chunks > MOST_OPERATIONS:
        chunks = f"{num_chunks} chunk{'s' * (num_chunks > 1)}"
        raise ValueError(
            f"a step of {num_microbatches:,} microbatches through {chunks} of the model is more than can be laid out "
            f"({MOST_OPERATIONS:,} forwards). A smaller --global-batch-size or a larger --micro-batch-size makes it less."
        )
