"""The warm Python of the tests runs programs of the repository as a fresh interpreter does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof.test_distributed_harness import gone, wait_until_gone
from tests.support.cli import ROOT, spawn_cli
from tests.support.warm_python import warm_python

PROGRAM = "tests/support/warm_program.py"


@pytest.mark.parametrize("words", [["0"], ["7", "a b", "*"], ["raise"], ["die"]], ids=lambda words: words[0])
def test_as_a_fresh_interpreter(words: list[str]) -> None:
    """The same exit code or signal, arguments, streams, folder, environment and path."""
    fresh, warm = (
        subprocess.run(
            [python, PROGRAM, *words],
            cwd=ROOT,
            env={**os.environ, "MINE": "yes"},
            input="given",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for python in (sys.executable, warm_python())
    )
    assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout)
    assert warm.stderr.splitlines()[:1] == fresh.stderr.splitlines()[:1] == ["told"]
    assert warm.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1]


def test_what_is_no_program_of_the_repository_runs_in_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import sys\nprint('torch' in sys.modules, sys.executable)")
    for words in (["other.py"], ["-c", (tmp_path / "other.py").read_text()]):
        done = subprocess.run([warm_python(), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"False {sys.executable}\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_program(number: signal.Signals) -> None:
    """Handled or not, and what kills the client ends the program too."""
    words = [warm_python(), PROGRAM, "wait"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout is not None
        client.stdout.readline()
        pid = int(client.stdout.readline())
        assert pid != client.pid and not gone(pid)
        client.send_signal(number)
        assert client.wait(30) == (9 if number == signal.SIGUSR1 else -number)
        assert wait_until_gone(pid)


@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_program_leaves_behind_is_seen_and_ended(fresh: bool) -> None:
    with pytest.raises(AssertionError, match=r"left processes behind: \[\d+\]") as error:
        spawn_cli([PROGRAM, "leave"], None, fresh=fresh)
    (pid,) = re.findall(r"behind: \[(\d+)\]", str(error.value))
    assert wait_until_gone(int(pid))
