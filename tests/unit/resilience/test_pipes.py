"""Settings from pipes, which are read more than once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.config.cli import load
from megatron.config.errors import ConfigError, Violation
from megatron_lab.commands import plan
from megatron_lab.resilience import launcher_flags, supervisor
from megatron_lab.resilience.node_launcher import launch_ranks
from megatron_lab.resilience.pipes import copy_pipes
from tests.support.runs import arguments


def open_pipe(text: str) -> str:
    """Path of a pipe whose writer has written a text and ended, as bash passes one for `<(command)`."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, text.encode())
    os.close(write_fd)
    return f"/dev/fd/{read_fd}"


def close(path: str) -> None:
    os.close(int(path.rpartition("/")[2]))


@pytest.mark.parametrize("joined", [False, True])
def test_an_open_pipe_keeps_its_path(joined: bool) -> None:
    path = open_pipe("train-iters: 7")
    words = [*arguments(), *([f"--config={path}"] if joined else ["--config", path])]
    assert copy_pipes(words) == words
    assert [load(words, 1).config.training.train_iters for _ in range(2)] == [7, 7]
    close(path)


def test_a_named_pipe_is_copied_with_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    os.mkfifo(path)
    read_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # keeps what the writer has written
    path.write_text("train-iters = 7")
    words = copy_pipes(["--metrics-file", str(path), "--config", str(path), *arguments()])
    os.close(read_fd)
    assert words[1] == str(path), "an output"
    assert words[3] != str(path) and words[3].endswith("/run.toml")
    assert load(words[2:], 1).config.training.train_iters == 7


def test_other_files_stay(tmp_path: Path) -> None:
    words = ["--config", str(tmp_path), "--config", "/dev/null", "--config=missing.yaml", "--lr", "1", "--config"]
    assert copy_pipes(words) == words


def test_the_launcher_reads_a_pipe_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count its ranks."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(launcher_flags, "count_devices", lambda: 0)
    path = open_pipe("train-iters: 7")
    flags = launch_ranks(pretrain_gpt.__file__, ["--nproc", "auto", "--dry-run", "--config", path, *arguments()])
    assert load(flags, 1).config.training.train_iters == 7
    close(path)


def test_the_supervisor_reads_a_pipe_before_its_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags: list[str] = []

    def read(argv: list[str], num_ranks: int) -> None:
        flags.extend(argv)
        raise ConfigError([Violation((), f"train-iters is {load(argv, num_ranks).config.training.train_iters}")])

    monkeypatch.setattr(supervisor, "load", read)
    path = open_pipe("train-iters: 7")
    assert supervisor.main([pretrain_gpt.__file__, "--config", path, *arguments()]) == 2
    assert "train-iters is 7" in capsys.readouterr().err and load(flags, 1).config.training.train_iters == 7
    close(path)


def test_the_planner_reads_a_pipe_again(capsys: pytest.CaptureFixture[str]) -> None:
    """For the layout of a question."""
    path = open_pipe("train-iters: 7")
    words = ["--gpus", "2", "--config", path, *arguments(), "--why", "--tensor-model-parallel-size 2"]
    assert plan.main(words) == 0
    output = capsys.readouterr()
    assert "why not --tensor-model-parallel-size 2" in output.out and not output.err
    close(path)
