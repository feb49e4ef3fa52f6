"""A cluster file is fitted to measurements: from made-up ones its figures come out again, and real ones make a file that loads."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lab.cluster import measurement, probes
from megatron_lab.cluster.cluster_file import format_cluster_file
from megatron_lab.cluster.measurement import LayerTimes, Measurement, MeasurementSizes, measure_rank, merge_measurements
from megatron_lab.cluster.probes import CollectiveTiming, OverlapTiming, WorkTiming
from megatron_lab.cluster.rates import build_cluster, compute_hidden_share, fit_line, fit_rates
from megatron_lab.commands import check_cluster
from megatron_lab.commands.against_runs import Comparison, count_ordered_pairs, format_table
from megatron_lab.planner.cluster import Cluster, Efficiency, load_cluster
from megatron_lab.planner.device_work import AttentionWork, DeviceWork, Gemm
from megatron_lab.planner.durations import CommGroup, Durations
from megatron_lab.planner.step_time import StepTime
from megatron_lab.verification.local_ranks import run_ranks

TRUE = Cluster(
    name="made up",
    device="cpu",
    memory_gb=8.0,
    memory_gb_s=20.0,
    gpus_per_node=4,
    node_gb_s=2.0,
    network_gb_s=0.5,
    reached=Efficiency(
        products={"float32": 1.0}, attention=0.4, attention_backward=0.3, memory=1.5, state=0.5, node=1.0, network=1.0
    ),
    peak_tflops={"float32": 0.1},
    node_us=100.0,
    network_us=300.0,
    operations={"all-gather": 0.5, "reduce-scatter": 0.25, "send": 1.0},
    host_gb_s=10.0,
    fresh_gb_s=4.0,
    kernel_us=20.0,
    host_us=0.0,
    product_us=5.0,
    hidden=0.5,
    step_ms=2.0,
    shared_by=2,
)


def works() -> list[tuple[str, DeviceWork, int]]:
    """What a measurement has, of many sizes: kind, work, fresh memory."""
    found = []
    for size in (64, 128, 256, 512, 1024):
        product = Gemm(1, size, 2 * size, size, "float32")
        found.append(("products", DeviceWork(Counter({product: 1})), 0))
        forward, back = (AttentionWork(size * size, 128, size, backward, "float32") for backward in (False, True))
        found.append(("attention", DeviceWork(attention=Counter({forward: 1})), 0))
        found.append(("attention backward", DeviceWork(attention=Counter({back: 1})), 0))
        for times, extra, kernels in ((3, 20, 40), (9, 45, 70), (4, 90, 30)):
            work = DeviceWork(Counter({product: times}), Counter({forward: 2, back: 1}), extra * size * size, kernels)
            found.append(("layers", work, (5 + kernels) * size * size))
    return found


def made_up(noise: float = 0.0) -> Measurement:
    """What a machine with the figures of `TRUE` would measure."""
    times = Durations(TRUE)
    randoms = random.Random(0)

    def samples(seconds: float) -> tuple[float, ...]:
        return tuple(seconds * (1 + noise * randoms.random()) for _ in range(9))

    timed = [WorkTiming(what, work, samples(times.predict_device_time(work, fresh).total), fresh) for what, work, fresh in works()]
    found = Measurement("cpu", "2.0", 4, 4, 1, 32 * 10**9, 2, "2026-01-01")
    found.concurrent_gemms = {1: samples(1.0), 2: samples(1.0), 4: samples(2.0)}
    found.work_timings = [one for one in timed if one.name != "layers"]
    moved = 3 * 2**26
    found.work_timings.append(WorkTiming("memory", DeviceWork(memory_bytes=moved), samples(moved / 20e9)))
    for i, one in enumerate(each for each in timed if each.name == "layers"):
        state = (i + 1) * 10**7
        found.layers.append(LayerTimes((one,), samples(0.002 + times.predict_optimizer_time(state)), state))
    found.empty_kernel = samples(1e-7)
    found.host_copies = [(size, samples(size / 10e9)) for size in (1 << 20, 1 << 24)]
    for size in (2, 4):
        for what in ("all-reduce", "all-gather", "reduce-scatter", "send"):
            for sent in (1e3, 1e5, 1e6, 1e7):
                seconds = times.predict_collective_time(sent, 1, CommGroup(size, size), what) * max(1.0, size / 2)
                found.collectives.append(CollectiveTiming(what, size, size, sent, samples(seconds)))
                seconds = times.predict_collective_time(sent, 1, CommGroup(size, 1), what)
                found.collectives.append(CollectiveTiming(what, size, 1, sent, samples(seconds)))
    found.overlap = OverlapTiming(samples(2.0), samples(1.0), samples(2.5))
    return found


def test_figures_come_out_again(tmp_path: Path) -> None:
    """Of what is foretold; how a sum is shared among constants of one kind of work is free."""
    found, figures = build_cluster(made_up(), "made up")
    assert found.shared_by == 2 and found.hidden == pytest.approx(0.5)
    for name in ("memory_gb_s", "node_gb_s", "network_gb_s", "node_us", "network_us", "host_gb_s", "step_ms"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert found.operations == pytest.approx(TRUE.operations, rel=0.05)
    times, truth = Durations(found), Durations(TRUE)
    for _, work, fresh in works():
        assert times.predict_device_time(work, fresh).total == pytest.approx(truth.predict_device_time(work, fresh).total, rel=0.05)
    path = tmp_path / "made-up.yaml"
    path.write_text(format_cluster_file(found, made_up(), figures))
    assert load_cluster(str(path)) == found
    said = path.read_text()
    assert (
        "# Measured by tools/check_cluster.py --measure on 2026-01-01: 1 node of 4 ranks, cpu, 1 threads a rank, torch 2.0." in said
    )


def test_disturbed_samples_change_little() -> None:
    """A third of the pieces take up to twice as long; the fit goes by the others."""
    measured = made_up()
    measured.work_timings = [
        replace(one, durations=tuple(2 * s for s in one.durations)) if i % 3 == 0 else one
        for i, one in enumerate(measured.work_timings)
    ]
    found, _ = build_cluster(measured, "made up")
    layers = [(work, fresh) for what, work, fresh in works() if what == "layers"]
    for work, fresh in layers:
        assert Durations(found).predict_device_time(work, fresh).total == pytest.approx(
            Durations(TRUE).predict_device_time(work, fresh).total, rel=0.15
        )


def test_a_fit_has_nothing_below_zero() -> None:
    rates, logs = fit_rates([({"a": 1.0, "b": amount}, 5.0 - amount) for amount in (1.0, 2.0, 3.0)])
    assert rates["b"] == 0.0 and rates["a"] > 0 and len(logs) == 3
    assert fit_line([(0.0, 1.0), (10.0, 2.0), (20.0, 3.0)]) == pytest.approx((1.0, 0.1))


@pytest.mark.parametrize(("both", "share"), [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (4.0, 0.0), (1.0, 1.0)])
def test_hidden_share(both: float, share: float) -> None:
    assert compute_hidden_share(OverlapTiming((2.0,) * 4, (1.0,) * 4, (both,) * 4)) == pytest.approx(share)


def test_the_slowest_rank_counts_in_layers() -> None:
    """And products have the samples of all."""
    one = made_up()
    slow = [
        replace(each, timings=tuple(replace(t, durations=tuple(2 * s for s in t.durations)) for t in each.timings))
        for each in one.layers
    ]
    idle = Measurement("cpu", "2.0", 4, 4, 1, 1, 2)
    joined = merge_measurements([one, replace(one, layers=slow), idle])
    assert joined.layers[0].timings[0].durations == slow[0].timings[0].durations
    assert len(joined.work_timings[0].durations) == 2 * len(one.work_timings[0].durations) and joined.collectives == one.collectives


def test_order_counts_pairs_that_are_apart() -> None:
    assert count_ordered_pairs([(1.0, 1.0), (2.0, 1.05), (3.0, 2.0), (0.5, 3.0)]) == (2, 5)


def test_the_score_of_a_range_says_how_wide_it_is() -> None:
    """In a wide range all times lie, whatever is predicted."""
    wide = StepTime({"compute": 1.0}, 1, 1.0, 1, 1.0, 1, 0.175, "made up")
    rows = [Comparison("gpt", 1, "", wide, (seconds,)) for seconds in (0.8, 1.3, 1.4)]
    assert (
        "in the 90 % range (-25% to +33%) 2 of 3; of pairs of one model over 10 % apart 0 of 2 in order" in format_table(rows)[-1]
    )


TINY = MeasurementSizes(
    model_shapes=((32, 16, 1, 64), (64, 16, 1, 128)),
    gemm_sizes=(16, 32),
    dtypes=("float32", "bfloat16"),
    attention_shapes=((1, 2, 16, 16),),
    elementwise_sizes=(1 << 10, 1 << 12),
    message_bytes=(1 << 10, 1 << 18),
    bucket_bytes=1 << 12,
    max_gemm_flops=1e8,
)


def test_a_real_measurement_makes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, tiny sizes, few repeats: everything has samples, and the file loads."""
    monkeypatch.setattr(measurement, "_NUM_STEPS", measurement._NUM_WARMUP_STEPS + 2)
    monkeypatch.setattr(measurement, "_MAX_GEMM_SHAPES", 6)
    monkeypatch.setattr(probes, "_NUM_SAMPLES", 3)
    monkeypatch.setattr(probes, "_MIN_COLLECTIVE_SAMPLE_S", 0.0)
    monkeypatch.setattr(probes.Stopwatch.time_repeated, "__defaults__", (None, 0.0))
    monkeypatch.setattr(measurement, "_compute_step_work", functools.cache(measurement._compute_step_work))
    for i, shape in enumerate(TINY.model_shapes):  # plan the models here, and not in each rank
        measurement._compute_step_work(measurement._build_config("cpu", TINY, *shape, llama=bool(i % 2)), 1)
    found: Measurement = run_ranks(2, lambda _: measure_rank("cpu", [], 1, TINY), init=False)[0]
    assert set(found.concurrent_gemms) == {1, 2} and found.num_ranks == found.ranks_per_node == 2
    assert {one.name for one in found.work_timings} == {"products", "attention", "attention backward", "memory"}
    assert {one.operation for one in found.collectives} == {"all-reduce", "all-gather", "reduce-scatter", "send"}
    assert len(found.layers) == 2 and all(len(each.timings) == 2 and each.remaining for each in found.layers)
    cluster, figures = build_cluster(found, "here")
    path = tmp_path / "here.yaml"
    path.write_text(format_cluster_file(cluster, found, figures))
    assert load_cluster(str(path)) == cluster and cluster.get_peak_flops("float32") > 0 and cluster.get_peak_flops("bfloat16") > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--measure", "x.yaml"], "--measure needs --ranks-per-node"),
        (["--measure", ".", "--ranks-per-node", "1"], "--measure . is a folder"),
        ([], "--ranks-per-node is needed"),
    ],
)
def test_wrong_flags_are_told(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_cluster.main(flags) == 2 and words in capsys.readouterr().err
