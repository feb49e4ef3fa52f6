"""Memory of one rank over a step, as predicted by the planner and, if requested, measured on CPU processes.

The module builds the panel of a figure, and formats a table of several panels.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.config import Config
from megatron.config.parsed_flags import DryRun
from megatron.data.tokenizer import predict_embedding_rows
from megatron.parallel.topology import Topology
from megatron_lab.memory_plots.figure import MemoryPanel
from megatron_lab.memory_plots.measure import measure_ranks
from megatron_lab.planner.dry_run import Planner, StageStep
from megatron_lab.planner.plan import RankProfile
from megatron_lab.planner.units import format_bytes
from megatron_lab.terminal import format_table
from megatron_lab.verification.local_ranks import run_ranks

INPUTS = "inputs"
"""Name of the tokens, labels and masks of all microbatches of a step."""


def build_panel(title: str, config: Config, world_size: int, stage: int, *, measures: bool) -> MemoryPanel:
    """Build the panel of a figure that shows the memory over a step on the first rank of a pipeline stage.

    Args:
        title: title of the panel.
        world_size: number of ranks of the job.
        stage: index of the pipeline stage.
        measures: also run the step on CPU processes and add the measured memory.

    Raises:
        ValueError: the settings cannot be planned for this number of ranks.
        RanksError: a process failed.
    """
    # Plan in a separate process: a process can be a rank of one job only.
    ((profile, step),) = run_ranks(1, lambda _: _plan_stage(config, world_size, stage), init=False)
    state = {
        name.replace("_", " "): purpose_memory.device
        for name, purpose_memory in profile.memory.by_purpose.items()
        if name != "activations"
    }
    state[INPUTS] = profile.memory.activations.device - max(memory.peak_bytes for memory in step.op_memory)
    state = {name: size for name, size in state.items() if size}
    measurement = measure_ranks(config, world_size)[_build_topology(config, world_size).find_rank(pp=stage)] if measures else None
    return MemoryPanel(title, state, step.op_memory, step.timeline.spans[stage], measurement)


def _plan_stage(config: Config, world_size: int, stage: int) -> tuple[RankProfile, StageStep]:
    """Predict the memory of a job.

    Returns:
        The memory profile of the first rank of `stage`, and the predicted operations of the stage with their times and memory.
    """
    planner = Planner(config, DryRun(world_size, world_size, None), predict_embedding_rows(config.data))
    profiles = planner.plan().profiles
    return min(
        (profile for profile in profiles if stage in profile.stages), key=lambda profile: profile.first_rank
    ), planner.plan_stage(stage)


def _build_topology(config: Config, world_size: int) -> Topology:
    parallel = config.parallel
    return Topology.of(parallel, world_size)


def format_panel_table(panels: Sequence[MemoryPanel], width: int | None = None) -> list[str]:
    """Format a table with a row for each panel. Columns: the memory that is in use during the entire step, and the predicted and
    the measured peak of activation memory.

    Args:
        width: maximum number of characters of a line; None for no limit.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.state))
    host_bytes = [panel.op_memory[-1].host_bytes for panel in panels]
    has_measurement = any(panel.measurement is not None for panel in panels)
    header = [
        "",
        *names,
        "activations",
        *(["measured", "difference"] if has_measurement else []),
        *(["in host memory"] if any(host_bytes) else []),
    ]
    rows = []
    for panel, offloaded_bytes in zip(panels, host_bytes, strict=True):
        row = [panel.title, *(format_bytes(panel.state.get(name, 0)) for name in names), format_bytes(panel.planned_peak)]
        if panel.measurement is not None:
            row += [format_bytes(panel.measurement.peak_bytes), f"{panel.measurement.peak_bytes / panel.planned_peak - 1:+.2%}"]
        elif has_measurement:
            row += ["", ""]
        rows.append([*row, *([format_bytes(offloaded_bytes)] if any(host_bytes) else [])])
    return format_table([header, *rows], width=width)
