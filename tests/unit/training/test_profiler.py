"""The profiler's window: which steps are in the trace, and what is written where."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from megatron.config.outputs import LoggingConfig
from megatron_lab.monitoring import profiler as profiler_module
from megatron_lab.monitoring.profiler import StepProfiler

CPU = torch.device("cpu")


def run(config: LoggingConfig, iterations: range, rank: int = 0) -> None:
    """Steps that can be told apart in a trace: step i multiplies an i x i matrix under its own name."""
    with StepProfiler(config, rank, CPU) as profiler:
        for iteration in iterations:
            profiler.step(iteration)
            with torch.profiler.record_function(f"step {iteration}"):
                torch.ones(iteration, iteration) @ torch.ones(iteration, iteration)


def steps_in(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"].startswith("step ")}


def test_window_is_recorded_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "made" / "here"
    config = LoggingConfig(profile=True, profile_step_start=3, profile_step_end=5, profile_ranks=(1,), profile_dir=str(folder))
    with caplog.at_level(logging.INFO):
        run(config, range(1, 8), rank=1)
    assert sorted(path.name for path in folder.iterdir()) == ["memory_rank1_step3-5.txt", "trace_rank1_step3-5.json"]
    assert steps_in(folder / "trace_rank1_step3-5.json") == {"step 3", "step 4"}
    assert "aten::mm" in (folder / "memory_rank1_step3-5.txt").read_text()
    assert str(folder / "trace_rank1_step3-5.json") in caplog.text


def test_run_that_ends_or_resumes_inside_the_window(tmp_path: Path) -> None:
    config = LoggingConfig(profile=True, profile_step_start=3, profile_step_end=9, profile_dir=str(tmp_path))
    run(config, range(5, 8))
    assert steps_in(tmp_path / "trace_rank0_step5-8.json") == {"step 5", "step 6", "step 7"}


@pytest.mark.parametrize("config", [LoggingConfig(), LoggingConfig(profile=True, profile_ranks=(1,))])
def test_off_writes_nothing(config: LoggingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(config, range(1, 15))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--profile-dir .* cannot be created"):
        StepProfiler(LoggingConfig(profile=True, profile_dir=str(tmp_path / "file")), 0, CPU)


@pytest.mark.filterwarnings("ignore")  # the profiler says so when it finds no CUDA
def test_on_cuda_the_memory_history_becomes_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        profiler_module, "record_memory_history", lambda enabled="all", max_entries=0: calls.append(f"record {enabled}")
    )
    monkeypatch.setattr(profiler_module, "dump_snapshot", lambda path: calls.append(f"dump {Path(path).name}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    config = LoggingConfig(profile=True, profile_step_start=1, profile_step_end=2, profile_dir=str(tmp_path))
    with StepProfiler(config, 0, torch.device("cuda:3")) as profiler:
        profiler.step(1)
        profiler.step(2)
    assert calls == ["record all", "wait for cuda:3", "dump memory_rank0_step1-2.pickle", "record None"]
    assert (tmp_path / "trace_rank0_step1-2.json").is_file()
