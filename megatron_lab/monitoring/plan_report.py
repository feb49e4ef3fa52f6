"""--plan-report: step time and memory as they were foretold, beside what the first steps measured, part by part.

What timers can tell apart without making the device wait are the operations of the schedule (with what tensor ranks send within
them), waiting between them, and the end of the step. So these are compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config.config import Config
from megatron.config.given import DryRun, check_output, this_job
from megatron.config.launcher import launched
from megatron.model.inputs import ModelInputs
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep
from megatron.training.watch import Watcher
from megatron_lab.monitoring.memory_report import MemoryAccount, measure
from megatron_lab.monitoring.profiler import SpanRecorder
from megatron_lab.monitoring.rehearsal import Rehearsal
from megatron_lab.planner.cluster import Cluster, load_cluster, shipped_for
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.state_report import amount
from megatron_lab.planner.step_time import StepTime, time_of
from megatron_lab.planner.step_work import StepWork

FIRST, LAST = 3, 10
"""The steps of a start that are measured; those before make connections, compile and fill caches."""
_NEAR = 0.1
"""What is off by less of the step is not told as off."""
BETWEEN = ("messages", "pipeline idle")
AT_END = ("gradients", "parameters", "optimizer", "numbers", "other")


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of a predicted step as timers see them, in seconds."""
    between, end = (sum(parts.get(name, 0.0) for name in names) for names in (BETWEEN, AT_END))
    return {"operations": sum(parts.values()) - between - end, "waiting between operations": between, "end of the step": end}


@dataclass(frozen=True)
class Foretold:
    """A predicted step, JSON-able."""

    cluster: str
    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    """Seconds, by the names of `StepTime.parts`."""
    device_bytes: int

    @classmethod
    def of(cls, cluster: Cluster, step: StepTime) -> Foretold:
        """What a prediction says."""
        return cls(cluster.name, step.seconds, step.low, step.high, dict(step.parts), step.device_bytes)


@dataclass(frozen=True)
class Found:
    """The measured steps, JSON-able."""

    steps: Sequence[float]
    """Seconds of each."""
    parts: Mapping[str, float]
    """Seconds, by the names of `grouped`; of the rank whose operations take longest."""
    device_bytes: int
    """The most memory of a rank: on CUDA in use on its device, elsewhere what the process took for the run."""

    @property
    def seconds(self) -> float:
        """A step."""
        return statistics.median(self.steps)


class StepPlan:
    """Begins to plan the job's steps, on its first rank. To be made before process groups, as `Rehearsal` is.

    Raises:
        ValueError: there is no such cluster, or the report cannot be written.
    """

    def __init__(self, config: Config) -> None:
        logging = config.logging
        assert logging.plan_report is not None
        if launched().rank == 0:
            check_output("--plan-report", logging.plan_report)
        self.path, self._config = Path(logging.plan_report), config
        self._cluster = None if logging.plan_cluster is None else load_cluster(logging.plan_cluster)
        self._rehearsal = Rehearsal(_planned)
        self.foretold: Foretold | str = "no plan was made"

    def begin(self, config: Config) -> None:
        """Send the settings, as `Rehearsal.begin`."""
        self._rehearsal.begin(config)

    def expect(self, context: ParallelContext) -> list[str]:
        """Take the plan; gives lines for the start-up log. All ranks call it together."""
        plan = self._rehearsal.plan(context)
        try:
            if isinstance(plan, str):
                raise ValueError(plan)
            device = device_name(context.device)
            cluster = self._cluster or shipped_for(device)
            if cluster is None:
                raise ValueError(
                    f"no cluster file is shipped for {device}: tools/check_cluster.py --measure writes one for --plan-cluster"
                )
            work, config, vocab_size = plan
            self.foretold = found = Foretold.of(cluster, time_of(work, config, this_job(), vocab_size, cluster))
        except ValueError as error:
            self.foretold = str(error)
            return [f"step times are not foretold: {error}"]
        span = f"{1e3 * found.low:,.0f} to {1e3 * found.high:,.0f}"
        return [f"foretold: {1e3 * found.seconds:,.0f} ms a step ({span} in nine of ten cases), for {found.cluster}"]


def _planned(config: Config, job: DryRun, vocab_size: int) -> tuple[StepWork, Config, int]:
    return Planner(config, job, vocab_size, few=True).work(), config, vocab_size


def device_name(device: torch.device) -> str:
    """As cluster files have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class PlanReport(Watcher):
    """Measures the first steps, and compares.

    Args:
        say: writes a line into the log, on the first rank.
    """

    def __init__(self, plan: StepPlan, step: TrainStep, account: MemoryAccount, say: Callable[[str], None]) -> None:
        self._plan, self._step, self._account, self._say = plan, step, account, say
        self._count = 0
        self._began = 0.0
        self._recorder: SpanRecorder | None = None
        self._steps: list[tuple[float, SpanRecorder]] = []
        self._done = isinstance(plan.foretold, str)

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Begin to measure the step, if it is one of those; one that is recorded otherwise is left out."""
        self._count += 1
        self._recorder = None
        if not self._done and self._count >= FIRST and self._step.executor.recorder is None:
            self._recorder = self._step.executor.recorder = SpanRecorder(self._step.context.device)
            self._began = time.perf_counter()

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Take the time. The step has waited for the device, for its loss."""
        if self._recorder is not None:
            self._steps.append((time.perf_counter() - self._began, self._recorder))
            self._step.executor.recorder = None
        if self._count >= LAST:
            self._report()

    def close(self) -> None:
        """Report what there is, if the run was shorter."""
        self._report()

    def _report(self) -> None:
        if self._done:
            return
        self._done = True
        foretold = self._plan.foretold
        assert isinstance(foretold, Foretold)
        if not self._steps:
            self._say(f"  --plan-report has nothing to compare: the run had less than {FIRST} steps to measure")
            return
        found = self._measured()
        lines = compared(foretold, found)
        for line in lines:
            self._say(f"  {line}")
        if self._step.context.rank == 0:
            write_report(self._plan.path, foretold, found, self._facts())

    def _measured(self) -> Found:
        """What all ranks measured."""
        mine = [(took, *_in_operations(recorder)) for took, recorder in self._steps]
        memory = measure(self._step, self._account.before)
        ranks = gather_objects((mine, memory.used or memory.peak), self._step.context.world)
        busiest = max((each for each, _ in ranks), key=lambda each: statistics.median(busy for _, busy, _ in each))
        took, busy, whole = (statistics.median(column) for column in zip(*busiest, strict=True))
        parts = {"operations": busy, "waiting between operations": whole - busy, "end of the step": max(0.0, took - whole)}
        steps = [max(each[i][0] for each, _ in ranks) for i in range(len(mine))]
        return Found(steps, parts, max(num_bytes for _, num_bytes in ranks))

    def _facts(self) -> dict[str, Any]:
        context = self._step.context
        ranks = {axis: context.topology.size(axis) for axis in ("tp", "cp", "pp", "dp")}
        return {"device": device_name(context.device), "torch": torch.__version__, "ranks": ranks}


def _in_operations(recorder: SpanRecorder) -> tuple[float, float]:
    """Seconds in operations, and from the begin of the step to the end of the last one."""
    spans = recorder.spans()
    return sum(span.end - span.start for span in spans), max(span.end for span in spans) - recorder.began


def compared(foretold: Foretold, found: Found) -> list[str]:
    """The comparison in words; last the part that is most off, if one is."""
    off = found.seconds / foretold.seconds - 1
    inside = "within" if foretold.low <= found.seconds <= foretold.high else "outside of"
    lines = [
        f"plan: a step takes {1e3 * found.seconds:,.0f} ms, foretold were {1e3 * foretold.seconds:,.0f} ({off:+.0%}, {inside} "
        f"{1e3 * foretold.low:,.0f} to {1e3 * foretold.high:,.0f})",
        f"plan: memory {amount(found.device_bytes)}, foretold were {amount(foretold.device_bytes)} "
        f"({found.device_bytes / max(1, foretold.device_bytes) - 1:+.0%})",
    ]
    planned = grouped(foretold.parts)
    for name, seconds in found.parts.items():
        lines.append(f"plan: {name} {1e3 * seconds:,.1f} ms, foretold were {1e3 * planned[name]:,.1f}")
    name = max(planned, key=lambda part: abs(found.parts[part] - planned[part]))
    apart = found.parts[name] - planned[name]
    if abs(apart) > _NEAR * found.seconds:
        lines.append(f"plan: most is off in {name}: {1e3 * abs(apart):,.1f} ms {'more' if apart > 0 else 'less'} than foretold")
    return lines


def write_report(path: Path, foretold: Foretold, found: Found, facts: Mapping[str, Any]) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {**facts, "foretold": asdict(foretold), "measured": {**asdict(found), "seconds": found.seconds}}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


class PlanFeature(Feature):
    """--plan-report."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._account, self._plan = MemoryAccount(), StepPlan(config)

    def begin(self) -> None:
        """Have the steps planned."""
        self._plan.begin(self.config)

    def start_up_lines(self, run: RunParts) -> list[str]:
        """Take the plan; gives the time of a step that it foretells."""
        return self._plan.expect(run.context)

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Measure the first steps, and compare."""
        return [PlanReport(self._plan, run.step, self._account, run.reporter.say)]
