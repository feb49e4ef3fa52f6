"""Savers of a run. With `SyncSaver` a checkpoint is complete when `save` returns. With `AsyncSaver` it is written in the
background.

The plan of which rank writes which slices is reused until the slices of a rank change.

With `AsyncSaver` training waits only for a copy into host memory. A writer process of each rank writes the copy:

1. All ranks together: each rank waits until its files of the previous save are written. The first rank waits until the previous
checkpoint is complete, and makes a new plan if slices have changed.
2. Each rank copies the slices that it writes into shared memory, and sends its writer process a message.
3. The writer processes write their files. The writer of the first rank commits the checkpoint when all ranks have written theirs.

Only the writer processes access the storage. Between saves no rank waits or communicates with other ranks: `poll` only reads the
replies of the rank's own writer. A writer that cannot write its files leaves a failure mark, a file in the draft's folder. If it
cannot write even the mark, the first rank learns about the failure in step 1 of the next save.
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

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list, format_ranks
from megatron.checkpoint.global_tensor import GlobalTensor, get_tensor_bytes
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.rank_writer import PATIENCE_S, RankWriter
from megatron.checkpoint.save_folder import Retention, claim_folder, commit, encode_json_files, get_checkpoint_name, read_latest
from megatron.checkpoint.save_plan import LocalTensorSpec, SavePlan, WriteItem, plan_save, write_rank_files
from megatron.checkpoint.storage import Draft, Storage
from megatron.checkpoint.writer_messages import CommitResult
from megatron.parallel.context import Group
from megatron.parallel.matmul import get_dtype_name

# ---- Coordination of the ranks: either all ranks continue or all ranks fail.

LocalResult = TypeVar("LocalResult")
Response = TypeVar("Response")


def coordinate(
    group: Group,
    action: str,
    local_fn: Callable[[], LocalResult],
    coordinator_fn: Callable[[list[LocalResult]], Sequence[Response]],
) -> Response:
    """Run a function on every rank and pass all results to a function on the first rank, which returns one response for each rank.

    Either all ranks succeed or all ranks raise an error.

    Args:
        group: ranks that take part. All of them call this function together.
        action: start of the error message, such as "cannot save /runs/a/iter_0000100".
        local_fn: called on every rank.
        coordinator_fn: called on the first rank with the results of all ranks in rank order, if no rank failed. Returns a response
            for each rank.

    Returns:
        the response for this rank.

    Raises:
        CheckpointError: on every rank, if any rank raised an `OSError` or a `CheckpointError`. Contains the messages and their
            ranks.
        RuntimeError: on every rank, if any rank raised another error, which is a bug.
    """
    results = _gather(_attempt(local_fn), group)
    responses: list[tuple[Any, dict[int, _Failure]]] | None = None
    if results is not None:
        failures = {rank: failure for rank, (_, failure) in enumerate(results) if failure is not None}
        values: Sequence[Any] = [None] * group.size
        if not failures:
            values, failure = _attempt(lambda: coordinator_fn([value for value, _ in results]))
            if failure is not None:
                failures, values = {0: failure}, [None] * group.size
        responses = [(value, failures) for value in values]
    value, failures = _scatter(responses, group)
    if failures:
        _raise_for_user(failures, action)
    return value


class _Failure(NamedTuple):
    error: Exception
    traceback: str


def _raise_for_user(failures: Mapping[int, _Failure], action: str) -> NoReturn:
    """Raise one error that names the failed ranks: a `CheckpointError` with their messages, or a `RuntimeError` if a failure is a
    bug.

    Only an `OSError` or a `CheckpointError` counts as no bug (see `coordinate`).

    Args:
        failures: failures by rank.
        action: start of the error message, such as "cannot save /runs/a/iter_0000100".
    """
    errors = {rank: failure.error for rank, failure in failures.items()}
    first = next(iter(errors.values()))
    if not all(isinstance(error, (CheckpointError, OSError)) for error in errors.values()):
        tracebacks = (
            f"Traceback (most recent call last): ({format_ranks([rank])})\n{failure.traceback}"
            for rank, failure in failures.items()
        )
        raise RuntimeError(f"{action}: {format_ranks(list(errors))} failed\n{''.join(tracebacks)}") from first
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, error in errors.items():
        ranks_of[str(error)].append(rank)
    # The first rank detects mismatches of settings and checkpoint for all ranks. Other errors are reported with their ranks.
    reasons = [
        text if type(errors[ranks[0]]) is CheckpointError else f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()
    ]
    damaged = any(isinstance(error, DamagedCheckpointError) for error in errors.values())
    error_type = DamagedCheckpointError if damaged else CheckpointError
    raise error_type(f"{action}:\n  " + format_list(reasons, "\n  ")) from first


def _attempt(action: Callable[[], Any]) -> tuple[Any, _Failure | None]:
    """Call a function and return its error instead of raising it, so that this rank can report the error to the other ranks.

    Returns:
        (result of the function, None), or (None, the failure). The failure can be pickled and sent to another process.
    """
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - sent to all ranks
        traceback_text = "".join([*traceback.format_tb(error.__traceback__), *traceback.format_exception_only(error)])
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - its class may raise anything
            return None, _Failure(RuntimeError(repr(error)), traceback_text)
        return None, _Failure(error, traceback_text)


def _gather(value: Any, group: Group) -> list[Any] | None:
    """Gather one value from every rank. Returns the list of values on the first rank, and None on all others."""
    if group.size == 1:
        return [value]
    values: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(value, values, dst=group.ranks[0], group=group.process_group)
    return values


def _scatter(values: list[Any] | None, group: Group) -> Any:
    """Send each rank one element of a list and return the element of this rank.

    Args:
        values: on the first rank, one element for each rank; None on all others.
    """
    if group.size == 1:
        assert values is not None
        return values[0]
    local_value: list[Any] = [None]
    dist.scatter_object_list(local_value, values, src=group.ranks[0], group=group.process_group)
    return local_value[0]


class Assignment(NamedTuple):
    """Message of the first rank to each rank before a save: the files that the rank is to write."""

    token: str
    """Hexadecimal digits that identify the run. They are part of the name of an unfinished checkpoint."""
    plan: SavePlan | None
    """Files that the rank writes. None if they are the same as in the previous save."""


class BaseSaver:
    """Base class of the objects that save the checkpoints of a run. It plans which rank writes which slices.

    A save needs one exchange of messages between the ranks and the first rank. The messages are small if no slices have changed
    since the previous save.

    Args:
        storage: save folder, on a file system that all ranks share. It is created if it does not exist.
        group: ranks that save.
        token: hexadecimal digits that identify the run, by default random ones. Only the first rank's token counts.
    """

    def __init__(self, storage: Storage, group: Group, token: str | None = None) -> None:
        self._storage, self._group = storage, group
        self._token = token or secrets.token_hex(4)
        self._specs: list[LocalTensorSpec] | None = None
        self._plan = SavePlan(group.rank, ())
        self._world_specs: list[list[LocalTensorSpec]] = []
        self._last_complete: int | None = None
        """On the first rank: iteration of the last complete checkpoint."""
        self.last_saved: int | None = None
        """On the first rank: iteration of the last save, if its checkpoint is complete; otherwise None."""

    @property
    def token(self) -> str:
        """Hexadecimal digits that identify the run, as in `run.json`. Valid on the first rank."""
        return self._token

    def claim_folder(self, record: dict[str, Any]) -> None:
        """Make this run the owner of the save folder: remove unfinished checkpoints of killed runs and write `run.json`. Called on
        the first rank, before the first save.

        Args:
            record: settings, versions and command line of the run.
        """
        self.remove_unfinished()
        claim_folder(self._storage, record, self._token)
        self._last_complete = read_latest(self._storage)

    def remove_unfinished(self) -> None:
        """Remove unfinished checkpoints of killed runs. Called on the first rank."""
        self._storage.remove_unfinished(self._token)

    def _draft(self, iteration: int) -> Draft:
        return self._storage.draft(get_checkpoint_name(iteration), self._token)

    def _get_changed_specs(self, specs: list[LocalTensorSpec]) -> list[LocalTensorSpec] | None:
        """Return the descriptions of this rank's tensors if they differ from those of the previous save, otherwise None."""
        return None if specs == self._specs else specs

    def _plan_assignments(self, changed_specs: list[list[LocalTensorSpec] | None]) -> list[Assignment]:
        """Plan which files each rank writes. Called on the first rank.

        Args:
            changed_specs: results of `_get_changed_specs` on all ranks.

        Raises:
            CheckpointError: the tensors cannot be saved; `plan_save` lists the reasons.
        """
        if all(specs is None for specs in changed_specs):
            return [Assignment(self._token, None)] * len(changed_specs)
        old_world = self._world_specs or [[]] * len(changed_specs)
        self._world_specs = [old if new is None else new for old, new in zip(old_world, changed_specs, strict=True)]
        return [Assignment(self._token, plan) for plan in plan_save(self._world_specs)]

    def _apply_assignment(self, specs: list[LocalTensorSpec], assignment: Assignment) -> SavePlan:
        """Store the token of the run and this rank's plan for a save, which the first rank has sent.

        Args:
            specs: descriptions of this rank's tensors, to which the plan belongs.

        Returns:
            the plan of this rank. If no rank's tensors have changed, this is the plan of the previous save.
        """
        self._token = assignment.token
        if assignment.plan is not None:
            self._plan = assignment.plan
        self._specs = specs
        return self._plan


def build_specs(tensors: list[GlobalTensor]) -> list[LocalTensorSpec]:
    """Describe a rank's local tensors for the plan of a save: names, shapes, dtypes and slices, without the elements."""
    return [
        LocalTensorSpec(
            tensor.name,
            tensor.global_shape,
            get_dtype_name(tensor.local.dtype),
            tuple(local_slice.slice for local_slice in tensor.slices),
        )
        for tensor in tensors
    ]


def build_data_reader(tensors: list[GlobalTensor]) -> Callable[[WriteItem], memoryview]:
    """Build the function that returns the bytes of a slice from the local tensors. A slice on a device is copied to the host only
    when the function is called."""
    local_slices = {(tensor.name, local_slice.slice): (tensor, local_slice) for tensor in tensors for local_slice in tensor.slices}

    def read_data(item: WriteItem) -> memoryview:
        tensor, local_slice = local_slices[item.name, item.tensor_slice]
        return get_tensor_bytes(tensor.get_local_view(local_slice))

    return read_data


class SyncSaver(BaseSaver):
    """Saver that writes a checkpoint while training waits: the checkpoint is complete when `save` returns."""

    def save(self, iteration: int, tensors: list[GlobalTensor], config: dict[str, Any], state: dict[str, Any]) -> str:
        """Write the checkpoint `<folder>/iter_<iteration>/` in the format of docs/checkpoints.md, and update the latest file
        (`latest_checkpointed_iteration.txt`).

        Call it on every rank of the group. Either all ranks return when the checkpoint is complete, or all ranks raise an error and
        no incomplete checkpoint has the final name. An existing checkpoint of this iteration is replaced.

        Args:
            iteration: iteration of the checkpoint.
            tensors: local slices of this rank. The slices of all ranks must cover every global tensor; replicated slices are
                written once. At most one slice at a time is copied (none if the slices are in host memory).
            config: content of `config.json`. The first rank's is written.
            state: content of `state.json`. The first rank's is written.

        Returns:
            the digest of the content.

        Raises:
            CheckpointError: a rank cannot write, config or state cannot be encoded as JSON, or the slices do not cover the tensors
                exactly.
        """
        action = f"cannot save {self._storage.get_location(get_checkpoint_name(iteration))}"
        specs = build_specs(tensors)
        small_files: dict[str, bytes] = {}
        drafts: list[Draft] = []

        def plan(changed_specs: list[list[LocalTensorSpec] | None]) -> list[Assignment]:
            small_files.update(encode_json_files(config, state))
            assignments = self._plan_assignments(changed_specs)
            drafts.append(self._draft(iteration))
            drafts[0].create_folder()
            return assignments

        def finish(rank_manifests: list[Manifest]) -> list[str]:
            manifest = commit(self._storage, drafts[0], iteration, rank_manifests, small_files, self._token)
            self.last_saved = iteration
            return [str(manifest.content_digest)] * len(rank_manifests)

        try:
            local_plan = self._apply_assignment(
                specs, coordinate(self._group, action, lambda: self._get_changed_specs(specs), plan)
            )
            return coordinate(
                self._group,
                action,
                lambda: write_rank_files(self._draft(iteration), local_plan, build_data_reader(tensors)),
                finish,
            )
        except (CheckpointError, RuntimeError):
            for draft in drafts:  # only the first rank has a draft
                draft.discard()
            raise


LogFunction = Callable[[str], None]
"""Function that writes a line to the log."""

_MIN_LOGGED_WAIT_S = 0.1
"""Shorter waits, in seconds, are not logged."""


class _Status(NamedTuple):
    """Message of a rank to the first rank before a save. It contains the result of the rank's previous save. If the descriptions of
    its tensors differ from those of the previous save, it also contains these descriptions."""

    failure: str | None
    """Reason why the rank could not write its files in the previous save. None if they were written."""
    changed_specs: list[LocalTensorSpec] | None
    """Descriptions of the rank's tensors. None if they have not changed since the previous save."""


class AsyncSaver(BaseSaver):
    """Saver that writes checkpoints in the background, at most one at a time.

    Args:
        storage: save folder, on a file system that all ranks share. It is created if it does not exist.
        group: ranks that save.
        token: hexadecimal digits that identify the run, by default random ones.
        retention: which checkpoints are kept.
        patience_s: while training waits for a writer process, kill the process after this many seconds without a reply. It must be
            less than the timeout of collectives.
    """

    def __init__(
        self, storage: Storage, group: Group, retention: Retention, patience_s: float = PATIENCE_S, token: str | None = None
    ) -> None:
        super().__init__(storage, group, token)
        self._writer = RankWriter(storage, group.rank, group.size, retention, patience_s)
        self._logged: CommitResult | None = None
        """On the first rank: the last result that was logged."""
        self._is_finishing = False
        self._failure: str | None = None
        """On the first rank: why the last save failed. None if it did not fail."""
        self._failed_iterations: list[int] = []
        """On the first rank: iterations of the saves that have failed since the last start of a save."""

    def save(
        self, iteration: int, tensors: list[GlobalTensor], config: dict[str, Any], state: dict[str, Any], log: LogFunction
    ) -> None:
        """Start a save in the background. All ranks call this together. The tensors may change as soon as the call returns.

        A failed write raises no error here. The first rank logs the failure, in `poll` or at the next save.

        Args:
            iteration: iteration of the checkpoint.
            tensors: local slices of this rank, as for `SyncSaver.save`.
            config: content of `config.json`. The first rank's is written.
            state: content of `state.json`. The first rank's is written.
            log: called on the first rank with lines for the log.

        Raises:
            CheckpointError: on all ranks, if config or state cannot be encoded as JSON, or the slices do not cover the tensors
                exactly.
        """
        location, specs = self._storage.get_location(get_checkpoint_name(iteration)), build_specs(tensors)
        small_files: dict[str, bytes] = {}
        start = time.monotonic()

        def plan(statuses: list[_Status]) -> list[Assignment]:
            self._finish_last_save(statuses, start, log)
            small_files.update(encode_json_files(config, state))
            return self._plan_assignments([status.changed_specs for status in statuses])

        assignment = coordinate(self._group, f"cannot save {location}", lambda: self._get_status(specs), plan)
        copy_start = time.monotonic()
        failed_iterations = tuple(i for i in self._failed_iterations if i != iteration)
        self._writer.start(
            iteration, assignment.token, self._apply_assignment(specs, assignment), tensors, small_files, failed_iterations
        )
        if self._group.rank == 0:
            self._failure, self._failed_iterations, self.last_saved = None, [], None
            log(f"saving {location} in the background (copied in {time.monotonic() - copy_start:.2f} s)")
            self._log_results(log)

    def poll(self, log: LogFunction) -> None:
        """Read the replies of this rank's writer process without waiting. The first rank logs that a save is complete, has failed
        or makes no progress."""
        self._writer.receive()
        if self._group.rank == 0:
            self._log_results(log)
            if (message := self._writer.get_stall_warning()) is not None:
                log(message)

    def wait(self, log: LogFunction) -> None:
        """Wait until the last save has completed or failed. All ranks call this together. A failure is only logged; no error is
        raised."""
        start = time.monotonic()

        def finish_last_save(statuses: list[_Status]) -> list[None]:
            self._finish_last_save(statuses, start, log)
            return [None] * len(statuses)

        coordinate(self._group, "cannot wait for the last save", lambda: self._get_status(None), finish_last_save)

    def finish(self, log: LogFunction) -> None:
        """Wait for the last save and end the writer processes. All ranks call this together.

        Raises:
            CheckpointError: on all ranks, if the last save failed.
        """
        start, self._is_finishing = time.monotonic(), True

        def finish_last_save(statuses: list[_Status]) -> list[None]:
            self._finish_last_save(statuses, start, log)
            if self._failure is not None:
                raise CheckpointError(self._failure)
            return [None] * len(statuses)

        try:
            coordinate(self._group, "the run ends without its last checkpoint", lambda: self._get_status(None), finish_last_save)
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                self._writer.close()  # another rank has died: its files may never be written
            raise
        finally:
            self._writer.shut_down(tuple(self._failed_iterations))
        if self._group.rank == 0:
            self._log_results(log)

    def _get_status(self, specs: list[LocalTensorSpec] | None) -> _Status:
        return _Status(self._writer.wait_for_rank_result(), None if specs is None else self._get_changed_specs(specs))

    def _finish_last_save(self, statuses: list[_Status], start: float, log: LogFunction) -> None:
        """Wait until the last checkpoint is complete or has failed, and log the result. Called on the first rank when all ranks
        have written their files or have failed.

        Args:
            statuses: messages of all ranks.
            start: time.monotonic() at the start of the wait for all ranks.
            log: writes a line to the log.
        """
        self._writer.wait_for_commit([status.failure for status in statuses if status.failure is not None])
        result = self._writer.commit_result
        if result is None:
            return
        if result is not self._logged and (wait_s := time.monotonic() - start) > _MIN_LOGGED_WAIT_S:
            log(f"waited {wait_s:.1f} s for the save of iteration {result.iteration}")
        self._log_results(log)

    def _log_results(self, log: LogFunction) -> None:
        """Log the messages of the writer process, and the result of the last save if it is not logged yet."""
        while self._writer.log_lines:
            log(self._writer.log_lines.pop(0))
        result = self._writer.commit_result
        if result is None or result is self._logged:
            return
        self._logged = result
        location = self._storage.get_location(get_checkpoint_name(result.iteration))
        if result.failure is not None:
            # Files remain: the writer process has died, or other ranks were still writing.
            self._failed_iterations.append(result.iteration)
            self._log_failure(location, result.failure, log)
        else:
            self._last_complete = self.last_saved = result.iteration
            log(f"saved {location} in {result.duration_s:.1f} s, digest {result.content_digest[:16]}")

    def _log_failure(self, location: str, reason: str, log: LogFunction) -> None:
        self._failure = f"cannot save {location}:\n  {reason}"
        last = self._last_complete
        last_checkpoint = (
            "There is no complete checkpoint yet" if last is None else f"The last complete one is {get_checkpoint_name(last)}"
        )
        log(f"SAVE FAILED: {self._failure}\n  {last_checkpoint}.{'' if self._is_finishing else ' Training goes on.'}")
