"""A window of steps under torch's profiler: a trace of what ran when, and where the memory went."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from megatron.config.outputs import LoggingConfig

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 1_000_000
"""Allocations and releases that the memory history holds; older ones are forgotten."""


class StepProfiler:
    """Records the steps from --profile-step-start up to, but not including, --profile-step-end.

        with StepProfiler(config, rank, device) as profiler:
            for iteration in ...:
                profiler.step(iteration)
                ...

    It writes into --profile-dir a Chrome trace (chrome://tracing, ui.perfetto.dev) `trace_rank0_step10-12.json` and, on CUDA,
    a memory snapshot `memory_rank0_step10-12.pickle` (pytorch.org/memory_viz), on other devices a table of the operations
    that allocate most, `memory_rank0_step10-12.txt`. Off, or on a rank that does not record, it does nothing.

    Args:
        config: Whether, when, on which ranks and where.
        rank: This rank.
        device: Where this rank computes.

    Raises:
        ValueError: The window is empty or the folder cannot be made.
    """

    def __init__(self, config: LoggingConfig, rank: int, device: torch.device) -> None:
        self._active = config.profile and rank in config.profile_ranks
        self._start, self._end = config.profile_step_start, config.profile_step_end
        self._folder = Path(config.profile_dir)
        self._rank = rank
        self._device = device
        self._profile: torch.profiler.profile | None = None
        self._first = self._last = 0
        if not self._active:
            return
        if self._end <= self._start:
            raise ValueError(f"--profile-step-end {self._end} must be larger than --profile-step-start {self._start}.")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--profile-dir {self._folder} cannot be made ({error.strerror}).") from error

    def step(self, iteration: int) -> None:
        """Say that `iteration` (the first is 1) is about to begin."""
        if not self._active:
            return
        if self._profile is None and self._start <= iteration < self._end:
            self._first = iteration
            self._begin()
        elif self._profile is not None and iteration >= self._end:
            self._finish()
        self._last = iteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The run ended, or failed, inside the window: what was recorded is worth all the more.
        if self._profile is not None:
            self._finish()

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _finish(self) -> None:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile.stop()
        window = f"rank{self._rank}_step{self._first}-{self._last + 1}"
        trace = self._folder / f"trace_{window}.json"
        profile.export_chrome_trace(str(trace))
        if self._device.type == "cuda":
            memory = self._folder / f"memory_{window}.pickle"
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            memory = self._folder / f"memory_{window}.txt"
            memory.write_text(profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=50), encoding="utf-8")
        logger.info("profile of steps %d to %d: %s and %s", self._first, self._last, trace, memory)
