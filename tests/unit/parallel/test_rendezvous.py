"""How ranks of a job find each other, with a store of torchrun's that outlives their starts."""

from __future__ import annotations

import itertools
import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.config.launcher import ProcessInfo, Rendezvous, adopt_launcher, describe_missing_rank, parse_init_method
from megatron.parallel import rendezvous

SIZE = 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of an agent, whose address ranks find in the environment."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return store


def begin(pool: ThreadPoolExecutor, ranks: range, timeout_s: float = 20.0) -> list[Future[dist.Store]]:
    return [pool.submit(rendezvous.rendezvous, ProcessInfo(rank, rank, SIZE), timeout_s) for rank in ranks]


def test_each_start_has_a_store_of_its_own(server: dist.TCPStore) -> None:
    """Keys of one start are not seen in the next, and all ranks of one see the same."""
    with ThreadPoolExecutor(SIZE) as pool:
        for start in range(3):
            stores = [future.result() for future in begin(pool, range(SIZE))]
            assert not any(store.check(["address"]) for store in stores)
            stores[start].set("address", str(start))
            assert all(store.get("address") == str(start).encode() for store in stores)


@pytest.mark.parametrize("late", [0, 2])
def test_who_is_missing_is_told(
    server: dist.TCPStore, late: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others wait for it, also where a meeting of before was complete, or was left by its first rank."""
    monkeypatch.setattr(rendezvous, "FIRST_LOG_AFTER_S", 0.1)
    monkeypatch.setattr(rendezvous, "LOG_EVERY_S", 0.05)
    said = ""
    with ThreadPoolExecutor(2 * SIZE) as pool:
        [future.result() for future in begin(pool, range(SIZE))]
        server.set("meeting", "a first rank that died before the others came")
        first = begin(pool, range(late)) + begin(pool, range(late + 1, SIZE))
        if late:  # (On a busy machine others may be missing too at first.)
            while "waiting for rank 2 of 4 to start" not in said:
                said += capfd.readouterr().err
                time.sleep(0.05)
        else:  # nobody knows yet who has come
            time.sleep(4 * rendezvous.FIRST_LOG_AFTER_S)
        assert not any(future.done() for future in first)
        last = begin(pool, range(late, late + 1))
        stores = [future.result() for future in (*first, *last)]
        stores[0].set("address", "one")
        assert all(store.get("address") == b"one" for store in stores)


def test_who_does_not_come_is_named(server: dist.TCPStore) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        first, second = begin(pool, range(2), timeout_s=0.5)
        with pytest.raises(ValueError, match="^ranks 2, 3 of 4 did not start in time"):
            first.result()
        with pytest.raises(ValueError, match="^rank 1: not all ranks of 4 started in time"):
            second.result()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR in the environment is ''. It must be the name or address of the node of rank 0"),
        ({"MASTER_PORT": None}, "MASTER_PORT in the environment is not set. It must be a port, from 1 to 65535"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT in the environment is 'abc'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT in the environment is '65536'"),
        ({"RANK": "4"}, "RANK in the environment is '4'. It must be a number from 0 to 3, below WORLD_SIZE"),
    ],
)
def test_variables_that_are_not_sound(variables: dict[str, str | None], said: str) -> None:
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", **variables}
    found = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(said)):
        rendezvous.read_master_address(found, ProcessInfo(int(found["RANK"]), 0, SIZE))


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_meet_at_a_place_of_their_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One after the other, with more and with fewer ranks: what an earlier start left in a file is nothing to the next. Who is
    missing is told."""
    monkeypatch.setattr(rendezvous, "FIRST_LOG_AFTER_S", 0.3)
    monkeypatch.setattr(rendezvous, "LOG_EVERY_S", 0.1)
    where = f"file://{tmp_path}/meeting"
    if kind == "tcp":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    for size in (2, 3, 3, 2):
        with ThreadPoolExecutor(size) as pool:
            jobs = [ProcessInfo(rank, rank, size) for rank in range(size)]
            first = [pool.submit(rendezvous.rendezvous, job, 20.0, where) for job in jobs[:-1]]
            said = ""
            while f"waiting for rank {size - 1} of {size} to start" not in said:
                said += capfd.readouterr().err
                time.sleep(0.02)
            stores = [future.result() for future in (*first, pool.submit(rendezvous.rendezvous, jobs[-1], 20.0, where))]
            stores[0].set("address", str(size))
            assert all(store.get("address") == str(size).encode() for store in stores)
            assert not any(store.check([f"address of {other}"]) for store in stores for other in (2, 3))
            stores[-1].set(f"address of {size}", "")
            del stores, first


def test_who_waits_for_the_first_rank_at_a_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_LOG_AFTER_S", 0.1)
    with pytest.raises(ValueError, match="^rank 1: not all ranks of 2 started in time"):
        rendezvous.rendezvous(ProcessInfo(1, 0, 2), 0.6, f"file://{tmp_path}/meeting")
    assert f"rank 1 waits for rank 0 and all other ranks at {tmp_path}/meeting" in capfd.readouterr().err


def test_a_file_that_cannot_be_a_meeting(tmp_path: Path) -> None:
    """What is something else stays as it is."""
    data = tmp_path / "corpus.bin"
    data.write_bytes(b"tokens")
    (tmp_path / "empty").touch()
    for place, said in (
        (data, "the file exists, and is not a rendezvous file of torch. It was not changed"),
        (tmp_path, "it is a folder"),
        (tmp_path / "no/where", f"there is no folder {tmp_path}/no on this node"),
    ):
        with pytest.raises(
            ValueError, match=re.escape(f"rank 0 cannot join the rendezvous at --init-method file://{place}: {said}")
        ):
            rendezvous.rendezvous(ProcessInfo(0, 0, 2), 1.0, f"file://{place}")
    assert data.read_bytes() == b"tokens" and len([*tmp_path.iterdir()]) == 2
    with pytest.raises(ValueError, match="^rank 1 of 2 did not start in time"):
        rendezvous.rendezvous(ProcessInfo(0, 0, 2), 0.3, f"file://{tmp_path}/empty")
    with pytest.raises(ValueError, match="RANK in the environment is '2'. It must be a number from 0 to 1"):
        rendezvous.rendezvous(ProcessInfo(2, 0, 2), 0.3, f"file://{tmp_path}/empty")


def test_looks_at_the_store_are_early_and_then_rare() -> None:
    """Whoever waits looks again before he has waited half as long again, and a few times a second however long it takes."""
    first, most = rendezvous._POLL_INTERVALS_S
    waited = 0.0
    for pause in itertools.islice(rendezvous._poll_intervals(), 50):
        assert first <= pause <= min(first + waited / 2 + 1e-9, most)
        waited += pause
    assert pause == most


def test_a_host_that_is_not_there(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(
        ValueError,
        match=r"^rank 1 did not reach the key-value store of the job at 127.0.0.1:1: .*--init-method tcp://127.0.0.1:1 must",
    ):
        rendezvous.rendezvous(ProcessInfo(1, 1, SIZE), 1.0, "tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match=rf"^rank 0 cannot open .*--init-method tcp://127.0.0.1:{server.port} must name"):
        rendezvous.rendezvous(ProcessInfo(0, 0, SIZE), 1.0, f"tcp://127.0.0.1:{server.port}")


def test_places_and_who_is_there() -> None:
    """srun and mpirun say it as torchrun does; for env:// they are not asked."""
    assert (
        parse_init_method("tcp://node-1.cluster:29500") == Rendezvous("node-1.cluster", 29500)
        and parse_init_method("env://") == Rendezvous()
    )
    assert parse_init_method("tcp://[fe80::1]:5") == Rendezvous("fe80::1", 5) and parse_init_method(
        "file:///shared/a b"
    ) == Rendezvous(file="/shared/a b")
    wrong = (
        "",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:65536",
        "tcp://:5",
        "file://a",
        "file:///",
        "file:///a/",
        "gloo://a",
        "tcp://a:5/b",
    )
    assert not any(map(parse_init_method, wrong))
    slurm = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    found = dict(slurm)
    adopt_launcher(["--init-method", "tcp://a:5"], found)
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert found == slurm | wanted
    found = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    adopt_launcher(["--lr", "1", "--init_method=file:///a"], found)
    assert found["WORLD_SIZE"] == "2" and "MASTER_ADDR" not in found
    for words in ([], ["--init-method", "env://"], ["--init-method"]):
        found = dict(slurm)
        adopt_launcher(words, found)
        assert found == slurm
    found = {**slurm, "RANK": "0", "WORLD_SIZE": "1"}
    adopt_launcher(["--init-method", "file:///a"], found)
    assert found == {**slurm, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun, started by srun"
    assert describe_missing_rank("env://", {}) is None and describe_missing_rank("file:///a", found) is None
    said = describe_missing_rank("tcp://a:5", {"RANK": "0"})
    assert said is not None and said.startswith("--init-method tcp://a:5: WORLD_SIZE is not set in the environment. Set RANK")


def test_a_store_that_is_not_there(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, and for the first rank a port that another has."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(
        ValueError, match=rf"^rank 0 cannot open the key-value store of the job at 127.0.0.1:{server.port}: .*MASTER_PORT must"
    ):
        rendezvous.rendezvous(ProcessInfo(0, 0, SIZE), 1.0)
    monkeypatch.setenv("MASTER_PORT", "1")
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^rank 1 did not reach the key-value store of the job at 127.0.0.1:1: .*MASTER_ADDR"):
        rendezvous.rendezvous(ProcessInfo(1, 1, SIZE), 1.0)
    assert time.monotonic() - began < 30
