"""What a dry run tells, as a page: memory bars, the grid of the ranks, and the whole text of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron.parallel.topology import Topology
from megatron_lab.pages.figures import Bar, stacked_bars
from megatron_lab.pages.html import Section, page
from megatron_lab.pages.rank_grid import rank_grid
from megatron_lab.planner.plan import Plan, RankKind
from megatron_lab.planner.plan_text import duration, format_plan, rows_of
from megatron_lab.planner.state_report import amount, in_units
from megatron_lab.planner.step_time import StepTime


def plan_page(plan: Plan, topology: Topology, time: StepTime | None = None, notes: Sequence[str] = ()) -> str:
    """One HTML file without links to anything outside of it.

    Args:
        topology: of the job, for the order in which its ranks are numbered.
        time: of a step, where it is predicted.
        notes: on the settings.
    """
    job, lines = plan.job, format_plan(plan, time)
    end = lines.index("")
    sections = [
        Section("Memory of a rank", memory_bars(plan)),
        Section("Ranks", grid_of(plan, topology)),
        Section("Step", _step(time)) if time is not None else None,
        Section("All of the plan", f"<pre>{escape(chr(10).join([*lines, *notes]))}</pre>"),
    ]
    lead = "".join(f"<p>{escape(line.strip())}</p>" for line in lines[:end])
    size = in_units(plan.parameters, ["", " thousand", " million", " billion", " trillion"])
    title = f"Plan: {size} parameters on {job.world_size:,} rank{'s' * (job.world_size > 1)}, {topology}"
    return page(title, [section for section in sections if section is not None], lead)


def memory_bars(plan: Plan) -> str:
    """A bar for the fullest kind of rank in each group of stages that keep alike; the device's memory as a line, if it is known."""

    def device(kind: RankKind) -> int:
        return kind.memory.total.device

    bars = [Bar(row.name, _parts(max(row.kinds, key=device)), row.spread(device, amount)) for row in rows_of(plan)]
    return stacked_bars(
        bars,
        amount,
        limit=plan.limit,
        limit_text="" if plan.limit is None else f"a device has {amount(plan.limit)}",
        note="Device memory at the peak of a step; the bar is that of the fullest rank of these stages.",
    )


def grid_of(plan: Plan, topology: Topology) -> str:
    """The ranks of the job, coloured by the memory that each needs on its device."""
    kinds: dict[tuple[int, int, int], RankKind] = {}

    def needed(rank: int) -> float:
        at = topology.coordinates(rank)
        place = at["pp"], at["tp"], at["cp"] + topology.cp * at["dp"]  # the plan counts context and data ranks together
        if place not in kinds:
            kinds[place] = plan.kind_at(*place)
        return float(kinds[place].memory.total.device)

    return rank_grid(topology, plan.job.gpus_per_node, needed, amount, "device memory")


def _parts(kind: RankKind) -> dict[str, float]:
    return {name.replace("_", " "): float(part.device) for name, part in kind.memory.parts.items() if part.device}


def _step(time: StepTime) -> str:
    """What the time of the busiest rank is spent on."""
    shares = dict(time.shares())
    return stacked_bars(
        [Bar("busiest rank", shares, duration(time.seconds))],
        lambda share: f"{share:.1%}",
        note=f"Share of a step, on {time.cluster}.",
    )
