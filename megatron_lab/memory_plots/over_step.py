"""A step of one rank as it is planned and, where that is asked for, as it ran on CPU processes; and both in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.data.tokenizer import planned_rows
from megatron.parallel.topology import Topology
from megatron_lab.memory_plots.figure import Panel
from megatron_lab.memory_plots.measure import measure
from megatron_lab.planner.dry_run import PlannedStep, Planner
from megatron_lab.planner.plan import RankKind
from megatron_lab.planner.plan_text import table
from megatron_lab.planner.state_report import amount
from megatron_lab.verification.local_ranks import run_ranks

INPUTS = "inputs"
"""Tokens, labels and masks of all microbatches of a step."""


def panel_of(title: str, config: Config, world_size: int, stage: int, *, measured: bool) -> Panel:
    """The step of the first rank of a pipeline stage.

    Args:
        measured: run it too.

    Raises:
        ValueError: the layout is impossible.
        RanksError: a rank failed.
    """
    # In a process of its own, which may be a rank of any world.
    ((kind, step),) = run_ranks(1, lambda _: _plan(config, world_size, stage), init=False)
    state = {name.replace("_", " "): part.device for name, part in kind.memory.parts.items() if name != "activations"}
    state[INPUTS] = kind.memory.activations.device - max(one.peak for one in step.held)
    state = {name: size for name, size in state.items() if size}
    run = measure(config, world_size)[_topology(config, world_size).rank(pp=stage)] if measured else None
    return Panel(title, state, step.held, step.timeline.spans[stage], run)


def _plan(config: Config, world_size: int, stage: int) -> tuple[RankKind, PlannedStep]:
    planner = Planner(config, DryRun(world_size, world_size, None), planned_rows(config.data))
    kinds = planner.plan().kinds
    return min((kind for kind in kinds if stage in kind.stages), key=lambda kind: kind.first_rank), planner.step(stage)


def _topology(config: Config, world_size: int) -> Topology:
    parallel = config.parallel
    return Topology.of(parallel, world_size)


def draw_table(panels: Sequence[Panel]) -> list[str]:
    """A row for each panel: what stays, what comes and goes at its peak as planned and as measured."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.state))
    hosts = [panel.held[-1].host for panel in panels]
    ran = any(panel.measured is not None for panel in panels)
    head = ["", *names, "activations", *(["measured", "off"] if ran else []), *(["in host memory"] if any(hosts) else [])]
    body = []
    for panel, host in zip(panels, hosts, strict=True):
        row = [panel.title, *(amount(panel.state.get(name, 0)) for name in names), amount(panel.planned_peak)]
        if panel.measured is not None:
            row += [amount(panel.measured.peak), f"{panel.measured.peak / panel.planned_peak - 1:+.2%}"]
        elif ran:
            row += ["", ""]
        body.append([*row, *([amount(host)] if any(hosts) else [])])
    return table(head, body)
