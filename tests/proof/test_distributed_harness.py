"""The harness itself: ranks see each other, failures are told, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lab.verification.local_ranks import RanksError, run_ranks
from tests.support.cli import spawn_cli
from tests.support.warm import RankPool


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that its new parent has yet to reap counts as ended)."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int) -> bool:
    """Whether a process ends within 10 s."""
    for _ in range(1000):
        if gone(pid):
            return True
        time.sleep(0.01)
    return False


def test_ranks_form_a_group_and_results_come_in_order() -> None:
    offset = 10  # a closure needs no pickling

    def function(rank: int, factor: int) -> tuple[int, int, float]:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        return rank * factor + offset, dist.get_world_size(), total.item()

    assert run_ranks(4, function, 2) == [(10, 4, 6.0), (12, 4, 6.0), (14, 4, 6.0), (16, 4, 6.0)]


def test_ranks_have_one_thread_their_environment_and_their_own_seed() -> None:
    def function(rank: int) -> tuple[int, str, str, str, float]:
        return (
            torch.get_num_threads(),
            os.environ["RANK"],
            os.environ["WORLD_SIZE"],
            os.environ["LOCAL_RANK"],
            torch.rand(()).item(),
        )

    first, second = run_ranks(2, function)
    assert first[:4] == (1, "0", "2", "0") and second[:4] == (1, "1", "2", "1")
    assert first[4] != second[4]
    assert (first, second) == tuple(run_ranks(2, function))


def test_autograd_in_ranks_after_autograd_in_the_parent() -> None:
    def gradient(rank: int) -> torch.Tensor:
        x = torch.full((300, 300), float(rank + 1), requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = [gradient(0), gradient(1)]
    assert all(torch.equal(a, b) for a, b in zip(run_ranks(2, gradient), expected, strict=True))


def test_large_results_do_not_block() -> None:
    """Four times 8 MB, far beyond what a pipe holds; rank 3's is sent while nobody reads it yet."""
    results = run_ranks(4, lambda rank: torch.full((1_000_000,), float(rank), dtype=torch.float64))
    assert [(r.numel(), r.unique().tolist()) for r in results] == [(1_000_000, [float(rank)]) for rank in range(4)]


def test_own_group_from_the_environment() -> None:
    def function(rank: int) -> float:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(2, function, init=False) == [2.0, 2.0]


def test_every_failing_rank_is_told_and_the_blocked_one_shown() -> None:
    def function(rank: int) -> None:
        if rank == 0:
            dist.barrier()  # the others never come
        raise ValueError(f"reason {rank}")

    with pytest.raises(RanksError) as error:
        run_ranks(3, function)
    message = str(error.value)
    assert "ValueError: reason 1" in message and "ValueError: reason 2" in message
    assert "not done when the others failed: rank 0" in message
    assert not error.value.timed_out
    assert "in barrier" in message.split("rank 0 was here")[1]


def test_timeout_shows_where_ranks_are_and_kills_them(tmp_path: Path) -> None:
    def function(rank: int) -> None:
        child = subprocess.Popen(["sleep", "1000"])  # what a rank starts is killed too
        (tmp_path / str(rank)).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(1000)

    with pytest.raises(RanksError, match=r"not done after 1.5 s: rank 0, 1(?s:.*)in function") as error:
        run_ranks(2, function, timeout=1.5)
    assert error.value.timed_out
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(pids) == 4 and all(wait_until_gone(pid) for pid in pids)


def test_a_rank_that_dies_is_told() -> None:
    def function(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RanksError, match=r"rank 1 failed:\nthe process ended without a report \(killed by SIGKILL\)"):
        run_ranks(2, function)


def test_exit_and_unpicklable_results_are_failures() -> None:
    with pytest.raises(RanksError, match="SystemExit: 3"):
        run_ranks(1, lambda rank: sys.exit(3))
    with pytest.raises(RanksError, match=r"(?i)can't pickle|cannot pickle|can't get local object"):
        run_ranks(1, lambda rank: lambda: rank)


def test_ranks_die_with_the_test_process(tmp_path: Path) -> None:
    def outer(rank: int) -> None:
        """Plays the test process: it starts ranks, and is killed while they run."""

        def inner(inner_rank: int) -> None:
            (tmp_path / f"{inner_rank}.part").write_text(str(os.getpid()))
            (tmp_path / f"{inner_rank}.part").rename(tmp_path / str(inner_rank))
            if inner_rank == 0:
                while not (tmp_path / "1").exists():
                    time.sleep(0.01)
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)

        run_ranks(2, inner)

    with pytest.raises(RanksError, match="killed by SIGKILL"):
        run_ranks(1, outer, init=False)
    assert all(wait_until_gone(int((tmp_path / str(rank)).read_text())) for rank in range(2))


SCRIPT = """
import os, subprocess, sys, time
print(f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}", flush=True)
open(os.path.join(sys.argv[1], "pid"), "w").write(str(os.getpid()))
if sys.argv[2] in ("hang", "leave"):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as torchrun starts its ranks
    open(os.path.join(sys.argv[1], "pid-child"), "w").write(str(child.pid))
    time.sleep(1000 if sys.argv[2] == "hang" else 0)
else:
    sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that says its rank, and then does as told."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_command_without_launcher(script: Path, tmp_path: Path) -> None:
    done = spawn_cli([str(script), str(tmp_path), "7"], nproc=None)
    assert (done.returncode, done.stdout, done.stderr) == (7, "rank None of None\n", "")


def test_command_that_leaves_a_process_behind_is_refused_and_cleaned_up(script: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left processes behind"):
        spawn_cli([str(script), str(tmp_path), "leave"], nproc=None)
    assert wait_until_gone(int((tmp_path / "pid-child").read_text()))


def test_command_under_torchrun(script: Path, tmp_path: Path) -> None:
    done = spawn_cli([str(script), str(tmp_path), "0"], nproc=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 0 of 2") == done.stdout.count("rank 1 of 2") == 1, done.stdout


def test_command_that_hangs_is_killed_with_what_it_started(script: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"was not done after 2 s(?s:.*)rank None"):
        spawn_cli([str(script), str(tmp_path), "hang"], nproc=None, timeout=2)
    assert all(wait_until_gone(int((tmp_path / name).read_text())) for name in ("pid", "pid-child"))


def test_ranks_of_a_pool_stay_until_one_fails() -> None:
    pool = RankPool()
    try:
        first = pool.run(2, own_process)
        assert [total for _, total in first] == [1, 1] and len({pid for pid, _ in first}) == 2
        assert [pid for pid, _ in pool.run(3, own_process)[:2]] == [pid for pid, _ in first], "and are joined by more"
        assert [total for _, total in pool.run(1, own_process)] == [0], "a group for each call"
        with pytest.raises(RanksError, match=r"rank 1 failed:(?s:.*)ValueError: no"):
            pool.run(2, fail_on_the_last)
        assert not {pid for pid, _ in pool.run(2, own_process)} & {pid for pid, _ in first}
    finally:
        pool.close()


def own_process(rank: int) -> tuple[int, int]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return os.getpid(), int(total)


def fail_on_the_last(rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        raise ValueError("no")
