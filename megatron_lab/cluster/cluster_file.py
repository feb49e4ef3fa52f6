"""Writes a measured cluster's file: its fields, and in comments what was measured, when, on what, and how sure each figure is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.config.launcher import launched
from megatron_lab.cluster.measurement import Measured, measure_here, measure_rank
from megatron_lab.cluster.rates import Figure, cluster_of
from megatron_lab.planner.cluster import Cluster


def measure_into(path: Path, device: str, ranks: int, planned: Sequence[str], world_size: int) -> list[str]:
    """Measure, by ranks started here or as one of a launcher's, and write the file on the first rank.

    Args:
        device: auto, cpu or cuda.
        ranks: of this node, where no launcher started this.
        planned: flags of a run whose products are measured too.
        world_size: ranks of that run.

    Returns:
        lines to tell; empty on other ranks.
    """
    if "RANK" in os.environ:
        found = measure_rank(device, planned, world_size)
        if launched().rank:
            return []
    else:
        found = measure_here(device, ranks, planned, world_size)
    cluster, figures = cluster_of(found, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(cluster, found, figures), encoding="utf-8")
    return [f"wrote {path}", *(f"{one.name}: {one.value}; {one.spread}" for one in figures)]


def text_of(cluster: Cluster, found: Measured, figures: Sequence[Figure]) -> str:
    """The file."""
    nodes = found.ranks // found.per_node
    where = f"{nodes} node{'s' * (nodes > 1)} of {found.per_node} ranks, {found.device}, {found.threads} threads a rank"
    comments = [
        f"Measured by tools/check_cluster.py --measure on {found.when}: {where}, torch {found.torch}.",
        "Rates are fitted to products and attention alone and to forwards and backwards of small models (docs/planning.md):",
        *(f"  {one.name}: {one.value}; {one.spread}" for one in figures),
    ]
    if nodes == 1:
        comments.append("Links between nodes were not measured: those here are the figures inside the node.")
    if found.device != "cpu":
        comments.append("Products in 8 bits were not measured: they are taken to reach what those of bfloat16 do.")
    return "".join(f"# {line}\n" for line in comments) + cluster.yaml()
