"""The same shard function on Ray: the same bytes, lost workers, errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.preprocess import run
from megatron.data.preprocess.job import Job
from megatron.data.preprocess.on_ray import run_on_ray, run_shard_remotely
from megatron.data.preprocess.parts import ShardReport
from megatron.data.preprocess.processes import Listen
from megatron.data.preprocess.run import Engine, preprocess
from megatron.data.preprocess.shards import Shard
from tests.corpora import JOB, SKIP, TEXTS, expected_of, files_of, write_lines, written

ray = pytest.importorskip("ray")
RAY = Engine("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of two workers, which the jobs of this file share."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def lost_at_first(job: Job, shard: Shard, folder: str) -> ShardReport | ValueError:
    """A worker that is lost with its first shard, and meets an error of the file system with the second."""
    for name, end in (("lost", lambda: os._exit(1)), ("failed", None)):
        try:
            os.mkdir(Path(folder).parent / name)
        except FileExistsError:
            continue
        if end:
            end()
        raise TimeoutError("stale file handle")
    return run_shard_remotely(job, shard, folder)


def never(job: Job, shard: Shard, folder: str) -> ShardReport | ValueError:
    """A task that fails whenever it is tried."""
    with open(Path(folder).parent / "tries", "a") as file:
        file.write("x")
    raise ConnectionError("unreachable")


def test_lost_workers_do_not_show_in_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_losses(job: Job, shards: list[Shard], folder: str, listen: Listen, num_workers: int, address: None) -> None:
        run_on_ray(job, shards, folder, listen, num_workers, address, lost_at_first)

    monkeypatch.setattr(run, "run_on_ray", with_losses)
    preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=Engine("ray", 2), shard_size=1000)
    assert (tmp_path / "lost").exists() and (tmp_path / "failed").exists()
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    assert written(tmp_path) == {"lost", "failed", "out_text_document.bin", "out_text_document.idx"}


def test_bad_lines_are_told_as_by_processes_and_not_tried_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    with Path(source).open("a") as file:
        file.write("[]\n")
    with pytest.raises(ValueError, match=rf"^{source}:41: not a JSON object") as caught:
        preprocess([source], str(tmp_path / "out"), JOB, engine=RAY, shard_size=1000)
    assert "Traceback" not in str(caught.value) and "ray::" not in str(caught.value)
    summary = preprocess([source], str(tmp_path / "out"), SKIP, engine=RAY, start="resume")
    assert [line.split(": ")[0] for line in summary.bad_lines] == [f"{source}:41"]
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_a_task_that_always_fails_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Job, shards: list[Shard], folder: str, listen: Listen, num_workers: int, address: None) -> None:
        run_on_ray(job, shards, folder, listen, num_workers, address, never)

    monkeypatch.setattr(run, "run_on_ray", failing)
    with pytest.raises(ValueError, match=r"(?s)a task failed 4 times, at last with: .*unreachable.*--resume"):
        preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=RAY)
    assert (tmp_path / "tries").read_text() == "x" * 4
    assert written(tmp_path) == {"tries"}
