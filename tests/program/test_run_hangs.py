"""Runs in which a rank departs: the watcher names it, with what it was about, and ends the run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.flight.watched import Flight
from megatron.flight.watcher import HANG_EXIT_CODE
from megatron.pipeline_parallel.p2p import Messenger
from megatron.spec.operations import Op
from megatron.training.step import TrainStep
from tests.support.runs import arguments, launch, read_metrics, report, run

TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}
SHARDED: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "disable_bias_linear": True,
    "expert_model_parallel_size": 2,
}
LAYOUTS = [(2, {}), (2, TENSOR), (2, STAGES), (4, {**TENSOR, **STAGES}), (4, {**STAGES, "use_distributed_optimizer": True})]
LAYOUTS += [(2, SHARDED), (4, {**TENSOR, **SHARDED}), (2, {"context_parallel_size": 2}), (2, EXPERTS)]


class Fault(NamedTuple):
    """What happens to one rank."""

    plant: Callable[[int], None]
    """Plants it in the process, to happen in an iteration."""
    says: str
    """A part of what is told."""


def _stop(iteration: int) -> None:
    """In front of the optimizer, or wherever the step sums up."""
    _at_phase("in a step", iteration, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def _slow_data(iteration: int) -> None:
    _at_phase("reading data", iteration, lambda: time.sleep(600))


def _frozen_folder(iteration: int) -> None:
    _at_phase("saving", iteration, lambda: time.sleep(600))


def _at_phase(wanted: str, first: int, happens: Callable[[], None]) -> None:
    real, at = Flight.phase, [0]

    def phase(self: Flight, name: str, iteration: int | None = None) -> None:
        at[0] = at[0] if iteration is None else iteration
        real(self, name, iteration)
        if name == wanted and at[0] >= first:
            happens()

    Flight.phase = phase  # type: ignore[method-assign]


def _absent_mind(iteration: int) -> None:
    """It computes, and never comes to the end of the step."""
    real = TrainStep.run

    def run(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        if kwargs["iteration"] >= iteration:
            while True:
                time.sleep(0.1)
        return real(self, *args, **kwargs)

    TrainStep.run = run  # type: ignore[method-assign]


def _lost_message(iteration: int) -> None:
    """What it should send to the next stage."""
    real, sent = Messenger.send, [0]

    def send(self: Messenger, message: Any, destination: int, tensors: Any) -> None:
        sent[0] += 1
        if sent[0] != 4 * iteration:
            real(self, message, destination, tensors)

    Messenger.send = send  # type: ignore[method-assign]


FAULTS = {
    "stopped": Fault(_stop, "was stopped by a signal"),
    "reads for ever": Fault(_slow_data, "last seen reading data"),
    "absent": Fault(_absent_mind, "last seen in a step"),
    "frozen folder": Fault(_frozen_folder, "saving"),
    "lost message": Fault(_lost_message, "did not enter message"),
}


def _hangs(tmp_path: Path, layout: int, name: str, culprit: int, iteration: int) -> None:
    ranks, flags = LAYOUTS[layout]
    fault = FAULTS[name]
    settings = {**flags, "train_iters": 10_000, "save": tmp_path / "run", "save_interval": 3, "hang_warn_s": 0.6, "hang_kill_s": 1}

    def before(rank: int) -> None:
        if rank == culprit:
            fault.plant(iteration)

    ended = launch(arguments(**settings), ranks, before=before, timeout=120.0)
    told = [line for line in ended[0].stderr.splitlines() if line.startswith("hang: nothing has moved")]
    assert told and f". rank {culprit} (node " in told[0] and fault.says in told[0], report(ended)
    assert len(told) == 2 and f"with exit code {HANG_EXIT_CODE}" in told[1], "said once, and ended"
    codes = [end.code for end in ended]
    wanted = -signal.SIGKILL if name == "stopped" else HANG_EXIT_CODE
    assert codes == [wanted if rank == culprit else HANG_EXIT_CODE for rank in range(ranks)], report(ended)
    folder = tmp_path / "run" / "stacks"
    assert sorted(path.name for path in folder.glob("*.stack")) == [f"rank-{rank}.stack" for rank in range(ranks)]
    for rank in range(ranks):  # torch's own trace, of all that can still write one
        traced = folder / f"rank-{rank}.calls.json"
        assert traced.exists() == (
            hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json") and (name != "stopped" or rank != culprit)
        )
        assert not traced.exists() or json.loads(traced.read_text())["entries"]
    if name == "lost message":
        return
    waits = next(rank for rank in range(ranks) if rank != culprit)
    assert "most recent call first" in (tmp_path / "run" / "stacks" / f"rank-{waits}.stack").read_text()


@pytest.mark.parametrize(
    ("layout", "name", "culprit"), [(3, "stopped", 2), (5, "reads for ever", 0), (1, "frozen folder", 1), (2, "lost message", 0)]
)
def test_a_rank_that_departs_is_named_and_the_run_ends(tmp_path: Path, layout: int, name: str, culprit: int) -> None:
    _hangs(tmp_path, layout, name, culprit, 4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(300) if metafunc.config.getoption("--full") else ())


def test_any_fault_at_any_layout(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    layout = draw.randrange(len(LAYOUTS))
    ranks, flags = LAYOUTS[layout]
    name = draw.choice([name for name in FAULTS if name != "lost message" or "pipeline_model_parallel_size" in flags])
    first = ranks // 2 if name == "lost message" else ranks  # the last stage sends no activations, and only gradients
    _hangs(tmp_path, layout, name, draw.randrange(first), draw.randrange(3, 9))


def test_a_rank_that_comes_back_ends_nothing(tmp_path: Path) -> None:
    """What stood still for a while goes on, and the watcher says so."""

    pauses = iter([1.6])

    def before(rank: int) -> None:
        if rank == 1:
            _at_phase("reading data", 4, lambda: time.sleep(next(pauses, 0)))

    ended = launch(arguments(**TENSOR, train_iters=30, hang_warn_s=0.6), 2, before=before)
    assert [end.code for end in ended] == [0, 0], report(ended)
    lines = [line for line in ended[0].stderr.splitlines() if line.startswith("hang: ")]
    assert "rank 1" in lines[0] and "reading data" in lines[0]
    assert any("the run goes on" in line for line in lines)


def test_a_slow_rank_is_told(tmp_path: Path) -> None:
    """Though all ranks wait for it, and take as long."""

    def before(rank: int) -> None:
        if rank == 2:
            real = Flight.operation

            def operation(self: Flight, op: Op) -> None:
                time.sleep(0.02)
                real(self, op)

            Flight.operation = operation  # type: ignore[method-assign]

    flags = {**TENSOR, **STAGES, "straggler_interval": 2, "hang_warn_s": 60, "metrics_file": tmp_path / "metrics"}
    said = run(arguments(**flags, train_iters=8), 4, before=before).splitlines()
    told = [line for line in said if "x its peers' time of computing" in line]
    assert [line.split()[-2] for line in told if line.startswith("  rank 2 (node ")] == ["4", "6", "8"], said
    found = [line["straggler_rank"] for line in read_metrics(tmp_path / "metrics") if "straggler_rank" in line]
    assert found == [-1, 2, 2, 2]


def test_nobody_is_watched_who_does_not_want_it() -> None:
    """Nor is a word said, or a method of torch changed, by a run that goes well."""
    before = dist.Work.wait
    said = run(arguments(**TENSOR, train_iters=2, hang_warn_s=5), 2)
    assert "hang" not in said.replace("--hang", "") and dist.Work.wait is before
