"""The health check of a cluster: passes where all is well, names what is wrong and who has it, and never waits longer than told."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lab.cluster import node_info, verdict
from megatron_lab.cluster import ranks as started
from megatron_lab.cluster.links import plan_exchange_rounds
from megatron_lab.cluster.node_info import NodeInfo
from megatron_lab.cluster.ranks import RankEnd, run_ranks
from megatron_lab.commands import check_cluster
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.cli import ROOT, spawn_cli
from tests.support.runs import arguments
from tests.support.warm_python import warm_python


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(nodes: int = 1, ranks: int = 2, port: int | None = None, **settings: Any) -> list[str]:
    """Flags of the check, and those of the run behind them."""
    place = f"localhost:{port or free_port()}"
    own = ["--nodes", str(nodes), "--ranks-per-node", str(ranks), "--head", place, "--wait", "30", "--limit", "60"]
    return [*own, "--", *arguments(**{"train_iters": 2, "device": "cpu", **settings})]


def changed(flags: list[str], **values: str) -> list[str]:
    """With other values of the check's own flags."""
    added = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [*added, *flags] if "--" not in flags else [*flags[: flags.index("--")], *added, *flags[flags.index("--") :]]


def test_two_nodes_of_two_ranks_are_well(tmp_path: Path) -> None:
    """As they are started: real processes, a dataset, a save folder that is not there yet."""
    settings = {**FLAGS, "data_path": write_bytes(tmp_path / "text"), "save": tmp_path / "run/checkpoints"}
    flags = ["tools/check_cluster.py", *command(2, 2, free_port(), **settings)]
    with (tmp_path / "other").open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        other = subprocess.Popen([warm_python(), *flags], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            done = spawn_cli(flags, nproc=None)
            assert other.wait(60) == done.returncode == 0, done.stderr + (tmp_path / "other").read_text()
        finally:
            other.kill()
    said = done.stdout + (tmp_path / "other").read_text()  # whoever was first is the head
    lines = [line for line in said.splitlines() if ": slow " not in line]  # on a machine that others use
    assert lines[-1] == "check_cluster: no problems found" and len(lines) == 5
    assert re.fullmatch(
        r"check_cluster: 2 nodes of 2 ranks: torch \S+, CUDA of torch \S+; .* GB free for checkpoints of .* GB", lines[0]
    )
    for words, line in zip(("inside a node", "between nodes", "a large all-reduce over all ranks"), lines[1:4], strict=True):
        assert re.match(rf"check_cluster: {words}: [\d.]+ (MB|GB)/s", line), line
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_files_that_cannot_be_used_are_told_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No rank is started, and each file has its own words."""
    (tmp_path / "file").touch()
    model = tmp_path / "none.model"
    settings: dict[str, Any] = {
        "mock_data": None,
        "vocab_size": None,
        "data_path": tmp_path / "none",
        "tokenizer_type": "GPTSentencePieceTokenizer",
        "tokenizer_model": model,
        "save": tmp_path / "file/checkpoints",
    }
    began = time.monotonic()
    assert check_cluster.main(command(**settings), program=("false",)) == 1
    said = capfd.readouterr().err.splitlines()
    host = socket.gethostname()
    for words in (
        f"{host}: .*{model}",
        rf"{host}: .*{tmp_path}/none\.idx",
        f"{host}: --save {tmp_path}/file/checkpoints cannot be written",
    ):
        assert any(re.match(f"check_cluster: {words}", line) for line in said), "\n".join(said)
    assert not any("rank " in line for line in said) and time.monotonic() - began < 30


def test_room_without_a_size_to_compare_it_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the tokenizer is missing, nobody knows how large a checkpoint is."""
    missing = tmp_path / "none.model"
    settings: dict[str, Any] = {"vocab_size": None, "tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": missing}
    assert check_cluster.main(command(**settings, save=tmp_path), program=("false",)) == 1
    assert re.search(r"; [\d,]+ GB free for checkpoints$", capfd.readouterr().out, re.MULTILINE)


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_info.shutil, "disk_usage", lambda _: node_info.shutil._ntuple_diskusage(10**12, 10**12 - 10**5, 10**5))
    assert check_cluster.main(command(save=tmp_path), program=("false",)) == 1
    assert "has 0.0 GB free, but a checkpoint takes 0.0 GB" in capfd.readouterr().err


def test_more_ranks_than_the_cores_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Refused in words, and none is started; what counts are the cores that the check may use."""
    monkeypatch.setattr(node_info.os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert node_info.check_num_ranks(128, "cpu") == []
    flags = command(ranks=129, micro_batch_size=1, global_batch_size=129)
    assert check_cluster.main(flags, program=("touch", str(tmp_path / "was started"))) == 1
    assert "129 ranks for 2 CPU cores: at most 128 (64 per core) start in reasonable time" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs count where there are any, and cores where the run takes a CPU."""
    monkeypatch.setattr(node_info.torch.cuda, "device_count", lambda: 8)
    assert node_info.check_num_ranks(8, "auto") == [] == node_info.check_num_ranks(9, "cpu")
    assert node_info.check_num_ranks(9, "auto") == node_info.check_num_ranks(9, "cuda") != []
    monkeypatch.setattr(node_info.torch.cuda, "device_count", lambda: 0)
    assert node_info.check_num_ranks(9, "auto") == [] and node_info.check_num_ranks(1, "cuda")[0].startswith("0 GPUs for 1 ranks")


class Rank:
    """Stands for a process that goes on for ever. Its start is one of the events."""

    every: list[Rank]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.killed = False
        self.every.append(self)
        self.begins()

    @staticmethod
    def begins() -> None:
        """What happens in the middle of a start."""

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        assert all(rank.killed for rank in self.every), "waited for one while others run"


@pytest.fixture
def rank_kind(monkeypatch: pytest.MonkeyPatch) -> type[Rank]:
    """What is started as a rank: no process."""
    kind = type("RankHere", (Rank,), {"every": []})
    monkeypatch.setattr(started.subprocess, "Popen", kind)
    return kind


def test_the_limit_counts_while_ranks_are_started(rank_kind: type[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each start puts on by 3 s: of a thousand, those of the first 10 s are started, and killed."""
    monkeypatch.setattr(started.time, "monotonic", lambda: 3.0 * len(rank_kind.every))
    ends = run_ranks(0, 1000, 1, "localhost", 1, "cpu", 10.0)
    assert len(rank_kind.every) == 4 and all(rank.killed for rank in rank_kind.every)
    assert len(ends) == 1000 and ends[999] == RankEnd(999, None, "its start", 1)


def test_a_stop_in_the_middle_of_a_start_leaves_nobody_behind(rank_kind: type[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is started, who was is killed, and then the signal does what it did before."""

    def begins() -> None:
        if len(rank_kind.every) == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(rank_kind, "begins", staticmethod(begins))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit) as ended:
            run_ranks(0, 5, 1, "localhost", 1, "cpu", 60.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143 and [rank.killed for rank in rank_kind.every] == [True, True]


def test_a_rank_that_never_comes(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stuck before it begins is named, and the check ends after its limit, together with all ranks.

    The clock passes the limit once the second rank waits for the first.
    """
    program = tmp_path / "rank"
    program.write_text(f'#!/bin/sh\n[ "$RANK" = 0 ] && exec sleep 600\nexec {warm_python()} -m megatron_lab.cluster.links "$@"\n')
    program.chmod(0o755)

    def clock() -> float:
        waits = any("joining the other ranks" in report.read_text() for report in tmp_path.glob("check-cluster-*/1"))
        return 4.0 if waits else 0.0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(started, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    assert check_cluster.main(changed(command(ranks=2), limit="4"), program=(str(program),)) == 1
    host = socket.gethostname()
    assert f"rank 0 on {host} did not get past its start within 4 s; 1 more wait" in capfd.readouterr().err


def test_a_rank_that_fails(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = tmp_path / "rank"
    program.write_text(
        '#!/bin/sh\necho \'{"at": "its device"}\' >> $1\n[ "$RANK" = 1 ] && echo \'{"failed": "no GPU 1"}\' >> $1\nexit 0\n'
    )
    program.chmod(0o755)
    assert check_cluster.main(command(ranks=2), program=(str(program),)) == 1
    assert f"rank 1 on {socket.gethostname()} failed at its device: no GPU 1" in capfd.readouterr().err


def test_a_node_that_never_comes(capfd: pytest.CaptureFixture[str]) -> None:
    host = socket.gethostname().partition(".")[0]
    flags = changed(command(nodes=2), wait="1", expect=f"{host},node7")
    began = time.monotonic()
    assert check_cluster.main(flags, program=("false",)) == 1
    assert "1 of 2 nodes answered within 1 s; missing: node7" in capfd.readouterr().err
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("no-such-host.invalid:29500", "the name of the head node, no-such-host.invalid, does not resolve"),
        ("192.0.2.1:29500", "no answer from 192.0.2.1 at port 29500 for 1 s"),  # an address for documents, which nobody has
    ],
)
def test_a_head_that_is_not_reached(capfd: pytest.CaptureFixture[str], head: str, words: str) -> None:
    began = time.monotonic()
    assert check_cluster.main(changed(command(nodes=2), head=head, wait="1"), program=("false",)) == 1
    assert words in capfd.readouterr().err
    assert time.monotonic() - began < 30


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert check_cluster.main(command(port=port), program=("false",)) == 1
    assert f"cannot listen at port {port}" in capfd.readouterr().err


def test_settings_that_are_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    """As the run would refuse them."""
    assert check_cluster.main(command(tensor_model_parallel_size=3)) == 2
    assert "--tensor-model-parallel-size 3" in capfd.readouterr().err


@pytest.mark.parametrize("flags", [["--head", "node0"], ["--head", "node0:99999"], ["--nodes", "0"], ["--limit", "-3"]])
def test_flags_of_its_own_that_are_wrong(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_cluster.main(["--ranks-per-node", "1", *flags])
    assert ended.value.code == 2 and flags[0] in capfd.readouterr().err


# ---- the verdict


def node(host: str, **versions: str) -> NodeInfo:
    return NodeInfo(host, {"torch": "2.13.0", "driver": "550.54", **versions})


def end(rank: int, failed: str | None = None, at: str = "the end", places: int = 9, **found: Any) -> RankEnd:
    return RankEnd(rank, {"rank": rank, "sum_is_right": True, "all": 1e9, **found} if failed is None else None, at, places, failed)


def test_versions_that_differ_name_the_few() -> None:
    nodes = [node("a"), node("b", driver="535.1"), node("c"), NodeInfo("d", {"torch": "2.12.0"})]
    assert verdict.find_version_mismatches(nodes) == [
        "torch is 2.13.0 on a, b, c, but 2.12.0 on d",
        "driver is 550.54 on a, c, but 535.1 on b, none on d",
    ]
    assert verdict.find_version_mismatches(nodes[::2]) == []


def test_the_same_fault_is_told_once() -> None:
    nodes = [node("a"), node("b"), node("c")]
    nodes[0].faults = nodes[1].faults = ["no data"]
    assert verdict.list_node_problems(nodes) == ["a, b: no data"]
    nodes[2].faults = ["no data", "7 GPUs for 8 ranks"]
    assert verdict.list_node_problems(nodes) == ["all nodes: no data", "c: 7 GPUs for 8 ranks"]


def test_clocks_against_the_many() -> None:
    """Also where it is the head's that is wrong."""
    assert verdict.find_skewed_clocks({"a": 0.0, "b": 0.3, "c": -0.2}) == []
    assert verdict.find_skewed_clocks({"a": 0.0, "b": 60.1, "c": 60.2}) == ["a: its clock is 60.1 s behind; is NTP running?"]
    assert verdict.find_skewed_clocks({"a": 0.0, "b": 0.1, "c": 5.1}) == ["c: its clock is 5.0 s ahead; is NTP running?"]


def test_who_is_waited_for() -> None:
    waiting = [RankEnd(rank, None, "a sum over all ranks", 3) for rank in range(3)]
    ends = {"a": waiting[:2], "b": [waiting[2], RankEnd(3, None, "joining the other ranks", 2)]}
    assert verdict.find_link_problems(ends, 60) == ["rank 3 on b did not get past joining the other ranks within 60 s; 3 more wait"]
    ends["a"][0] = end(0, failed="no route", at="joining the other ranks")
    assert verdict.find_link_problems(ends, 60) == ["rank 0 on a failed at joining the other ranks: no route"]


def test_a_sum_that_is_wrong() -> None:
    assert verdict.find_link_problems({"a": [end(0), end(1)]}, 60) == []
    assert (
        "an all-reduce over all ranks gave a wrong result"
        in verdict.find_link_problems({"a": [end(0), end(1, sum_is_right=False)]}, 60)[0]
    )


def test_memory_that_is_not_free() -> None:
    whole = 80 * 10**9
    ends = {"a": [end(0, free=79 * 10**9, memory=whole), end(1, free=50 * 10**9, memory=whole)]}
    assert verdict.find_memory_problems(ends, None) == ["rank 1 on a: its GPU has 50.0 of 80.0 GB free: another process uses it"]
    assert verdict.find_memory_problems(ends, 79 * 10**9 + 1)[0].endswith("79.0 of 80.0 GB free, but the run needs 79.0 GB")
    assert verdict.find_memory_problems({"a": [end(0)]}, 10**15) == []  # on a CPU


@pytest.mark.parametrize("num_nodes", range(1, 12))
def test_rounds_of_exchanges(num_nodes: int) -> None:
    """Each node has one partner a round, who has it; and in all both neighbours on the ring."""
    met: dict[int, set[int]] = {node: set() for node in range(num_nodes)}
    for pairs in plan_exchange_rounds(num_nodes):
        for one, other in pairs.items():
            assert pairs[other] == one != other
            met[one].add(other)
    assert met == {node: {(node - 1) % num_nodes, (node + 1) % num_nodes} - {node} for node in range(num_nodes)}


def rates_of(slow: int | None) -> dict[str, list[RankEnd]]:
    """Four nodes of two ranks in a ring; links of the slow one take ten times as long."""

    def rate(one: int, other: int) -> float:
        return 1e9 if slow in (one, other) else 1e10

    return {
        f"node{i}": [
            end(2 * i + j, inside=5e10 if i != slow else 5e9, between={str(k): rate(i, k) for k in ((i - 1) % 4, (i + 1) % 4)})
            for j in range(2)
        ]
        for i in range(4)
    }


def test_a_slow_node_is_named_and_its_neighbours_are_not() -> None:
    found = verdict.compare_rates(rates_of(2), "cuda")
    assert found.problems == ["node2: slow inside a node, 5 GB/s", "node2: slow between nodes, 2 GB/s"]
    assert found.notes[0] == "inside a node: 50 GB/s (median), slowest node2 with 5 GB/s"
    on_cpu = verdict.compare_rates(rates_of(2), "cpu")
    assert on_cpu.problems == [] and set(found.problems) < set(on_cpu.notes)
    assert verdict.compare_rates(rates_of(None), "cuda").problems == []


def test_the_help_comes_without_torch() -> None:
    code = (
        "import sys\n"
        "from megatron_lab.commands import check_cluster\n"
        "try: check_cluster.main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--ranks-per-node" in done.stdout, done.stderr
