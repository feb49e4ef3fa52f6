"""How long work takes on a cluster's devices, and what is sent on its links.

Time of a product: its FLOPs at the rate that large products reach, and its factors and result through memory. So small or thin ones
are slow in the measure in which they are (the roofline of Williams et al. 2009, with a sum in place of its corner).
Time of a collective: (n - 1) latencies and the bytes that one rank sends, at the rate of the slowest link in the ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lab.planner.cluster import Cluster
from megatron_lab.planner.work import AttentionWork, DeviceWork, MatrixProduct

_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8": 1}
_UNFUSED_FORWARD, _UNFUSED_BACKWARD = 13, 17
"""Bytes that go through memory for each pair of a query and a key where attention is made of single kernels in 16 bits: scores
written, scaled and masked to probabilities, dropped, read again (Korthikanti et al. 2022, section 4.1, lists what is kept)."""


@dataclass(frozen=True)
class Stack:
    """Software that differs from ours, for runs of others that a prediction is compared with. Ours is the default."""

    name: str = "ours"
    flash: bool = True
    """Whether attention is one kernel that keeps no probabilities."""
    attention: float = 1.0
    """Speed of attention's kernels over those that the cluster file has in mind."""
    products: float = 1.0
    """Speed of products over the cluster's."""
    elementwise: float = 1.0
    """Bytes that kernels beside products move, over those of ours: fused ones move fewer."""
    launches: float = 1.0
    """Kernels launched over those of ours; CUDA graphs launch none."""
    hidden: float = 1.0
    """How well sending is hidden, over ours."""


OURS = Stack()
COMPILED = Stack("ours, compiled", elementwise=0.5, launches=0.4)
"""With --compile: neighbouring element-wise kernels are one."""


class Spent(NamedTuple):
    """Seconds of a device, by what it does."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Kernels that go through memory, and the gaps between all kernels."""
    launching: float = 0.0
    """Waiting for the host to launch."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Ranks(NamedTuple):
    """Ranks that send to each other."""

    size: int
    per_node: float
    """How many of them a node has."""


class Durations:
    """Times on one cluster with one software, of a rank that has a device for itself."""

    def __init__(self, cluster: Cluster, stack: Stack = OURS) -> None:
        self.cluster, self.stack = cluster, stack
        self._memory = cluster.memory_gb_s * 1e9 * cluster.reached.memory

    def of(self, work: DeviceWork, fresh: int = 0) -> Spent:
        """Seconds of some work that takes so many bytes of memory beside what there was."""
        products = sum(times * self.product(one) for one, times in work.products.items())
        attention = sum(times * self.attention(one) for one, times in work.attention.items())
        kernels = work.kernels * self.stack.launches
        elementwise = work.moved * self.stack.elementwise / self._memory + kernels * self.cluster.kernel_us * 1e-6
        if self.cluster.fresh_gb_s:
            elementwise += fresh / (self.cluster.fresh_gb_s * 1e9)
        on_device = products + attention + elementwise
        return Spent(products, attention, elementwise, max(0.0, kernels * self.cluster.host_us * 1e-6 - on_device))

    def product(self, one: MatrixProduct) -> float:
        """Seconds of a product."""
        return one.flops / self._rate(one.dtype) + product_bytes(one) / self._memory + self.cluster.product_us * 1e-6

    def attention(self, one: AttentionWork) -> float:
        """Seconds of an attention kernel, or of the kernels in its place."""
        reached, peak = self.cluster.reached, self.cluster.peak(column(one.dtype))
        if not self.stack.flash:
            pairs = 2 * one.pairs  # of the whole square
            per_pair = _UNFUSED_BACKWARD if one.backward else _UNFUSED_FORWARD
            return 2 * one.flops / self._rate(one.dtype) + pairs * per_pair * _ITEMSIZE[one.dtype] / 2 / self._memory
        share = reached.attention_backward if one.backward else reached.attention
        return one.flops / (peak * share * self.stack.attention)

    def _rate(self, dtype: str) -> float:
        name = column(dtype)
        reached = self.cluster.reached.products
        share = reached.get(name, reached.get("bfloat16", min(reached.values())))
        return self.cluster.peak(name) * share * self.stack.products

    def update(self, num_bytes: float) -> float:
        """Seconds of an optimizer's step that reads and writes so many bytes. They come from memory, not from caches."""
        reached = self.cluster.reached
        return num_bytes / (self.cluster.memory_gb_s * 1e9 * (reached.state or reached.memory))

    def sending(self, num_bytes: float, calls: float, ring: Ranks, operation: str = "all-reduce") -> float:
        """Seconds in which one rank sends so many bytes in so many collectives.

        Where a node has several ranks of the ring, each sends over its own network links, so the ring has all of them.
        """
        if ring.size <= 1 or not (num_bytes or calls):
            return 0.0
        cluster, inside = self.cluster, min(ring.per_node, ring.size)
        rate, nodes = cluster.node_gb_s * cluster.reached.node, ring.size / inside
        if nodes > 1:
            rate = (
                min(rate, inside * cluster.network_gb_s * cluster.reached.network)
                if inside > 1
                else (cluster.network_gb_s * cluster.reached.network)
            )
        latency = (inside - 1) * cluster.node_us + (nodes - 1) ** 0.5 * cluster.network_us
        rate *= cluster.operations.get(operation, 1.0)
        return num_bytes / (rate * 1e9) + calls * latency * 1e-6

    def message(self, num_bytes: float, *, between_nodes: bool) -> float:
        """Seconds of a message between stages."""
        cluster = self.cluster
        rate, latency = cluster.node_gb_s * cluster.reached.node, cluster.node_us
        if between_nodes:
            rate, latency = cluster.network_gb_s * cluster.reached.network, cluster.network_us
        return num_bytes / (rate * cluster.operations.get("send", 1.0) * 1e9) + latency * 1e-6


def product_bytes(one: MatrixProduct) -> int:
    """What a product reads and writes; its result has 16 bits at least."""
    size = _ITEMSIZE[one.dtype]
    return one.batch * ((one.m + one.n) * one.k * size + one.m * one.n * max(size, 2))


def added(some: Iterable[Spent]) -> Spent:
    """The sum of each part."""
    return Spent(*(sum(each) for each in zip(*some, strict=True))) if (some := list(some)) else Spent()  # type: ignore[assignment]


def column(dtype: str) -> str:
    """The column of the table of peaks for a dtype of torch."""
    return "float8" if dtype.startswith("float8") else dtype
