"""What memory a rank takes for what, measured between two steps, and told beside the plan (--log-memory).

The model's state is measured tensor by tensor, by its storages. What else was allocated at the peak are activations, and whatever
passes within a step. On CUDA that is known from torch's allocator. On the CPU there is only the memory of the whole process, less
what it had before the model was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.config.config import Config
from megatron.metrics.measures import process_bytes
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult, TrainStep
from megatron.training.watch import Watcher
from megatron_lab.monitoring.rehearsal import Rehearsal, full_plan
from megatron_lab.planner.plan import Plan, RankMemory
from megatron_lab.planner.plan_text import table
from megatron_lab.planner.state_layout import Bytes, StateMemory
from megatron_lab.planner.state_report import amount


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of one rank."""

    state: StateMemory
    """What the model's state takes. Padding is not told apart."""
    peak: int
    """The most bytes at once: on CUDA those that the allocator gave out, on the CPU those of the process beyond `before`."""
    reserved: int
    """The most bytes that the allocator of CUDA took from the device; 0 on the CPU."""
    used: int
    """Bytes of the device that are in use now, by any process; 0 on the CPU."""
    host: int
    """The most bytes of host memory that the process had at once."""
    moved: int
    """Bytes of host memory for activations between forward and backward."""
    before: int
    """Bytes of host memory that it had before the model was built: Python and the libraries."""

    @property
    def activations(self) -> int:
        """The rest of the peak: activations and what passes within a step."""
        on_device = self.state.total.device if self.reserved else self.state.total.total + self.moved
        return max(0, self.peak - on_device)


def measure(step: TrainStep, before: int) -> MeasuredMemory:
    """Measure this rank, between two steps. It waits for nothing.

    Args:
        before: see `MeasuredMemory`.
    """
    device, state, moved = step.context.device, state_held(step), step.executor.host.num_bytes
    if device.type != "cuda":
        return MeasuredMemory(state, max(0, process_bytes() - before), 0, 0, process_bytes(), moved, before)
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    peak, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return MeasuredMemory(state, peak, reserved, total - free, process_bytes(), moved, before)


def state_held(step: TrainStep) -> StateMemory:
    """The bytes of the storages that the model's state lies in, each counted once, for the first purpose that it has."""
    known: set[int] = set()

    def held(tensors: Iterable[torch.Tensor], *, on_host: bool = False) -> Bytes:
        device = host = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in known or not storage.nbytes():
                continue
            known.add(storage.data_ptr())
            if on_host or storage.device.type != step.context.device.type:
                host += storage.nbytes()
            else:
                device += storage.nbytes()
        return Bytes(device, host)

    providers = [provider.held() for provider in step.providers]
    away = step.optimizer.offloaded
    chosen = {id(shard) for shard in away}
    here = [shard for shard in step.optimizer.shards if id(shard) not in chosen]
    parameters = sum((held(one.parameters, on_host=one.on_host) for one in providers), Bytes())
    gradients = sum((held(one.gradients, on_host=one.on_host) for one in providers), Bytes())
    mains = held(shard.main for shard in here) + held((shard.main for shard in away), on_host=True)
    moments = held(moment for shard in here for moment in shard.moments.values())
    moments += held((moment for shard in away for moment in shard.moments.values()), on_host=True)
    averages = held(shard.average for shard in here if shard.average is not None)
    averages += held((shard.average for shard in away if shard.average is not None), on_host=True)
    buffers = held(tensor for one in providers for tensor in one.buffers) + held(step.optimizer.staging, on_host=True)
    buffers += held(step.optimizer.buffers)
    return StateMemory(parameters, gradients, mains, moments, averages, buffers)


@dataclass
class MemoryAccount:
    """What is known of a rank's memory so far; a run fills it in as it begins."""

    before: int = field(default_factory=process_bytes)
    step: TrainStep | None = None
    plan: Plan | None = None
    planned: RankMemory | None = None
    """What the plan says of this rank."""

    def expect(self, plan: Plan | str, context: ParallelContext) -> list[str]:
        """Take the plan of the job; gives lines for the start-up log.

        Args:
            plan: or why there is none.
        """
        if isinstance(plan, str):
            return [f"memory is reported without a plan: {plan}"]
        at = context.coordinates
        self.plan = plan
        self.planned = plan.kind_at(at["pp"], at["tp"], at["cp"] + context.topology.cp * at["dp"]).memory
        needed = max(kind.memory.total.device for kind in plan.kinds)
        buffers = [buffer for kind in plan.kinds for buffer in kind.allowances if buffer.communicators]
        most = max(buffers, key=lambda buffer: buffer.bytes, default=None)
        beyond = [f"advice: {line}" for line in plan.advice if line.startswith("the fullest rank")]
        nccl = [] if most is None else [f"planned: a rank has {most}, made at their first use"]
        return [f"planned: the fullest rank takes {amount(needed)} of its device", *nccl, *beyond]

    def rows(self) -> list[tuple[str, int, int | None]]:
        """Bytes of each part on the device and in host memory: its name, measured, and planned if there is a plan."""
        assert self.step is not None
        found, planned = measure(self.step, self.before), self.planned
        rows: list[tuple[str, int, int | None]] = []
        for name, part in found.state.parts.items():
            aimed = None if planned is None else planned.parts[name]
            rows.append((name.replace("_", " "), part.device, None if aimed is None else aimed.device))
            if part.host or (aimed is not None and aimed.host):
                rows.append((f"{name.replace('_', ' ')} on the host", part.host, None if aimed is None else aimed.host))
        rows.append(("activations and the rest", found.activations, None if planned is None else planned.activations.device))
        aside = None if planned is None else planned.activations.host
        if found.moved or aside:
            rows.append(("activations on the host", found.moved, aside))
        if found.reserved:
            exact = None if planned is None else planned.total.device - planned.cuda.device
            rows.append(("allocated at the peak", found.peak, exact))
            rows.append(("reserved at the peak", found.reserved, None))
            rows.append(("used of the device", found.used, None if planned is None else planned.total.device))
        rows.append(("Python and libraries", found.before, None))
        rows.append(("the process at its peak", found.host, None))
        return rows


def report(account: MemoryAccount, context: ParallelContext, when: str) -> tuple[list[str], dict[str, float]]:
    """What all ranks take, least and most where they differ, as lines of the log; and by name the most measured, in bytes. All
    ranks call it together."""
    ranks = [{row[0]: row[1:] for row in rows} for rows in gather_objects(account.rows(), context.world)]
    names = list(dict.fromkeys(name for rows in ranks for name in rows))
    body, most = [], {}
    for name in names:
        measured = [rows[name][0] if name in rows else 0 for rows in ranks]
        planned = [rows[name][1] for rows in ranks if name in rows]
        if any(measured) or any(planned):
            most[f"memory/{name.replace(' ', '-')}"] = float(max(measured))
            body.append([f"  {name}", _spread(measured), _spread([one for one in planned if one is not None])])
    of = f"a rank, least and most of {context.world.size}" if context.world.size > 1 else "this process"
    return [f"  {line}" for line in table([f"memory {when}, of {of}", "measured", "planned"], body)], most


def _spread(numbers: Sequence[int]) -> str:
    if not numbers:
        return "-"
    low, high = amount(min(numbers)), amount(max(numbers))
    return high if low == high else f"{low} - {high}"


class MemoryReports(Watcher):
    """--log-memory: tells what memory the ranks take, after the first step and every so many."""

    def __init__(self, account: MemoryAccount, context: ParallelContext, every: int, reporter: Reporter) -> None:
        self._account, self._context, self._every, self._reporter = account, context, every, reporter
        self._first = True

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Report, if it is time."""
        if self._first or progress.iteration % self._every == 0:
            lines, most = report(self._account, self._context, f"after iteration {progress.iteration}")
            for line in lines:
                self._reporter.say(line)
            self._reporter.measured(progress, most)
        self._first = False


class MemoryFeature(Feature):
    """--log-memory: a plan of the job is made beside the start of the run, and the reports have both."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.account = MemoryAccount()
        self._rehearsal = Rehearsal(full_plan)

    def begin(self) -> None:
        """Have the job planned."""
        self._rehearsal.begin(self.config)

    def start_up_lines(self, run: RunParts) -> list[str]:
        """Take the plan; gives what it says of the fullest rank."""
        return self.account.expect(self._rehearsal.plan(run.context), run.context)

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Report after the first step and every so many."""
        interval = run.config.logging.memory_interval
        assert interval is not None
        self.account.step = run.step
        return [MemoryReports(self.account, run.context, interval, run.reporter)]
