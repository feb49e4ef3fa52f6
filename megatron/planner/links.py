"""Over which links a group sends: inside a node, or between nodes. Arithmetic over all ranks at once, without listing groups.

Ranks of a group are taken as a ring in the order of their numbers, each sending to the next and the last to the first. As ranks of
a node are neighbours in that order, no other ring leaves nodes less often.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.parallel.topology import Topology

Crossing = NDArray[np.bool_]
"""For each data rank and tensor rank of a stage, whether what it sends goes to another node: [data, tensor]."""


class Links:
    """The nodes of all ranks.

    Args:
        gpus_per_node: rank r sits on node r // gpus_per_node.
    """

    def __init__(self, topology: Topology, gpus_per_node: int) -> None:
        self._topology = topology
        stage, dp, cp, tp = np.ogrid[: topology.pp, : topology.dp, : topology.cp, : topology.tp]
        number: Any = topology.rank  # the arithmetic of one rank is that of arrays
        self._ranks: NDArray[np.int64] = np.broadcast_to(
            number(tp=tp, cp=cp, dp=dp, pp=stage), (topology.pp, topology.dp, topology.cp, topology.tp)
        )
        self._gpus_per_node = gpus_per_node
        self._nodes = self._ranks // gpus_per_node

    def ring(self, stage: int, *axes: str) -> Crossing:
        """Groups over some of tp, cp and dp."""
        nodes = self._nodes[stage]
        inside = [place for place, axis in enumerate(("dp", "cp", "tp")) if axis in axes]
        return self._as_places(_crossing(nodes, inside))

    def parts(self, stage: int, shard_size: int) -> Crossing:
        """Parts of the data ranks that share one copy of the model (--fsdp-shard-size)."""
        return self._as_places(_crossing(self._in_parts(stage, shard_size), [1]))

    def replicas(self, stage: int, shard_size: int) -> Crossing:
        """Groups of one rank from each part."""
        return self._as_places(_crossing(self._in_parts(stage, shard_size), [0]))

    def world(self, stage: int) -> Crossing:
        """All ranks."""
        following = (self._ranks[stage] + 1) % self._topology.world_size // self._gpus_per_node
        return self._as_places(self._nodes[stage] != following)

    def between(self, stage: int, peer: int) -> Crossing:
        """From a stage to another, at the same place."""
        return self._as_places(self._nodes[stage] != self._nodes[peer])

    def first_rank(self, stage: int, data: int, tensor: int) -> int:
        """Number of the rank at a place."""
        return int(self._ranks[stage].reshape(-1, self._topology.tp)[data, tensor])

    def _in_parts(self, stage: int, shard_size: int) -> NDArray[np.int64]:
        return self._nodes[stage].reshape(-1, shard_size, self._topology.tp)

    def _as_places(self, crossing: Crossing) -> Crossing:
        return crossing.reshape(-1, self._topology.tp)


def _crossing(nodes: NDArray[np.int64], axes: list[int]) -> Crossing:
    """Whether the next one in the ring over these axes, the last of which counts fastest, is on another node."""
    others = [axis for axis in range(nodes.ndim) if axis not in axes]
    order = [*others, *axes]
    turned = nodes.transpose(order)
    rings = turned.reshape(*turned.shape[: len(others)], -1)
    crossing = rings != np.roll(rings, -1, axis=-1)
    return crossing.reshape(turned.shape).transpose(np.argsort(order))
