"""Signals that ask a run to exit: noted while it trains, else they end it at once, also where Python does not hear them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training.signals import SIGNALS, ExitSignals
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.cli import fork_program


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    def body(_: int) -> None:
        seen: list[int] = []
        signal.signal(number, lambda got, frame: seen.append(got))
        with pytest.raises(KeyError), ExitSignals(85) as exits, exits.deferred():
            assert exits.received is None and exits.describe() == "on a signal to another rank"
            for _ in range(2):
                os.kill(os.getpid(), number)
            assert exits.received is number and exits.describe() == f"on {number.name}"
            time.sleep(0.1)  # the other thread has heard of it too
            raise KeyError
        assert seen == []
        os.kill(os.getpid(), number)
        assert seen == [number]

    run_ranks(1, body, init=False)


def test_a_child_ends_as_any_other_and_its_parent_does_not() -> None:
    def body(_: int) -> None:
        with ExitSignals(85):
            read_end, write_end = os.pipe()
            if not (child := os.fork()):
                os.write(write_end, b".")
                signal.pause()
                os._exit(0)
            os.read(read_end, 1)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            time.sleep(0.2)

    run_ranks(1, body, init=False)


def _deaf(port: int) -> None:
    with ExitSignals(77):
        print("there", flush=True)
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).get("never")


def test_a_rank_that_waits_for_others_leaves_at_once(tmp_path: Path) -> None:
    """It waits in a library, where no handler of Python's would run for minutes."""
    port, told = os.pipe()
    said, errors = tmp_path / "said", tmp_path / "errors"
    pid = fork_program(lambda: _deaf(int(os.read(port, 5))), said, errors)
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # after the fork, since it has a thread
        os.write(told, f"{store.port:5d}".encode())
        until = time.monotonic() + 60
        while said.read_text() != "there\n":
            assert time.monotonic() < until, "it does not start"
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 20
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.02)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(port)
        os.close(told)
    assert os.waitstatus_to_exitcode(ended[1]) == 77
    assert errors.read_text() == "pretrain_gpt.py: SIGTERM before training: there is nothing to save\n"
