"""The state in the memory of the nodes: a restart goes on from it, it outlives a lost node, and it ends up in the save folder.

Nodes are made up: each has a process of its own for its launcher, with which its keeper lives.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.safetensors_file import DTYPES
from megatron.checkpoint.save_folder import get_checkpoint_name, load_manifest
from megatron.checkpoint.storage_url import open_storage
from megatron.config.cli import load
from megatron.config.parsed_flags import DryRun
from megatron.model.build import get_model_dtype
from megatron.training.step import TrainStep
from megatron_lab.node_memory import keeper, node_memory
from megatron_lab.node_memory.node_storage import STATE_FOLDER
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.state_size import count_checkpoint_bytes
from megatron_lab.planner.units import format_bytes
from tests.program.test_run_spikes import HALVES, REWINDS, bad_batches
from tests.support.forked_modules import fork_modules
from tests.support.runs import (
    arguments,
    at_iteration,
    checkpoint,
    complete_checkpoints,
    digest,
    launch,
    losses,
    report,
    run,
    saved_state,
)

STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
LAST = 6
"""Steps of a run."""
BATCH: dict[str, Any] = {"global_batch_size": 4}


class Nodes:
    """Launchers of a job, one a node.

    Args:
        fresh: start keepers and writers in interpreters of their own, as a run does; otherwise as forks.
    """

    def __init__(self, count: int, fresh: bool) -> None:
        self._fresh = fresh
        self._sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]

    def before(self, ranks: int, and_then: Callable[[int], None] | None = None) -> Callable[[int], None]:
        """For `launch`: put the ranks onto the nodes, as many on each."""
        each = ranks // len(self._sleepers)

        def prepare(rank: int) -> None:
            os.environ |= {"LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
            pid = self._sleepers[rank // each].pid
            node_memory.get_launcher_pid = lambda: pid
            if not self._fresh:
                fork_modules()
            if and_then is not None:
                and_then(rank)

        return prepare

    def end(self, node: int | None = None) -> None:
        """End the launcher of a node, or all."""
        for sleeper in self._sleepers if node is None else [self._sleepers[node]]:
            sleeper.kill()
            sleeper.wait()

    def lose(self, node: int, save: Path) -> None:
        """Lose a node with all that is in its memory; another comes for it."""
        folder = self.folder(node, save)
        found = keeper._read_keeper(folder)
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        while found.is_alive:
            time.sleep(0.01)
        shutil.rmtree(folder)
        self.end(node)
        self._sleepers[node] = subprocess.Popen(["sleep", "600"])

    def folder(self, node: int, save: Path) -> Path:
        """Where the keeper of a node has its files."""
        return self.folders(save)[node]

    def folders(self, save: Path) -> list[Path]:
        """Return the folder in which the keepers of all nodes have their files."""
        pids = [sleeper.pid for sleeper in self._sleepers]
        return [keeper._get_keeper_folder(keeper.Keeper(str(save), pid, keeper.get_process_identity(pid), False)) for pid in pids]


@pytest.fixture
def nodes() -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(count: int, *, fresh: bool = False) -> Nodes:
        made.append(Nodes(count, fresh))
        return made[-1]

    yield make
    for one in made:
        one.end()


def _killed(tmp_path: Path, nodes: Nodes, ranks: int, at: int, last: int = LAST, **flags: Any) -> dict[str, Any]:
    """A run whose ranks are killed before a step, once all nodes have the newest copy of one before it; returns its settings."""
    settings = {"save": tmp_path / "run", "load": tmp_path / "run", "memory_save_interval": 2, **BATCH, **flags}

    def die(step: TrainStep) -> None:
        copy = Path(STATE_FOLDER, get_checkpoint_name((at - 1) // 2 * 2))
        while not all((folder / copy).exists() for folder in nodes.folders(tmp_path / "run")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    ended = launch(arguments(train_iters=last, **settings), ranks, before=nodes.before(ranks, lambda rank: at_iteration(at, die)))
    assert [end.code for end in ended] == [-signal.SIGKILL] * ranks, report(ended)
    return settings


def _gone(*folders: Path) -> None:
    until = time.monotonic() + 30
    while any(folder.exists() for folder in folders):
        assert time.monotonic() < until, folders
        time.sleep(0.02)


@pytest.mark.full("the next test; test_forks.py starts the keeper as an interpreter of its own")
def test_a_restart_goes_on_from_memory(tmp_path: Path, nodes: Callable[..., Nodes]) -> None:
    """Bit for bit, with nothing on the storage, and nothing stays behind in memory."""
    node = nodes(1, fresh=True)
    run(arguments(train_iters=LAST, save=tmp_path / "whole", **BATCH, **STAGES), 2)
    settings = _killed(tmp_path, node, 2, 6, **STAGES)
    assert complete_checkpoints(tmp_path / "run") == []
    said = run(arguments(train_iters=LAST, **settings), 2, before=node.before(2))
    assert "resuming from nodes://state/iter_0000004 at iteration 4" in said, said
    assert digest(tmp_path / "run", LAST) == digest(tmp_path / "whole", LAST)
    _gone(node.folder(0, tmp_path / "run"))


def test_a_restart_from_memory_goes_back_as_a_run_that_never_stopped(tmp_path: Path, nodes: Callable[..., Nodes]) -> None:
    """Memory keeps one copy, of iteration 6; behind the loss spike of iteration 8 both runs go back to the storage's of 4."""
    node, spike = nodes(1), bad_batches(56)
    flags = {**REWINDS, **HALVES, "save_interval": 4}
    run(arguments(**flags, train_iters=9, save=tmp_path / "whole"), 2, before=spike)
    settings = _killed(tmp_path, node, 2, 7, last=9, **flags)
    said = run(arguments(train_iters=9, **settings), 2, before=node.before(2, spike))
    assert "resuming from nodes://state/iter_0000006 at iteration 6" in said, said
    assert f"rewound to {checkpoint(tmp_path / 'run', 4)} (iteration 4); samples 32 to 79 are skipped" in said
    assert digest(tmp_path / "run", 9) == digest(tmp_path / "whole", 9)
    _gone(node.folder(0, tmp_path / "run"))


def test_state_in_memory_is_written_when_the_launcher_ends(tmp_path: Path, nodes: Callable[..., Nodes]) -> None:
    """The checkpoint is the one that a save would have made, and the next launch goes on from it."""
    node = nodes(1)
    run(arguments(train_iters=LAST, exit_interval=4, save=tmp_path / "whole", **BATCH), 2)
    settings = _killed(tmp_path, node, 2, 5)
    folder = node.folder(0, tmp_path / "run")
    node.end()
    _gone(folder)
    assert complete_checkpoints(tmp_path / "run") == ["iter_0000004"]
    assert digest(tmp_path / "run", 4) == digest(tmp_path / "whole", 4)
    assert saved_state(tmp_path / "run", 4) == saved_state(tmp_path / "whole", 4)
    said = run(arguments(train_iters=LAST, **settings), 2, before=nodes(1).before(2))
    assert "iter_0000004 at iteration 4" in said


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full("the other case, and test_supervisor.py")), 1])
def test_a_lost_node_is_no_loss_with_a_copy(tmp_path: Path, nodes: Callable[..., Nodes], ranks: int) -> None:
    """Another node takes its place, or the ranks that are left go on at another layout."""
    pair = nodes(2)
    settings = _killed(tmp_path, pair, 2, 4, replicate_state=1, fp64=True, **TENSOR)
    pair.lose(0, tmp_path / "run")
    left = pair
    if ranks == 1:
        left = nodes(1)
        left._sleepers = [pair._sleepers[1]]
    settings |= {"metrics_file": tmp_path / "metrics", "replicate_state": ranks - 1, "tensor_model_parallel_size": ranks}
    said = run(arguments(train_iters=LAST, **settings), ranks, before=left.before(ranks))
    assert "resuming from nodes://state/iter_0000002 at iteration 2" in said, said
    run(arguments(train_iters=LAST, fp64=True, metrics_file=tmp_path / "whole", **BATCH), 1)
    assert losses(tmp_path / "metrics") == pytest.approx(losses(tmp_path / "whole")[2:], rel=1e-10)


def test_a_lost_node_without_a_copy_is_told(tmp_path: Path, nodes: Callable[..., Nodes]) -> None:
    """The run goes on from the storage."""
    pair = nodes(2)
    settings = _killed(tmp_path, pair, 2, 5, save_interval=3)
    pair.lose(1, tmp_path / "run")
    ended = launch(arguments(train_iters=LAST, **settings), 2, before=pair.before(2))
    assert [end.code for end in ended] == [0, 0], report(ended)
    assert "the checkpoints in the memory of the nodes are incomplete" in ended[0].stderr
    assert f"resuming from {tmp_path / 'run' / 'iter_0000003'}" in ended[0].stdout


def test_more_copies_than_nodes_are_refused(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"save": tmp_path, "memory_save_interval": 1, "replicate_state": 1}
    ended = launch(arguments(train_iters=1, **flags), 1)
    assert ended[0].code == 1 and "set --replicate-state 0" in ended[0].stderr, report(ended)


def test_the_plan_knows_the_bytes_of_a_checkpoint(tmp_path: Path) -> None:
    """Exactly, with moments of any shape, and what a node holds for copies of it."""
    styles: list[dict[str, Any]] = [
        {"bf16": True, "ema_decay": 0.9},
        {"optimizer": "adafactor"},
        {"optimizer": "muon", "untie_embeddings_and_output_weights": True},
        {"optimizer": "adam8bit", "adam_8bit_block_size": 7},
        {"fp64": True, "no_save_optim": True},
    ]
    for number, style in enumerate(styles):
        save = tmp_path / str(number)
        run(arguments(train_iters=1, save=save, **style))
        found = sum(
            DTYPES[tensor.dtype].itemsize * box.tensor_slice.numel
            for tensor in load_manifest(open_storage(checkpoint(save, 1))).tensors.values()
            for box in tensor.slices
        )
        flags = arguments(train_iters=1, save=save, async_save=True, memory_save_interval=1, replicate_state=2, **style)
        config = load(flags, 1).config
        assert count_checkpoint_bytes(config, 61, get_model_dtype(config.precision)) == found, style
    config = load([*flags, "--global-batch-size", "32"], 16).config
    notes = Planner(config, DryRun(16, 8, None), 61).plan().notes
    assert (
        f"a checkpoint has {format_bytes(found)} of tensors; a node holds {format_bytes(8 * found / 2)} for copies in its memory"
        in notes
    )
