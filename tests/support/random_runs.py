"""What becomes of a command line: refused in words, or run and compared with the reference; and as a user runs it."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import tempfile
import traceback
from enum import StrEnum
from pathlib import Path

import megatron_lab.planner.dry_run  # once here, not in every forked rank
import megatron_lab.planner.plan
import megatron_lab.planner.plan_text  # noqa: F401
from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import find_flag
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.save import to_yaml
from megatron.parallel.topology import Topology
from megatron.training.progress import BatchSizePlan
from megatron_lab.verification.diagnosis import diagnose
from tests.support.random_configs import CommandLine
from tests.support.runs import read_metrics, run
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
    assert found.equal, "\n".join(finding.format() for finding in found.findings)


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
    assert all(find_flag(word[2:]) is not None for word in words if word.startswith("--")), suggestion
    return (*line.argv, *words), line.world_size


def violations_of(argv: tuple[str, ...], world_size: int) -> tuple[Violation, ...]:
    """What stands against a command line."""
    try:
        load(argv, world_size)
    except ConfigError as error:
        return error.violations
    return ()


_BANDS = {"fp64": 1e-9, "fp16": 0.02, "bf16": 0.04, "": 1e-4}
"""Relative difference of the first loss from that in float64."""


def start(line: CommandLine, config: Config, timeout: float) -> None:
    """Run the whole program at the layout and in one process, and compare what it says.

    Args:
        config: what the command line says.

    Raises:
        AssertionError: a rank failed or hung, a loss is not finite, or the first one is too far from that of one process.
    """
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        run([*line.argv, "--metrics-file", str(folder / "layout")], line.world_size, timeout=timeout)
        plain = folder / "plain.yaml"
        plain.write_text(to_yaml(in_one_process(config, line.world_size)))
        run(["--config", str(plain), "--metrics-file", str(folder / "plain")], timeout=timeout)
        found, wanted = _losses(folder / "layout"), _losses(folder / "plain")
    precision, model = config.precision, config.model
    kind = next((kind for kind in ("fp64", "fp16", "bf16") if getattr(precision, kind)), "")
    # In float16 a step may be left out, because its gradient overflowed.
    assert found.keys() <= wanted.keys() and (kind == "fp16" or len(found) == len(wanted)), (found, wanted)
    assert all(map(math.isfinite, found.values())), found
    if model.attention_dropout or model.hidden_dropout:
        return
    # A later loss depends on updates, which rounding may turn round; in float64 all are the same.
    for iteration in found.keys() & (wanted if kind == "fp64" else list(wanted)[:1]):
        far = abs(found[iteration] - wanted[iteration]) / wanted[iteration]
        assert far <= _BANDS[kind], f"iteration {iteration}: loss {found[iteration]!r}, in one process {wanted[iteration]!r}"


def rehearse(line: CommandLine) -> None:
    """Lay the run out without running it.

    Raises:
        AssertionError: that failed.
    """
    said = run([*line.argv, "--dry-run", "--world-size", str(line.world_size)])
    assert f"{line.world_size} rank" in said.replace(",", ""), said


def in_one_process(config: Config, world_size: int) -> Config:
    """The same training without a layout, in float64."""
    parallel, training = config.parallel, config.training
    data_size = Topology.of(parallel, world_size).dp
    batch = training.global_batch_size or training.micro_batch_size * data_size
    precision = PrecisionConfig(fp64=True)
    if config.precision.fp8_format is not None:
        precision = dataclasses.replace(config.precision, bf16=False, fp64=True)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(training, global_batch_size=batch),
        parallel=ParallelConfig(device="cpu"),
        memory=dataclasses.replace(config.memory, recompute_layers_per_stage=None),
        precision=precision,
        optimizer=dataclasses.replace(config.optimizer, optimizer_cpu_offload=False, optimizer_offload_fraction=1.0),
    )


def _losses(path: Path) -> dict[int, float]:
    return {line["iteration"]: line["lm_loss"] for line in read_metrics(path) if "lm_loss" in line}
