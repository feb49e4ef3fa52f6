"""Save a checkpoint: the same call on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format.folder import checkpoint_name
from megatron.checkpoint.format.manifest import Manifest
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.saving.commit import commit, encoded, sweep, take_over
from megatron.checkpoint.saving.part import write_part
from megatron.checkpoint.saving.plan import Held
from megatron.checkpoint.saving.planner import Assignment, PartPlanner, described, reader_of
from megatron.checkpoint.storage.opening import open_storage
from megatron.checkpoint.storage.protocol import Draft, Storage
from megatron.checkpoint.together import decide, group_of
from megatron.parallel.context import Group


class Written(NamedTuple):
    """A checkpoint that is complete."""

    location: str
    """Its folder: a path or a URL."""
    content_digest: str


def save_checkpoint(
    folder: Path,
    iteration: int,
    tensors: list[GlobalTensor],
    config: dict[str, Any],
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """Write `<folder>/iter_<iteration>/`, in the format that `manifest.py` describes, and point the latest file to it.

    Call it on every rank of the group. All ranks return when the checkpoint is complete, or all raise, and then nothing half
    written stands under its name. A checkpoint of the same iteration is replaced.

    Args:
        folder: the save folder (`--save`), on a file system that all ranks share; made if it does not exist.
        iteration: number of the checkpoint.
        tensors: what this rank holds. Together the ranks' boxes must make up whole tensors; equal boxes are written once.
            At most one box at a time is copied (and none that is in host memory already).
        config: goes into `config.json`; the first rank's is written.
        state: goes into `state.json`; the first rank's is written.
        process_group: the ranks that save; by default all, or this process alone where torch.distributed is not initialised.
        max_file_bytes: begin another data file where one would become larger (a box is never cut).

    Returns:
        the folder of the checkpoint.

    Raises:
        CheckpointError: a rank could not write, config or state do not fit into JSON, or the boxes are not whole tensors.
    """
    saver = TensorSaver(open_storage(folder), group_of(process_group), max_file_bytes)
    return Path(saver.save(iteration, tensors, config, state).location)


class TensorSaver:
    """Saves checkpoints of one run into one folder, each complete when `save` returns.

    Args:
        storage: the save folder.
        group: the ranks that save.
        max_file_bytes: see `save_checkpoint`.
    """

    def __init__(self, storage: Storage, group: Group, max_file_bytes: int | None = None) -> None:
        self._storage, self._group = storage, group
        self._planner = PartPlanner(group, max_file_bytes)
        self._swept = self._owns = False

    def begin(self, record: dict[str, Any]) -> None:
        """On the first rank, before the first save: remove what killed runs left, and take the folder over (`run.json`)."""
        self._sweep()
        take_over(self._storage, record, self._planner.token)
        self._owns = True

    def _sweep(self) -> None:
        if not self._swept:
            sweep(self._storage, self._planner.token)
            self._swept = True

    def save(self, iteration: int, tensors: list[GlobalTensor], config: dict[str, Any], state: dict[str, Any]) -> Written:
        """Write a checkpoint; see `save_checkpoint`."""
        name = checkpoint_name(iteration)
        doing = f"cannot save {self._storage.at(name)}"
        held = described(tensors)
        files: dict[str, bytes] = {}
        draft: Draft | None = None

        def begin(shares: list[list[Held] | None]) -> list[Assignment]:
            nonlocal draft
            files.update(encoded(config, state))
            answers = self._planner.assign(shares)
            self._sweep()
            draft = self._storage.draft(name, self._planner.token)
            draft.make()
            return answers

        def write() -> Manifest:
            return write_part(self._storage.draft(name, self._planner.token), part, data_of)

        def finish(parts: list[Manifest]) -> list[Written]:
            assert draft is not None
            manifest = commit(self._storage, draft, iteration, parts, files, self._planner.token if self._owns else None)
            return [Written(self._storage.at(name), str(manifest.content_digest))] * len(parts)

        try:
            part = self._planner.take(held, decide(self._group, doing, lambda: self._planner.unless_known(held), begin))
            data_of = reader_of(tensors)
            return decide(self._group, doing, write, finish)
        except (CheckpointError, RuntimeError):
            if draft is not None:
                draft.abandon()
            raise
