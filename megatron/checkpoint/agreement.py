"""Steps of a save or load that all ranks make together: each does its share, the first one decides, all continue or all fail."""

from __future__ import annotations

import pickle
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed, ranks_named
from megatron.parallel.context import SELF_GROUP, Group

Share = TypeVar("Share")
Answer = TypeVar("Answer")


def group_of(process_group: dist.ProcessGroup | None) -> Group:
    """The ranks of a process group; for None all ranks, or this process alone where torch.distributed is not initialised."""
    if process_group is None:
        if not dist.is_initialized():
            return SELF_GROUP
        process_group = dist.group.WORLD
    assert process_group is not None
    return Group("save", tuple(dist.get_process_group_ranks(process_group)), process_group.rank(), process_group)


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
    answers: list[Any] | None = None
    if shares is not None:
        failures = {rank: value for rank, (value, failed) in enumerate(shares) if failed}
        decided: tuple[Any, bool] = (failures, True)
        if not failures:
            value, failed = _attempt(lambda: answer([value for value, _ in shares]))
            decided = ({0: value}, True) if failed else (value, False)
        value, failed = decided
        answers = [decided] * group.size if failed else [(item, False) for item in value]
    value, failed = _dealt(answers, group)
    if failed:
        _raise_for_user(value, doing)
    return value


def _raise_for_user(failures: Mapping[int, tuple[Exception, traceback.StackSummary]], doing: str) -> NoReturn:
    """Turn the failures of some ranks into one error; see `decide`."""
    causes = {rank: cause for rank, (cause, _) in sorted(failures.items())}
    first = next(iter(causes.values()))
    if not all(isinstance(cause, (CheckpointError, OSError)) for cause in causes.values()):
        traces = (
            f"Traceback (most recent call last): ({ranks_named([rank])})\n"
            + "".join([*trace.format(), *traceback.format_exception_only(cause)])
            for rank, (cause, trace) in sorted(failures.items())
        )
        raise RuntimeError(f"{doing}: {ranks_named(list(causes))} failed\n{''.join(traces)}") from first
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, cause in causes.items():
        ranks_of[str(cause)].append(rank)
    # A disagreement between settings and checkpoint is found by one rank for all. Anything else is reported with its ranks.
    reasons = [
        text if type(causes[ranks[0]]) is CheckpointError else f"{ranks_named(ranks)}: {text}" for text, ranks in ranks_of.items()
    ]
    damaged = any(isinstance(cause, DamagedCheckpointError) for cause in causes.values())
    kind = DamagedCheckpointError if damaged else CheckpointError
    raise kind(f"{doing}:\n  " + listed(reasons, "\n  ")) from first


def _attempt(action: Callable[[], Any]) -> tuple[Any, bool]:
    """(what an action returns, or what it raises with its trace; whether it raised)."""
    try:
        return action(), False
    except Exception as error:  # noqa: BLE001 - told to all ranks
        frames = traceback.extract_tb(error.__traceback__)
        # A new one is made, since from Python 3.13 on those of a live trace cannot be sent to another process.
        plain = traceback.StackSummary.from_list([(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in frames])
        return (_sendable(error), plain), True


def _sendable(error: Exception) -> Exception:
    """The error, or one with the same words where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        return RuntimeError(repr(error))
    return error


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
