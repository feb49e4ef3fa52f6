"""The end of a run that fails: commands that repeat the tests, with their seeds and examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repeating import MOST, lines, seed

ROOT = Path(__file__).parents[2]
FAILING = """
import hypothesis, pytest
from hypothesis import strategies as st

@hypothesis.given(st.integers(), st.text("ab"))
def test_drawn(number, text):
    assert number < 10

@pytest.mark.parametrize("name", ["a b", "it's"])
def test_named(name):
    raise AssertionError("the line with seed 17 is wrong")

def test_right():
    pass

@pytest.fixture
def broken():
    raise RuntimeError

def test_without_its_fixture(broken):
    pass
"""


def test_a_run_that_fails_ends_with_what_repeats_it(tmp_path: Path) -> None:
    """Run pytest with the settings of these tests in another process; a worker's reports come to the same place."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_it.py").write_text(FAILING)
    run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--full", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*run, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout.rstrip().splitlines()
    end = told[told.index("4 failed; each repeated alone by:") + 1 :]
    assert done.returncode == 1 and len(end) == 7
    assert [line for line in end if line.startswith("bash")] == [
        "bash tests/run.sh -n 0 --full test_it.py::test_drawn",
        "bash tests/run.sh -n 0 --full 'test_it.py::test_named[a b]'",
        """bash tests/run.sh -n 0 --full 'test_it.py::test_named[it'"'"'s]'""",
        "bash tests/run.sh -n 0 --full test_it.py::test_without_its_fixture",
    ]
    assert (
        end[1].startswith("    example, the same in each run: test_drawn(number=10, text='')") and "@reproduce_failure(" in end[1]
    )
    assert end[3] == end[5] == "    the line with seed 17 is wrong"


def test_many_failures_are_told_in_few_lines() -> None:
    """A node that fails twice, in a test and in its fixture, counts once."""
    failures = [(f"tests/test_x.py::test_y[{number}]", "E   seed 3\n") for number in range(MOST + 5)]
    told = list(lines([*failures, failures[0]], full=False))
    assert len(told) == 2 * MOST + 2 <= 30
    assert told[0].startswith(f"{MOST + 5} failed") and told[-1] == "and 5 more"
    assert told[1] == "bash tests/run.sh -n 0 'tests/test_x.py::test_y[0]'"


def test_a_random_command_line_brings_its_own_command() -> None:
    report = "    seed(4)\nE   WrongError: Traceback\nE   ValueError\nE   Repeat it by: bash tests/run.sh --fuzz-repeat 2 --lr 1"
    assert seed(report) == "Repeat it by: bash tests/run.sh --fuzz-repeat 2 --lr 1"
    assert seed("E   assert 1 == 2") == ""
