"""pretrain_gpt.py as users start it: real processes, also under torchrun. (Everything else forks, which is quicker.)"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.process
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
import torch.distributed.run

from megatron.checkpoint.save_folder import LATEST
from megatron.data.indexed_writer import write_dataset
from tests.support.cli import ROOT, forget_children, last_rows, spawn_cli
from tests.support.runs import arguments, complete_checkpoints, digest, run
from tests.support.warm_python import warm_python

SCRIPT = "pretrain_gpt.py"


def test_one_plain_process_ends_by_itself(tmp_path: Path, full: bool) -> None:
    """With loader threads, evaluation and TensorBoard; it saves what a forked run saves. (In the normal run the ranks of the
    torchrun below are interpreters of their own.)"""
    settings = {"train_iters": 2, "num_workers": 2, "eval_iters": 1}
    done = spawn_cli(
        [SCRIPT, *arguments(**settings, save=tmp_path / "own", tensorboard_dir=tmp_path / "board")], nproc=None, fresh=full
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


LEAVES = """
import atexit
from pathlib import Path


def print_threads(when: str) -> None:
    print(when, *(file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")))


atexit.register(print_threads, "at the end:")
from megatron.config.parallel import ParallelConfig
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import connect, disconnect


def main() -> None:
    cycle: list = [connect(ParallelConfig(device="cpu"))]
    cycle.append(cycle)
    broadcast_object(1, cycle[0].world)
    disconnect()
    print_threads("before:")


main()
"""


def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    """Such a thread would abort the process if it then released a tensor."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    done = spawn_cli([str(script)], nproc=2, fresh=True)
    assert done.returncode == 0, done.stderr
    before, after = ([line for line in done.stdout.splitlines() if line.startswith(when)] for when in ("before:", "at the end:"))
    assert len(before) == 2 and all("gloo" in line for line in before)
    assert len(after) == 2 and not any("gloo" in line for line in after)


def _start_torchrun(words: list[str], python: str, said: TextIO) -> multiprocessing.process.BaseProcess:
    """Start a torchrun as a fork of this process, in which torch is imported already. Its ranks are its children, as always.

    Args:
        words: its command line.
        python: what it starts the ranks with.
        said: file for what it and the ranks write.
    """

    def life() -> None:
        os.setsid()  # a group as that of a command in a terminal; the ranks are in sessions of their own
        forget_children()
        for number in (1, 2):
            os.dup2(said.fileno(), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        logging.getLogger().handlers.clear()  # pytest's
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        os.environ |= {"PYTHON_EXEC": python, "PYTHONPATH": str(ROOT)}
        os.chdir(Path(said.name).parent)
        torch.distributed.run.main(words)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside pytest-timeout's thread
        process = multiprocessing.get_context("fork").Process(target=life)
        process.start()
    return process


def ranks_of(launcher: int) -> list[int]:
    """Processes that train, below one that launched them."""

    def below(pid: int) -> list[int]:
        try:
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:  # it has ended
            return []
        return [*children, *(grandchild for child in children for grandchild in below(child))]

    found = []
    for pid in below(launcher):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if re.search(rb"\0-u\0[^\0]*pretrain_gpt\.py\0", words) and b"torch.distributed.run" not in words:
            found.append(pid)
    return found


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    """They save first, and none is left."""
    words = ["--standalone", "--nproc-per-node=2", str(ROOT / SCRIPT)]
    job = arguments(train_iters=100_000, log_interval=100_000, save=tmp_path / "save", save_interval=50_000)
    said = (tmp_path / "said").open("w+")
    # The ranks are not warm: those are children of another process.
    process = _start_torchrun([*words, *job], sys.executable, said)
    ranks: list[int] = []
    try:
        until = time.monotonic() + 60
        while "iteration        1/" not in Path(said.name).read_text():
            assert time.monotonic() < until and process.is_alive(), Path(said.name).read_text()
            time.sleep(0.1)
        ranks = ranks_of(process.pid or 0)
        assert len(ranks) == 2
        process.kill()
        process.join()
        until = time.monotonic() + 20
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < until, Path(said.name).read_text()
            time.sleep(0.05)
        assert (tmp_path / "save" / LATEST).exists() and "exiting on SIGTERM" in Path(said.name).read_text()
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.join()
        said.close()


def test_the_last_lines_of_torchrun_have_the_reason_once() -> None:
    """On a terminal of 24 rows and 80 columns."""
    done = spawn_cli([SCRIPT, *arguments(), "--bogus-flag", "3"], nproc=2)
    assert done.returncode == 1 and not done.stdout
    assert last_rows(done.stderr).count("--bogus-flag is not a flag.") == 1, done.stderr


def test_ctrl_c_under_torchrun_saves(tmp_path: Path) -> None:
    """It comes to the process group of the terminal: to torchrun, which passes it on."""
    words = ["--standalone", "--nproc-per-node=2", str(ROOT / SCRIPT)]
    job = arguments(train_iters=100_000, log_interval=1, save=tmp_path / "save")
    said = (tmp_path / "said").open("w+")
    process = _start_torchrun([*words, *job], sys.executable, said)  # whose parent is torchrun
    try:
        until = time.monotonic() + 60
        while "iteration        1/" not in Path(said.name).read_text():
            assert time.monotonic() < until and process.is_alive(), Path(said.name).read_text()
            time.sleep(0.1)
        os.killpg(process.pid or 0, signal.SIGINT)
        process.join(60)
        text = Path(said.name).read_text()
        assert process.exitcode not in (0, None) and complete_checkpoints(tmp_path / "save"), text
        assert text.count("Ctrl-C: the run finishes this step, saves and exits.") == 1 and "exiting on SIGINT" in text
        until = time.monotonic() + 20  # below the traceback of torchrun
        while f"resume with --load {tmp_path}/save" not in " ".join(last_rows(Path(said.name).read_text()).split()):
            assert time.monotonic() < until, Path(said.name).read_text()
            time.sleep(0.1)
        assert " ".join(last_rows(Path(said.name).read_text()).split()).count("exited on SIGINT at iteration") == 1
    finally:
        for pid in ranks_of(process.pid or 0):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.join()
        said.close()


@pytest.mark.full("test_run_exits.py::test_a_signal_to_one_rank: 85 is no success on any rank")
def test_a_node_that_is_asked_to_stop_is_no_success_for_the_others(tmp_path: Path) -> None:
    """Of two nodes: a signal to the rank of one. Both torchruns end at once, and not with 0, after which one would wait 300 s."""
    words = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=stops", "--nproc-per-node=1"]
    words += [f"--rdzv-endpoint=localhost:{21000 + os.getpid() % 10000}", str(ROOT / SCRIPT)]
    job = arguments(train_iters=100_000, log_interval=100_000, save=tmp_path / "save", save_interval=5, keep_last=1)
    files = [(tmp_path / f"{node}").open("w+") for node in range(2)]
    nodes = [_start_torchrun([*words, *job], warm_python(), file) for file in files]
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "save" / LATEST).exists():
            assert time.monotonic() < until and all(node.is_alive() for node in nodes), files[0].read()
            time.sleep(0.1)
        (rank,) = ranks_of(nodes[1].pid or 0)
        os.kill(rank, signal.SIGTERM)
        for node in nodes:
            node.join(60)
        assert [node.exitcode for node in nodes] == [1, 1]
        said = "".join(Path(file.name).read_text() for file in files)
        assert said.count("exitcode  : 85") == 2 and "exiting on" in said
    finally:
        for node, file in zip(nodes, files, strict=True):
            for pid in ranks_of(node.pid or 0):
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.join()
            file.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Interrupt the imports of torch, and those behind it, with --full alone: they take long to come to."""
    if "module" in metafunc.fixturenames:
        later = ["torch.cuda", "megatron.training.loop"] if metafunc.config.getoption("--full") else []
        metafunc.parametrize("module", ["megatron.config.config", *later])


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
