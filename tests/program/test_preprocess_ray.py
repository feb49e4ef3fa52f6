"""The same shard function on Ray: the same bytes, lost workers, errors. Ray itself takes long to start, and runs with --full."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron.config.data import DataConfig
from megatron_lab.commands.preprocess_data import main
from megatron_lab.data_tools.preprocess import engines
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from tests.support.bpe_trainer import encode_plainly, train_bpe, write_bpe
from tests.support.cli import spawn_cli
from tests.support.corpora import JOB, SKIP, TEXTS, documents, expected_of, files_of, write_lines, written
from tests.support.remote_shards import elsewhere, lost_at_first, never

RAY = Engine("ray")


class StandIn:
    """What the engine asks of Ray, in this process: a task runs at once, in a folder of its own, and is tried again as often."""

    exceptions = types.SimpleNamespace(RayError=OSError)
    is_initialized = staticmethod(lambda: True)
    put = staticmethod(lambda value: value)
    wait = staticmethod(lambda tasks, num_returns: (tasks[:num_returns], tasks[num_returns:]))
    cancel = staticmethod(lambda task, force: None)

    def __init__(self, elsewhere: Path) -> None:
        self._elsewhere = elsewhere

    def remote(self, function: Callable[..., Any]) -> Any:
        def options(num_cpus: int, max_retries: int, retry_exceptions: list[type[Exception]]) -> Any:
            def task(*given: Any) -> Callable[[], Any]:
                failures: list[Exception] = []
                with contextlib.chdir(self._elsewhere):
                    while len(failures) <= max_retries:
                        try:
                            found = function(*given)
                            return lambda: found
                        except tuple(retry_exceptions) as failure:
                            failures.append(failure)
                return lambda: _raise(failures[-1])

            return types.SimpleNamespace(remote=task)

        return types.SimpleNamespace(options=options)

    def get(self, task: Callable[[], Any]) -> Any:
        return task()


def _raise(error: BaseException) -> NoReturn:
    raise error


@pytest.fixture(scope="module", autouse=True)
def ray(full: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The library with a cluster of two workers, which the jobs of this file share; without --full a stand-in."""
    if full:
        library = pytest.importorskip("ray")
        engines._connect(library, 2, None)
        yield library
        library.shutdown()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ray", StandIn(tmp_path_factory.mktemp("elsewhere")))
            yield sys.modules["ray"]


@pytest.mark.full("the next test, and those of the stand-in")
def test_the_tool_finds_a_cluster_by_its_address(tmp_path: Path, ray: Any) -> None:
    argv = ["tools/preprocess_data.py", "--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    argv += ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--shard-size", "1K", "--engine", "ray"]
    done = spawn_cli([*argv, "--ray-address", ray.get_runtime_context().gcs_address], None)
    assert done.returncode == 0, done.stderr
    assert "onnecting to existing Ray cluster" in done.stderr
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_the_tool_asks_for_the_cluster_of_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or for one of its own; and says what to do where none answers."""
    asked = []

    def init(**given: Any) -> NoReturn:
        asked.append(given)
        raise ConnectionError("nobody there")

    absent = types.SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", absent)  # type: ignore[arg-type]
    argv = ["--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type"]
    assert main([*argv, "ByteTokenizer", "--engine", "ray", "--ray-address", "10.0.0.1:6379"]) == 1
    assert "--ray-address 10.0.0.1:6379: nobody there\n  Start Ray on the nodes" in capsys.readouterr().err
    assert main([*argv, "ByteTokenizer", "--engine", "ray", "--workers", "3"]) == 1
    assert [(given["address"], given.get("num_cpus")) for given in asked] == [("10.0.0.1:6379", None), ("local", 3)]


@pytest.mark.full("test_a_task_that_always_fails_ends_the_job: a task is tried again")
def test_lost_workers_do_not_show_in_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "run_shard_remotely", lost_at_first)
    preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=Engine("ray", 2), shard_size=1000)
    assert (tmp_path / "lost").exists() and (tmp_path / "failed").exists()
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    assert written(tmp_path) == {"lost", "failed", *(f"out_text_document.{suffix}" for suffix in ("bin", "idx", "tokenizer"))}


def test_bad_lines_are_told_as_by_processes_and_not_tried_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    with Path(source).open("a") as file:
        file.write("[]\n")
    with pytest.raises(ValueError, match=rf"^{source}:41: the line is not a JSON object") as caught:
        preprocess([source], str(tmp_path / "out"), JOB, engine=RAY, shard_size=1000)
    assert "Traceback" not in str(caught.value) and "ray::" not in str(caught.value)
    summary = preprocess([source], str(tmp_path / "out"), SKIP, engine=RAY, start_mode="resume")
    assert [line.split(": ")[0] for line in summary.bad_records] == [f"{source}:41"]
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "run_shard_remotely", elsewhere)
    with pytest.raises(ValueError, match=r"out\.parts does not exist on the node .*\n.*must be shared by all nodes, or be a URL"):
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
    with pytest.raises(ValueError, match=r"(?s)a Ray task failed 4 times, the last time with: .*unreachable.*--resume"):
        preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=RAY)
    assert (tmp_path / "tries").read_text() == "x" * 4
    assert written(tmp_path) == {"tries"}
