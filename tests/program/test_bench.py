"""`tools/bench.py` runs and says what it says in the agreed form. What it measures is not tested here: machines are noisy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.counts import count_flops_per_token, count_output_flops
from megatron.spec.operations import OpCosts
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.benchmarks import activations, bubble, context, experts, loss, memory, overlap, tensor_ranks
from megatron_lab.benchmarks.shapes import SHAPES, Shape
from megatron_lab.commands import bench
from megatron_lab.memory_plots.measure import MeasuredStep
from tests.support.cli import ROOT, Finished, spawn_cli
from tests.support.warm_python import warm_python

SHORT = "--stages 2 --microbatches 3 --forward-ms 1 --input-grad-ms 1 --weight-grad-ms 2 --repeats 1 --hidden 4 1 8".split()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--recompute-ms", "2"], marks=pytest.mark.full("the other case; tests/unit/pipeline_parallel has recompute")),
        ["--no-overlap-p2p"],
    ],
    ids=["recompute", "no overlap"],
)
def test_bubble_gives_a_line_for_each_schedule(more: list[str]) -> None:
    done = spawn_cli(["tools/bench.py", "bubble", *SHORT, *more], nproc=None)
    assert not done.stderr
    number = r"\d+\.\d"
    row = re.compile(
        rf"^(\S+) +({number}) ms +({number}) ms +\(({number}) to ({number})\) +[+-]{number}% +([+-]{number})%$", re.MULTILINE
    )
    rows = row.findall(done.stdout)
    assert [name for name, *_ in rows] == list(SCHEDULES)
    for name, simulated, median, least, most, against in rows:
        chunks = SCHEDULES[name].chunks_per_stage or 2
        again = 2 if "--recompute-ms" in more else 0
        schedule = build_schedule(name, 2, 3, chunks, recomputed_chunks=range(2 * chunks) if again else ())
        assert float(simulated) == simulate(schedule, OpCosts(1, 1, 2, recompute=again).divide_by_chunks(chunks)).step_time
        assert float(simulated) <= float(least) <= float(median) <= float(most)
        assert name != "1f1b" or float(against) == 0.0
    assert ("not overlapped" in done.stdout) == ("--no-overlap-p2p" in more) == ("recompute layers" not in done.stdout)
    missed, held = "MISSED: " in done.stdout, "all bounds hold" in done.stdout
    assert missed + held == ("--no-overlap-p2p" not in more), "bounds are asked of overlapped steps only"
    assert done.returncode == missed


def test_bubble_says_what_is_out_of_bounds() -> None:
    good = [bubble.ScheduleResult("1f1b", 2.0, (1.9, 2.0, 9.0)), bubble.ScheduleResult("zb-v", 1.5, (1.55,))]
    assert not bubble.find_violations(good)
    assert (
        "zb-v saves 21.5% of 1f1b's step time (25.0% in the simulation)"
        in bubble.find_violations([good[0], bubble.ScheduleResult("zb-v", 1.5, (1.57,))])[0]
    )
    assert not bubble.find_violations([good[0], bubble.ScheduleResult("zb-v", 1.6, (1.65,))]), "saves less on paper too"
    for wrong in (2.12, 1.88):
        assert re.match(
            r"1f1b takes 6.0% (more|less) time than simulated",
            bubble.find_violations([bubble.ScheduleResult("1f1b", 2.0, (wrong,))])[0],
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_bubble_tells_the_executor_whether_to_overlap(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: object, boundary: object, *, overlap: bool) -> NoReturn:
        raise ValueError(f"asked for {overlap}")

    monkeypatch.setattr(bubble, "Executor", refuse)
    with pytest.raises(RuntimeError, match=f"asked for {overlap}"):
        bubble.measure(bubble.Settings(stages=1, overlap=overlap))


def test_activations_move_beside_computation_or_make_it_wait() -> None:
    """Both do, however long it takes; and what is told of too long steps."""
    moved = {True: 0, False: 0}

    class Counted(activations.SlowHostBufferPool):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            moved[self._overlapped] += 1
            super().copy(target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "SlowHostBufferPool", Counted)
        results = activations.measure(activations.Settings(forward_s=0.0002, repeats=1))
    assert [one.name for one in results] == ["1f1b", "gpipe"] and all(
        len(one.overlapped) == len(one.blocking) == 1 for one in results
    )
    # Two steps of four microbatches, there and back: five of six layers where backward follows at once, else all six.
    assert set(moved.values()) == {2 * 2 * (4 * 5 + 4 * 6)}
    assert not activations.find_violations([activations.ScheduleTimes("1f1b", [1.0, 2.0, 1.0], [1.04, 2.0, 9.0], [3.0] * 3)])
    (told,) = activations.find_violations([activations.ScheduleTimes("1f1b", [1.0], [1.06], [3.0])])
    assert told.startswith("1f1b: a step with copies takes 1.06 x as long as without; the limit is 1.05")


def test_tensor_ranks_send_as_much_one_after_the_other_and_in_pieces() -> None:
    """In a pass two gathers and a reduce-scatter forward and backward, and a gather again; and what is told of too long passes."""
    result = tensor_ranks.measure(tensor_ranks.Settings(3, product_s=0.0005, repeats=1))
    assert len(result.computation) == len(result.sequential) == len(result.overlapped) == 1
    rows, hidden, float32 = 32, 64, 4
    assert result.sent_bytes == pytest.approx(5 * (3 - 1) * rows * hidden * float32)
    assert not tensor_ranks.find_violations(tensor_ranks.LayerPassTimes([1.0, 2.0], [9.0, 9.0], [1.09, 2.18], 0.0))
    (told,) = tensor_ranks.find_violations(tensor_ranks.LayerPassTimes([1.0, 2.0], [9.0, 9.0], [1.2, 2.4], 0.0))
    assert told.startswith("a pass with overlap takes 1.20 x computation")


def test_context_ranks_are_measured_against_the_simulated_best() -> None:
    """The ring hides all but the sum that goes home; a gather what is longer than the own part, and the whole reduce-scatter."""
    settings = context.Settings(2, step_s=0.0005, share=0.5, repeats=1)
    result = context.measure(settings)
    assert all(
        len(times[way]) == 1 for times in (result.computation, result.sequential, result.overlapped) for way in context.COMM_TYPES
    )
    assert (
        context.simulate_best_ratio(settings, "p2p")
        == pytest.approx((2 * 3.5 + 0.5) / 7)
        == context.simulate_best_ratio(settings, "all_gather")
    )
    assert context.simulate_best_ratio(context.Settings(4, share=0.5), "all_gather") == pytest.approx((14 + 0.5 + 1.5) / 14)
    good = context.PassTimes(*({way: [seconds] for way in context.COMM_TYPES} for seconds in (1.0, 9.0, 1.2)))
    assert not context.find_violations(settings, good)
    (told,) = context.find_violations(
        settings, context.PassTimes(good.computation, good.sequential, {"p2p": [1.5], "all_gather": [1.0]})
    )
    assert told.startswith("p2p takes 1.40 x the simulated best time; the limit is 1.15")


def test_experts_are_measured_against_what_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A plain loop, all experts on each rank, and a dense model with as many FLOPs but for the router's; else it says so."""
    settings = experts.Settings(Shape(1, 32, 2, 8, 2, 128), num_ranks=2, pairs=1)
    assert experts.run(settings)
    said = capsys.readouterr().out
    assert (
        "layer / plain loop over experts: " in said
        and "layer of as many experts / plain loop over 64 experts, 8 per token: " in said
    )
    assert said.count(" / dense step: ") == said.count("x the mean") == 2
    assert re.search(r"alltoall / all experts on each rank: .*\n.*\n.*\n.*allgather / all experts on each rank: ", said)
    dense, mixture = (count_flops_per_token(model, 128) for model in (settings.dense, settings.mixture))
    assert mixture - dense == 3 * 2 * settings.num_experts * 32
    with pytest.raises(RuntimeError, match="have a relative difference of 5.0e-01"):
        experts._require_agreement(torch.ones(3), torch.full((3,), 0.5))


def test_overlap_gives_a_line_for_each_strategy() -> None:
    done = spawn_cli("tools/bench.py overlap --gpt 2 32 2 8 2 128 --accumulate 2 --repeats 1".split(), nproc=None)
    assert not done.stderr
    number = r"(-?\d+\.\d+)"
    spread = rf"{number} \(\d+ to \d+\)"
    row = re.compile(rf"^ *(\S+) +2 +{number} +{number} +{spread} +{spread} +{number} +{number} +{number} +{number}$", re.MULTILINE)
    rows = [(name, *map(float, numbers)) for name, *numbers in row.findall(done.stdout)]
    assert [name for name, *_ in rows] == ["no_shard", "optim", "optim_grads"]
    megabyte = int(re.findall(r"([\d,]+) parameters in bfloat16", done.stdout)[0].replace(",", "")) / 1e6
    # Of two ranks each sends half of what is reduced (4 bytes an element) or gathered (2), the whole where it is all-reduced.
    for (_, sent, computation, off, on, exposed_off, exposed_on, ratio, _), a_byte in zip(rows, (4, 2 + 1, 2 * 2 + 1), strict=True):
        assert sent == pytest.approx(a_byte * megabyte, rel=0.1)
        assert exposed_off == pytest.approx(off - computation, abs=0.11)
        assert exposed_on == pytest.approx(on - computation, abs=0.11)
        assert ratio == pytest.approx(on / computation, abs=0.1)
    asked = sum(perfect <= 1.25 for *_, perfect in rows)
    missed, held = "MISSED: " in done.stdout, "all bounds hold" in done.stdout
    assert f"in {asked} of 3" in done.stdout and missed + held == (asked > 0)
    assert done.returncode == missed


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_overlap_trains_without_and_with_all_overlap_that_there_is(
    strategy: ShardingStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(*args: object, parallel: ParallelConfig, **settings: object) -> None:
        asked.append((parallel.sharding, parallel.overlap_grad_reduce, parallel.overlap_param_gather))
        if len(asked) == 3:
            raise ValueError(f"asked for {asked}")

    monkeypatch.setattr(overlap, "TrainStep", refuse)
    off, on = (strategy, False, False), (strategy, True, strategy != "no_shard")
    with pytest.raises(RuntimeError, match=re.escape(f"asked for {[off, off, on]}")):
        overlap.measure(overlap.Settings(Shape(1, 8, 1, 4, 1, 128), (strategy,), (1,), 1), lambda result: None)


def test_overlap_says_what_is_out_of_bounds() -> None:
    def result(strategy: ShardingStrategy, perfect: float, *on: float) -> overlap.CaseResult:
        return overlap.CaseResult(overlap.Case(strategy, 1), 1e6, perfect, [2.0, 4.0, 2.0], [4.0, 8.0, 4.0], list(on))

    assert not overlap.find_violations([result("optim", 1.1, 2.4, 4.8, 9.0)])
    (told,) = overlap.find_violations([result("optim", 1.1, 2.6, 5.2, 2.0), result("no_shard", 1.3, 2.8, 5.6, 2.8)])
    assert told.startswith("optim with 1 microbatches takes 1.30 x computation with overlap; the limit is 1.25")


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (
            "optimizer --ranks 2",
            [("float32", "step", "torch's update"), ("bfloat16", "step", "torch's update, then rounding")],
        ),
        ("offload", [("float32", "step", "torch's update"), ("bfloat16", "step", "torch's update")]),
    ],
)
def test_an_update_is_compared_for_each_dtype(words: str, rows: list[tuple[str, str, str]]) -> None:
    done = spawn_cli(["tools/bench.py", *words.split(), "--pairs", "1", "--elements", "1000"], nproc=None)
    assert not done.stderr
    found = re.findall(r"^(\S+) +(step) +(\d+\.\d+) ms \(.*\) +(\d+\.\d+) x (.*)$", done.stdout, re.MULTILINE)
    assert [(dtype, action, reference) for dtype, action, _, _, reference in found] == rows
    assert done.returncode == ("MISSED: " in done.stdout) == ("the bound holds" not in done.stdout)


def test_memory_is_as_planned_for_every_way_to_hold_less(
    full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the normal run for some, in this process."""
    words = "tools/bench.py memory --gpt 2 32 2 64 2 200 --pairs 1".split()
    if full:
        done = spawn_cli(words, nproc=None)
    else:
        some = ("none", "selective", "full", "full, host")
        monkeypatch.setattr(memory, "MEMORY_OPTIONS", {name: memory.MEMORY_OPTIONS[name] for name in some})
        monkeypatch.setattr(sys, "argv", words)
        status, told = bench.main(), capsys.readouterr()
        done = Finished(status, told.out, told.err)
    assert not done.stderr
    number = r"(\d+\.\d+)"
    spread = rf"{number} \({number} to {number}\)"
    row = rf"^(\S.*?) +{number} +{number} +([+-]\d+\.\d+)% +{number}   {spread} +{spread} +{number}$"
    rows = {name: [*map(float, numbers)] for name, *numbers in re.findall(row, done.stdout, re.MULTILINE)}
    assert list(rows) == list(memory.MEMORY_OPTIONS)
    for name, (planned, measured, off, host, *_, ratio, least, most, processor) in rows.items():
        assert (host > 0) == ("host" in name) and processor > 0
        assert abs(off) <= 100 * memory.MAX_RELATIVE_ERROR and planned == pytest.approx(measured, abs=0.011)
        assert least <= ratio <= most
    peaks = {name: measured for name, (_, measured, *_) in rows.items()}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    found, layers, one, bound = map(
        float,
        re.search(rf"last layer: {number} MiB at most; .* = {number} \+ {number} = {number} MiB", done.stdout).groups(),  # type: ignore[union-attr]
    )
    assert found <= bound == pytest.approx(layers + one, abs=0.011) and layers == pytest.approx(
        2 * 64 * 2 * 32 * 4 / 2**20, abs=0.01
    )
    assert done.returncode == ("MISSED: " in done.stdout) == ("all bounds hold" not in done.stdout)


def test_memory_says_what_is_out_of_bounds() -> None:
    def result(name: str, peak: int, *ratios: float) -> memory.OptionResult:
        return memory.OptionResult(name, 1000, MeasuredStep((0.0,), (peak,), (), None), (1.0,), ratios, 1.0)

    assert not memory.find_violations([result("none", 1004, 1.0), result("full", 996, 1.29, 1.0, 9.0)])
    told = memory.find_violations([result("none", 1006, 1.0), result("full", 994, 1.31)])
    assert len(told) == 3
    assert told[0].startswith("none: the measured peak differs by +0.60% from the predicted one") and told[1].startswith(
        "full: the measured peak differs by -0.60% from the predicted one"
    )
    assert told[2] == "full: a step takes 1.31 x as long as without it; the limit is 1.30"


def test_loss_compares_both_forms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a smaller model; what the bench takes has its output layer for a quarter of the work."""
    assert 4 * count_output_flops(loss.SHAPE.model, loss.SHAPE.vocab) == pytest.approx(
        count_flops_per_token(loss.SHAPE.model, loss.SHAPE.vocab) / 3, rel=0.01
    )
    monkeypatch.setattr(loss, "SHAPE", SHAPES["tiny"])
    for bound in (1e9, 0.0):
        monkeypatch.setattr(loss, "BOUND", bound)
        assert loss.run(1) == (bound > 0.0)
        said = capsys.readouterr().out
        assert re.search(r"^loss +in chunks / all at once: \d", said, re.MULTILINE) and ("MISSED: " in said) == (bound == 0.0)


def test_checkpoint_compares_saves_and_loads_with_plain_ones(tmp_path: Path) -> None:
    done = spawn_cli(["tools/bench.py", "checkpoint", *f"--state-mb 1 --pairs 1 --folder {tmp_path}".split()], nproc=None)
    assert not done.stderr
    found = re.findall(
        r"^.*?(\S[^:\n]* / (?:plain writes|copy in memory|without a save|plain reads)): \d+\.\d+ ", done.stdout, re.MULTILINE
    )
    actions = [text.rsplit("  ", 1)[-1].split(" / ")[0].removeprefix("to the disk ").strip() for text in found]
    assert actions[:3] == ["save", "asynchronous save", "while a save is written"]
    assert actions[3:] == ["load", "load at another layout"] * 2, done.stdout  # of one process, and of two
    assert re.search(r"^memory +\d+ MiB for saves of 2 MiB", done.stdout, re.MULTILINE)
    assert done.returncode == ("MISSED: " in done.stdout)
    assert not list(tmp_path.iterdir())


def test_executor_gives_a_cost_for_each_operation_from_any_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [warm_python(), str(ROOT / "tools/bench.py"), "executor", "--pairs", "1", "--start-sizes", "2x3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert not done.stderr
    operations = dict(re.findall(r"^(\S+) +\d+ +(\d+) +\d+\.\d us +\d+\.\d us +-?\d+\.\d us", done.stdout, re.MULTILINE))
    assert operations == {"gpipe": "64", "1f1b": "64", "interleaved": "256", "zb-h1": "96", "zb-v": "192"}
    start = re.findall(r"^(\S+) +2 x 3 +\d+ +\d+\.\d ms +\d+\.\d ms$", done.stdout, re.MULTILINE)
    assert start == list(SCHEDULES)
    assert done.returncode == ("MISSED: " in done.stdout)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["parallel", "--pairs", "3"],
            "--pairs acts in single, executor, optimizer, offload, memory, checkpoint, data, packing, loss, experts, not in",
        ),
        (["bubble", "--accumulate", "2"], "--accumulate acts in overlap, not in bubble"),
        (["bubble", "--stages", "0"], "--stages: must be at least 1, not 0"),
        (["executor", "--start-sizes", "8"], "must be a number of stages, x and a number of microbatches, as in 8x64, not '8'"),
    ],
)
def test_a_flag_that_cannot_act_is_refused(words: list[str], told: str) -> None:
    done = spawn_cli(["tools/bench.py", *words], nproc=None)
    assert done.returncode == 2 and told in done.stderr


# ---- its processes
