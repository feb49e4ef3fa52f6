"""Plan of the job that is about to run, made by a child of the first rank while the run starts.

A plan takes the place of every kind of rank, with fake process groups. So the child is forked before the real groups exist, and
leaves nothing behind in this process.

CUDA does not survive a fork (see `parallel.forks`). So the process forks first, then asks CUDA for the facts about the device that
a plan needs, and sends them to the child, which sees no device. If CUDA was in use before the fork, the child replaces itself by a
fresh process.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO, Generic, Literal, TypeVar

import torch

from megatron.config.checks.memory import AUTO
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.given import DryRun, this_job
from megatron.config.imports import import_modules
from megatron.config.launcher import launched, module_start
from megatron.data.tokenizer import planned_rows
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.training.failure import together
from megatron.training.features import Feature
from megatron_lab.monitoring.forks import has_lost_devices, hide_devices
from megatron_lab.planner.dry_run import make_plan
from megatron_lab.planner.fit import memory_limit, with_fit_advice, with_least_layers
from megatron_lab.planner.plan import Plan
from megatron_lab.planner.step_time import cluster_name_of

T = TypeVar("T")


class Rehearsal(Generic[T]):
    """A process that plans a job, started by its first rank. Create it before anything else of the run, process groups above all,
    and before CUDA is used; then call `begin`, then `plan`.

    Args:
        make: module-level function that makes the result from the settings of the job, its size and the vocabulary.
    """

    def __init__(self, make: Callable[[Config, DryRun, int], T]) -> None:
        self._make = make
        self._child: tuple[int, BinaryIO, BinaryIO] | None = _start_child() if launched().rank == 0 else None

    def begin(self, config: Config) -> None:
        """Send the settings. On a machine with GPUs this process uses CUDA from now on: start all forks before."""
        if self._child is None:
            return
        try:
            request: tuple[Callable[[Config, DryRun, int], T], Config] | str = (self._make, with_device_facts(config))
        except Exception as error:  # noqa: BLE001 - the run goes on without a plan, and says why
            request = _reason(error)
        with suppress(BrokenPipeError), self._child[1] as pipe:
            pipe.write(pickle.dumps(request))

    def plan(self, context: ParallelContext) -> T | str:
        """Return the result, or the reason of a failure as text. All ranks call it together."""
        answer: T | str = ""
        if self._child is not None:
            pid, _, pipe = self._child
            with pipe:
                data = pipe.read()
            os.waitpid(pid, 0)
            answer = pickle.loads(data) if data else "its process ended early"
        shared: T | str = broadcast_object(answer, context.world)
        return shared


def on_this_device(config: Config) -> Config:
    """The settings with --device written out: what `auto` finds here."""
    device: Literal["cpu", "cuda"] = "cpu" if config.parallel.device == "cpu" or not torch.cuda.is_available() else "cuda"
    return replace(config, parallel=replace(config.parallel, device=device))


def with_device_facts(config: Config) -> Config:
    """Return the settings with everything written out that a plan would ask CUDA for: device, its memory, and the cluster of its
    kind. A plan of them makes no CUDA call."""
    config = on_this_device(config)
    limit = memory_limit(config)
    memory = replace(config.memory, device_memory_gb=None if limit is None else limit / 1e9)
    return replace(config, memory=memory, logging=replace(config.logging, plan_cluster=cluster_name_of(config)))


def full_plan(config: Config, job: DryRun, vocab_size: int) -> Plan:
    """The plan as --dry-run tells it."""
    return with_fit_advice(make_plan(config, job, vocab_size), config, job, vocab_size)


def _start_child() -> tuple[int, BinaryIO, BinaryIO]:
    """Fork the process that plans. Returns its number, the pipe for the request, and the pipe with its answer."""
    request_end, request = os.pipe()
    answer, answer_end = os.pipe()
    if pid := os.fork():
        os.close(request_end)
        os.close(answer_end)
        return pid, os.fdopen(request, "wb"), os.fdopen(answer, "rb")
    try:
        os.close(request)
        os.close(answer)
        if has_lost_devices():
            for end in (request_end, answer_end):
                os.set_inheritable(end, True)
            command, environment = module_start("megatron_lab.monitoring.rehearsal_child", request_end, answer_end)
            os.execve(command[0], command, environment)
        serve(request_end, answer_end)
    finally:
        os._exit(0)


def serve(request_end: int, answer_end: int) -> None:
    """Read a request from a pipe, and write the result or the reason of a failure to another. Hide CUDA devices first."""
    hide_devices()
    with os.fdopen(request_end, "rb") as pipe:
        try:
            # Read until the pickle ends, not until the pipe does: a process that was forked later holds the other end too.
            answer: Any = pickle.load(pipe)
        except EOFError:  # the run has ended
            return
    try:
        if not isinstance(answer, str):
            make, config = answer
            if problems := list(import_modules(config.training.imports)):
                raise ConfigError(problems)
            vocab_size = planned_rows(config.data)
            answer = make(with_least_layers(config, this_job(), vocab_size), this_job(), vocab_size)
    except Exception as error:  # noqa: BLE001 - the run goes on without a plan, and says why
        answer = _reason(error)
    with os.fdopen(answer_end, "wb") as pipe:
        pipe.write(pickle.dumps(answer))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
    return replace(config, memory=replace(config.memory, recompute_layers_per_stage=numbers))


class RecomputeFeature(Feature):
    """--recompute-layers-per-stage auto."""

    def begin(self) -> None:
        """Choose, on the first rank."""
        self._choice = choose_layers(self.config)

    def adjust_config(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings with the numbers of the first rank."""
        return with_layers(config, self._choice, context)
