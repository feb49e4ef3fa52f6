"""Saves of a run: complete when the call returns, or in the background. Both are planned anew only when boxes have changed.

In the background training waits for a copy into host memory, and a process beside each rank writes it:

1. All ranks together: each waits until its part of the save before is written. The first one waits until that is a checkpoint, and
   plans anew if boxes have changed.
2. Each rank copies what it writes into shared memory and sends its process a message.
3. The processes write their parts. The first rank's makes a checkpoint of them when all are there.

Only these processes touch the storage. Between saves nothing waits and nobody asks another rank: `poll` looks whether the own
process has replied. Where a part cannot be written, a process leaves a mark in the folder. If even that is impossible, the first
rank learns of it in the next step 1.
"""

from __future__ import annotations

import pickle
import secrets
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed, ranks_named
from megatron.checkpoint.global_tensor import GlobalTensor, bytes_of
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.rank_parts import BoxToWrite, HeldTensor, RankPart, share_out, write_part
from megatron.checkpoint.rank_writer import PATIENCE_S, RankWriter
from megatron.checkpoint.save_folder import Retention, checkpoint_name, commit, encoded, latest_in, take_over
from megatron.checkpoint.storage import Draft, Storage
from megatron.checkpoint.writer_messages import Committed
from megatron.parallel.context import Group
from megatron.parallel.products import dtype_name

# ---- Steps of a save or load that all ranks make together: each does its share, the first one decides, all continue or all fail.

Share = TypeVar("Share")
Answer = TypeVar("Answer")


def decide(group: Group, doing: str, share: Callable[[], Share], answer: Callable[[list[Share]], Sequence[Answer]]) -> Answer:
    """One round: every rank gives its share, and the first rank answers each of them.

    Args:
        group: the ranks, all of which call this together.
        doing: words for the error, e.g. "cannot save /runs/a/iter_0000100".
        share: called on every rank.
        answer: called on the first rank with all shares in the order of the ranks, if no rank failed; gives one answer for each.

    Returns:
        this rank's answer.

    Raises:
        CheckpointError: on every rank, if any raised an `OSError` or a `CheckpointError`; with each message and its ranks.
        RuntimeError: on every rank, if any raised something else, which is a fault of the program.
    """
    shares = _gathered(_attempt(share), group)
    answers: list[tuple[Any, dict[int, _Failure]]] | None = None
    if shares is not None:
        failures = {rank: failure for rank, (_, failure) in enumerate(shares) if failure is not None}
        decided: Sequence[Any] = [None] * group.size
        if not failures:
            decided, failure = _attempt(lambda: answer([value for value, _ in shares]))
            if failure is not None:
                failures, decided = {0: failure}, [None] * group.size
        answers = [(value, failures) for value in decided]
    value, failures = _dealt(answers, group)
    if failures:
        _raise_for_user(failures, doing)
    return value


class _Failure(NamedTuple):
    error: Exception
    trace: str


def _raise_for_user(failures: Mapping[int, _Failure], doing: str) -> NoReturn:
    """Turn the failures of some ranks into one error; see `decide`."""
    errors = {rank: failure.error for rank, failure in failures.items()}
    first = next(iter(errors.values()))
    if not all(isinstance(error, (CheckpointError, OSError)) for error in errors.values()):
        traces = (
            f"Traceback (most recent call last): ({ranks_named([rank])})\n{failure.trace}" for rank, failure in failures.items()
        )
        raise RuntimeError(f"{doing}: {ranks_named(list(errors))} failed\n{''.join(traces)}") from first
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, error in errors.items():
        ranks_of[str(error)].append(rank)
    # A disagreement between settings and checkpoint is found by one rank for all. Anything else is reported with its ranks.
    reasons = [
        text if type(errors[ranks[0]]) is CheckpointError else f"{ranks_named(ranks)}: {text}" for text, ranks in ranks_of.items()
    ]
    damaged = any(isinstance(error, DamagedCheckpointError) for error in errors.values())
    kind = DamagedCheckpointError if damaged else CheckpointError
    raise kind(f"{doing}:\n  " + listed(reasons, "\n  ")) from first


def _attempt(action: Callable[[], Any]) -> tuple[Any, _Failure | None]:
    """What an action returns, or how it fails, in a form that can be sent to another process."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - told to all ranks
        trace = "".join([*traceback.format_tb(error.__traceback__), *traceback.format_exception_only(error)])
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever its class does
            return None, _Failure(RuntimeError(repr(error)), trace)
        return None, _Failure(error, trace)


def _gathered(value: Any, group: Group) -> list[Any] | None:
    """Every rank's value on the first rank, None on the others."""
    if group.size == 1:
        return [value]
    values: list[Any] | None = [None] * group.size if group.index == 0 else None
    dist.gather_object(value, values, dst=group.ranks[0], group=group.process_group)
    return values


def _dealt(values: list[Any] | None, group: Group) -> Any:
    """Give every rank its own one of the values that the first rank has."""
    if group.size == 1:
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values, src=group.ranks[0], group=group.process_group)
    return mine[0]


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
        token: that of the run, by default a new one. Only the first rank's counts.
    """

    def __init__(self, storage: Storage, group: Group, token: str | None = None) -> None:
        self._storage, self._group = storage, group
        self._token = token or secrets.token_hex(4)
        self._held: list[HeldTensor] | None = None
        self._part = RankPart(group.index, ())
        self._world: list[list[HeldTensor]] = []
        self._complete: int | None = None
        """On the first rank: the iteration of the last complete checkpoint."""

    @property
    def token(self) -> str:
        """The run's token in `run.json`, on the first rank."""
        return self._token

    def begin(self, record: dict[str, Any]) -> None:
        """On the first rank, before the first save: remove what killed runs left, and take the folder over (`run.json`).

        Args:
            record: settings, versions and command line of the run.
        """
        self.sweep()
        take_over(self._storage, record, self._token)
        self._complete = latest_in(self._storage)

    def sweep(self) -> None:
        """On the first rank: remove what killed runs left."""
        self._storage.sweep(self._token)

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
        return [Assignment(self._token, part) for part in share_out(self._world)]

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


Say = Callable[[str], None]
"""Writes a line into the log."""

_WORTH_SAYING_S = 0.1
"""Waits of fewer seconds are not logged."""


class _Status(NamedTuple):
    """What each rank reports before a save."""

    failure: str | None
    """Why its part of the previous save could not be written."""
    held: list[HeldTensor] | None
    """What it holds, if that has changed."""


class BackgroundSaver(RunSaver):
    """Saves checkpoints, at most one at a time.

    Args:
        storage, group, token: see `RunSaver`.
        retention: which checkpoints stay.
        patience_s: see `RankWriter`; less than the ranks wait for each other in a collective.
    """

    def __init__(
        self, storage: Storage, group: Group, retention: Retention, patience_s: float = PATIENCE_S, token: str | None = None
    ) -> None:
        super().__init__(storage, group, token)
        self._writer = RankWriter(storage, group.index, group.size, retention, patience_s)
        self._told: Committed | None = None
        """On the first rank: the last result of a save that was logged."""
        self._at_end = False
        self._failure: str | None = None
        """On the first rank: why the last save failed, if it did."""
        self._failed: list[int] = []
        """On the first rank: iterations whose saves have failed since the last that was begun."""

    def save(self, iteration: int, tensors: list[GlobalTensor], config: dict[str, Any], state: dict[str, Any], say: Say) -> None:
        """Begin a save; all ranks call it together. The tensors may change when it returns.

        A checkpoint that cannot be written is no error here: the first rank logs it, in `poll` or at the next save.

        Args:
            say: called on the first rank with lines for the log. The others are those of `TensorSaver.save`.

        Raises:
            CheckpointError: on all ranks, if config or state do not fit into JSON, or the boxes are not whole tensors.
        """
        location, held = self._storage.at(checkpoint_name(iteration)), described(tensors)
        files: dict[str, bytes] = {}
        asked = time.monotonic()

        def begin(statuses: list[_Status]) -> list[Assignment]:
            self._settle(statuses, asked, say)
            files.update(encoded(config, state))
            return self._assign([status.held for status in statuses])

        assignment = decide(self._group, f"cannot save {location}", lambda: self._status(held), begin)
        began = time.monotonic()
        failed = tuple(number for number in self._failed if number != iteration)
        self._writer.start(iteration, assignment.token, self._take(held, assignment), tensors, files, failed)
        if self._group.index == 0:
            self._failure, self._failed = None, []
            say(f"saving {location} in the background (copied in {time.monotonic() - began:.2f} s)")
            self._tell(say)

    def poll(self, say: Say) -> None:
        """Look, without waiting, whether the process has replied. The first rank logs how a save has ended, or that it waits."""
        self._writer.receive()
        if self._group.index == 0:
            self._tell(say)
            if (line := self._writer.stall()) is not None:
                say(line)

    def settle(self, say: Say) -> None:
        """Wait until the last save is a checkpoint, or has failed, which is no error here; all ranks call it together."""
        asked = time.monotonic()

        def settle(statuses: list[_Status]) -> list[None]:
            self._settle(statuses, asked, say)
            return [None] * len(statuses)

        decide(self._group, "cannot wait for the last save", lambda: self._status(None), settle)

    def finish(self, say: Say) -> None:
        """Wait for the last save, and end the processes; all ranks call it together.

        Raises:
            CheckpointError: on all ranks, if the last save failed.
        """
        asked, self._at_end = time.monotonic(), True

        def settle(statuses: list[_Status]) -> list[None]:
            self._settle(statuses, asked, say)
            if self._failure is not None:
                raise CheckpointError(self._failure)
            return [None] * len(statuses)

        try:
            decide(self._group, "the run ends without its last checkpoint", lambda: self._status(None), settle)
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                self._writer.close()  # another rank is lost: its part may never come
            raise
        finally:
            self._writer.end(tuple(self._failed))
        if self._group.index == 0:
            self._tell(say)

    def _status(self, held: list[HeldTensor] | None) -> _Status:
        return _Status(self._writer.wait_until_written(), None if held is None else self._unless_known(held))

    def _settle(self, statuses: list[_Status], asked: float, say: Say) -> None:
        """On the first rank, when all parts of the last save are written: wait until it is a checkpoint, and log it.

        Args:
            statuses: those of all ranks.
            asked: when they began to wait for each other, by time.monotonic().
            say: writes a line into the log.
        """
        self._writer.wait_until_committed([status.failure for status in statuses if status.failure is not None])
        committed = self._writer.committed
        if committed is None:
            return
        if committed is not self._told and (waited := time.monotonic() - asked) > _WORTH_SAYING_S:
            say(f"waited {waited:.1f} s for the save of iteration {committed.iteration}")
        self._tell(say)

    def _tell(self, say: Say) -> None:
        """Log what has arrived, once."""
        while self._writer.notes:
            say(self._writer.notes.pop(0))
        committed = self._writer.committed
        if committed is None or committed is self._told:
            return
        self._told = committed
        location = self._storage.at(checkpoint_name(committed.iteration))
        if committed.failure is not None:
            self._failed.append(committed.iteration)  # its process has died, or others were still writing when it gave up
            self._say_failed(location, committed.failure, say)
        else:
            self._complete = committed.iteration
            say(f"saved {location} in {committed.seconds:.1f} s, digest {committed.content_digest[:16]}")

    def _say_failed(self, location: str, reason: str, say: Say) -> None:
        self._failure = f"cannot save {location}:\n  {reason}"
        last = self._complete
        kept = "There is no complete checkpoint yet" if last is None else f"The last complete one is {checkpoint_name(last)}"
        say(f"SAVE FAILED: {self._failure}\n  {kept}.{'' if self._at_end else ' Training goes on.'}")
