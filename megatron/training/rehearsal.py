"""The plan of the job that is about to run, made in a process of its own beside the start of the first rank.

A plan takes the place of every kind of rank, with process groups that are none. So it is made before there are real ones, by a
fork, which leaves nothing behind in this process.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import torch

from megatron.config.checks.memory import AUTO
from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.config.launcher import launched
from megatron.data.tokenizers.tokenizer import planned_rows
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.planner.dry_run import make_plan
from megatron.planner.fit import with_fit_advice, with_least_layers
from megatron.planner.plan import Plan
from megatron.training.failure import together

T = TypeVar("T")


class Rehearsal(Generic[T]):
    """Begins to plan a job, on its first rank. To be made before anything else of the run, process groups above all.

    Args:
        make: makes what is wanted of the settings of the job, its size and the vocabulary.
    """

    def __init__(self, config: Config, make: Callable[[Config, DryRun, int], T]) -> None:
        self._child, self._result = _plan_beside(config, make) if launched().rank == 0 else (0, -1)

    def plan(self, context: ParallelContext) -> T | str:
        """What was made, or why there is none. All ranks call it together."""
        told: T | str = ""
        if context.rank == 0:
            with os.fdopen(self._result, "rb") as pipe:
                data = pipe.read()
            os.waitpid(self._child, 0)
            told = pickle.loads(data) if data else "its process ended early"
        answer: T | str = broadcast_object(told, context.world)
        return answer


def this_job() -> DryRun:
    """The size of the job that the launcher describes, as a request to lay it out."""
    job = launched()
    return DryRun(job.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size)), None)


def on_this_device(config: Config) -> Config:
    """The settings with --device written out: what `auto` finds here."""
    device: Literal["cpu", "cuda"] = "cpu" if config.parallel.device == "cpu" or not torch.cuda.is_available() else "cuda"
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, device=device))


def full_plan(config: Config, job: DryRun, vocab_size: int) -> Plan:
    """The plan as --dry-run tells it."""
    return with_fit_advice(make_plan(config, job, vocab_size), config, job, vocab_size)


def _plan_beside(config: Config, make: Callable[[Config, DryRun, int], T]) -> tuple[int, int]:
    """Fork a process that makes the plan; gives its number and the end of the pipe in which the plan will lie."""
    config = on_this_device(config)
    read_end, write_end = os.pipe()
    if child := os.fork():
        os.close(write_end)
        return child, read_end
    try:
        try:
            vocab_size = planned_rows(config.data)
            config = with_least_layers(config, this_job(), vocab_size)
            told: T | str = make(config, this_job(), vocab_size)
        except Exception as error:  # noqa: BLE001 - the run goes on without a plan, and says why
            told = f"{type(error).__name__}: {error}"
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(pickle.dumps(told))
    finally:
        os._exit(0)


def choose_layers(config: Config) -> Callable[[], str | None]:
    """Choose numbers for `--recompute-layers-per-stage auto`, on the first rank of the job.

    It is called before the ranks connect, because a plan connects ranks of its own that nobody hears.

    Returns:
        gives the numbers, None on other ranks and where they are not asked for. It raises ValueError if there are none.
    """
    if config.memory.recompute_layers_per_stage != AUTO or launched().rank > 0:
        return lambda: None
    error: ValueError | None = None
    numbers = None
    try:
        numbers = with_least_layers(on_this_device(config), this_job(), planned_rows(config.data)).memory.recompute_layers_per_stage
    except ValueError as found:
        error = found

    def give() -> str | None:
        if error is not None:
            raise error
        return numbers

    return give


def with_layers(config: Config, chosen: Callable[[], str | None], context: ParallelContext) -> Config:
    """The settings with the numbers that the first rank chose (see `choose_layers`). All ranks call it together.

    Raises:
        SetupError: it found none.
    """
    numbers = broadcast_object(together(context, chosen), context.world)
    if numbers is None:
        return config
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, recompute_layers_per_stage=numbers))
