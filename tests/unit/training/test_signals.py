"""Signals that ask a run to exit: noted while it trains, else they end it at once, also where Python does not hear them."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.config.launcher import EXIT_SIGNALS
from megatron.training import signals
from megatron.training.signals import ExitSignals, get_exit_signals
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.cli import fork_program


@pytest.mark.parametrize("number", EXIT_SIGNALS)
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


def _run_alone(body: Callable[[], None], tmp_path: Path) -> tuple[int, str]:
    """In a process of its own; returns its exit status and what it printed to stderr."""
    (tmp_path / "errors").unlink(missing_ok=True)
    pid = fork_program(body, tmp_path / "out", tmp_path / "errors")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (tmp_path / "errors").read_text()


def _press_ctrl_c(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)


def test_one_press_of_ctrl_c_that_arrives_twice_is_one(tmp_path: Path) -> None:
    """From the terminal, and from a launcher that passes it on. It is announced once."""

    def body() -> None:
        with ExitSignals(85, saves=True) as exits, exits.deferred():
            _press_ctrl_c(2)
            assert exits.received is signal.SIGINT

    hint = "pretrain_gpt.py: Ctrl-C: the run finishes this step, saves and exits. A second Ctrl-C exits at once.\n"
    assert _run_alone(body, tmp_path) == (0, hint)


def test_a_second_ctrl_c_ends_at_once_and_other_signals_never_do(tmp_path: Path) -> None:
    def body() -> None:
        signals.SAME_KEY_PRESS_S = 0
        with ExitSignals(85, saves=False) as exits, exits.deferred():
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
                os.kill(os.getpid(), number)
                time.sleep(0.05)
            _press_ctrl_c(2)
            time.sleep(60)

    code, said = _run_alone(body, tmp_path)
    assert code == 130 and said.splitlines() == [
        "pretrain_gpt.py: SIGUSR2: the run finishes this step and exits (without --save nothing is saved)",
        "pretrain_gpt.py: SIGTERM: the run finishes this step and exits (without --save nothing is saved)",
        "pretrain_gpt.py: Ctrl-C: the run finishes this step and exits (without --save nothing is saved). A second Ctrl-C exits "
        "at once.",
        "pretrain_gpt.py: second Ctrl-C: exiting without waiting for the step or the save",
    ]


@pytest.mark.parametrize("is_torchrun", [False, True])
def test_torchrun_sends_sigterm_for_the_second_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_torchrun: bool) -> None:
    """From another launcher, SIGTERM after Ctrl-C does not keep a run from its save."""
    if is_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def body() -> None:
        signals.SAME_KEY_PRESS_S = 0
        with ExitSignals(85) as exits, exits.deferred():
            _press_ctrl_c(1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60 if is_torchrun else 0.2)
            assert exits.received is signal.SIGTERM

    code, said = _run_alone(body, tmp_path)
    assert code == (130 if is_torchrun else 0) and ("second Ctrl-C: exiting" in said) == is_torchrun


def test_a_failure_is_not_hidden_by_the_signal_of_the_launcher(tmp_path: Path) -> None:
    """Another rank was killed. This one reports what it saw, though the launcher already asks it to end."""

    def body() -> None:
        with ExitSignals(85) as exits:
            try:
                with exits.deferred():
                    raise ConnectionError("lost contact")
            except ConnectionError as error:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
                os.write(2, f"{error}\n".encode())

    assert _run_alone(body, tmp_path) == (0, "lost contact\n")


def test_a_signal_of_the_training_does_not_end_a_run_after_it(tmp_path: Path) -> None:
    """However late the thread that listens to signals gets its turn."""

    def body() -> None:
        late = ExitSignals._announce

        def announce(self: ExitSignals, signum: signal.Signals) -> None:
            time.sleep(0.1)
            late(self, signum)

        ExitSignals._announce = announce  # type: ignore[method-assign]
        with ExitSignals(85) as exits:
            with exits.deferred():
                os.kill(os.getpid(), signal.SIGUSR1)  # keeps the listener busy
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    code, said = _run_alone(body, tmp_path)
    assert code == 0 and "after training" not in said


def test_ctrl_c_outside_training(tmp_path: Path) -> None:
    def before() -> None:
        with ExitSignals(85):
            _press_ctrl_c(1)
            time.sleep(60)

    def after() -> None:
        with ExitSignals(85) as exits:
            with exits.deferred():
                pass
            _press_ctrl_c(1)
            time.sleep(60)

    assert _run_alone(before, tmp_path) == (130, "pretrain_gpt.py: SIGINT before training: there is nothing to save\n")
    assert _run_alone(after, tmp_path) == (130, "pretrain_gpt.py: SIGINT after training\n")


def test_a_program_that_trains_gets_its_ctrl_c_back(tmp_path: Path) -> None:
    """The handler is not entered, as in a notebook: the first ends `deferred` in order, the second raises."""

    def body() -> None:
        signals.SAME_KEY_PRESS_S = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exits = ExitSignals(85)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), exits.deferred():
                _press_ctrl_c(1)
                assert exits.received is signal.SIGINT
                _press_ctrl_c(1)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    code, said = _run_alone(body, tmp_path)
    assert code == 0 and said.count("A second Ctrl-C exits at once.") == 2


def test_the_signal_of_the_settings_and_one_that_nohup_ignores() -> None:
    def body(_: int) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup started the tests
        assert get_exit_signals("SIGQUIT") == (*EXIT_SIGNALS, signal.SIGQUIT) and get_exit_signals("SIGINT") == EXIT_SIGNALS
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ExitSignals(85, get_exit_signals("SIGQUIT")) as exits, exits.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert exits.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGQUIT)
            assert exits.received is signal.SIGQUIT

    run_ranks(1, body, init=False)


def test_signals_are_heard_with_descriptors_above_1024(tmp_path: Path) -> None:
    """`select` cannot wait for these."""

    def body() -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        filler = os.open(os.devnull, os.O_RDONLY)
        while os.dup(filler) < 1100:
            pass
        with ExitSignals(77) as exits:
            assert exits._read_fd > 1024
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    assert _run_alone(body, tmp_path)[0] == 77


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
