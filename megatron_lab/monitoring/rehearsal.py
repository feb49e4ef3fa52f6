"""Prediction of the current job's memory or step time by the planner, in a child process of the first rank while the run starts.

The planner simulates ranks with fake process groups. The child is therefore forked before the real process groups exist, and the
planner leaves no state in this process.

CUDA does not work in a fork (`megatron_lab.monitoring.forks`). The process therefore forks the child first. Then it queries CUDA
for the device properties that the planner needs, and sends them to the child, from which all CUDA devices are hidden. If CUDA was
used before the fork, the child replaces itself by a new process.
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
from megatron.config.imports import import_modules
from megatron.config.launcher import build_module_command, read_process_info
from megatron.config.parsed_flags import DryRun, get_current_job
from megatron.data.tokenizer import predict_embedding_rows
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.training.failure import run_on_all_ranks
from megatron.training.features import Feature
from megatron_lab.monitoring.forks import has_lost_devices, hide_devices
from megatron_lab.planner.dry_run import build_plan
from megatron_lab.planner.fit import add_fit_advice, get_device_memory, resolve_auto_recompute_layers
from megatron_lab.planner.plan import Plan
from megatron_lab.planner.step_time import select_cluster_name

T = TypeVar("T")


class PlanProcess(Generic[T]):
    """Child process of the first rank that runs the planner for the job.

    Create it before everything else in a run, in particular before process groups exist and before CUDA is used. Then call
    `send_config`, and later `receive_plan`. On other ranks there is no child process.

    Args:
        build: function that computes the result from the settings of the job, its number of ranks (`DryRun`), and the vocabulary
            size. It must be defined at module level, because it is pickled.
    """

    def __init__(self, build: Callable[[Config, DryRun, int], T]) -> None:
        self._build = build
        self._child: tuple[int, BinaryIO, BinaryIO] | None = _fork_plan_process() if read_process_info().rank == 0 else None

    def send_config(self, config: Config) -> None:
        """Send the settings to the child process, which then starts to plan.

        On a machine with GPUs this call initializes CUDA, which a process forked later could not use. So all other forks must be
        started earlier.
        """
        if self._child is None:
            return
        try:
            request: tuple[Callable[[Config, DryRun, int], T], Config] | str = (self._build, resolve_device_facts(config))
        except Exception as error:  # noqa: BLE001 - the run continues without a plan, and logs the reason
            request = _format_error(error)
        with suppress(BrokenPipeError), self._child[1] as pipe:
            pipe.write(pickle.dumps(request))

    def receive_plan(self, context: ParallelContext) -> T | str:
        """Wait for the child process and return its result or, if it failed, the reason as text. All ranks must call the method."""
        result: T | str = ""
        if self._child is not None:
            pid, _, pipe = self._child
            with pipe:
                data = pipe.read()
            os.waitpid(pid, 0)
            result = pickle.loads(data) if data else "the planning process ended without a result"
        shared_result: T | str = broadcast_object(result, context.world)
        return shared_result


def resolve_device(config: Config) -> Config:
    """Return the settings with --device auto replaced by the device type of this machine: cuda if CUDA is available, else cpu."""
    device: Literal["cpu", "cuda"] = "cpu" if config.parallel.device == "cpu" or not torch.cuda.is_available() else "cuda"
    return replace(config, parallel=replace(config.parallel, device=device))


def resolve_device_facts(config: Config) -> Config:
    """Return the settings with device type, device memory and cluster file filled in, for which the planner would otherwise query
    CUDA.

    Planning with the returned settings makes no CUDA call.
    """
    config = resolve_device(config)
    limit = get_device_memory(config)
    memory = replace(config.memory, device_memory_gb=None if limit is None else limit / 1e9)
    return replace(config, memory=memory, logging=replace(config.logging, plan_cluster=select_cluster_name(config)))


def build_full_plan(config: Config, job: DryRun, vocab_size: int) -> Plan:
    """Build the memory plan of a job, with advice on how to make it fit into device memory, as --dry-run shows it.

    Args:
        job: number of ranks of the job, and of ranks per node.
        vocab_size: rows of the word embedding.
    """
    return add_fit_advice(build_plan(config, job, vocab_size), config, job, vocab_size)


def _fork_plan_process() -> tuple[int, BinaryIO, BinaryIO]:
    """Fork the process that runs the planner.

    Returns:
        Its process id, the pipe to which the settings are written, and the pipe from which the result is read.
    """
    request_fd, request_pipe_fd = os.pipe()
    result_pipe_fd, result_fd = os.pipe()
    if pid := os.fork():
        os.close(request_fd)
        os.close(result_fd)
        return pid, os.fdopen(request_pipe_fd, "wb"), os.fdopen(result_pipe_fd, "rb")
    try:
        os.close(request_pipe_fd)
        os.close(result_pipe_fd)
        if has_lost_devices():
            for fd in (request_fd, result_fd):
                os.set_inheritable(fd, True)
            command, environment = build_module_command("megatron_lab.monitoring.rehearsal_child", request_fd, result_fd)
            os.execve(command[0], command, environment)
        serve_request(request_fd, result_fd)
    finally:
        os._exit(0)


def serve_request(request_fd: int, result_fd: int) -> None:
    """Run the planner in the child process: read a function and settings from a pipe, and write the function's result to another
    pipe.

    If the planner fails, write the reason as text. CUDA devices are hidden first.

    Args:
        request_fd, result_fd: file descriptors of the two pipes.
    """
    hide_devices()
    with os.fdopen(request_fd, "rb") as pipe:
        try:
            # Read until the end of the pickle, not of the pipe: processes that were forked later also hold the write end open.
            message: Any = pickle.load(pipe)
        except EOFError:  # the run has ended
            return
    try:
        if not isinstance(message, str):
            build, config = message
            if problems := list(import_modules(config.training.imports)):
                raise ConfigError(problems)
            vocab_size = predict_embedding_rows(config.data)
            message = build(resolve_auto_recompute_layers(config, get_current_job(), vocab_size), get_current_job(), vocab_size)
    except Exception as error:  # noqa: BLE001 - the run continues without a plan, and logs the reason
        message = _format_error(error)
    with os.fdopen(result_fd, "wb") as pipe:
        pipe.write(pickle.dumps(message))


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def choose_recompute_layers(config: Config) -> Callable[[], str | None]:
    """Choose the number of recomputed layers of each stage for `--recompute-layers-per-stage auto`, on the first rank of the job.

    Call this function before process groups exist, because the planner connects simulated ranks itself.

    Returns:
        Function that returns the numbers as text for `--recompute-layers-per-stage`. It returns None on other ranks, and if the
        flag is not `auto`. It raises ValueError if the run does not fit into memory with any numbers.
    """
    if config.memory.recompute_layers_per_stage != AUTO or read_process_info().rank > 0:
        return lambda: None
    error: ValueError | None = None
    layer_counts = None
    try:
        layer_counts = resolve_auto_recompute_layers(
            resolve_device(config), get_current_job(), predict_embedding_rows(config.data)
        ).memory.recompute_layers_per_stage
    except ValueError as caught:
        error = caught

    def get_layer_counts() -> str | None:
        if error is not None:
            raise error
        return layer_counts

    return get_layer_counts


def apply_recompute_layers(config: Config, get_layer_counts: Callable[[], str | None], context: ParallelContext) -> Config:
    """Return the settings with the numbers of recomputed layers that the first rank chose. All ranks must call the function.

    Args:
        get_layer_counts: result of `choose_recompute_layers`.

    Raises:
        SetupError: the run does not fit into memory with any number of recomputed layers.
    """
    layer_counts = broadcast_object(run_on_all_ranks(context, get_layer_counts), context.world)
    if layer_counts is None:
        return config
    return replace(config, memory=replace(config.memory, recompute_layers_per_stage=layer_counts))


class RecomputeFeature(Feature):
    """Feature of --recompute-layers-per-stage auto: chooses how many layers each stage recomputes."""

    def on_forks_done(self) -> None:
        """Choose the number of recomputed layers of each stage, on the first rank."""
        self._get_layer_counts = choose_recompute_layers(self.config)

    def adjust_config(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings with the number of recomputed layers of each stage that the first rank chose."""
        return apply_recompute_layers(config, self._get_layer_counts, context)
