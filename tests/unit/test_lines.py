"""Line coverage by `python -m tests.lines`: which lines count, which the recorder writes, and the table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lines.__main__ import executable_lines, main, read_lines, table

LATER_PYTHON = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
SOURCE = '''"""A module."""

import os


def half(number: int) -> int:
    """A docstring is no code of its function."""
    # Nor is a comment.
    if number % 2:
        return -1
    return number // 2


class Empty:
    width = 2

    def wide(self) -> bool:
        return (
            self.width > 1
        )


half(4)
if os.environ.get("FORKED"):
    if os.fork() == 0:
        half(3)
        os._exit(0)
    os.wait()
'''


def lines_run(folder: Path, source: str, **environment: str) -> set[int]:
    """Return the lines of a module that recorders have written by now, after importing it once more."""
    root, lines = folder / "root", folder / "lines"
    (root / "megatron").mkdir(parents=True, exist_ok=True)
    lines.mkdir(exist_ok=True)
    (root / "megatron" / "module.py").write_text(source)
    recorder = Path(__file__).resolve().parents[1] / "lines"
    paths = {"PYTHONPATH": f"{recorder}:{root}", "TEST_LINES_FOLDER": str(lines), "TEST_LINES_ROOT": f"{root}/"}
    subprocess.run(
        [sys.executable, "-c", "import megatron.module"], env={**os.environ, **paths, **environment}, check=True, timeout=60
    )
    return read_lines(lines)["megatron/module.py"]


def test_lines_with_code_are_executable_inside_functions_too(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    lines = executable_lines(path)
    assert {9, 10, 11, 15, 19, 23, 26} <= lines, "statements of the module, of a class, of a function and of a method"
    assert not {2, 4, 5, 7, 8, 12, 20, 21, 22} & lines, "empty lines, comments, docstrings and closing brackets"


@LATER_PYTHON
def test_the_recorder_writes_each_line_that_runs_in_forks_too(tmp_path: Path) -> None:
    assert {9, 11, 23} <= (once := lines_run(tmp_path, SOURCE)) and not {10, 19, 26} & once
    assert {10, 26} <= lines_run(tmp_path, SOURCE, FORKED="1"), "the fork ran a branch that its parent did not"


@LATER_PYTHON
@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE, (80, hard)", "RLIMIT_NOFILE, (3, hard)"])
def test_limits_on_files_neither_end_what_is_recorded_nor_spoil_the_record(limit: str, tmp_path: Path) -> None:
    limited = f"""
import resource


def once():
    return 1


def last():
    return once()


soft, hard = resource.getrlimit(resource.{limit.split(",")[0]})
once()
resource.setrlimit(resource.{limit})
last()
resource.setrlimit(resource.{limit.split(",")[0]}, (soft, hard))
last()
"""
    assert lines_run(tmp_path, limited) - {1} == {2, 5, 6, 9, 10, 13, 14, 15, 18}, "16 and 17 ran under the limit"


def test_lines_of_several_processes_are_joined(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("\nmegatron/a.py:1;\nmegatron/b/c.py:7;")
    (tmp_path / "2").write_text("\nmegatron/a.py:1;\nmegatron/a.py:2;")
    assert read_lines(tmp_path) == {"megatron/a.py": {1, 2}, "megatron/b/c.py": {7}}


def test_the_table_counts_lines_that_have_code_by_package() -> None:
    wanted = {"megatron/a/x.py": {1, 2, 3, 4}, "megatron/a/y.py": {1, 2}, "megatron/b/z.py": {1, 2}}
    run = {"megatron/a/x.py": {1, 2, 9}, "megatron/b/z.py": {1, 2}, "megatron/gone.py": {1}}
    assert table(wanted, run).splitlines()[2:] == [
        "| `megatron/a` | 6 | 2 | 33.33% |",
        "| `megatron/b` | 2 | 2 | 100.00% |",
        "| all | 8 | 4 | 50.00% |",
    ]


def test_an_older_python_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(SystemExit, match=r"needs Python 3\.12 or newer, and this is 3\."):
        main([])
