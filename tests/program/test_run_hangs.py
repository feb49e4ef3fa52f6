"""Runs in which a rank departs: the watcher names it, with what it was about, and ends the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist

from megatron.config.launcher import ERROR_FILE_VARIABLE, read_error_file
from megatron.parallel.torch_private import get_default_store
from megatron.pipeline_parallel.p2p import Messenger
from megatron.spec.operations import Op, OpType
from megatron.training.step import TrainStep
from megatron_lab.flight import rank_monitor, stragglers
from megatron_lab.flight.rank_monitor import Flight
from megatron_lab.flight.stragglers import StragglerCallback
from megatron_lab.flight.watcher import HANG_EXIT_CODE
from tests.support import network
from tests.support.runs import Ended, arguments, launch, read_metrics, report, run

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
    _at_phase("in a step", iteration, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def _slow_data(iteration: int) -> None:
    _at_phase("reading data", iteration, lambda _: time.sleep(600))


def _frozen_folder(iteration: int) -> None:
    _at_phase("saving", iteration, lambda _: time.sleep(600))


def _at_phase(wanted: str, first: int, happens: Callable[[Flight], None]) -> None:
    real, at = Flight.set_phase, [0]

    def phase(self: Flight, name: str, iteration: int | None = None) -> None:
        at[0] = at[0] if iteration is None else iteration
        real(self, name, iteration)
        if name == wanted and at[0] >= first:
            happens(self)

    Flight.set_phase = phase  # type: ignore[method-assign]


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
        (tmp_path / "errors" / str(rank)).mkdir(parents=True)
        os.environ[ERROR_FILE_VARIABLE] = str(tmp_path / "errors" / str(rank) / "error.json")
        if rank == culprit:
            fault.plant(iteration)

    ended = launch(arguments(**settings), ranks, before=before, gloo=True, timeout=120.0)
    told = [line for line in ended[0].stderr.splitlines() if line.startswith("hang: no rank has made progress")]
    assert told and f". rank {culprit} (node " in told[0] and fault.says in told[0], report(ended)
    assert len(told) == 2 and f"with exit code {HANG_EXIT_CODE}" in told[1], "said once, and ended"
    cause = read_error_file(tmp_path / "errors" / "0" / "error.json")
    assert cause is not None and not cause.is_consequence and f"rank {culprit} (node" in " ".join(cause.message.split()), cause
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


NAMED = pytest.mark.full("the other cases, and tests/unit/flight")


@pytest.mark.parametrize(
    ("layout", "name", "culprit"),
    [
        (3, "stopped", 2),
        pytest.param(5, "reads for ever", 0, marks=NAMED),
        pytest.param(1, "frozen folder", 1, marks=NAMED),
        (2, "lost message", 0),
    ],
)
def test_a_rank_that_departs_is_named_and_the_run_ends(tmp_path: Path, layout: int, name: str, culprit: int) -> None:
    _hangs(tmp_path, layout, name, culprit, 4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        full = 60 if metafunc.function is test_what_any_other_fault_says else 300
        metafunc.parametrize("seed", range(full) if metafunc.config.getoption("--full") else ())


def test_any_fault_at_any_layout(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    layout = draw.randrange(len(LAYOUTS))
    ranks, flags = LAYOUTS[layout]
    name = draw.choice([name for name in FAULTS if name != "lost message" or "pipeline_model_parallel_size" in flags])
    first = ranks // 2 if name == "lost message" else ranks  # the last stage sends no activations, and only gradients
    _hangs(tmp_path, layout, name, draw.randrange(first), draw.randrange(3, 9))


def _on_two_nodes(
    nodes: network.Nodes, ranks: int, then: Callable[[int], None] = lambda rank: None, **settings: Any
) -> list[Ended]:
    """A run of which each half of the ranks is on a node of its own."""

    def before(rank: int) -> None:
        node = rank // (ranks // 2)
        nodes.enter(node)
        os.environ |= {
            "MASTER_ADDR": nodes.addresses[0],
            "LOCAL_RANK": str(rank % (ranks // 2)),
            "LOCAL_WORLD_SIZE": str(ranks // 2),
            "GLOO_SOCKET_IFNAME": "wire",
        }
        then(rank)

    with nodes.inside(0):  # the store's threads stay there
        return launch(arguments(**settings), ranks, before=before, gloo=True, timeout=120.0)


def _said_by_first_rank() -> str:
    """Standard error of rank 0, and with it that of its watcher; for any rank of `launch`, which has a file beside that one."""
    return Path(os.readlink("/proc/self/fd/2")).with_name("0.err").read_text()


def _pauses(tmp_path: Path, layout: int, culprit: int, iteration: int) -> None:
    """A signal stops the rank until the hang is reported. The next step lasts until the watcher has seen that the run goes on."""
    ranks, flags = LAYOUTS[layout]

    def stop(_: Flight) -> None:
        said = Path(os.readlink("/proc/self/fd/2")).with_name("0.err")
        again = f"while b'hang: no rank has made progress' not in open({str(said)!r}, 'rb').read(): time.sleep(0.05)"
        subprocess.Popen([sys.executable, "-S", "-c", f"import os, time\n{again}\nos.kill({os.getpid()}, {signal.SIGCONT:d})"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def linger(flight: Flight) -> None:
        while "the run continues" not in _said_by_first_rank():
            time.sleep(0.05)
            flight.start_op(Op(OpType.FORWARD, 0, 0))

    def before(rank: int) -> None:
        if rank == culprit:
            happens = iter([stop, linger])
            _at_phase("in a step", iteration, lambda flight: next(happens, lambda _: None)(flight))

    ended = launch(
        arguments(**flags, train_iters=iteration + 1, log_interval=100, hang_warn_s=0.6), ranks, before=before, gloo=True
    )
    assert [end.code for end in ended] == [0] * ranks, report(ended)
    lines = [line for line in ended[0].stderr.splitlines() if line.startswith("hang: ")]
    assert f". rank {culprit} (node " in lines[0] and FAULTS["stopped"].says in lines[0], lines
    assert any("the run continues" in line for line in lines)


def _raises(tmp_path: Path, layout: int, culprit: int, iteration: int) -> None:
    """A rank cannot read its data: it says so, and the others whom they lost."""
    ranks, flags = LAYOUTS[layout]

    def fail(_: Flight) -> NoReturn:
        raise OSError("the disk is broken")

    def before(rank: int) -> None:
        if rank == culprit:
            _at_phase("reading data", iteration, fail)

    ended = launch(arguments(**flags, train_iters=10_000, hang_warn_s=5), ranks, before=before, gloo=True)
    assert all(end.code for end in ended) and "the disk is broken" in ended[culprit].stderr, report(ended)
    others = [end.stderr for rank, end in enumerate(ended) if rank != culprit]
    assert all("lost contact with rank" in said for said in others), report(ended)
    assert any(f"lost contact with rank {culprit} (node" in said for said in others), report(ended)
    assert not any("hang: " in end.stderr for end in ended), report(ended)


def _watchers_have_talked(port: int) -> bool:
    """Whether the watcher of the first node, which listens at a port, has answered that of the other: both directions have data."""
    words = ["ss", "--tcp", "--info", "--numeric", "--oneline", "--no-header", f"sport = :{port} or dport = :{port}"]
    found = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return any("bytes_sent:" in line and "bytes_received:" in line for line in found.splitlines())


def _is_cut_off(tmp_path: Path, layout: int, culprit: int, iteration: int) -> None:
    """The link between two nodes loses all that is sent; no connection breaks, so nothing but silence shows it."""
    ranks, flags = LAYOUTS[layout]
    with network.nodes() as nodes:

        def cut(_: Flight) -> None:
            port = dist.PrefixStore("flight", get_default_store()).get("head").split()[0].rpartition(b":")[2].decode()
            while not _watchers_have_talked(int(port)):
                time.sleep(0.05)
            nodes.cut(culprit // (ranks // 2))

        def then(rank: int) -> None:
            if rank == culprit:
                _at_phase("in a step", iteration, cut)

        ended = _on_two_nodes(nodes, ranks, then, **flags, train_iters=10_000, hang_warn_s=3, hang_kill_s=4, save=tmp_path)
    assert [end.code for end in ended] == [HANG_EXIT_CODE] * ranks, report(ended)
    mine, others = (", ".join(map(str, some)) for some in (range(ranks // 2), range(ranks // 2, ranks)))
    plural = "s" * (ranks > 2)
    for rank, words in (
        (0, f"node node1 (rank{plural} {others}) has sent no report for "),
        (ranks // 2, "the first node (10.77.0.1:"),
    ):
        told = [line for line in ended[rank].stderr.splitlines() if line.startswith("hang: no rank has made progress")]
        assert len(told) == 2 and words in told[0] and "the node or the link to it is down or very slow" in told[0], report(ended)
        assert told[0].endswith(f"rank{plural} {others if rank else mine} wait{'s' * (ranks == 2)}"), report(ended)


def _is_slow(tmp_path: Path, layout: int, culprit: int, iteration: int) -> None:
    """Though all ranks wait for it, and take as long. A rank's clock counts its processor time, its sleep and its waits, so that
    other work of the machine makes no rank slow."""
    ranks, flags = LAYOUTS[layout]

    def before(rank: int) -> None:
        slept, began = [0.0], StragglerCallback.before_step

        def operation(self: Flight, op: Op) -> None:
            if rank == culprit:
                time.sleep(0.02)
                slept[0] += 0.02
            real(self, op)

        def before_step(self: StragglerCallback, *args: Any) -> None:
            clock.perf_counter = lambda: time.thread_time() + slept[0] + self._flight.waited_s
            began(self, *args)

        real, clock = Flight.start_op, types.SimpleNamespace()
        Flight.start_op = operation  # type: ignore[method-assign]
        StragglerCallback.before_step = before_step  # type: ignore[method-assign, assignment]
        stragglers.time = clock  # type: ignore[assignment]

    settings = {**flags, "straggler_interval": 2, "global_batch_size": 4, "hang_warn_s": 60, "metrics_file": tmp_path / "metrics"}
    said = run(arguments(**settings, train_iters=6), ranks, before=before, gloo=True).splitlines()
    told = [line for line in said if "x as long as the other ranks of its stage" in line]
    assert [line.split()[-2] for line in told if line.startswith(f"  rank {culprit} (node ")] == ["4", "6"], said
    found = [line["straggler_rank"] for line in read_metrics(tmp_path / "metrics") if "straggler_rank" in line]
    assert found == [-1, culprit, culprit]


def _link_is_slow(tmp_path: Path, layout: int, culprit: int, iteration: int) -> None:
    """A step takes seconds from then on, and before it took some milliseconds: it is told, and the run goes on.

    The steps before, of 20 milliseconds or more, are so many that the watchers, which look twice a second, have seen some.
    """
    (ranks, flags), first = LAYOUTS[layout], 100 + iteration
    with network.nodes() as nodes:
        slows = iter([lambda _: nodes.slow("100kbit")])

        def then(rank: int) -> None:
            if rank == 0:
                _at_phase("in a step", first, lambda flight: next(slows, lambda _: None)(flight))

        ended = _on_two_nodes(nodes, ranks, then, **flags, train_iters=first + 1, hang_warn_s=0.6)
    assert [end.code for end in ended] == [0] * ranks, report(ended)
    lines = [line for line in ended[0].stderr.splitlines() if line.startswith("hang: ")]
    assert "a link between nodes node0, node1 is slow" in lines[0] or "or the link to it, is down or very slow" in lines[0], lines
    assert any("the run continues" in line for line in lines)


OTHERS = (_pauses, _raises, _is_slow, *((_is_cut_off,) * network.possible()))


WITH_SLOW_LINKS = (*OTHERS, *((_link_is_slow,) * network.possible()))


@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: fault.__name__.strip("_"))
def test_what_another_fault_says(tmp_path: Path, fault: Callable[[Path, int, int, int], None]) -> None:
    """Of two tensor ranks. With --full they are of any layout."""
    fault(tmp_path, 1, 1, 4)


def test_what_any_other_fault_says(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    fault = draw.choice(WITH_SLOW_LINKS)
    layout = (
        0 if fault is _link_is_slow else draw.choice([one for one in range(len(LAYOUTS)) if fault is not _is_slow or one != 2])
    )  # a stage alone has no peers
    fault(tmp_path, layout, draw.randrange(LAYOUTS[layout][0]), draw.randrange(3, 9))


def test_nobody_is_watched_who_does_not_want_it() -> None:
    """Nor is a word said, or a method of torch changed, by a run that goes well."""
    before = dist.Work.wait
    said = run(arguments(**TENSOR, train_iters=2, hang_warn_s=5), 2, gloo=True)
    assert "hang" not in said.replace("--hang", "") and dist.Work.wait is before


def test_ranks_that_cannot_be_watched_are_told() -> None:
    """As in containers of their own, whose processes do not see each other."""

    def before(rank: int) -> None:
        rank_monitor.open_files = lambda files: [one.open() for one in files if one.rank == rank]  # type: ignore[assignment]

    ended = launch(arguments(**TENSOR, train_iters=1, hang_warn_s=5), 2, before=before, gloo=True)
    assert [end.code for end in ended] == [0, 0], report(ended)
    assert "1 ranks of node" in ended[0].stderr and "are not watched for hangs" in ended[0].stderr, report(ended)
    assert not ended[1].stderr, report(ended)
