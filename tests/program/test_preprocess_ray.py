"""The same shard function on Ray: the same bytes, lost workers, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.config.data import DataConfig
from megatron.data.preprocess import engines
from megatron.data.preprocess.engines import Engine
from megatron.data.preprocess.job import preprocess
from megatron.data.preprocess.shard_work import PreprocessJob
from tests.support.bpe_trainer import encode_plainly, train_bpe, write_bpe
from tests.support.cli import spawn_cli
from tests.support.corpora import JOB, SKIP, TEXTS, documents, expected_of, files_of, write_lines, written
from tests.support.remote_shards import elsewhere, lost_at_first, never

RAY = Engine("ray")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """The library, imported only where it is used, with a cluster of two workers, which the jobs of this file share."""
    library = pytest.importorskip("ray")
    engines._connect(library, 2, None)
    yield library
    library.shutdown()


def test_the_tool_finds_a_cluster_by_its_address(tmp_path: Path, ray: Any) -> None:
    argv = ["tools/preprocess_data.py", "--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    argv += ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--shard-size", "1K", "--engine", "ray"]
    done = spawn_cli([*argv, "--ray-address", ray.get_runtime_context().gcs_address], None)
    assert done.returncode == 0, done.stderr
    assert "onnecting to existing Ray cluster" in done.stderr
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_lost_workers_do_not_show_in_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "run_shard_remotely", lost_at_first)
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


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "run_shard_remotely", elsewhere)
    with pytest.raises(ValueError, match=r"out\.parts is not there on the node .*\n.*must be shared by all nodes, or be a URL"):
        preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=RAY)


def test_paths_of_a_tokenizer_hold_on_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bpe = train_bpe(TEXTS[0], 30)
    write_bpe(bpe, tmp_path)
    monkeypatch.chdir(tmp_path)
    config = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json", merge_file="merges.txt")
    preprocess([write_lines(tmp_path / "in.jsonl")], "out", PreprocessJob(config, ("text",), False), engine=RAY)
    assert documents(tmp_path / "out_text_document") == [encode_plainly(text, bpe) for text in TEXTS]


def test_a_task_that_always_fails_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "run_shard_remotely", never)
    with pytest.raises(ValueError, match=r"(?s)a task failed 4 times, at last with: .*unreachable.*--resume"):
        preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=RAY)
    assert (tmp_path / "tries").read_text() == "x" * 4
    assert written(tmp_path) == {"tries"}
