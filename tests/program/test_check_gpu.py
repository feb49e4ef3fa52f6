"""The checks for a GPU run on a CPU, say what needs CUDA, and end alone whatever happens in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT
from tools import check_gpu
from tools.gpu import table
from tools.gpu.checks import CHECKS, LAYOUTS, SCRIPTS
from tools.gpu.isolated import Ended, run

PAGE = (ROOT / "docs/gpu.md").read_text()


def test_some_checks_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products, a run that overflows, one rank of 3,072; what needs CUDA says so."""
    file = tmp_path / "found.json"
    only = "products,fp16-overflow,varlen,rank-3072gpu_gpt_1t"
    assert check_gpu.main(["--device", "cpu", "--only", only, "--json", str(file)]) == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    states = {one["name"]: one["state"] for one in report["checks"]}
    assert states == {"products": "pass", "varlen": "needs CUDA", "fp16-overflow": "pass", "rank-3072gpu_gpt_1t": "pass"}
    assert all(one["figure"] for one in report["checks"] if one["state"] == "pass")
    assert "rank 0 of 3072" in report["checks"][-1]["figure"] and report["device_name"] == "CPU" and report["torch"]
    assert capsys.readouterr().out.count("\n") == 6, "a head, a line for each, a sum"
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert check_gpu.main(["--table", str(file), "--write-docs", str(page)]) == 0
    assert "| varlen | needs CUDA |" in page.read_text() and page.read_text().startswith(PAGE.partition(table.BEGIN)[0])


def test_what_hangs_ends_with_its_children(tmp_path: Path) -> None:
    """Also a child that has gone to a session of its own."""
    note = tmp_path / "pid"
    child = f"import os, time; os.setsid(); open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    line = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    ended = run([sys.executable, "-c", line], 12, tmp_path)
    assert ended.code is None and ended.seconds < 60
    assert not _alive(int(note.read_text()))


def _alive(pid: int) -> bool:
    """Whether it runs. One that has ended may wait for a parent that collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_how_a_check_ended_is_told() -> None:
    passed = Ended(1.0, 0, 'text\nresult: {"state": "pass", "figure": "3"}\n', "")
    assert check_gpu.verdict(passed, 9, out_of_budget=False) == {"state": "pass", "figure": "3", "words": ""}
    found = check_gpu.verdict(Ended(1.0, -9, "", "first\nCUDA out of memory. Tried\nlast"), 9, out_of_budget=False)
    assert found == {"state": "crash", "words": "exit status -9: CUDA out of memory. Tried"}
    assert check_gpu.verdict(Ended(1.0, 0, "", ""), 9, out_of_budget=False)["state"] == "crash", "it found nothing"
    hung = Ended(9.0, None, passed.out, "")
    assert [check_gpu.verdict(hung, 9, out_of_budget=out)["state"] for out in (False, True)] == ["too slow", "no time left"]
    check = CHECKS[0]
    assert check_gpu.one(check, "cuda", left=0.0)["state"] == "no time left"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "products,nothing"], "no check is called nothing"),
        (["--minutes", "0"], "'0' is no time above 0"),
        (["--only", ""], "names no check"),
    ],
)
def test_a_wrong_command_line_is_told(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_gpu.main(flags)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_files_that_are_not_results_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert check_gpu.main(["--table", str(file)]) == 2 and "is not what --json writes" in capsys.readouterr().err
    assert check_gpu.main(["--table", str(tmp_path / "none")]) == 2


def test_without_a_gpu_it_says_so() -> None:
    """And nothing runs."""
    done = subprocess.run(
        [sys.executable, "tools/check_gpu.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "torch sees no GPU here" in done.stderr and not done.stdout


def test_every_script_and_check_has_its_place() -> None:
    """Each launch script for GPUs is a check; the page names every check."""
    scripts = {path.stem for path in (ROOT / "examples").glob("train_*.sh")}
    assert scripts == {*SCRIPTS, "train_cpu_laptop"} and len({check.name for check in CHECKS}) == len(CHECKS)
    named = re.findall(r"`([\w.-]+)`", PAGE.partition("## Results")[0])
    for check in CHECKS:
        assert any(check.name == name or (name.endswith("...") and check.name.startswith(name[:-3])) for name in named), check.name
    assert len(LAYOUTS) == 6
