"""Any rank of any world in this process, for what needs no communication: shapes, initial values, who counts what."""

from __future__ import annotations

import torch

from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.topology import AXES, DATA_AXES, GRADIENT_AXES, Topology

GROUPS = (("tp",), ("cp",), ("tp", "cp"), DATA_AXES, ("pp",), GRADIENT_AXES, ("tp", *GRADIENT_AXES), AXES, ("etp", "ep"), ("edp",))
CPU = torch.device("cpu")


def lone_rank(topology: Topology | None = None, rank: int = 0, device: torch.device = CPU) -> ParallelContext:
    """The context of one rank. Its groups have their sizes and places, but nobody to talk to."""
    topology = topology or Topology()
    context = ParallelContext(topology, rank, device)

    def enter(key: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        context._groups[key] = Group("-".join(key), ranks, ranks.index(rank))

    for axes in GROUPS:
        enter(axes, topology.group(rank, *axes))
    for ring in ("cp_ring", "cp_ring_grad"):
        enter((ring,), topology.group(rank, "cp"))
    pipeline = topology.group(rank, "pp")
    enter(("pp_up",), pipeline)
    enter(("pp_down",), pipeline)
    enter(("ends",), (pipeline[0], pipeline[-1]) if len(pipeline) > 1 and rank in (pipeline[0], pipeline[-1]) else (rank,))
    return context
