"""The plan of a run's saves, made again only when boxes have changed; and saves that are complete when the call returns."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.checkpoint.agreement import decide
from megatron.checkpoint.commit import commit, encoded, take_over
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import GlobalTensor, bytes_of, dtype_name
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.rank_parts import BoxToWrite, HeldTensor, RankPart, share_out, write_part
from megatron.checkpoint.save_folder import checkpoint_name
from megatron.checkpoint.storage import Draft, Storage
from megatron.parallel.context import Group


class Assignment(NamedTuple):
    """The first rank's message to each rank before a save."""

    token: str
    """The run's token, which is in the names of unfinished saves."""
    part: RankPart | None
    """What this rank writes; None: the same as before."""


class RunSaver:
    """Plans the saves of one run into one folder, with one round of messages, which are small when nothing has changed.

    Args:
        storage: the save folder, on a file system that all ranks share; made if it does not exist.
        group: the ranks that save.
        max_file_bytes: begin another data file where one would become larger (a box is never cut).
    """

    def __init__(self, storage: Storage, group: Group, max_file_bytes: int | None = None) -> None:
        self._storage, self._group, self._max_file_bytes = storage, group, max_file_bytes
        self._token = secrets.token_hex(4)  # the first rank's token is the run's
        self._held: list[HeldTensor] | None = None
        self._part = RankPart(group.index, ())
        self._world: list[list[HeldTensor]] = []

    def begin(self, record: dict[str, Any]) -> None:
        """On the first rank, before the first save: remove what killed runs left, and take the folder over (`run.json`).

        Args:
            record: settings, versions and command line of the run.
        """
        self._storage.sweep(self._token)
        take_over(self._storage, record, self._token)

    def _draft(self, iteration: int) -> Draft:
        return self._storage.draft(checkpoint_name(iteration), self._token)

    def _unless_known(self, held: list[HeldTensor]) -> list[HeldTensor] | None:
        """What this rank holds; None if that has not changed."""
        return None if held == self._held else held

    def _assign(self, shares: list[list[HeldTensor] | None]) -> list[Assignment]:
        """On the first rank: plan what every rank writes.

        Args:
            shares: what each rank's `_unless_known` returned.

        Raises:
            CheckpointError: the boxes are not whole tensors; see `share_out`.
        """
        if all(share is None for share in shares):
            return [Assignment(self._token, None)] * len(shares)
        before = self._world or [[]] * len(shares)
        self._world = [old if new is None else new for old, new in zip(before, shares, strict=True)]
        return [Assignment(self._token, part) for part in share_out(self._world, self._max_file_bytes)]

    def _take(self, held: list[HeldTensor], assignment: Assignment) -> RankPart:
        """On every rank: take the assignment; returns what this rank writes."""
        self._token = assignment.token
        if assignment.part is not None:
            self._part = assignment.part
        self._held = held
        return self._part


def described(tensors: list[GlobalTensor]) -> list[HeldTensor]:
    """What a rank holds, without the elements."""
    return [
        HeldTensor(tensor.name, tensor.global_shape, dtype_name(tensor.local.dtype), tuple(placed.box for placed in tensor.boxes))
        for tensor in tensors
    ]


def reader_of(tensors: list[GlobalTensor]) -> Callable[[BoxToWrite], memoryview]:
    """A function that gives the bytes of a box that this rank holds. From a device they are copied when they are asked for."""
    parts = {(tensor.name, placed.box): (tensor, placed) for tensor in tensors for placed in tensor.boxes}

    def data_of(box: BoxToWrite) -> memoryview:
        tensor, placed = parts[box.name, box.box]
        return bytes_of(tensor.part(placed))

    return data_of


class TensorSaver(RunSaver):
    """Saves checkpoints, each complete when `save` returns."""

    def save(self, iteration: int, tensors: list[GlobalTensor], config: dict[str, Any], state: dict[str, Any]) -> str:
        """Write `<folder>/iter_<iteration>/`, in the format that docs/checkpoints.md describes, and point the latest file to it.

        Call it on every rank of the group. All ranks return when the checkpoint is complete, or all raise, and then nothing half
        written stands under its name. A checkpoint of the same iteration is replaced.

        Args:
            iteration: number of the checkpoint.
            tensors: what this rank holds. Together the ranks' boxes must make up whole tensors; equal boxes are written once.
                At most one box at a time is copied (and none that is in host memory already).
            config: goes into `config.json`; the first rank's is written.
            state: goes into `state.json`; the first rank's is written.

        Returns:
            the digest of the content.

        Raises:
            CheckpointError: a rank could not write, config or state do not fit into JSON, or the boxes are not whole tensors.
        """
        doing = f"cannot save {self._storage.at(checkpoint_name(iteration))}"
        held = described(tensors)
        files: dict[str, bytes] = {}
        drafts: list[Draft] = []

        def plan(shares: list[list[HeldTensor] | None]) -> list[Assignment]:
            files.update(encoded(config, state))
            assignments = self._assign(shares)
            drafts.append(self._draft(iteration))
            drafts[0].make()
            return assignments

        def finish(parts: list[Manifest]) -> list[str]:
            manifest = commit(self._storage, drafts[0], iteration, parts, files, self._token)
            return [str(manifest.content_digest)] * len(parts)

        try:
            part = self._take(held, decide(self._group, doing, lambda: self._unless_known(held), plan))
            return decide(self._group, doing, lambda: write_part(self._draft(iteration), part, reader_of(tensors)), finish)
        except (CheckpointError, RuntimeError):
            for draft in drafts:  # only the first rank has one
                draft.abandon()
            raise
