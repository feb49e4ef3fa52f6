"""The random command line of a number, the same on every machine, and how a line that fails is made simpler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import hypothesis
from hypothesis import HealthCheck, Phase

from megatron.config.given import split
from tests.support.random_configs import CommandLine, command_lines

_SIZES = ("tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size")


def line_of(number: int) -> CommandLine:
    """The command line of a number."""
    found: list[CommandLine] = []

    # Of two examples the first is always the simplest line.
    @hypothesis.settings(
        max_examples=2,
        phases=[Phase.generate],
        database=None,
        derandomize=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.seed(number)
    @hypothesis.given(command_lines())
    def draw(line: CommandLine) -> None:
        found.append(line)

    draw()
    return found[-1]


def simpler(line: CommandLine, fails: Callable[[CommandLine], bool], tries: int) -> CommandLine:
    """A line that fails, with fewer flags and smaller numbers as far as it still fails.

    Args:
        fails: whether a line fails in the same way.
        tries: lines looked at, at most.
    """
    left = tries
    changed = True
    while changed:
        changed = False
        for candidate in _changes(line):
            left -= 1
            if left < 0:
                return line
            if fails(candidate):
                line, changed = candidate, True
                break
    return line


def _changes(line: CommandLine) -> Iterator[CommandLine]:
    """The line on fewer data ranks, then without some of its flags (many first), then with smaller numbers."""
    if (copies := line.world_size // _ranks(line.argv)) > 1:
        yield from (CommandLine(line.argv, number * _ranks(line.argv)) for number in range(1, copies))
    parts = [(f"--{item.name}", *item.values) for item in split(line.argv)[1]]
    for size in (len(parts) // 4, len(parts) // 8, 2, 1):
        for start in range(0, len(parts), max(1, size)):
            yield _joined(parts[:start] + parts[start + max(1, size) :], line)
    for index, part in enumerate(parts):
        if len(part) == 2 and part[1].isdigit() and int(part[1]) > 1:
            for smaller in (int(part[1]) // 2, int(part[1]) - 1):
                yield _joined([*parts[:index], (part[0], str(smaller)), *parts[index + 1 :]], line)


def _joined(parts: list[tuple[str, ...]], before: CommandLine) -> CommandLine:
    """A line for as many data ranks as before."""
    argv = tuple(word for part in parts for word in part)
    return CommandLine(argv, before.world_size // _ranks(before.argv) * _ranks(argv))


def _ranks(argv: tuple[str, ...]) -> int:
    """Tensor size x context size x pipeline size."""
    return math.prod(max(1, int(item.values[0])) for item in split(argv)[1] if item.name in _SIZES)
