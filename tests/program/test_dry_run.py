"""The dry run as a whole: jobs of any size on one process, what is printed and written, and settings that cannot be planned."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config.config import Config
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.regular_file import check_output
from megatron.model import build
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import Chunk, build_layer_table, partition_layers
from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.counts import count_flops_per_step, count_flops_per_token, count_parameters
from megatron.spec.operations import Op, OpType
from megatron.spec.schedules import build_schedule
from megatron_lab.planner import dry_run
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.costs import compute_chunk_costs
from megatron_lab.planner.plan import (
    Job,
    Plan,
    RankMemory,
    RankProfile,
    RankRange,
    StepFlops,
    Traffic,
    count_step_flops,
    plan_to_json,
    write_plan,
)
from megatron_lab.planner.plan_text import format_plan
from megatron_lab.planner.state_layout import Bytes
from megatron_lab.planner.step_time import StepTime
from megatron_lab.planner.units import format_bytes
from tests.support.planned import kind_of, plans_of, settings
from tests.support.runs import arguments, launch, report

TRILLION = {
    "num_layers": 128,
    "hidden_size": 25600,
    "num_attention_heads": 160,
    "seq_length": 2048,
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 64,
    "micro_batch_size": 1,
    "global_batch_size": 3072,
    "vocab_size": 51199,
    "bf16": True,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "device": None,
}
"""Narayanan et al. 2021, table 1: on 3,072 GPUs."""


# ---- jobs that no machine here could run


def test_sharded_over_ranks_that_divide_no_dimension() -> None:
    """A Llama 2 of 7 billion: 4,096 rows over 96 ranks are 42 2/3 each, so 43; over 384 they are 11, and the last 11 have none."""
    model: dict[str, Any] = {
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "num_layers": 32,
        "swiglu": True,
    }
    llama: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "disable_bias_linear": True}
    sharded: dict[str, Any] = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "untie_embeddings_and_output_weights": True,
        "bf16": True,
    }
    sizes: dict[str, Any] = {"vocab_size": 31999, "seq_length": 4096, "device": None, "global_batch_size": None}
    most_padding = {96: 0.008, 384: 0.06}
    jobs = [settings(world_size, **model, **llama, **sharded, **sizes) for world_size in most_padding]
    for (world_size, most), plan in zip(most_padding.items(), plans_of(jobs), strict=True):
        assert sum(kind.num_ranks for kind in plan.profiles) == world_size
        assert sum(kind.num_ranks * kind.parameters for kind in plan.profiles) == world_size * plan.parameters
        held = sum(kind.num_ranks * (kind.memory.parameters.total - kind.memory.parameters.padding) for kind in plan.profiles)
        padding = sum(kind.num_ranks * kind.memory.parameters.padding for kind in plan.profiles)
        assert held == 4 * plan.parameters and 0 < padding < most * held
        last = next(kind for kind in plan.profiles if world_size - 1 in kind.rank_ranges[0].data)
        assert last.memory.gradients.total < plan.profiles[0].memory.gradients.total


def data_size() -> int:
    """Bytes that this process has for its own; a forked one begins with as many, whatever the tests before it have left."""
    found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def test_a_job_of_3072_ranks_on_a_laptop(tmp_path: Path, full: bool) -> None:
    """In less than 2 GB beside what the test has; counted by the stages, it has the model's parameters.

    tests/program/test_examples.py plans all 512 microbatches of such a job in any case.
    """
    file = tmp_path / "plan.json"
    settings = TRILLION if full else {**TRILLION, "global_batch_size": 6 * 8}
    argv = arguments(**settings, train_iters=1, dry_run=True, world_size=3072, dry_run_json=file)
    (done,) = launch(argv, before=lambda _: resource.setrlimit(resource.RLIMIT_DATA, (data_size() + 2 * 10**9,) * 2), timeout=240)
    assert done.code == 0, done.stderr
    said = json.loads(file.read_text())
    model = ModelConfig(num_layers=128, hidden_size=25600, num_attention_heads=160, seq_length=2048)
    assert said["model"]["parameters"] == count_parameters(model, 51200) == sum(said["model"]["parameters_by_stage"])
    assert said["job"]["nodes"] == 384 and len(said["layers"]) == 64
    assert sum(kind["ranks"] for kind in said["kinds"]) == 3072
    # Each of the middle stages has two layers of 12 h^2 + 13 h, of which a tensor rank has its part of the matrices.
    middle = next(kind for kind in said["kinds"] if 30 in kind["stages"])
    h = 25600
    assert middle["parameters"] == 2 * (12 * h * h // 8 + 7 * h // 8 + 6 * h)
    assert done.stdout.startswith("fullest rank (stage 0, rank 0): needs ")
    assert f"{said['device_bytes'] / 1e9:.3g} GB of device memory" in done.stdout.splitlines()[0]


@pytest.mark.full("test_sharded_over_ranks_that_divide_no_dimension, test_a_job_of_3072_ranks_on_a_laptop")
def test_a_million_ranks_fall_into_few_kinds(full: bool) -> None:
    """More ranks than there are elements of the model, so that many keep nothing of the optimizer's state.

    An eighth of a million is enough for that; with --full it is the most that is allowed.
    """
    world_size = 2**20 if full else 2**17
    layouts: list[dict[str, Any]] = [
        {"use_distributed_optimizer": True, "micro_batch_size": 1},
        {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "data_parallel_sharding_strategy": "optim_grads",
            "bf16": True,
        },
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "fsdp_shard_size": 2,
            "make_vocab_size_divisible_by": 2,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
        },
    ]
    jobs = [settings(world_size, **layout, global_batch_size=None) for layout in layouts]
    for job, plan in zip(jobs, plans_of(jobs), strict=True):
        assert sum(kind.num_ranks for kind in plan.profiles) == world_size and len(plan.profiles) < 200
        topology = Topology.of(job.config.parallel, world_size)
        for rank in (0, 1, 5, 1000, 4095, 4096, world_size // 2 - 1, world_size // 2, world_size - 1):
            assert kind_of(plan.profiles, topology, rank)


# ---- what is simulated and counted


def test_idle_time_is_the_simulators(full: bool) -> None:
    """With FLOPs for durations: of a stage's layers, and of the loss on the last chunk."""
    chunks = {"1f1b": 1, "zb-h1": 1, "zb-v": 2} if full else {"1f1b": 1, "zb-v": 2}
    layouts: list[dict[str, Any]] = [
        {"num_layers": 4 * count, "pipeline_model_parallel_size": 4, "pipeline_schedule": schedule}
        for schedule, count in chunks.items()
    ]
    jobs = [settings(4, **layout, global_batch_size=16) for layout in layouts]
    for (schedule, count), job, plan in zip(chunks.items(), jobs, plans_of(jobs), strict=True):
        timeline = simulate(build_schedule(schedule, 4, 8, count), duration_in_flops(job.config))
        assert plan.work.bubble_share == pytest.approx(timeline.bubble_share, abs=1e-12) and plan.work.bubble_share > 0.05, schedule


def duration_in_flops(config: Config) -> Callable[[Op], float]:
    """FLOPs of an operation, counted by hand."""
    model = config.model
    h, f, s = model.hidden_size, model.ffn_size, model.seq_length
    attention, product = 2 * s * h, 2 * (4 * h * h + 2 * h * f)
    loss = 2 * h * 61
    table = build_layer_table(model, config.parallel, 61)

    def duration(op: Op) -> float:
        chunk = table[op.chunk]
        weights, scores, output = product * len(chunk.layers), attention * len(chunk.layers), loss * chunk.is_last
        parts = {
            OpType.FORWARD: weights + scores + output,
            OpType.INPUT_GRAD: weights + 2 * scores + 2 * output,
            OpType.WEIGHT_GRAD: weights,
            OpType.BACKWARD: 2 * weights + 2 * scores + 2 * output,
        }
        return parts[op.type]

    return duration


def test_work_is_that_of_the_metrics() -> None:
    model = ModelConfig(num_layers=6, hidden_size=64, num_attention_heads=4, seq_length=32)
    table = partition_layers(6, (0, 1))
    found = count_step_flops(model, 100, table, build_schedule("1f1b", 2, 4), 24)
    assert (found.tokens, found.flops_per_token) == (24 * 32, count_flops_per_token(model, 100))
    assert found.flops == count_flops_per_step(model, 100, 24) and found.compute_flops_per_rank(4) == found.flops / 4
    costs = compute_chunk_costs(model, 100, table)
    assert sum(one.forward + one.input_grad + one.weight_grad for one in costs) == count_flops_per_token(model, 100)
    again = build_layer_table(
        model, ParallelConfig(pipeline_model_parallel_size=2), 100, MemoryConfig("full", recompute_num_layers=2)
    )
    costs = compute_chunk_costs(model, 100, again)
    more = sum(one.forward + one.recompute + one.input_grad + one.weight_grad for one in costs) - count_flops_per_token(model, 100)
    assert count_step_flops(model, 100, again, build_schedule("1f1b", 2, 4), 24).recompute_flops == more * found.tokens > 0
    costs = compute_chunk_costs(model, 100, table, recomputes_logits=True)
    more = sum(one.forward + one.input_grad + one.weight_grad for one in costs) - count_flops_per_token(model, 100)
    work = count_step_flops(model, 100, table, build_schedule("1f1b", 2, 4), 24, recomputes_logits=True)
    assert work.recompute_flops == more * work.tokens > 0 and work.flops == found.flops and work.bubble_share > found.bubble_share
    even = count_step_flops(
        dataclasses.replace(model, num_layers=2), 0, partition_layers(2, (0, 1)), build_schedule("1f1b", 2, 4), 8
    )
    assert even.bubble_share == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1), where no stage has more to do


def test_what_is_measured_of_activations_counts() -> None:
    """The first stages of 1F1B keep more microbatches, and so are kinds of their own; under GPipe all stages keep all."""
    stages: dict[str, Any] = {"num_layers": 4, "pipeline_model_parallel_size": 4}
    plan, of_gpipe = plans_of([settings(4, **stages), settings(4, **stages, pipeline_schedule="gpipe")])
    peaks = [next(kind for kind in plan.profiles if stage in kind.stages).memory.activations.device for stage in range(4)]
    assert [kind.stages for kind in plan.profiles] == [(0,), (1,), (2,), (3,)]
    assert peaks[1] > peaks[2] > 0 and len(set(peaks)) == 4
    assert [kind.stages for kind in of_gpipe.profiles] == [(0,), (1, 2), (3,)], "stages that look alike are one kind"


def test_a_lost_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of all stages are compared with the settings'."""

    def without_last(*args: Any) -> list[Chunk]:
        *others, last = build_layer_table(*args)
        return [*others, dataclasses.replace(last, layers=last.layers[:-1], segments=())]

    for module in (dry_run, build):
        monkeypatch.setattr(module, "build_layer_table", without_last)
    with pytest.raises(
        RuntimeError, match=r"the stages together hold 40,640 parameters, but the settings describe .* missing or duplicated"
    ):
        plans_of([settings(2, num_layers=4, pipeline_model_parallel_size=2)])


# ---- how it is told

_HELD = {"parameters": 2, "gradients": 4, "main_params": 1, "moments": 2, "activations": 40}
_MEMORY = RankMemory(**{name: Bytes(gigabytes * 10**9) for name, gigabytes in _HELD.items()})
_JOB = Job(16, 8, 2, 4, 1, 2, 2, True, "cuda", "bfloat16", "optim", "1f1b", 1, 1, 8, 4, 2048, 1000, 1024)
_SENT = (
    Traffic("tp", "activations", 9 * 10**9, 4, 0.0),
    Traffic("dp", "gradients", 3 * 10**9, 2, 0.25),
    Traffic("world", "scalars", 120, 16, 0.1),
)


def plan(**changes: Any) -> Plan:
    """Two stages of 8 ranks."""
    last = dataclasses.replace(_MEMORY, activations=Bytes(20 * 10**9))
    places = tuple(RankRange(tensor, range(2)) for tensor in range(4))
    kinds = (RankProfile((0,), places, 0, 10**9, _MEMORY, _SENT), RankProfile((1,), places, 8, 10**9, last, _SENT))
    work = StepFlops(16384, 6 * 10**9, 8e16, 0.2)
    return dataclasses.replace(
        Plan(_JOB, partition_layers(4, (0, 1)), 2 * 10**9, 2 * 10**9, (10**9, 10**9), kinds, work), **changes
    )


def test_first_comes_whether_it_fits_and_where_the_time_goes() -> None:
    time = StepTime({"products": 9.0, "messages": 1.0, "other": 0.02}, 16384, 8e16, 16, 1e15, 0, 0.1, "a cluster", ("16 ranks",))
    lines = format_plan(plan(), time)
    assert lines[:7] == [
        "fullest rank (stage 0, rank 0): needs 49 GB of device memory: more than a GPU of 48 GB has, fits one of 80 GB with 31 GB "
        "to spare",
        "  parameters 2 GB, gradients 4 GB, main params 1 GB, moments 2 GB, activations 40 GB",
        "a step: 16,384 tokens, 80 PFLOP, 5 PFLOP on each rank; 20.0% of the time idle in the pipeline",
        "  a rank of stages 0-1 sends 11.3 GB inside its node and 750 MB to other nodes",
        "  such a step takes about 10 s (90 % range 8.5 s to 11.8 s; 102 tokens/s per GPU, 49.9% MFU) on a cluster",
        "    on its busiest rank: products 89.8%, messages 10.0%",
        "    not calibrated there: 16 ranks",
    ]
    assert format_plan(plan()) == lines[:4] + lines[7:]
    text = "\n".join(lines)
    (row,) = re.findall(r"^stages 0-1 .*$", text.split("sent by")[0], re.MULTILINE)
    assert row.endswith(" 20 GB - 40 GB  29 GB - 49 GB")
    assert re.search(r"^tp: activations +4 +inside the node +9 GB$", text, re.MULTILINE)
    assert re.search(r"^dp: gradients +2 +25% to other nodes +3 GB$", text, re.MULTILINE)


def test_the_times_are_those_of_the_cluster_that_is_named() -> None:
    """Also where other settings are tried, since the job does not fit."""
    argv = arguments(device=None, micro_batch_size=8, plan_cluster="h200", device_memory_gb=0.0004)
    (ended,) = launch([*argv, "--dry-run"])
    assert ended.code == 0, report([ended])
    assert load_cluster("h200").name in ended.stdout and "advice: the fullest rank needs" in ended.stdout


def test_what_context_ranks_hold_of_each_other_is_told() -> None:
    """Of a job that shares sequences of several documents, where each rank has one head of keys for its head of queries."""
    heads: dict[str, Any] = {"group_query_attention": True, "num_query_groups": 2, "tensor_model_parallel_size": 2}
    (made,) = plans_of([settings(4, context_parallel_size=2, reset_attention_mask=True, device=None, bf16=True, **heads)])
    assert any(re.match(r"of other context ranks a rank holds at most \S+ \w+ of keys, values and", note) for note in made.notes)
    assert any("depends on the documents" in note for note in made.notes)
    assert not any("copy keys and values" in note for note in made.notes)


def test_host_memory_and_jobs_that_fit_no_gpu() -> None:
    kinds = tuple(
        dataclasses.replace(
            kind, memory=dataclasses.replace(kind.memory, moments=Bytes(10**12, 10**10)), offloaded_bytes=kind.first_rank * 10**9
        )
        for kind in plan().profiles
    )
    lines = format_plan(plan(profiles=kinds))
    assert "more than any GPU has (the largest has 288 GB)" in lines[0]
    assert lines[2] == "  and 10 GB of host memory, 80 GB on a node: moments 10 GB"
    assert "  a rank moves up to 8 GB of activations to host memory and back" in lines
    (alone,) = plans_of([settings(1)])
    said = format_plan(alone)
    assert said[0].startswith("fullest rank (rank 0): needs ") and "GPU" not in said[0]
    assert "a rank sends nothing in a step" in said


def test_json_holds_all_of_it(tmp_path: Path) -> None:
    made = plan()
    write_plan(made, str(tmp_path / "plan.json"))
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read == plan_to_json(made)
    assert read["device_bytes"] == 49 * 10**9 and read["fullest"] == 0 and read["host_bytes"] == 0
    assert read["kinds"][1]["memory"]["activations"] == {"device": 20 * 10**9, "host": 0, "padding": 0}
    assert read["kinds"][1]["places"][3] == {"tensor": 3, "data": [0, 2]} and read["kinds"][1]["ranks"] == 8
    assert read["kinds"][0]["sent"][1]["between_nodes"] == 0.25
    assert read["links"] == {"inside_bytes": pytest.approx(11.25e9, rel=1e-6), "between_bytes": pytest.approx(0.75e9, rel=1e-6)}


# ---- from the command line


@pytest.mark.full("tests/proof/test_dry_run_memory.py")
def test_a_run_and_its_plan_agree_on_the_model(tmp_path: Path) -> None:
    """The same flags: once on real ranks, once laid out."""
    flags = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "train_iters": 1, "device": "cpu"}
    told = launch(arguments(**flags), 4)[0].stdout
    planned = launch(arguments(**flags, dry_run=True, world_size=4, dry_run_json=tmp_path / "p.json"))[0].stdout
    parameters = json.loads((tmp_path / "p.json").read_text())["model"]["parameters"]
    assert f"model of {parameters:,} parameters" in told and f"model of {parameters:,} parameters" in planned


def test_under_a_launcher_one_rank_speaks() -> None:
    """As many ranks as the launcher gives, if nothing else is said."""
    ended = launch([*arguments(train_iters=1), "--dry-run"], 2)
    assert [end.code for end in ended] == [0, 0] and "2 ranks on 1 node" in ended[0].stdout and ended[1].stdout == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dry_run_json": "/dev/null/new/plan"}, "--dry-run-json /dev/null/new/plan cannot be written: /dev/null is not a folder"),
        ({"dry_run_json": "/"}, "--dry-run-json / is a folder"),
        ({"dry_run_html": "/"}, "--dry-run-html / is a folder"),
        ({"world_size": 10_000_000}, "--world-size 10000000: --world-size takes a whole number from 1 to 1,048,576"),
        ({"world_size": 0}, "--world-size takes a whole number"),
        ({"world_size": 3, "tensor_model_parallel_size": 2}, "The world size 3 is not divisible by TP x CP x PP"),
        ({"global_batch_size": 2_000_000, "micro_batch_size": 1}, "2,000,000 microbatches through 1 chunk"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(changes: dict[str, Any], words: str) -> None:
    (ended,) = launch(arguments(**{"train_iters": 1, "dry_run": True, "world_size": 1, **changes}))
    assert ended.code == 2 and words in ended.stderr and "Traceback" not in ended.stderr, report([ended])
    assert ended.stderr.startswith("pretrain_gpt.py: ") and ended.stdout == ""


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made by looking; folders that are missing are made by writing."""
    new = tmp_path / "new" / "folder" / "plan.json"
    check_output("--dry-run-json", str(new))
    assert not list(tmp_path.iterdir())
    write_plan(plan(), str(new))
    check_output("--dry-run-json", str(new))
    with pytest.raises(ValueError, match="is a folder"):
        check_output("--dry-run-json", str(new.parent))
    with pytest.raises(ValueError, match="cannot be written"):
        write_plan(plan(), str(new.parent))
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="broken is not a folder"):
        check_output("--dry-run-json", str(tmp_path / "broken" / "plan.json"))
    monkeypatch.setattr("megatron.config.parsed_flags.os.access", lambda *_: False)  # root may write anywhere
    for path in (new, tmp_path / "other" / "plan.json"):
        with pytest.raises(ValueError, match="permission denied"):
            check_output("--dry-run-json", str(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_does_not_take_the_plan_away() -> None:
    (ended,) = launch([*arguments(train_iters=1), "--dry-run", "--dry-run-json", "/dev/full"])
    assert ended.code == 2 and "fullest rank" in ended.stdout, report([ended])
    assert (
        ended.stderr
        == "pretrain_gpt.py: --dry-run-json /dev/full cannot be written: no space left on device. Choose another path.\n"
    )


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        (30 * 10**9, ": more than a GPU of 24 GB has, fits one of 32 GB with 2 GB to spare"),
        (31 * 10**9, ": too tight for a GPU of 32 GB (1 GB to spare), fits one of 40 GB with 9 GB to spare"),
        (32 * 10**9, ": more than a GPU of 32 GB has, fits one of 40 GB with 8 GB to spare"),
        (10**9, ": fits one of 16 GB with 15 GB to spare"),
        (280 * 10**9, ": too tight for a GPU of 288 GB (8 GB to spare)"),
        (288 * 10**9, ": more than any GPU has (the largest has 288 GB)"),
    ],
)
def test_what_the_plan_does_not_count_must_fit_too(needed: int, words: str) -> None:
    memory = RankMemory(Bytes(needed))
    kinds = tuple(dataclasses.replace(kind, memory=memory) for kind in plan().profiles)
    assert format_plan(plan(profiles=kinds))[0].endswith(f" of device memory{words}")
    for limit, known in ((2, "fits a device of {}, with {} to spare"), (1.01, "too tight for a device of {}, with {} to spare")):
        limit = int(limit * needed)
        told = format_plan(plan(profiles=kinds, device_memory=limit))[0]
        assert told.endswith(f": {known.format(format_bytes(limit), format_bytes(limit - needed))}"), told
    assert format_plan(plan(profiles=kinds, device_memory=needed - 1))[0].endswith(
        f": more than a device of {format_bytes(needed - 1)} has"
    )
