"""SIGTERM becomes a request, and only inside the block."""

from __future__ import annotations

import os
import signal

import pytest

from megatron.training.failure import ExitSignal


def test_signal_is_noted_and_the_old_handler_comes_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with ExitSignal() as exit_signal:
            assert not exit_signal.requested
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert exit_signal.requested
        assert seen == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        with exit_signal:
            assert not exit_signal.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_comes_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyError), ExitSignal(signal.SIGUSR1):
        assert signal.getsignal(signal.SIGUSR1) != before
        raise KeyError
    assert signal.getsignal(signal.SIGUSR1) == before
