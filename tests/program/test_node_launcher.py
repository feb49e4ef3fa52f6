"""Runs with --nproc: what the terminal shows at the end, the log files of the ranks, signals, and the exit code."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.training import failure
from megatron_lab.resilience import node_launcher
from tests.program.test_run_terminal import Terminal, seen
from tests.support.cli import last_rows
from tests.support.runs import arguments, at_iteration, complete_checkpoints
from tests.support.supervised import Node

ENDLESS: dict[str, Any] = {"num_layers": 1, "train_iters": 100_000, "log_interval": 1, "lr_decay_style": "constant"}
STEP_S = 0.1


def start(folder: Path, before: Callable[[], None] | None = None, step_s: float = STEP_S, **settings: Any) -> Node:
    """Start two ranks of a tiny run that saves in this folder.

    Args:
        before: called in the launcher, before it forks the ranks.
    """

    def launch(words: Sequence[str]) -> None:
        tempfile.tempdir = str(folder)
        if before is not None:
            before()
        pretrain_gpt.main([*words])

    words = ["--nproc", "2", *arguments(**{**ENDLESS, "save": folder / "save", "load": folder / "save", **settings})]
    return Node(folder / "said", words, step_s, launch)


def on_second_rank(iteration: int, action: Callable[[], None]) -> Callable[[], None]:
    """For `start`: call an action on rank 1 before an iteration."""

    def act(_: Any) -> None:
        if os.environ["RANK"] == "1":
            action()

    return lambda: at_iteration(iteration, act)


def logs(folder: Path) -> list[str]:
    """The log files of the ranks of the only run in this folder, in the order of ranks."""
    (log_folder,) = (folder / "save" / "logs").iterdir()
    files = sorted(log_folder.iterdir())
    assert [file.name for file in files] == ["rank_0.log", "rank_1.log"], files
    return [file.read_text() for file in files]


def assert_all_end(ranks: Iterable[int]) -> None:
    """Processes of ranks, which the launcher has ended or left alone."""
    until = time.monotonic() + 20
    while left := [rank for rank in ranks if Path(f"/proc/{rank}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """With its signal, what to do, and its log file; the other rank ends too."""
    node = start(tmp_path)
    node.wait_for("iteration        2/")
    ranks = [*node.ranks().values(), node.kill_rank(1)]
    assert node.ended() == 128 + signal.SIGKILL, node.said()
    rows = " ".join(last_rows(node.said()).split())
    assert rows.count("rank 1 was ended by SIGKILL after iteration") == 1 and "`dmesg`" in rows
    assert "The same command continues from the newest checkpoint" in rows
    assert rows.endswith("rank_1.log") and f"Log of rank 1: {tmp_path}/save/logs/" in rows
    assert "lost contact" not in node.said() and "Traceback" not in node.said()
    first_log, _ = logs(tmp_path)
    assert "iteration        2/" in first_log
    assert_all_end(ranks)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGUSR2, marks=pytest.mark.full("SIGINT"))])
def test_a_signal_saves_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches the process group of the terminal, others the launcher alone. Each rank gets it once."""
    node = start(tmp_path)
    node.wait_for("iteration        2/")
    ranks = node.ranks().values()
    (os.killpg if number == signal.SIGINT else os.kill)(node.pid, number)
    assert node.ended() == 85, node.said()
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert node.said().count(f"{name}: the run finishes this step, saves and exits") == 1
    assert f"exiting on {number.name}" in last_rows(node.said()) and "ended with exit code" not in node.said()
    assert len(complete_checkpoints(tmp_path / "save")) == 1
    assert_all_end(ranks)


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    """A step that hangs does not keep it."""

    def before() -> None:
        node_launcher.SAME_KEY_PRESS_S = 0.0
        at_iteration(2, lambda _: time.sleep(600))

    node = start(tmp_path, before)
    node.wait_for("iteration        1/")
    ranks = node.ranks().values()
    node.tell(signal.SIGINT)
    node.wait_for("A second Ctrl-C exits at once")
    node.tell(signal.SIGINT)
    assert node.ended(20) == 130 and "second Ctrl-C: the ranks were ended at once" in last_rows(node.said()), node.said()
    assert_all_end(ranks)


def test_ctrl_c_before_training(tmp_path: Path) -> None:
    """When the ranks have just been forked. There is no traceback."""
    node = start(tmp_path)
    node.wait_for("2 ranks on this node")
    node.tell(signal.SIGINT)
    assert node.ended() == 130, node.said()
    _, *rest = node.said().splitlines()
    assert rest in (["pretrain_gpt.py: interrupted"], ["pretrain_gpt.py: SIGINT before training: there is nothing to save"])


def test_a_full_pipe_does_not_keep_signals(tmp_path: Path) -> None:
    """As after Ctrl-S in a terminal. The run goes on, and its log files are complete."""

    def before() -> None:
        node_launcher._DRAIN_TIME_S = 0.0
        _, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        with suppress(BlockingIOError):
            while True:
                os.write(write_fd, b"x" * 4096)
        os.set_blocking(write_fd, True)
        os.dup2(write_fd, 1)

    node = start(tmp_path, before)
    node.wait_for(lambda: any("iteration        2/" in file.read_text() for file in tmp_path.glob("save/logs/*/rank_0.log")))
    node.tell(signal.SIGTERM)
    assert node.ended() == 85, node.said()
    assert "SIGTERM: the run finishes this step, saves and exits" in node.said() and "exiting on SIGTERM" in logs(tmp_path)[0]


def test_an_error_is_printed_once(tmp_path: Path) -> None:
    """Of the rank that failed, without the consequences for others. Its traceback is in its log file."""

    def fail() -> None:
        raise RuntimeError("the cheese of this device is gone")

    node = start(tmp_path, on_second_rank(3, fail))
    assert node.ended() == 1, node.said()
    text = " ".join(node.said().split())
    assert text.count("the cheese of this device is gone") == 1 and "lost contact" not in text, node.said()
    rows = " ".join(last_rows(node.said()).split())
    assert "error: rank 1: RuntimeError" in rows and "rank 1 ended with exit code 1 after iteration 2." in rows
    assert "Traceback" not in node.said() and "Traceback" in logs(tmp_path)[1]
    assert not [*tmp_path.glob("megatron-errors-*")]


def test_the_output_of_an_unexpected_exit_is_shown(tmp_path: Path) -> None:
    """A library ends the process, with a line on stderr. The exit code is its own."""

    def leave() -> None:
        os.write(2, b"library: cannot go on\n")
        os._exit(7)

    node = start(tmp_path, on_second_rank(2, leave), save=tmp_path / "save", load=None)
    assert node.ended() == 7, node.said()
    rows = " ".join(last_rows(node.said()).split())
    assert rows.count("library: cannot go on") == 1 and "rank 1 ended with exit code 7 after iteration 1." in rows
    assert f"--load {tmp_path}/save continues" in rows


def test_ranks_save_and_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    node = start(tmp_path)
    node.wait_for("iteration        2/")
    ranks = node.ranks().values()
    node.tell(signal.SIGKILL)
    assert node.ended() == -signal.SIGKILL
    assert_all_end(ranks)
    assert complete_checkpoints(tmp_path / "save")


def test_a_rank_that_hangs_at_its_end_is_ended(tmp_path: Path) -> None:
    """It is named before."""

    def before() -> None:
        node_launcher.EXIT_NOTICE_S, node_launcher.EXIT_TIMEOUT_S = 0.2, 0.4
        exit_immediately = failure.exit_immediately

        def hang(code: int = 0) -> None:
            if os.environ["RANK"] == "1":
                time.sleep(600)
            exit_immediately(code)

        failure.exit_immediately = hang

    node = start(tmp_path, before, train_iters=2, report=False, loss_picture=False)
    node.wait_for("iteration        1/")
    ranks = node.ranks().values()
    assert node.ended() == 1, node.said()
    assert "waiting for rank 1 to end" in node.said() and "done after 2 iterations" in node.said()
    rows = " ".join(last_rows(node.said()).split())
    assert "the launcher has ended rank 1, which did not end within" in rows and "rank_1.log" in rows
    assert_all_end(ranks)


def test_auto_without_a_gpu_is_one_rank(tmp_path: Path) -> None:
    """It says so; the folder of the log files can be chosen, and other files in it stay. The run itself is the same as without a
    launcher: it calls its own exit functions, but not those of the launcher."""
    (tmp_path / "logs/errors").mkdir(parents=True)

    def register(_: Any) -> None:
        atexit.register((tmp_path / "rank").touch)

    def launch(words: Sequence[str]) -> None:
        atexit.register((tmp_path / "launcher").touch)
        at_iteration(1, register)
        pretrain_gpt.main([*words])

    settings = {**ENDLESS, "train_iters": 2, "device": "cpu", "save": tmp_path / "save"}
    words = ["--nproc=auto", "--log-dir", str(tmp_path / "logs"), *arguments(**settings)]
    node = Node(tmp_path / "said", words, launcher=launch)
    assert node.ended() == 0, node.said()
    assert node.said().count("--nproc auto starts 1 rank, because --device is cpu") == 1
    assert f"1 rank on this node, logs: {tmp_path}/logs/rank_0.log" in node.said() and "done after 2 iterations" in node.said()
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["errors", "rank_0.log"]
    assert (tmp_path / "rank").exists() and not (tmp_path / "launcher").exists()
    assert "done after 2 iterations" in (tmp_path / "logs/rank_0.log").read_text()


@pytest.mark.parametrize(("closed", "words", "code"), [(">&-", "--version", 0), ("<&- >&- 2>&-", "--bogus", 2)])
def test_closed_streams(closed: str, words: str, code: int) -> None:
    """What the program prints there is lost. Files that it opens do not take their descriptors."""
    command = f"exec {sys.executable} {pretrain_gpt.__file__} {words} {closed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_a_terminal_shows_the_progress_of_the_first_rank(tmp_path: Path) -> None:
    """Under the log, with the bar; messages replace the bar. The log file has only the lines that stay."""
    terminal = Terminal(80)

    def launch(words: Sequence[str]) -> None:
        terminal.take_stdout()
        os.dup2(terminal.slave, 2)
        pretrain_gpt.main([*words])

    words = ["--nproc", "2", *arguments(**{**ENDLESS, "train_iters": 6, "save": tmp_path / "save"})]
    node = Node(tmp_path / "said", words, STEP_S, launch)
    assert node.ended() == 0, terminal.text()
    text = terminal.text()
    lines = [line.rstrip() for line in seen(text) if line.strip()]
    first_log, _ = logs(tmp_path)
    logged = [line.rstrip() for line in first_log.splitlines() if line.strip()]
    assert "━" in text and "\x1b" not in first_log and "━" not in first_log
    assert "2 ranks on this node with OMP_NUM_THREADS=1" in " ".join(lines[:2])
    assert [line for line in logged if line.startswith("it ")] == [line for line in lines if line.startswith("it ")]
    assert "done after 6 iterations" in logged and not any("━" in line for line in lines)
    with suppress(OSError):
        os.close(terminal.slave)
