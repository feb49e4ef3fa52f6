"""How ranks of a job find each other, with a store of torchrun's that outlives their starts."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron.config.launcher import Launched
from megatron.parallel import meeting

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
    return [pool.submit(meeting.meet, Launched(rank, rank, SIZE), timeout_s) for rank in ranks]


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
    monkeypatch.setattr(meeting, "TELL_AFTER_S", 0.3)
    monkeypatch.setattr(meeting, "TELL_EVERY_S", 0.1)
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
            time.sleep(0.8)
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
        meeting.address(found, Launched(int(found["RANK"]), 0, SIZE))


def test_a_store_that_is_not_there(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, and for the first rank a port that another has."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(
        ValueError, match=rf"^rank 0 cannot open the store of the job at 127.0.0.1:{server.port}: .*MASTER_PORT must"
    ):
        meeting.meet(Launched(0, 0, SIZE), 1.0)
    monkeypatch.setenv("MASTER_PORT", "1")
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^rank 1 did not reach the store of the job at 127.0.0.1:1: .*MASTER_ADDR"):
        meeting.meet(Launched(1, 1, SIZE), 1.0)
    assert time.monotonic() - began < 30
