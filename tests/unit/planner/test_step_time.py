"""What a step is said to do and to take, against counts and formulas that share nothing with it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.parsed_flags import DryRun
from megatron.spec.counts import count_flops_per_token
from megatron.spec.operations import OpType
from megatron_lab.planner.cluster import list_cluster_names, load_cluster
from megatron_lab.planner.device_work import AttentionWork, DeviceWork, Gemm
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import CommGroup, Durations
from megatron_lab.planner.step_time import StepTime, predict_step_time
from megatron_lab.planner.step_work import StepWork

VOCAB = 1024
SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --bf16 --device cuda "
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB} --lr 1e-4 --train-iters 2 --micro-batch-size 2 "
    "--attention-dropout 0 --hidden-dropout 0"
)
LAYOUTS = {
    "one rank": (1, 2, ""),
    "tensor": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "stages": (2, 8, "--pipeline-model-parallel-size 2"),
    "zero bubble": (2, 8, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "context": (2, 2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "chunks": (2, 8, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "sharded": (2, 4, "--data-parallel-sharding-strategy optim_grads_params"),
}


@functools.cache
def job(layout: str, more: str = "") -> tuple[StepWork, StepTime]:
    ranks, batch, flags = LAYOUTS[layout]
    config = load(f"{SMALL} --global-batch-size {batch} {flags} {more}".split(), ranks).config
    dry_run = DryRun(ranks, 8, None)
    work = Planner(config, dry_run, VOCAB, shortened=True).compute_step_work()
    return work, predict_step_time(config, dry_run, VOCAB, load_cluster("h100"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_flops_of_the_model_are_done_by_some_rank(layout: str) -> None:
    ranks, batch, flags = LAYOUTS[layout]
    work, _ = job(layout)
    config = load(f"{SMALL} --global-batch-size {batch} {flags}".split(), ranks).config
    sharers = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    done = sum(span.work.flops for ops in work.ops for span in ops.values()) * sharers
    wanted = count_flops_per_token(config.model, VOCAB) * config.model.seq_length * config.training.micro_batch_size
    # Context ranks compute squares of which causal attention needs a part; norms and sums have a few products of their own.
    assert wanted * 0.999 <= done <= wanted * (1.2 if "context" in layout else 1.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_the_step(layout: str) -> None:
    work, time = job(layout)
    assert all(seconds >= 0 for seconds in time.breakdown.values())
    assert math.isclose(sum(time.breakdown.values()), time.seconds) and time.low < time.seconds < time.high
    assert 0 < time.mfu < 1 and len(work.ops) == len(work.schedule.stage_of_chunk)


def test_waiting_for_the_first_stage_is_that_of_the_formula() -> None:
    """(p - 1) / m of the time that a stage computes, where stages take equally long (Narayanan et al. 2021, section 2.2.1)."""
    _, time = job("stages", "--num-layers 24")
    parts = dict(time.breakdown)
    idle = parts.pop("pipeline idle")
    for at_the_end in ("gradients", "parameters", "optimizer", "numbers", "other"):
        parts.pop(at_the_end, None)
    assert 0.7 / 4 < idle / sum(parts.values()) < 1.3 / 4


def test_what_is_computed_again_takes_time() -> None:
    _, plain = job("one rank")
    _, again = job("one rank", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert 1.15 < (again.breakdown["products"] + again.breakdown.get("recompute", 0)) / plain.breakdown["products"] < 1.4


def test_durations_follow_their_formulas() -> None:
    cluster = replace(load_cluster("h100"), product_us=0.0, kernel_us=0.0, host_us=0.0)
    durations, peak, memory = Durations(cluster), 989.4e12, 3350e9 * cluster.reached.memory
    one = Gemm(1, 4096, 4096, 8192, "bfloat16")
    moved = 2 * (4096 * 8192 * 2 + 4096 * 4096)
    wanted = 2 * 4096 * 4096 * 8192 / (peak * cluster.reached.products["bfloat16"]) + moved / memory
    assert durations.predict_gemm_time(one) == pytest.approx(wanted)
    attention = AttentionWork(1000, 256, 8192, True, "bfloat16")
    assert durations.predict_attention_time(attention) == pytest.approx(
        4 * 1000 * 256 / (peak * cluster.reached.attention_backward)
    )
    assert durations.predict_device_time(DeviceWork(memory_bytes=10**9)).elementwise == pytest.approx(1e9 / memory)
    inside, across = (
        durations.predict_collective_time(1e9, 0, CommGroup(8, 8)),
        durations.predict_collective_time(1e9, 0, CommGroup(8, 1)),
    )
    assert inside == pytest.approx(1 / (450 * cluster.reached.node))
    assert across == pytest.approx(1 / (50 * cluster.reached.network))
    assert durations.predict_collective_time(1e9, 0, CommGroup(16, 8)) == pytest.approx(
        1 / min(450 * cluster.reached.node, 400 * cluster.reached.network)
    )
    assert durations.predict_collective_time(1e9, 5, CommGroup(1, 1)) == 0


def test_what_was_never_calibrated_is_marked() -> None:
    config = load(f"{SMALL} --global-batch-size 2 {LAYOUTS['tensor'][2]}".split(), 2).config
    few = replace(load_cluster("h100"), calibrated={"ranks": 2, "tensor": 1})
    assert predict_step_time(config, DryRun(2, 8, None), VOCAB, few).uncalibrated_sizes == ("2 tensor ranks (calibrated to 1)",)
    assert not job("tensor")[1].uncalibrated_sizes


def test_a_slow_host_is_waited_for() -> None:
    work = DeviceWork(memory_bytes=1000, num_kernels=100)
    assert Durations(replace(load_cluster("h100"), host_us=50.0)).predict_device_time(work).launching > 0.004


def test_every_kind_of_operation_has_work() -> None:
    work, _ = job("zero bubble")
    assert {kind for ops in work.ops for kind in ops} == {OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD}
    assert all(span.work.gemms for ops in work.ops for span in ops.values())


def test_shipped_clusters_are_read_and_written(tmp_path: object) -> None:
    from pathlib import Path

    for name in list_cluster_names():
        cluster = load_cluster(name)
        file = Path(str(tmp_path)) / f"{name}.yaml"
        file.write_text(cluster.to_yaml(), encoding="utf-8")
        assert load_cluster(str(file)) == cluster and cluster.get_peak_flops("float16") > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x", "lacks"),
        ("[1, 2]", "must be a table"),
        ("nam: x", "name"),
        ("{", "x.yaml is not valid YAML"),
        (replace(load_cluster("h100"), calibrated={"gpus": 1}).to_yaml(), "allowed keys"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path: object, text: str, said: str) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_cluster(str(file))


def test_an_unknown_cluster_names_a_near_one() -> None:
    with pytest.raises(ConfigError, match="h100"):
        load_cluster("h10")
