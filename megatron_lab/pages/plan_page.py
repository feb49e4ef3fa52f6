"""HTML page of a dry run: predicted memory as bars, the grid of ranks, and the text of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron.parallel.topology import Topology
from megatron_lab.pages.figures import Bar, build_stacked_bars
from megatron_lab.pages.html import Section, build_page
from megatron_lab.pages.rank_grid import build_rank_grid
from megatron_lab.planner.plan import Plan, RankProfile
from megatron_lab.planner.plan_text import build_rows, format_duration, format_plan
from megatron_lab.planner.step_time import StepTime
from megatron_lab.planner.units import format_bytes, format_with_unit


def build_plan_page(plan: Plan, topology: Topology, step_time: StepTime | None = None, notes: Sequence[str] = ()) -> str:
    """Return the HTML page of a job's memory plan (--dry-run): one file without links to other files.

    Args:
        plan: predicted memory of the ranks.
        topology: rank grid of the job, which determines the order of the ranks.
        step_time: predicted time of a step; None if step times are not predicted.
        notes: lines about the settings, shown below the text of the plan.
    """
    job, lines = plan.job, format_plan(plan, step_time)
    lead_end = lines.index("")
    sections = [
        Section("Memory of a rank", build_memory_bars(plan)),
        Section("Ranks", build_grid(plan, topology)),
        Section("Step", _build_step_bar(step_time)) if step_time is not None else None,
        Section("Complete plan", f"<pre>{escape(chr(10).join([*lines, *notes]))}</pre>"),
    ]
    lead = "".join(f"<p>{escape(line.strip())}</p>" for line in lines[:lead_end])
    num_params = format_with_unit(plan.parameters, ["", " thousand", " million", " billion", " trillion"])
    title = f"Plan: {num_params} parameters on {job.world_size:,} rank{'s' * (job.world_size > 1)}, {topology}"
    return build_page(title, [section for section in sections if section is not None], lead)


def build_memory_bars(plan: Plan) -> str:
    """Return the HTML of bars that show device memory by purpose: one bar for each group of pipeline stages with similar memory.

    A bar shows the rank of the group that needs most memory. If the memory size of the device is known, a line marks it.
    """

    def get_device_bytes(profile: RankProfile) -> int:
        return profile.memory.total.device

    bars = [
        Bar(row.name, _split_by_purpose(max(row.profiles, key=get_device_bytes)), row.format_range(get_device_bytes, format_bytes))
        for row in build_rows(plan)
    ]
    return build_stacked_bars(
        bars,
        format_bytes,
        limit=plan.device_memory,
        limit_text="" if plan.device_memory is None else f"a device has {format_bytes(plan.device_memory)}",
        caption_text="Predicted device memory at the peak of a step. A bar shows the rank of these stages that needs most.",
    )


def build_grid(plan: Plan, topology: Topology) -> str:
    """Return the HTML of the rank grid, in which the colour of a cell shows the predicted device memory of the rank."""
    profiles: dict[tuple[int, int, int], RankProfile] = {}

    def get_device_bytes(rank: int) -> float:
        coordinates = topology.get_coordinates(rank)
        key = (
            coordinates["pp"],
            coordinates["tp"],
            coordinates["cp"] + topology.cp * coordinates["dp"],
        )  # the plan counts context and data ranks together
        if key not in profiles:
            profiles[key] = plan.profile_at(*key)
        return float(profiles[key].memory.total.device)

    return build_rank_grid(topology, plan.job.gpus_per_node, get_device_bytes, format_bytes, "device memory")


def _split_by_purpose(profile: RankProfile) -> dict[str, float]:
    return {name.replace("_", " "): float(memory.device) for name, memory in profile.memory.by_purpose.items() if memory.device}


def _build_step_bar(step_time: StepTime) -> str:
    """Return the HTML of a bar that divides the predicted step time by activity, such as matrix products or communication.

    The times are those of the rank that limits the step.
    """
    shares = dict(step_time.find_largest_shares())
    return build_stacked_bars(
        [Bar("busiest rank", shares, format_duration(step_time.seconds))],
        lambda share: f"{share:.1%}",
        caption_text=f"Predicted shares of the step time, on {step_time.cluster}.",
    )
