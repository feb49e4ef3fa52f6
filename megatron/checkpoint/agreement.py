"""Steps of a save or load that all ranks make together: each does its share, the first one decides, all continue or all fail."""

from __future__ import annotations

import pickle
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed, ranks_named
from megatron.parallel.context import Group

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
