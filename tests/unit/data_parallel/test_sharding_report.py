"""The report at the start: what a rank holds and sends, by arithmetic, and how it is told. (`test_sharding_memory` and
`test_sharding_traffic` compare it with real runs.)"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import FsdpReshard, ParallelConfig, ShardingStrategy
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.bucket_plan import plan_buckets
from megatron.data_parallel.fsdp_plan import FsdpPolicy, UnitPlan
from megatron.data_parallel.traffic import GroupTraffic
from megatron.model.build import Model, build_model
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_parameters
from megatron.spec.operations import Op, OpType
from megatron.spec.schedules import build_schedule
from megatron_lab.planner.state_layout import Bytes, StateMemory, StateReport, compute_fsdp_buffer_bytes
from megatron_lab.planner.state_report import build_state_report, format_state_report, iter_grad_writes
from megatron_lab.planner.transient_buffers import simulate_steps
from megatron_lab.planner.units import format_bytes
from tests.support.lone_rank import lone_rank
from tests.support.runs import arguments, run

META = torch.device("meta")
# All dimensions are multiples of 64 x 8, so that slices of 8 ranks need no padding.
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=512,
    num_attention_heads=8,
    seq_length=512,
    untie_embeddings_and_output_weights=True,
    make_vocab_size_divisible_by=512,
)
VOCAB = 1024
STRATEGIES: tuple[ShardingStrategy, ...] = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def build(context: ParallelContext, config: ModelConfig = MODEL, dtype: torch.dtype = torch.bfloat16) -> Model:
    return build_model(config, context, dtype=dtype, vocab_size=VOCAB, sequence_parallel=True, seed=1)


def reported(
    topology: Topology,
    rank: int,
    parallel: ParallelConfig,
    *,
    config: ModelConfig = MODEL,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: OptimizerConfig | None = None,
    microbatches: int = 1,
    device: torch.device = META,
) -> StateReport:
    """Of a rank that has nobody to talk to."""
    context = lone_rank(topology, rank, META)
    model = build(context, config, dtype)
    context.device = device
    schedule = build_schedule(parallel.schedule, topology.pp, microbatches)
    return build_state_report(model, context, parallel, optimizer or OptimizerConfig(), schedule)


def strategy(name: ShardingStrategy, **settings: object) -> ParallelConfig:
    return ParallelConfig(data_parallel_sharding_strategy=name, **settings)  # type: ignore[arg-type]


def together(memory: StateMemory) -> int:
    """Without what only passes through, and without padding."""
    parts = (memory.parameters, memory.gradients, memory.main_params, memory.moments)
    return sum(part.total - part.padding for part in parts)


# ---- what stays


@pytest.mark.parametrize(("dtype", "weight", "main", "apart"), [(torch.bfloat16, 2, 4, 4), (torch.float32, 4, 4, 0)])
@pytest.mark.parametrize("moments", [0, 1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_together_hold_what_the_formulas_say(
    name: ShardingStrategy, moments: int, dtype: torch.dtype, weight: int, main: int, apart: int
) -> None:
    """Bytes of all N data ranks: some things N times, and others once. Without padding they are equal, not nearly equal."""
    optimizer = OptimizerConfig() if moments == 2 else OptimizerConfig(optimizer="sgd", sgd_momentum=0.9 * moments)
    parameters = count_parameters(MODEL, VOCAB)
    for ranks in (2, 4 if name == "optim_grads_params" else 3):
        whole, once = {
            "no_shard": (weight + main + apart + moments * main, 0),
            "optim": (weight + main, apart + moments * main),
            "optim_grads": (weight, main + apart + moments * main),
            "optim_grads_params": (0, main + main + moments * main),
        }[name]
        found = [reported(Topology(dp=ranks), r, strategy(name), dtype=dtype, optimizer=optimizer).memory for r in range(ranks)]
        assert sum(map(together, found)) == parameters * (ranks * whole + once)
        assert all(memory.total.host == 0 for memory in found)


def test_padding_is_told_apart() -> None:
    """Of 7 ranks, the last slices are short; all buffers are as long."""
    found = [reported(Topology(dp=7), rank, strategy("optim_grads")).memory for rank in range(7)]
    assert len({memory.gradients.total for memory in found}) == 1
    parameters = count_parameters(MODEL, VOCAB)
    assert sum(memory.gradients.total - memory.gradients.padding for memory in found) == 4 * parameters
    assert sum(memory.gradients.padding for memory in found) > 0
    assert all(memory.parameters.total - memory.parameters.padding == 2 * parameters for memory in found)
    assert found[-1].gradients.padding > found[0].gradients.padding == 0


def test_tied_and_tensor_partial_parameters_stay_whole() -> None:
    """Under optim_grads_params: as under optim_grads."""
    tied, topology = replace(MODEL, untie_embeddings_and_output_weights=False), Topology(tp=2, dp=4)
    table = VOCAB * MODEL.hidden_size // 2
    # Norms, biases after a sum and positions see a part of the tokens on each tensor rank.
    partial = MODEL.hidden_size * (2 * (2 + 2 + 1 + 1) + 2 + MODEL.seq_length)
    others = (count_parameters(tied, VOCAB) - 2 * table - partial) // 2
    memory = reported(topology, 0, strategy("optim_grads_params"), config=tied).memory
    assert memory.parameters.total == 2 * (table + partial) + 4 * others // 4
    assert memory.gradients.total == 4 * (table // 4 + partial // 8 + others // 4)
    assert memory.main_params.total == 4 * (table // 4 + partial // 8)


# ---- what passes through


def played(model: Model, context: ParallelContext, size: int | None, *, overlap: bool, microbatches: int) -> list[int]:
    """Elements that optim_grads needs for buffers, and then those of the buckets."""
    plans = plan_buckets(model.params, context, bucket_size=size)
    order = iter_grad_writes(model, build_schedule("1f1b", 1, microbatches).ops[0])
    found, _, reductions = simulate_steps(plans, order, torch.float32, overlap=overlap)
    assert reductions == [microbatches] * len(plans)
    return [found, *sorted((plan.size for plan in plans), reverse=True)]


def test_buffers_of_buckets_that_pass_through() -> None:
    """Where each parameter has a bucket, one is open at a time, and a table that is used twice all the time."""
    context = lone_rank(Topology(dp=2), 0, META)
    untied = build(context)
    found, *sizes = played(untied, context, 1, overlap=False, microbatches=3)
    assert found == sizes[0] == 4 * MODEL.hidden_size**2
    found, *sizes = played(untied, context, None, overlap=False, microbatches=3)
    assert len(sizes) == 2 and found == sum(sizes)  # of matrices and of vectors
    # With overlap, buffers are on their way while others are written.
    found, *sizes = played(untied, context, None, overlap=True, microbatches=3)
    assert sum(sizes) < found <= 6 * sizes[0]  # four at most, beside two that are open
    tied = build(context, replace(MODEL, untie_embeddings_and_output_weights=False))
    found, *sizes = played(tied, context, 1, overlap=False, microbatches=1)
    assert found == 4 * MODEL.hidden_size**2 + VOCAB * MODEL.hidden_size


def test_what_a_schedule_puts_off_is_written_late() -> None:
    """Products of layers. Vectors are not put off, nor are tables in which rows are looked up, nor the output layer's product."""
    context = lone_rank(Topology(dp=2), 0, META)
    model = build(context, replace(MODEL, untie_embeddings_and_output_weights=False))
    word, position = "embedding.word.weight", "embedding.position.weight"
    early, late, whole = (list(iter_grad_writes(model, [Op(OpType(kind), 0, 0)])) for kind in "IWB")
    assert {name for name in early if model.params[name].record.param_type != "vector"} == {word, position}
    assert early.count(word) == 2 and early[0] == word and not {word, position} & set(late)
    assert late[0] == "layers.1.mlp.down.weight" and all(model.params[name].record.param_type != "vector" for name in late)
    assert sorted(early + late) == sorted(whole) and whole.count(word) == 2
    assert list(iter_grad_writes(model, [Op(OpType.FORWARD, 0, 0)])) == []


def test_no_buffers_where_nothing_is_sliced() -> None:
    for name in STRATEGIES:
        assert reported(Topology(dp=1), 0, strategy(name)).memory.buffers == Bytes()
        assert reported(Topology(dp=1), 0, strategy(name)).traffic == ()


@pytest.mark.parametrize("reshard", ["always", "never"])
def test_units_at_work(reshard: FsdpReshard) -> None:
    """Largest is a block: its gradients and a copy of them in float32, its parameters and the next's in bfloat16."""
    hidden = MODEL.hidden_size
    block = 12 * hidden**2 + 13 * hidden
    embedding, last = (VOCAB + MODEL.seq_length) * hidden, VOCAB * hidden + 2 * hidden
    gathered = 2 * block if reshard == "always" else embedding + 2 * block + last
    memory = reported(Topology(dp=8), 0, strategy("optim_grads_params", fsdp_reshard_after_forward=reshard)).memory
    assert memory.buffers.total == 2 * gathered + 4 * (2 * block + block // 8)


def test_a_unit_that_encloses_others_is_left_for_the_one_before_it() -> None:
    """Backward then holds its gathered parameters and those of the unit before it, beside its gradients and their copy."""
    context = lone_rank(Topology(dp=8), 0, META)
    entries = {entry.record.name: entry for entry in build(context).params}
    names = ("layers.0.attention.output.weight", "layers.0.mlp.up.weight", "layers.0.mlp.down.bias", "layers.1.mlp.down.bias")
    before, around, *inner = (UnitPlan((), (entries[name],)) for name in names)
    units = [before, replace(around, num_nested=2), *inner]

    def at_work(*recomputed: list[range]) -> int:
        return compute_fsdp_buffer_bytes([units], recomputed, context, FsdpPolicy(), accumulates=False, dtype=torch.bfloat16)

    square = MODEL.hidden_size**2
    assert at_work([]) == 2 * (4 + 1) * square + 4 * (2 * 4 * square + 4 * square // 8)
    with pytest.raises(ValueError, match="shorter"):
        at_work()  # the groups of a chunk are missing


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_that_are_reduced_once_wait_as_a_whole(microbatches: int) -> None:
    """With several microbatches. The last backward leaves the output first, and its copy is larger than a block's is."""
    hidden = MODEL.hidden_size
    large = replace(MODEL, make_vocab_size_divisible_by=16 * 512)
    block, last = 12 * hidden**2 + 13 * hidden, 16 * 512 * hidden + 2 * hidden
    parallel = strategy("optim_grads_params", fsdp_reduce_once=True)
    memory = reported(Topology(dp=8), 0, parallel, config=large, microbatches=microbatches).memory
    waiting = last if microbatches == 1 else 2 * last + MODEL.seq_length * hidden - 2 * hidden + 2 * block
    assert memory.buffers.total == 2 * (block + last) + 4 * (waiting + last + last // 8)


def test_what_is_sharded_in_host_memory() -> None:
    """Parameters, gradients and moments: as much as before. What is left to buckets stays, or is offloaded by itself."""
    tied, parallel = replace(MODEL, untie_embeddings_and_output_weights=False), strategy("optim_grads_params")
    for optimizer in (OptimizerConfig(), OptimizerConfig(optimizer_cpu_offload=True)):
        here = reported(Topology(dp=4), 1, parallel, config=tied).memory
        memory = reported(Topology(dp=4), 1, replace(parallel, fsdp_params_cpu=True), config=tied, optimizer=optimizer).memory
        table = VOCAB * MODEL.hidden_size
        assert memory.parameters == Bytes(2 * table, here.parameters.total - 2 * table)
        assert memory.gradients == Bytes(table, here.gradients.total - table)
        assert (memory.moments.total, memory.main_params.total) == (here.moments.total, here.main_params.total)
        offloaded = optimizer.optimizer_cpu_offload
        assert (memory.moments.device, memory.main_params.device) == ((0, 0) if offloaded else (2 * table, table))
        arriving = memory.gradients.host
        assert memory.buffers == Bytes(here.buffers.device, arriving + (table if offloaded else 0))


# ---- what is sent


@pytest.mark.parametrize("microbatches", [1, 5])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_step_sends_what_the_formulas_say(ranks: int, microbatches: int) -> None:
    """In elements of the model, and in bytes: gradients in float32, parameters in bfloat16."""
    parameters, share = count_parameters(MODEL, VOCAB), Fraction(ranks - 1, ranks)
    cases: list[tuple[ParallelConfig, int, int]] = [
        (strategy("no_shard"), 2, 0),
        (strategy("optim"), 1, 1),
        (strategy("optim_grads"), microbatches, 1),
        (strategy("optim_grads_params"), microbatches, 2 * microbatches),
        (strategy("optim_grads_params", fsdp_reshard_after_forward="never"), microbatches, 1),
        (strategy("optim_grads_params", fsdp_reduce_once=True), 1, 2 * microbatches),
        (strategy("optim_grads_params", fsdp_reshard_after_forward="never", fsdp_reduce_once=True), 1, 1),
    ]
    for parallel, reduced, gathered in cases:
        sent = reported(Topology(dp=ranks), 0, parallel, microbatches=microbatches).traffic
        expected = [
            GroupTraffic("dp", kind, int(size * times * share * parameters))  # type: ignore[arg-type]
            for kind, times, size in (("gradients", reduced, 4), ("parameters", gathered, 2))
            if times
        ]
        assert list(sent) == expected


@pytest.mark.parametrize("microbatches", [1, 3])
def test_replicas(microbatches: int) -> None:
    """Parts of 4 of 8 data ranks: within a part as on 4 ranks, and across an all-reduce of a quarter over 2, once a step."""
    topology, parallel = Topology(dp=8), strategy("optim_grads_params")
    context = lone_rank(topology, 0, META)
    context._groups[("fsdp_shard",)] = Group("fsdp_shard", (0, 1, 2, 3), 0)
    context._groups[("fsdp_replica",)] = Group("fsdp_replica", (0, 4), 0)
    schedule = build_schedule("1f1b", 1, microbatches)
    found = build_state_report(build(context), context, parallel, OptimizerConfig(), schedule)
    alone = reported(Topology(dp=4), 0, parallel, microbatches=microbatches)
    quarter = count_parameters(MODEL, VOCAB) // 4
    assert list(found.traffic) == [
        *(replace(one, over="4 ranks of dp") for one in alone.traffic),
        GroupTraffic("2 replicas in dp", "gradients", 4 * quarter),
    ]
    # What is summed over the replicas at the end has to wait somewhere.
    assert found.memory == alone.memory + StateMemory(buffers=Bytes(4 * quarter))


def test_groups_are_told_by_their_axes() -> None:
    """Under sequence parallelism with ties across two stages; an all-reduce over two ranks sends what it reduces once."""
    tied = replace(MODEL, untie_embeddings_and_output_weights=False)
    table = VOCAB * MODEL.hidden_size // 2
    for name, joined in (("no_shard", table), ("optim", table // 4)):
        sent = reported(Topology(tp=2, dp=4, pp=2), 0, strategy(name), config=tied).traffic  # type: ignore[arg-type]
        assert {one.over for one in sent} == {"dp", "tp x dp", "pipeline ends"}
        (ends,) = (one for one in sent if one.over == "pipeline ends")
        assert ends.bytes == 4 * joined


# ---- offload


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_offloaded_state_lies_in_host_memory(fraction: float) -> None:
    """Whole shards, near to the fraction; what stays and what goes is as much as before, and the host has copies of gradients."""
    here = reported(Topology(dp=2), 0, strategy("optim")).memory
    settings = OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    memory = reported(Topology(dp=2), 0, strategy("optim"), optimizer=settings).memory
    for part, before in ((memory.main_params, here.main_params), (memory.moments, here.moments)):
        assert part.total == before.total
        assert part.host == pytest.approx(fraction * part.total, rel=0.05)
    assert memory.buffers == Bytes(host=memory.main_params.host)
    assert memory.parameters == here.parameters and memory.gradients == here.gradients
    # What is its own main has one apart on the host; on a machine whose device is the CPU nothing moves.
    narrow = reported(Topology(dp=2), 0, strategy("optim"), optimizer=settings, dtype=torch.float32).memory
    assert narrow.main_params.host == narrow.main_params.total == pytest.approx(fraction * narrow.parameters.total / 2, rel=0.05)
    cpu = reported(Topology(dp=2), 0, strategy("optim"), optimizer=settings, dtype=torch.float32, device=torch.device("cpu")).memory
    assert cpu.main_params == cpu.buffers == Bytes() and cpu.moments.host > 0


# ---- how it is told


def test_the_fullest_stage_is_told() -> None:
    def stage(size: int) -> StateReport:
        memory = StateMemory(Bytes(2 * size, padding=size // 100), Bytes(4 * size), moments=Bytes(host=8 * size))
        return StateReport(memory, (GroupTraffic("dp", "gradients", 4 * size), GroupTraffic("dp", "parameters", 2 * size)))

    lines = format_state_report([stage(10**6), stage(10**9)], strategy("optim_grads_params", fsdp_shard_size=2), Topology(dp=8), 3)
    assert lines == [
        "state of the model, optim_grads_params over 8 data ranks in groups of 2: 6 GB on a rank of stage 1, the fullest: "
        "parameters 2 GB, gradients 4 GB; 10 MB of it padding",
        "and 8 GB in host memory: moments 8 GB",
        "in a step of 3 microbatches such a rank sends 6 GB over dp (gradients 4 GB, parameters 2 GB)",
    ]
    small = StateReport(StateMemory(Bytes(2000), Bytes(4000)), ())
    assert format_state_report([small], strategy("optim"), Topology(), 1) == [
        "state of the model, one data rank: 6 kB on each rank: parameters 2 kB, gradients 4 kB"
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (2.345e13, "23.4 TB")],
)
def test_amounts(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_the_start_up_log_tells_it() -> None:
    """After any ramp-up of the batch: 2 samples at a time over 2 data ranks are 2 microbatches of a batch of 8."""
    settings = {"data_parallel_sharding_strategy": "optim_grads", "pipeline_model_parallel_size": 2, "bf16": True}
    said = run(arguments(**settings, train_iters=1, global_batch_size=8, micro_batch_size=2), 4)
    (state,) = re.findall(r"^  state of the model, optim_grads over 2 data ranks: .*$", said, re.MULTILINE)
    assert "the fullest: parameters" in state and "buffers" in state
    (sent,) = re.findall(r"^  in a step of 2 microbatches such a rank sends .*$", said, re.MULTILINE)
    assert "over dp (gradients" in sent and "over pipeline ends" in sent
