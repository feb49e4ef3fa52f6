"""The program that checks a GPU runs on a CPU, keeps to its time, and loses no result whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lab.commands import check_gpu
from megatron_lab.gpu import processes, report, session
from megatron_lab.gpu.checks import CHECKS, LAYOUTS, SCRIPTS, Check
from megatron_lab.gpu.context import CheckContext
from megatron_lab.gpu.jobs import build_train_step, create_random_batch, run_without_communication
from megatron_lab.gpu.processes import MarkedProcess
from megatron_lab.gpu.scripts import build_script_job
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.cli import ROOT
from tests.support.warm_python import warm_python

PAGE = (ROOT / "docs/gpu.md").read_text()
BY_NAME = {check.name: check for check in CHECKS}


@pytest.fixture(autouse=True)
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session in this process look at the device without another import of torch."""
    known = json.dumps({"torch": str(torch.__version__), "gpus": 0, "name": None})
    monkeypatch.setattr(check_gpu, "_PROBE_CODE", f"print({known!r})")


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[session.Worker]:
    """Start a real worker on the CPU, for all tests that leave it usable. Those that end one import torch for it anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.sys, "executable", warm_python())
        made = session.Worker("cpu", tmp_path_factory.mktemp("worker"))
    yield made
    made.close()


@pytest.fixture
def in_lasting(lasting: session.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions in this process use the lasting worker instead of starting and ending workers of their own."""

    class Borrowed:
        def __init__(self, device: str, folder: Path) -> None:
            assert device == "cpu" and folder.is_dir()

        run = staticmethod(lasting.run)
        close = staticmethod(lambda: None)

    monkeypatch.setattr(session, "Worker", Borrowed)


SMALL_SCRIPT = "rank-8gpu_llama_7b"
"""A check of a launch script that is planned in half a second."""
FULLEST = {SMALL_SCRIPT: (0, 8, 1), "rank-16nodes_long_llama_70b": (64, 128, 2), "rank-256gpu_deepseek_v3": (19, 256, 61)}
"""The rank of a launch script that takes most memory, the number of ranks, and the layers of the small model. The small models of
the last two scripts need care: 64 ranks share a sequence, and a layout names all layers."""


@pytest.mark.usefixtures("in_lasting")
def test_some_checks_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool) -> None:
    """Two launch scripts take long to plan, and a step in float64 long to make; they are checked with --full."""
    file = tmp_path / "results/gpu.json"
    scripts = [*FULLEST] if full else [SMALL_SCRIPT]
    names = ["weight-gradients", "varlen", *(["float64-windows"] if full else []), *scripts]
    assert check_gpu.main(["--device", "cpu", "--only", ",".join(names), "--json", str(file)]) == 0, capsys.readouterr().out
    results = {result["name"]: result for result in json.loads(file.read_text())["checks"]}
    assert list(results) == [check.name for check in CHECKS], "the file names all checks"
    states = {name: results[name]["state"] for name in names}
    assert states == {name: "needs CUDA" if name == "varlen" else "pass" for name in names}
    assert {result["state"] for name, result in results.items() if name not in names} == {"not run"}
    for name in scripts:
        assert results[name]["figure"].startswith("rank {} of {}: ".format(*FULLEST[name]))
    printed = capsys.readouterr().out
    assert all(re.search(rf"^(pass|needs CUDA) +{name} ", printed, re.MULTILINE) for name in names)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert check_gpu.main(["--table", str(file), "--write-docs", str(page)]) == 0
    assert "| varlen | needs CUDA |" in page.read_text() and page.read_text().startswith(PAGE.partition(report.START_MARKER)[0])


@pytest.mark.parametrize("name", [name for name in FULLEST if name != SMALL_SCRIPT])
def test_the_fullest_rank_of_a_small_model_makes_a_step(name: str, tmp_path: Path) -> None:
    """Make the same step as scripts whose check takes long to plan, of fewer microbatches and without the plan."""
    rank, *sizes = FULLEST[name]

    def steps(_: int) -> list[int]:
        job = build_script_job(BY_NAME[name].argument, CheckContext("cpu", tmp_path))
        job = job.with_microbatches(job.topology.pp)
        with build_train_step(job, rank, torch.device("cpu")) as step:
            step.prepare(job.topology.pp)
            run_without_communication(step, create_random_batch(job, step))
        return [job.world_size, job.config.model.num_layers]

    assert run_ranks(1, steps, init=False) == [sizes]


@pytest.mark.full("test_a_second_signal_does_not_disturb_the_summary, and the two tests of --resume")
def test_an_interrupted_session_is_resumed(in_lasting: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM, which `timeout` sends, ends with a complete file and a summary."""
    file, names = tmp_path / "gpu.json", ["varlen", "kill-resume", SMALL_SCRIPT]
    command = [sys.executable, "tools/check_gpu.py", "--device", "cpu", "--only", ",".join(names), "--json", str(file)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("needs CUDA") and " varlen " in line:
                    break
            states = {result["name"]: result["state"] for result in json.loads(file.read_text())["checks"]}
            assert states["varlen"] == "needs CUDA" and states["kill-resume"] == "not run", "the file is complete after each"
            while not list(tmp_path.glob("check_gpu_*/kill-resume/log-*")):
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "interrupted: kill-resume" in printed
    written = json.loads(file.read_text())
    assert (written["device_name"], written["gpus"], written["torch"]) == ("CPU", 0, torch.__version__)
    states = {result["name"]: result["state"] for result in written["checks"]}
    assert [states[name] for name in names] == ["needs CUDA", "interrupted", "not run"]
    assert check_gpu.main(["--device", "cpu", "--only", f"varlen,{SMALL_SCRIPT}", "--resume", str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^pass +{SMALL_SCRIPT}", printed, re.MULTILINE)
    assert not re.search(r"^needs CUDA +varlen ", printed, re.MULTILINE), "it has its result"
    states = {result["name"]: result["state"] for result in json.loads(file.read_text())["checks"]}
    assert [states[name] for name in names] == ["needs CUDA", "interrupted", "pass"]


def test_a_failed_check_that_is_named_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fix. Without its name it keeps its result."""
    file = tmp_path / "gpu.json"
    old = check_gpu.create_report("cpu")
    for result in old["checks"]:
        result["state"] = "fail" if result["name"] == "varlen" else "pass"
    file.write_text(json.dumps(old))
    states = []

    def run(checks: Any, results: dict[str, Any], *rest: Any) -> None:
        states.append((results["varlen"]["state"], results["device"]["state"]))

    monkeypatch.setattr(check_gpu, "run_checks", run)
    check_gpu.main(["--device", "cpu", "--resume", str(file)])
    check_gpu.main(["--device", "cpu", "--resume", str(file), "--only", "varlen,device"])
    assert states == [("fail", "pass"), ("not run", "pass")]


def test_results_of_another_device_are_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    old = {**check_gpu.create_report("cpu"), "device_name": "NVIDIA H100"}
    file.write_text(json.dumps(old))
    assert check_gpu.main(["--device", "cpu", "--resume", str(file)]) == 2
    assert "has results of device NVIDIA H100, but this session has device CPU" in capsys.readouterr().err


# ---- time


class FakeWorker:
    """Takes the seconds that a test says, on a clock of its own."""

    def __init__(self, clock: list[float], seconds: dict[str, float]) -> None:
        self.clock, self.seconds, self.started, self.closed = clock, seconds, 0, 0

    def __call__(self, device: str, folder: Path) -> FakeWorker:
        self.started += 1
        return self

    def run(self, check: Check, data: dict[str, Any], limit: float) -> tuple[dict[str, Any], bool]:
        """A check of more seconds than the limit is ended, and one named crash takes the process with it."""
        took = self.seconds[check.name]
        self.clock[0] += min(took, limit)
        if check.name == "crash":
            return {"state": "crash", "message": "exit status -11"}, False
        if took > limit:
            return {"state": "too slow", "message": ""}, False
        return {"state": "pass", "figure": "1", "message": "", "data": {"seen": sorted(data)}}, True

    def close(self) -> None:
        """Counts."""
        self.closed += 1


def _session(
    monkeypatch: pytest.MonkeyPatch, estimates: dict[str, float], seconds: dict[str, float], budget: float
) -> tuple[dict[str, Any], FakeWorker, float]:
    clock = [0.0]
    worker = FakeWorker(clock, seconds)
    monkeypatch.setattr(session, "Worker", worker)
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    checks = [Check(name, "", "", estimate, estimate) for name, estimate in estimates.items()]
    results = {check.name: session.create_result(check) for check in checks}
    session.run_checks(checks, results, "cuda", budget, lambda result: None)
    return results, worker, clock[0]


def test_what_does_not_fit_is_left_out_and_shorter_checks_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = {"first": 10.0, "long": 100.0, "short": 5.0}
    results, _, clock = _session(monkeypatch, estimates, {"first": 12.0, "long": 100.0, "short": 5.0}, budget=60.0)
    assert [result["state"] for result in results.values()] == ["pass", "no time left", "pass"]
    assert results["long"]["message"] == "takes about 100 s, 48 s were left" and clock <= 60.0
    assert results["short"]["data"]["seen"] == ["first"], "a check gets the data of earlier ones"


def test_a_check_that_takes_too_long_ends_and_the_next_has_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = {"hangs": 10.0, "crash": 5.0, "last": 5.0}
    results, worker, clock = _session(monkeypatch, estimates, {"hangs": 1e9, "crash": 1.0, "last": 1.0}, budget=480.0)
    assert [result["state"] for result in results.values()] == ["too slow", "crash", "pass"]
    assert worker.started == worker.closed == 3 and clock == 10.0 + session._SLACK_S + 1.0 + 1.0


def test_the_budget_ends_a_check_that_a_resumed_session_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    results, _, clock = _session(monkeypatch, {"slow": 10.0, "next": 1.0}, {"slow": 1e9, "next": 1.0}, budget=15.0)
    assert [result["state"] for result in results.values()] == ["no time left", "no time left"] and clock == 15.0
    assert set(session.REPEATABLE) >= {"no time left", "interrupted", "not run"}


def test_most_checks_fit_into_eight_minutes() -> None:
    """By their estimates: everything but the additions to the first seven groups and the launch scripts."""
    seconds = [check.gpu_seconds for check in CHECKS]
    first_seven = [check.name for check in CHECKS].index("kill-resume") + 1
    assert sum(seconds[:first_seven]) <= 480 - 60
    first_speed = [check.name for check in CHECKS].index("speed-350m")
    assert sum(seconds[:first_speed]) <= 50, "the first figure of speed comes within the first minute"


# ---- the process of the checks


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[session.Worker]:
    """Start a real worker on the CPU, for a test that ends it."""
    made = session.Worker("cpu", tmp_path)
    yield made
    made.close()


def test_an_exception_is_a_crash_with_its_line_and_the_process_goes_on(lasting: session.Worker) -> None:
    result, usable = lasting.run(BY_NAME["flash-parts"], {}, 60.0)  # the CPU has no such kernel
    assert result["state"] == "crash" and usable and "flash_range_pairs.py" in result["message"], result
    assert any("in flash_parts" in line for line in result["data"]["log"]), "the traceback"
    result, usable = lasting.run(BY_NAME["cross-entropy"], {}, 60.0)
    assert result["state"] == "pass" and usable


def test_the_end_of_the_process_is_a_crash(worker: session.Worker, tmp_path: Path) -> None:
    def kill_within_the_check() -> None:
        while not (tmp_path / "two-ranks-tensor").exists():
            time.sleep(0.01)
        worker._process.popen.kill()

    killer = threading.Thread(target=kill_within_the_check, daemon=True)
    killer.start()
    result, usable = worker.run(BY_NAME["two-ranks-tensor"], {}, 60.0)
    killer.join()
    assert (result["state"], usable) == ("crash", False) and "exit status -9" in result["message"]


def test_a_time_limit_leaves_no_process(worker: session.Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is over once the check has started two runs."""

    def wait(streams: list[int], timeout: float) -> list[int]:
        assert 0.0 < timeout <= 6.0
        while len(list(tmp_path.glob("kill-resume/log-*"))) < 2:
            time.sleep(0.01)
        return []

    monkeypatch.setattr(session.multiprocessing.connection, "wait", wait)
    result, usable = worker.run(BY_NAME["kill-resume"], {}, 6.0)
    assert (result["state"], usable) == ("too slow", False)
    assert any("in kill_and_resume" in line for line in result["data"]["log"]), "where it was"
    mark = worker._process._mark
    worker._process.end()
    assert not any(_has_mark(path, mark) for path in Path("/proc").iterdir() if path.name.isdigit())


def _has_mark(process: Path, mark: str) -> bool:
    try:
        return mark.encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def test_descendants_end_too(tmp_path: Path) -> None:
    """Also a child that has gone to a session of its own."""
    note = tmp_path / "pid"
    child = f"import os, time; os.setsid(); open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    line = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    process = MarkedProcess([sys.executable, "-c", line], {})
    while not (note.exists() and note.read_text()):
        time.sleep(0.05)
    assert process.end() == -signal.SIGKILL
    assert not _alive(int(note.read_text()))


def test_a_process_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in a driver."""
    monkeypatch.setattr(processes, "_KILL_TIMEOUT_S", 0.2)
    process = MarkedProcess([sys.executable, "-c", "import time; time.sleep(600)"], {})
    monkeypatch.setattr(process, "_list_marked_processes", lambda: [Path("/proc/2147483647")])
    assert process.end() == -signal.SIGKILL


def _alive(pid: int) -> bool:
    """Whether it runs. One that has ended may wait for a parent that collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- the report


def _full_report() -> dict[str, Any]:
    """All checks with long figures, every speed row, two profiles."""
    made = {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "date": "2026-11-27"}
    checks = [{**session.create_result(check), "state": "pass", "figure": "x" * 200, "seconds": 12.3} for check in CHECKS]
    by_name = {check["name"]: check for check in checks}
    for kind, modes in {"speed": ["eager"], "compiled": ["compiled"], "fp8": ["fp8 rowwise", "fp8 tensorwise"]}.items():
        for model in ("350m", "1.3b", "8b", "experts"):
            if check := by_name.get(f"{kind}-{model}"):
                loops = ["ours"] if kind == "fp8" else ["ours", "plain"]
                check["data"] = {"rows": [_row(model, mode, loop) for mode in modes for loop in loops], "errors": []}
    use = {"kernel": "void cutlass::" + "k" * 200, "operation": "aten::mm", "launches": 4, "microseconds": 900.0}
    kernels = [{**use, "bytes": 1e9, "flops": 1e12}] * 25
    for name, model in (("profile-1", "experts"), ("profile-2", "8b")):
        profile = {"kernels": kernels, "rest_microseconds": 10.0, "milliseconds": 99.0, "idle_share": 0.1, "launches": 900}
        by_name[name]["data"] = {"model": model, "profile": {**profile, "attention": "cudnn"}}
    for name in ("varlen", "rank-3072gpu_gpt_1t"):
        by_name[name].update(state="fail", figure="the reason")
    by_name["nccl"].update(state="no time left", figure="")
    return {**made, "checks": checks}


def _row(model: str, mode: str, loop: str) -> dict[str, Any]:
    ours = loop == "ours"
    row = {"model": model, "mode": mode, "loop": loop, "layers": 8, "milliseconds": 100.0 if ours else 90.0}
    row |= {"fastest": 99.0, "slowest": 102.0, "tokens_per_second": 123456.0, "tflops": 432.1, "mfu": 0.4321}
    return {
        **row,
        "peak_gb": 41.23,
        "planned_gb": 41.0 if ours else None,
        "first_loss": 10.9,
        "parameters": 10**9,
        "attention": "cudnn" if ours else "flash",
    }


def test_the_last_hundred_lines_have_everything() -> None:
    lines = report.format_summary(_full_report())
    text = "\n".join(lines)
    assert len(lines) <= report.MAX_SUMMARY_LINES and len(text) <= 12_000, (len(lines), len(text))
    assert "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130" in text
    assert re.search(r"8b \(8 layers\) +fp8 rowwise +100\.0 +90\.0 +0\.900", text), "in 8 bits beside the eager plain loop"
    assert text.count("(mm)") >= 40, "the tables of two models"
    assert "FAIL varlen: the reason" in text and "FAIL rank-3072gpu_gpt_1t" in text and "no time left: nccl" in text


def test_the_page_has_the_tables() -> None:
    text = report.format_markdown(_full_report())
    cells = ["8b (8 layers)", "eager", "100.0", "90.0", "0.900", "123,456", "432.1", "43.2%", "43.2%", "41.23", "41.00", "41.23"]
    assert f"| {' | '.join(cells)} | cudnn (plain: flash) |" in text
    assert "| varlen | fail | the reason |" in text and text.count("```text") == 2
    on_cpu = report.format_markdown({**_full_report(), "device": "cpu"})
    assert "tokens/s" not in on_cpu and "```" not in on_cpu and "| speed-8b | pass |  |" in on_cpu, "times of a CPU say nothing"


# ---- the command line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "products,device"], "no check has the name 'products'. `--list` shows all names"),
        (["--minutes", "0"], "must be a number of minutes above 0, not '0'"),
        (["--only", ""], "must contain at least one name of a check"),
    ],
)
def test_a_wrong_command_line_is_told(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_gpu.main(flags)
    assert ended.value.code == 2 and message.replace(". `", "; `") in capsys.readouterr().err


def test_files_that_are_not_results_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    for text in ("{}", "no JSON", '{"checks": [{}]}'):
        file.write_text(text)
        assert check_gpu.main(["--table", str(file)]) == 2 and "is not a report that --json has written" in capsys.readouterr().err
    assert check_gpu.main(["--table", str(tmp_path / "none")]) == 2


def test_the_compiler_cache_is_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The processes of the checks run in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "cache")
    assert check_gpu.get_compiler_cache() == str(tmp_path / "cache")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert os.path.isabs(check_gpu.get_compiler_cache())


def test_a_second_signal_does_not_disturb_the_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`timeout` sends one to the process and one to its group."""

    def interrupted(*args: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(check_gpu, "run_checks", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert check_gpu.main(["--device", "cpu", "--only", "device"]) == 130
    assert "== CPU" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) == before


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu.main([]) == 2
    printed = capsys.readouterr()
    assert "torch sees no GPU here" in printed.err and not printed.out


def test_every_script_and_check_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each launch script for GPUs is a check, and the page names every check."""
    scripts = {path.stem for path in (ROOT / "examples").glob("train_*.sh")}
    assert scripts == {*SCRIPTS, "train_cpu_laptop"} and len(BY_NAME) == len(CHECKS) and len(LAYOUTS) == 6
    named = re.findall(r"`([\w.-]+)`", PAGE.partition("## Results")[0])
    for check in CHECKS:
        assert any(check.name == name or (name.endswith("...") and check.name.startswith(name[:-3])) for name in named), check.name
    assert check_gpu.main(["--list"]) == 0
    assert capsys.readouterr().out.count(" s  ") == len(CHECKS), "with an estimate each"


def test_the_checks_are_functions() -> None:
    import importlib

    for check in CHECKS:
        module, _, function = check.function.partition(".")
        body: Callable[..., Any] = getattr(importlib.import_module(f"megatron_lab.gpu.{module}"), function)
        assert callable(body) and check.gpu_seconds > 0 and check.cpu_seconds > 0
