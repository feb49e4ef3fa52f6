"""What becomes of a command line: refused in words, or run and compared with the reference."""

from __future__ import annotations

import re
import shlex
import traceback
from enum import StrEnum

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flag_of
from megatron.parallel.topology import Topology
from megatron.training.progress import BatchSizePlan
from megatron.verification.diagnosis import diagnose
from tests.support.random_configs import CommandLine
from tests.support.random_starts import rehearse, start
from tests.support.verify_observations import prove_warm

_MOST_TOLD = 2000  # characters, of both ends of a message
_WORLD = re.compile(r"world size (\d+)")


class Outcome(StrEnum):
    """What a command line came to."""

    REFUSED = "refused"
    EQUAL = "equal"
    IDLE = "without a step"
    """All its iterations are skipped, so there is nothing to compare."""


class WrongError(AssertionError):
    """A command line came to what it must not; says how to repeat it."""

    def __init__(self, line: CommandLine, error: Exception) -> None:
        told = "".join(traceback.format_exception(error, chain=False))
        shortened = told if len(told) < 2 * _MOST_TOLD else f"{told[:_MOST_TOLD]}\n...\n{told[-_MOST_TOLD:]}"
        super().__init__(f"{shortened}\nRepeat it by: bash tests/run.sh --fuzz-repeat {line}")
        raised = re.findall(r"^(\w+(?:Error|Exception|Exit))\b", told, re.MULTILINE)
        self.kind = f"{type(error).__name__} {raised[-1] if raised else ''} {str(error).partition(' of ')[0][:40]}"
        """Lines that fail in the same way have the same."""


def judge(line: CommandLine, timeout: float = 60.0, *, started: bool = False) -> Outcome:
    """Refused in words, or equal to the reference.

    Args:
        timeout: seconds after which a run hangs.
        started: run the program too, as a user does, and lay the run out without running it.

    Raises:
        WrongError: anything else.
    """
    try:
        try:
            config = load(line.argv, line.world_size).config
        except ConfigError as error:
            check_refusal(line, error)
            return Outcome.REFUSED
        if not makes_a_step(config, line.world_size):
            return Outcome.IDLE
        compare(config, line.world_size, timeout)
        if started:
            start(line, config, timeout)
            rehearse(line)
        return Outcome.EQUAL
    except Exception as error:  # noqa: BLE001 - whatever it is, the line is told with it
        raise WrongError(line, error) from None


def makes_a_step(config: Config, world_size: int) -> bool:
    """Whether --iterations-to-skip leaves one."""
    parallel, training = config.parallel, config.training
    data_size = Topology.of(parallel, world_size).dp
    iterations = BatchSizePlan(training, data_size, config.model.seq_length).total_iterations
    return not {*range(1, iterations + 1)} <= {*training.iterations_to_skip}


def compare(config: Config, world_size: int, timeout: float) -> None:
    """Run valid settings in float64 beside the reference.

    Raises:
        AssertionError: something differs.
    """
    found = diagnose(prove_warm(config, world_size, timeout=timeout))
    assert found.equal, "\n".join(finding.line() for finding in found.findings)


def check_refusal(line: CommandLine, error: ConfigError) -> None:
    """Every violation says in words what is wrong and names flags, and what it suggests removes it.

    Raises:
        AssertionError: one does not.
    """
    found = error.violations
    assert found and str(error).strip()
    fits = not any(_hides_the_data_size(violation) for violation in found)
    for violation in found:
        assert violation.message.endswith(".") and len(violation.message.split()) > 2, violation
        assert violation.flags or "world size" in violation.message or "belongs to no flag" in violation.message, violation
        for suggestion in violation.nearest:
            left = violations_of(*with_suggestion(line, suggestion))
            # While there is no data size, the rules about batches are silent: then others may come up instead.
            fewer = len(left) <= len(found) - fits and violation.message not in [other.message for other in left]
            assert fewer, f"{suggestion} does not help against: {violation.message}\nleft: {left}"


def _hides_the_data_size(violation: Violation) -> bool:
    """Ranks and layout do not fit, or the layout has a size that cannot be."""
    sizes = {"--tensor-model-parallel-size", "--pipeline-model-parallel-size"}
    out_of_range = "out of range" in violation.message and not sizes.isdisjoint(violation.flags)
    return out_of_range or violation.message.startswith("The world size ")


def with_suggestion(line: CommandLine, suggestion: str) -> tuple[tuple[str, ...], int]:
    """The command line and the world size after a suggestion was followed."""
    world = _WORLD.fullmatch(suggestion)
    if world:
        return line.argv, int(world[1])
    words = shlex.split(suggestion)
    assert all(flag_of(word[2:]) is not None for word in words if word.startswith("--")), suggestion
    return (*line.argv, *words), line.world_size


def violations_of(argv: tuple[str, ...], world_size: int) -> tuple[Violation, ...]:
    """What stands against a command line."""
    try:
        load(argv, world_size)
    except ConfigError as error:
        return error.violations
    return ()
