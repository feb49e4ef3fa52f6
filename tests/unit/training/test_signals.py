"""Signals that ask a run to exit: noted while it trains, else they end it at once, also where Python does not hear them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from megatron.training.signals import SIGNALS, ExitSignals
from megatron.verification.local_ranks import run_ranks


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    def body(_: int) -> None:
        seen: list[int] = []
        signal.signal(number, lambda got, frame: seen.append(got))
        with pytest.raises(KeyError), ExitSignals(85) as exits, exits.noted():
            assert exits.seen is None and exits.words() == "on a signal to another rank"
            for _ in range(2):
                os.kill(os.getpid(), number)
            assert exits.seen is number and exits.words() == f"on {number.name}"
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


DEAF = """
import os, select, sys, time
from megatron.training.signals import ExitSignals
from megatron.parallel.context import dist
with ExitSignals(77):
    print("there", flush=True)
    dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False).get("never")
"""


def test_a_rank_that_waits_for_others_leaves_at_once() -> None:
    """It waits in a library, where no handler of Python's would run for minutes."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    child = subprocess.Popen(
        [sys.executable, "-c", DEAF, str(store.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and select.select([child.stdout], [], [], 60)[0], "it does not start"
        time.sleep(0.5)
        child.terminate()
        _, said = child.communicate(timeout=20)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 77 and said == "pretrain_gpt.py: SIGTERM before training: there is nothing to save\n"
