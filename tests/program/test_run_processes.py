"""pretrain_gpt.py as users start it: real processes, also under torchrun. (Everything else forks, which is quicker.)"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.save_folder import LATEST
from megatron.data.indexed_writer import write_dataset
from tests.support.cli import ROOT, ranks_of, spawn_cli
from tests.support.runs import arguments, digest, run
from tests.support.warm_python import warm_python

SCRIPT = "pretrain_gpt.py"


def test_one_plain_process_ends_by_itself(tmp_path: Path) -> None:
    """With loader threads, evaluation and TensorBoard; it saves what a forked run saves."""
    settings = {"train_iters": 2, "num_workers": 2, "eval_iters": 1}
    done = spawn_cli(
        [SCRIPT, *arguments(**settings, save=tmp_path / "own", tensorboard_dir=tmp_path / "board")], nproc=None, fresh=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "done after 2 iterations" in done.stdout
    run(arguments(**settings, save=tmp_path / "forked"))
    assert digest(tmp_path / "own", 2) == digest(tmp_path / "forked", 2)


def test_torchrun_ends_all_ranks_of_a_run_that_fails(tmp_path: Path, full: bool) -> None:
    """One rank reads a token that is not in the vocabulary: its message stands on the screen, and nothing is left behind."""
    prefix = tmp_path / "ids"
    with write_dataset(str(prefix), np.uint16) as writer:
        for document in range(20):
            writer.add_documents(np.full(17, 99 if document == 7 else 7))
    settings = {"mock_data": None, "data_path": prefix, "split": "1,0,0", "train_iters": 20, "save": tmp_path / "save"}
    done = spawn_cli([SCRIPT, *arguments(**settings)], nproc=2, fresh=full)
    assert done.returncode != 0
    assert "has token id 99, but the tokenizer has 61 ids" in done.stderr
    assert [path.name for path in (tmp_path / "save").glob("*.json")] == ["run.json"]


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    """They save first, and none is left."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / SCRIPT)]
    job = arguments(train_iters=100_000, log_interval=100_000, save=tmp_path / "save", save_interval=50_000)
    said = (tmp_path / "said").open("w+")
    # The ranks are not warm: those are children of another process.
    process = subprocess.Popen([sys.executable, *words, *job], cwd=tmp_path, stdout=said, stderr=said)
    ranks: list[int] = []
    try:
        until = time.monotonic() + 60
        while "iteration        1/" not in Path(said.name).read_text():
            assert time.monotonic() < until and process.poll() is None, Path(said.name).read_text()
            time.sleep(0.1)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        process.kill()
        process.wait()
        until = time.monotonic() + 20
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < until, Path(said.name).read_text()
            time.sleep(0.05)
        assert (tmp_path / "save" / LATEST).exists() and "exiting on SIGTERM" in Path(said.name).read_text()
    finally:
        for pid in (*ranks, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said.close()


def _warm_ranks() -> dict[str, str]:
    """Variables for a torchrun whose ranks begin with torch imported; no PYTHONPATH, or torchrun would be warm too."""
    return {**os.environ, "PYTHON_EXEC": warm_python(), "PYTHONPATH": ""}


def test_a_node_that_is_asked_to_stop_is_no_success_for_the_others(tmp_path: Path) -> None:
    """Of two nodes: a signal to the rank of one. Both torchruns end at once, and not with 0, after which one would wait 300 s."""
    words = ["-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=stops", "--nproc-per-node=1"]
    words += [f"--rdzv-endpoint=localhost:{21000 + os.getpid() % 10000}", str(ROOT / SCRIPT)]
    job = arguments(train_iters=100_000, log_interval=100_000, save=tmp_path / "save", save_interval=5, keep_last=1)
    files = [(tmp_path / f"{node}").open("w+") for node in range(2)]
    nodes = [
        subprocess.Popen([warm_python(), *words, *job], env=_warm_ranks(), cwd=tmp_path, stdout=file, stderr=file) for file in files
    ]
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "save" / LATEST).exists():
            assert time.monotonic() < until and all(node.poll() is None for node in nodes), files[0].read()
            time.sleep(0.1)
        (rank,) = ranks_of(nodes[1].pid)
        os.kill(rank, signal.SIGTERM)
        assert [node.wait(60) for node in nodes] == [1, 1]
        said = "".join(Path(file.name).read_text() for file in files)
        assert said.count("exitcode  : 85") == 2 and "exiting on" in said
    finally:
        for node, file in zip(nodes, files, strict=True):
            for pid in ranks_of(node.pid):
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.wait()
            file.close()


@pytest.mark.parametrize("module", ["megatron.config.config", "torch.cuda", "megatron.training.loop"])
def test_ctrl_c_while_starting_leaves_no_traceback(module: str) -> None:
    """When a module has been imported: among those of the settings, of torch, and of the run."""
    words = [sys.executable, "-X", "importtime", str(ROOT / SCRIPT), *arguments(train_iters=10**6)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any(line.rpartition("|")[2].strip() == module for line in process.stderr), "it is not imported"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in said, (process.returncode, said[-2000:])
