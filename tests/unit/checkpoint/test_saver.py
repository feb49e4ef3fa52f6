"""The saver of a run, where it says no before training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.outputs import CheckpointConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.context import connect, disconnect
from megatron.training.saver import Saver


def make(**settings: object) -> Saver:
    context = connect(ParallelConfig())
    try:
        return Saver(CheckpointConfig(**settings), context, {"config": {}}, 10)  # type: ignore[arg-type]
    finally:
        disconnect()


def test_memory_of_this_process_is_not_seen_by_the_writer() -> None:
    pytest.importorskip("fsspec")
    make(save="memory://saver")
    with pytest.raises(ValueError, match="--save memory://saver: --async-save writes in another process"):
        make(save="memory://saver", async_save=True)


def test_checkpoints_of_another_program_are_not_written_among(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds what is no checkpoint of this program: iter_0000100"):
        make(save=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000100"]


@pytest.mark.parametrize("in_background", [False, True])
def test_what_killed_runs_left_is_removed_at_the_start(tmp_path: Path, in_background: bool) -> None:
    (tmp_path / ".iter_0000003.0123abcd.saving").mkdir()
    saver = make(save=str(tmp_path), async_save=in_background)
    assert not [*tmp_path.iterdir()], "a run that may still be refused takes nothing over"
    with pytest.raises(RuntimeError, match="the loop"), saver.owning():  # a run that fails leaves no beat either
        assert (tmp_path / "run.alive").exists()
        raise RuntimeError("the loop")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
