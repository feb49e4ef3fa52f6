"""Writes the cluster file of a measured cluster: YAML with the rates that the planner uses, and comments that say what was
measured, when, on which hardware and how accurately."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.config.launcher import read_process_info
from megatron_lab.cluster.measurement import Measurement, measure_on_local_ranks, measure_rank
from megatron_lab.cluster.rates import Figure, build_cluster
from megatron_lab.planner.cluster import Cluster


def write_measured_cluster(path: Path, device: str, num_ranks: int, run_flags: Sequence[str], world_size: int) -> list[str]:
    """Measure the cluster, and write its cluster file on the first rank. If no launcher has started this process, start the ranks
    on this node.

    Args:
        device: value of --device: auto, cpu or cuda.
        num_ranks: number of ranks to start on this node if there is no launcher.
        run_flags: command line of a run. The matrix products of that run are measured too, in their shapes. Empty for no run.
        world_size: number of ranks of that run.

    Returns:
        messages for the user; empty on other ranks than the first.
    """
    if "RANK" in os.environ:
        measurement = measure_rank(device, run_flags, world_size)
        if read_process_info().rank:
            return []
    else:
        measurement = measure_on_local_ranks(device, num_ranks, run_flags, world_size)
    cluster, figures = build_cluster(measurement, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_cluster_file(cluster, measurement, figures), encoding="utf-8")
    return [f"wrote {path}", *(f"{figure.name}: {figure.value}; {figure.accuracy}" for figure in figures)]


def format_cluster_file(cluster: Cluster, measurement: Measurement, figures: Sequence[Figure]) -> str:
    """Format the YAML text of a cluster file.

    Args:
        measurement: measurement to which the rates of the cluster were fitted.
        figures: lines about the values and their accuracy, for the comments of the file.
    """
    num_nodes = measurement.num_ranks // measurement.ranks_per_node
    hardware = (
        f"{num_nodes} node{'s' * (num_nodes > 1)} of {measurement.ranks_per_node} ranks, {measurement.device}, "
        f"{measurement.num_threads} threads a rank"
    )
    comments = [
        f"Measured by tools/check_cluster.py --measure on {measurement.date}: {hardware}, torch {measurement.torch_version}.",
        "Rates are fitted to the times of single matrix products and attention, and of passes of small models (docs/planning.md):",
        *(f"  {figure.name}: {figure.value}; {figure.accuracy}" for figure in figures),
    ]
    if num_nodes == 1:
        comments.append("Links between nodes were not measured: this file repeats the values inside the node.")
    if measurement.device != "cpu":
        comments.append("FP8 matrix products were not measured: they are assumed to be as efficient as those of bfloat16.")
    return "".join(f"# {comment}\n" for comment in comments) + cluster.to_yaml()
