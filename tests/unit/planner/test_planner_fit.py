"""The search for settings that fit: a sample is the plan, what is proposed is valid, fits, and could not be less."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from typing import Any

import pytest

from megatron.config.checks.finding import Change, create_change
from megatron.config.cli import LoadedConfig, load
from megatron.config.parsed_flags import DryRun
from megatron.config.rules import find_violations
from megatron.data.tokenizer import predict_embedding_rows
from megatron.spec.operations import OpType, Schedule
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.dry_run import Planner, build_plan, limit_microbatches
from megatron_lab.planner.fit import (
    Cost,
    FitSearch,
    FittingChange,
    Lever,
    add_fit_advice,
    estimate_cost,
    find_min_recompute_layers,
    get_device_memory,
    get_usable_bytes,
    list_levers,
    resolve_auto_recompute_layers,
)
from megatron_lab.planner.plan import Plan
from megatron_lab.planner.step_time import StepTime, predict_from_work
from tests.support.covering import full_but
from tests.support.planned import settings
from tests.support.runs import arguments

GIVEN: dict[str, Any] = {"seq_length": 256, "vocab_size": 61}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block"}


def job(world_size: int, **changes: Any) -> tuple[LoadedConfig, DryRun, int]:
    one = settings(world_size, **{**GIVEN, "micro_batch_size": 2, **changes})
    assert one.dry_run is not None
    return one, one.dry_run, predict_embedding_rows(one.config.data)


def fullest(plan: Plan) -> int:
    return plan.profiles[plan.fullest_index].memory.total.device


@pytest.mark.parametrize(
    ("schedule", "chunks", "batches"),
    [
        ("1f1b", 1, 13),
        ("gpipe", 1, 11),
        *(
            pytest.param(*case, marks=pytest.mark.full("zb-v and 1f1b here, all schedules by arithmetic alone below"))
            for case in (("interleaved", 2, 12), ("zb-h1", 1, 13))
        ),
        ("zb-v", 2, 19),
    ],
)
def test_a_few_microbatches_show_the_peak_and_the_time_of_all(schedule: str, chunks: int, batches: int) -> None:
    """Of three stages, with recompute and inputs of all microbatches; but GPipe's memory grows with each."""
    stages: dict[str, Any] = {"device": None, "pipeline_model_parallel_size": 3, "num_layers": 6, "pipeline_schedule": schedule}
    if schedule == "interleaved":
        stages["num_virtual_stages_per_pipeline_rank"] = chunks
    for again in ({}, FULL) if schedule in ("1f1b", "zb-v") else ({},):
        one, dry_run, rows = job(3, **stages, **again, global_batch_size=2 * batches)

        def both(config: Any = one.config, dry_run: DryRun = dry_run, rows: int = rows) -> tuple[Plan, list[int], Any]:
            few = Planner(config, dry_run, rows, shortened=True)
            return build_plan(config, dry_run, rows), few.compute_fullest_device_bytes(), few.compute_step_work()

        plan, needed, work = both()
        by_stage = [max(kind.memory.total.device for kind in plan.profiles if stage in kind.stages) for stage in range(3)]
        assert needed == by_stage and max(kind.memory.total.device for kind in work.profiles) == fullest(plan)
        assert (work.scheduled_share < 1) == (schedule != "gpipe")


def test_a_few_microbatches_borrow_all_buffers() -> None:
    """Under optim_grads, where weight gradients that are put off keep buffers of two microbatches at once."""
    state: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads", "ddp_bucket_size": 3000, "device": None}
    one, dry_run, rows = job(2, **state, pipeline_schedule="zb-v", overlap_grad_reduce=True, global_batch_size=24)

    def both() -> tuple[list[int], Plan]:
        return Planner(one.config, dry_run, rows, shortened=True).compute_fullest_device_bytes(), build_plan(
            one.config, dry_run, rows
        )

    needed, plan = both()
    assert needed == [fullest(plan)]


def test_a_few_microbatches_show_the_peak_at_every_number_of_stages() -> None:
    """With chunks that keep unequally much, and operations that take something for a while: by arithmetic alone."""

    def peaks(schedule: Schedule) -> list[float]:
        keeps = [1 + 4 * (chunk * 7 % 4 == 0) for chunk in range(schedule.num_chunks)]
        beside = {OpType.FORWARD: 2.0, OpType.BACKWARD: 9.0, OpType.INPUT_GRAD: 3.0, OpType.WEIGHT_GRAD: 2.0}
        freed = {OpType.FORWARD: -1.0, OpType.BACKWARD: 1.0, OpType.INPUT_GRAD: 0.6, OpType.WEIGHT_GRAD: 0.4}
        found = []
        for ops in schedule.ops:
            kept, peak = 0.0, 0.0
            for op in ops:
                peak = max(peak, kept + keeps[op.chunk] * (op.type is OpType.FORWARD) + beside[op.type])
                kept -= freed[op.type] * keeps[op.chunk]
            found.append(round(peak, 6))
        return found

    fewer = 0
    for name in SCHEDULES:
        for chunks in {"interleaved": (2, 3), "zb-v": (2,)}.get(name, (1,)):
            for stages in (2, 3, 5):
                for batches in range(stages, 6 * stages + 2):
                    few = limit_microbatches(name, stages, batches)
                    fewer += few < batches
                    whole = build_schedule(name, stages, batches, chunks)
                    assert peaks(build_schedule(name, stages, few, chunks)) == peaks(whole), (name, stages, chunks, batches)
    assert fewer > 80


WIDE = {"num_layers": 4, "micro_batch_size": 4, "global_batch_size": 32, "bf16": True, "device": None, "hidden_size": 256}
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (4, {**WIDE, "tensor_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "stages": (4, {**WIDE, "pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "name", ["tensor", pytest.param("stages", marks=pytest.mark.full("the same of tensor ranks, and the tests of stages below"))]
)
def test_what_is_proposed_fits_and_one_layer_less_would_not(name: str) -> None:
    """Under falling limits, until nothing helps. The full plan says the same as the search."""
    world_size, changes = JOBS[name]
    one, dry_run, rows = job(world_size, **changes)

    def search() -> list[tuple[int, FittingChange | None, int | None, int | None]]:
        looking, found = FitSearch(one.config, dry_run, rows), []
        base = looking.get_cost(Change())
        assert base is not None
        plan = build_plan(one.config, dry_run, rows)
        taken = plan.profiles[plan.fullest_index].memory.cuda.device
        for limit in (*(taken + int((base.device_bytes - taken) * part) for part in (0.8, 0.5)), 10**6):
            best = looking.find_best(limit)
            planned = less = None
            if best is not None:
                planned = fullest(build_plan(best.change.apply(one.config, world_size)[0], dry_run, rows))
                fields = dict(best.change.fields)
                if (layers := fields.get("recompute_num_layers", 0)) > 1:
                    fewer = Change(tuple((fields | {"recompute_num_layers": layers - 1}).items()))
                    less = fullest(build_plan(fewer.apply(one.config, world_size)[0], dry_run, rows))
            found.append((limit, best, planned, less))
        return found

    found = search()
    assert found[0][1] is not None and found[-1][1] is None, found
    seconds = 0.0
    for limit, best, planned, less in found:
        if best is not None:
            config, _ = best.change.apply(one.config, world_size)
            assert not find_violations(config, world_size)
            assert planned == best.cost.device_bytes <= limit
            assert less is None or less > limit, "one layer fewer would do"
            assert best.cost.seconds >= seconds, "a lower limit costs no less"
            seconds = best.cost.seconds


def test_the_cheapest_of_all_levers_is_taken() -> None:
    """Where one is enough, none of the others that are enough costs less time."""
    one, dry_run, rows = job(4, **WIDE)

    def search() -> tuple[FittingChange | None, list[Cost], int]:
        looking = FitSearch(one.config, dry_run, rows)
        base = looking.get_cost(Change())
        assert base is not None
        limit = int(base.device_bytes * 0.96)  # most of it is what CUDA takes
        costs = [
            cost
            for _, each in list_levers(looking._config, dry_run, rows, 4)
            if (cost := looking.get_cost(each)) is not None and cost.device_bytes <= limit
        ]
        return looking.find_best(limit), costs, limit

    best, alone, _limit = search()
    assert best is not None and len(alone) > 2 and best.cost.seconds <= min(cost.seconds for cost in alone)


def test_a_loss_in_chunks_is_a_lever_where_it_is_whole() -> None:
    """It saves what microbatches keep of their logits, for the time of one more product; where they are in chunks there is none."""
    heavy = {**WIDE, "num_layers": 6, "vocab_size": 30_000, "pipeline_schedule": "gpipe"}

    def search(**changes: Any) -> tuple[list[Change], list[Cost | None]]:
        one, dry_run, rows = job(1, **heavy, **changes)
        looking = FitSearch(one.config, dry_run, rows)
        found = [each for kind, each in list_levers(one.config, dry_run, rows, 6) if kind == "loss"]
        return found, [looking.get_cost(Change()), *map(looking.get_cost, found)]

    (lever,), (base, chunked) = search()
    assert dict(lever.fields) == {"loss_chunk_tokens": 4 * 256} and base is not None and chunked is not None
    assert base.activation_bytes - chunked.activation_bytes > 6 * 4 * 256 * 30_000 * 2  # of 7 of 8 microbatches, and more
    assert base.seconds < chunked.seconds < 1.3 * base.seconds
    assert search(loss_chunk_tokens=1024)[0] == []


def test_levers_together_are_estimated_by_parts() -> None:
    base = Cost(100, (60, 40, 0), 10.0)
    full = Lever("layers", create_change(recompute_num_layers=4), Cost(20, (60, 40, 0), 14.0))
    shard = Lever("sharding", create_change(fsdp_shard_size=2), Cost(100, (15, 40, 3), 11.0))
    host = Lever("host", create_change(optimizer_cpu_offload=True), Cost(100, (0, 40, 2), 20.0))
    assert estimate_cost(base, [shard], 0) == Cost(100, (15, 40, 3), 11.0)
    assert estimate_cost(base, [shard, host], 0) == Cost(100, (0, 40, 3), 22.0), "what is gone cannot be divided once more"
    assert estimate_cost(base, [full], 0).seconds == 14.0 and estimate_cost(base, [full], 160).seconds == pytest.approx(12.0)
    assert estimate_cost(base, [full, shard], 0) == Cost(20, (15, 40, 3), 15.0)


def test_each_stage_computes_as_little_again_as_it_can() -> None:
    """Under 1F1B later stages keep fewer microbatches, so they need less."""
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 6, "device": None}
    one, dry_run, rows = job(2, **stages, global_batch_size=16, **FULL)

    def search() -> tuple[tuple[int, ...], list[list[int]], int]:
        def needed(numbers: tuple[int, ...]) -> list[int]:
            config, _ = create_change(recompute_layers_per_stage=",".join(map(str, numbers))).apply(one.config, 2)
            return Planner(config, dry_run, rows, shortened=True).compute_fullest_device_bytes()

        limit = (needed((0, 0))[0] + 2 * needed((3, 3))[0]) // 3
        found = find_min_recompute_layers(one.config, dry_run, rows, limit)
        fewer = tuple(max(0, number - 1) for number in found)
        return found, [needed(found), needed(fewer)], limit

    found, (fit, fewer), limit = search()
    assert len(set(found)) > 1 and list(found) == sorted(found, reverse=True)
    assert max(fit) <= limit and all(bytes_ > limit for bytes_, number in zip(fewer, found, strict=True) if number)
    with pytest.raises(ValueError, match=r"stage 0 needs .* even with all of its layers recomputed"):
        find_min_recompute_layers(one.config, dry_run, rows, 1000)


def test_where_all_layers_are_not_enough_it_says_what_else_to_change() -> None:
    """Beside auto, which then finds numbers."""
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 6, "device": None, **FULL}
    one, dry_run, rows = job(4, **stages, recompute_num_layers=3)

    def search() -> None:
        needed = max(Planner(one.config, dry_run, rows, shortened=True).compute_fullest_device_bytes())
        auto = {**stages, "recompute_layers_per_stage": "auto", "device_memory_gb": (needed - 1000) / 0.95e9}
        with pytest.raises(ValueError, match=r"^stage 0 needs .* with all of its layers recomputed.* It fits with ") as error:
            resolve_auto_recompute_layers(job(4, **auto)[0].config, dry_run, rows)
        flags = str(error.value).split("It fits with ")[1].split(" (")[0]
        again = load([*arguments(**GIVEN, **auto, train_iters=1, micro_batch_size=2), *shlex.split(flags)], 4).config
        assert resolve_auto_recompute_layers(again, dry_run, rows).memory.recompute_counts is not None

    search()


@pytest.mark.parametrize(
    ("given", "proposed"),
    [
        ({"recompute_num_layers": 1}, True),
        ({"recompute_layers_per_stage": "1,0"}, True),
        ({"recompute_method": "uniform", "recompute_num_layers": 4}, True),
        ({"recompute_num_layers": 4}, False),
        ({"recompute_method": "uniform", "recompute_num_layers": 1}, False),
    ],
)
def test_layers_are_a_lever_until_each_runs_again_by_itself(given: dict[str, Any], proposed: bool) -> None:
    """Of 8 layers on two stages; what is proposed is accepted as it is typed."""
    stages: dict[str, Any] = {"num_layers": 8, "pipeline_model_parallel_size": 2, **FULL, **given}
    one, dry_run, rows = job(2, **stages)
    full = [str(each) for kind, each in list_levers(one.config, dry_run, rows, 4) if kind == "layers"]
    assert len(full) == proposed, full
    for flags in full:
        again = load([*arguments(**GIVEN, **stages, train_iters=1), *shlex.split(flags)], 2).config.memory
        assert (again.recompute_method, again.recompute_num_layers, again.recompute_layers_per_stage) == ("block", 4, None)


def test_the_line_of_advice_can_be_followed() -> None:
    """Its flags are accepted, and then there is no such line; without a limit, or within it, there is none at all."""
    one, dry_run, rows = job(4, **WIDE)

    def told(loaded: LoadedConfig, gigabytes: float | None) -> tuple[str, ...]:
        memory = dataclasses.replace(loaded.config.memory, device_memory_gb=gigabytes)
        config = dataclasses.replace(loaded.config, memory=memory)
        plan = add_fit_advice(build_plan(config, dry_run, rows), config, dry_run, rows)
        return tuple(line for line in plan.advice if line.startswith("the fullest rank"))

    def search() -> None:
        needed = fullest(build_plan(one.config, dry_run, rows))
        assert told(one, None) == told(one, needed / 0.94e9) == ()
        (line,) = told(one, needed / 1e9)
        assert line.startswith("the fullest rank needs ") and "time for a step)" in line
        flags = line.split("It fits with ")[1].split(" (")[0]
        again = load([*arguments(**GIVEN, **WIDE, train_iters=1), *shlex.split(flags)], 4)
        assert again.config != one.config and told(again, needed / 1e9) == ()

    search()


def test_the_limit_is_what_the_user_says() -> None:
    one = settings(1, device_memory_gb=80.0)
    assert get_device_memory(one.config) == 80 * 10**9 and get_usable_bytes(80 * 10**9) == 76 * 10**9
    assert get_device_memory(settings(1).config) is None, "a CPU's memory is no limit"


def test_moving_activations_to_the_host_is_priced_by_what_it_moves() -> None:
    """Proposed where there is a device, and its copies cost time where computing does not hide them."""
    wide = {**WIDE, "num_layers": 6}
    one, dry_run, rows = job(1, **wide)

    def search() -> tuple[Cost | None, Cost | None]:
        looking = FitSearch(one.config, dry_run, rows)
        return looking.get_cost(Change()), looking.get_cost(create_change(cpu_offload_activations=True))

    kept, moved = search()
    assert kept is not None and moved is not None
    assert moved.activation_bytes < kept.activation_bytes and moved.seconds > 1.1 * kept.seconds, (
        "the layers are tiny, so copies take longer"
    )
    offered = [each for kind, each in list_levers(one.config, dry_run, rows, 6) if kind == "offload"]
    assert offered == [create_change(cpu_offload_activations=True)]
    on_cpu = job(1, **{**wide, "device": "cpu"})[0]
    assert not [each for kind, each in list_levers(on_cpu.config, dry_run, rows, 6) if kind == "offload"]


LONG: dict[str, Any] = {"bf16": True, "device": None, "seq_length": 16384, "global_batch_size": 4, "recompute_granularity": "full"}


def test_context_ranks_are_a_lever_where_one_sequence_is_long() -> None:
    """As long as each has enough tokens, and with microbatches of one sequence. They are found where nothing else is enough."""

    def offered(**changes: Any) -> list[dict[str, Any]]:
        one, dry_run, rows = job(8, **{**LONG, "global_batch_size": None, "use_distributed_optimizer": True, **changes})
        fields = [dict(each.fields) for _, each in list_levers(one.config, dry_run, rows, 2)]
        return [each for each in fields if "context_parallel_size" in each]

    def two_and_four(**others: int) -> list[dict[str, Any]]:
        return [{"context_parallel_size": size, **others} for size in (2, 4)]

    assert offered(micro_batch_size=1) == two_and_four(global_batch_size=8)
    assert offered(micro_batch_size=2) == two_and_four(micro_batch_size=1, global_batch_size=16)
    assert offered(context_parallel_size=2) == [{"context_parallel_size": 4, "micro_batch_size": 1, "global_batch_size": 8}]
    assert offered(seq_length=4096) == offered(micro_batch_size=1, context_parallel_size=8) == []

    wide = {**LONG, "seq_length": 65536, "hidden_size": 512, "num_attention_heads": 4, "num_layers": 4, "micro_batch_size": 1}
    one, dry_run, rows = job(4, **wide, gpus_per_node=1)  # so no tensor ranks

    def search() -> tuple[Cost, FittingChange, int]:
        looking = FitSearch(one.config, dry_run, rows)
        base = looking.get_cost(Change())
        assert base is not None
        best = looking.find_best(base.device_bytes - base.activation_bytes * 2 // 3)
        assert best is not None
        return base, best, fullest(build_plan(best.change.apply(one.config, 4)[0], dry_run, rows))

    base, best, planned = search()
    ranks = dict(best.change.fields)["context_parallel_size"]
    assert best.cost.device_bytes == planned < base.device_bytes - base.activation_bytes * 2 // 3
    assert best.cost.activation_bytes < 1.4 / ranks * base.activation_bytes, "each holds its share, and keys of the others"


def test_state_is_shared_by_context_ranks_too() -> None:
    """So there are ways to share more of it where there is one data rank."""
    one, dry_run, rows = job(2, **LONG, context_parallel_size=2, micro_batch_size=1)
    assert sum(kind == "sharding" for kind, _ in list_levers(one.config, dry_run, rows, 2)) == 4


@pytest.mark.parametrize(
    ("strategy", "sharers"),
    full_but(
        [("optim_grads", "tensor"), ("optim_grads_params", "context")],
        itertools.product(("optim", "optim_grads", "optim_grads_params"), ("tensor", "context")),
        "the two cases that are kept",
    ),
)
def test_a_few_microbatches_take_the_time_of_all(strategy: str, sharers: str) -> None:
    """What is counted for the microbatches that are laid out, and what for all: with moves to the host and stages too."""
    layout = {"data_parallel_sharding_strategy": strategy, "bf16": True, "device": None, "cpu_offload_activations": True}
    layout[f"{sharers}_{'model_' * (sharers == 'tensor')}parallel_size"] = 2
    world_size = 4
    if strategy == "optim_grads_params":
        layout["fsdp_params_cpu"] = True
    else:
        layout["pipeline_model_parallel_size"], world_size = 2, 8
    one, dry_run, rows = job(world_size, **layout, micro_batch_size=1, global_batch_size=64, hidden_size=64, num_layers=4)
    # A slow host, so that nothing hides what moves there.
    cluster = dataclasses.replace(load_cluster("h100"), host_gb_s=0.01)

    def both() -> tuple[StepTime, StepTime]:
        few, (_, whole) = (
            Planner(one.config, dry_run, rows, shortened=True).compute_step_work(),
            Planner(one.config, dry_run, rows).plan_and_work(),
        )
        assert few.scheduled_share < 0.2 and whole.scheduled_share == 1
        few_time, whole_time = (predict_from_work(work, one.config, dry_run, rows, cluster) for work in (few, whole))
        return few_time, whole_time

    few, whole = both()
    assert few.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert few.breakdown["moves to the host"] == pytest.approx(whole.breakdown["moves to the host"], rel=0.03)
    assert whole.breakdown["moves to the host"] > 0


def test_a_job_for_no_gpu_at_all_is_told_what_fits_the_largest() -> None:
    """Without a limit too: 13 billion parameters on one rank."""
    giant = {"num_layers": 2, "hidden_size": 25600, "num_attention_heads": 8, "bf16": True, "micro_batch_size": 1}
    one, dry_run, rows = job(1, **giant, device=None)

    def told() -> tuple[str, ...]:
        plan = build_plan(one.config, dry_run, rows)
        return add_fit_advice(plan, one.config, dry_run, rows).advice

    assert any(re.match(r"the fullest rank needs 28\d GB, but of a device of 288 GB it may take 274 GB", line) for line in told())
