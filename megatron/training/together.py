"""All ranks succeed or all stop with the same message: nobody is left waiting for a rank that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext

T = TypeVar("T")


class SetupError(ValueError):
    """Something that the user can mend was wrong on at least one rank."""


def together(context: ParallelContext, action: Callable[[], T]) -> T:
    """Run an action without collectives on every rank, and agree on how it went.

    Raises:
        SetupError: on every rank, if the action raised ValueError or OSError on any; names the ranks and gives each message once.
    """
    failure, result = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = str(error) or type(error).__name__
    failures: dict[str, list[int]] = {}
    for rank, message in enumerate(gather_objects(failure, context.world)):
        if message is not None:
            failures.setdefault(message, []).append(rank)
    if failures:
        everywhere = len(failures) == 1 and len(next(iter(failures.values()))) == context.world.size
        raise SetupError(
            "\n".join(message if everywhere else f"rank {_ranks(ranks)}: {message}" for message, ranks in failures.items())
        )
    return result  # type: ignore[return-value]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
