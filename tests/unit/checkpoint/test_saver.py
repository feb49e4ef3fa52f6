"""The saver of a run, where it says no before training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.outputs import CheckpointConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.context import connect, disconnect
from megatron.training import saver as saving
from megatron.training.failure import SetupError
from megatron.training.saver import Saver
from megatron_lab.verification.local_ranks import run_ranks


def make(**settings: object) -> Saver:
    context = connect(ParallelConfig())
    try:
        return Saver(CheckpointConfig(**settings), context, {"config": {}}, 10)  # type: ignore[arg-type]
    finally:
        if context.world.size == 1:
            disconnect()


def test_memory_of_this_process_is_not_seen_by_the_writer() -> None:
    pytest.importorskip("fsspec")
    make(save="memory://saver")
    with pytest.raises(ValueError, match="--save memory://saver: --async-save writes in another process"):
        make(save="memory://saver", async_save=True)


def test_checkpoints_of_another_program_are_not_written_among(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds checkpoints of another program: iter_0000100"):
        make(save=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000100"]


@pytest.mark.parametrize("in_background", [False, True])
def test_what_killed_runs_left_is_removed_at_the_start(tmp_path: Path, in_background: bool) -> None:
    (tmp_path / ".iter_0000003.0123abcd.saving").mkdir()
    saver = make(save=str(tmp_path), async_save=in_background)
    assert not [*tmp_path.iterdir()], "a run that may still be refused takes nothing over"
    with pytest.raises(RuntimeError, match="the loop"), saver.claim_folder():  # a run that fails leaves no beat either
        assert (tmp_path / "run.alive").exists()
        raise RuntimeError("the loop")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_that_ranks_do_not_share_is_told_before_training(tmp_path: Path) -> None:
    def start(rank: int) -> str:
        saving._VISIBILITY_TIMEOUT_S = 0.2
        saver = make(save=str(tmp_path / f"node{rank}"))
        with pytest.raises(SetupError) as error, saver.claim_folder():
            pass
        return str(error.value)

    first, second = run_ranks(2, start)
    assert first == second and "rank 1: " in first and "on a file system that all nodes share" in first
    assert not list(tmp_path.glob("node*/run.alive"))
