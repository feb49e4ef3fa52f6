"""Duration of computation on a cluster's devices, and of communication on its links.

A matrix product takes its FLOPs at the rate that large products achieve, plus the time to move its inputs and its result through
memory. So small or thin products are slower. (This is the roofline model of Williams et al. 2009 with a sum in place of a maximum.)

The time of a collective is the number of bytes that one rank sends, divided by the rate of the slowest link in the ring, plus
latencies. With r ranks on each of n nodes, these are r - 1 latencies inside a node and sqrt(n - 1) latencies between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lab.planner.cluster import Cluster
from megatron_lab.planner.device_work import AttentionWork, DeviceWork, Gemm

_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8": 1}
_UNFUSED_FORWARD, _UNFUSED_BACKWARD = 13, 17
"""Memory traffic in bytes per pair of query and key if attention consists of separate kernels in 16 bits: scores are written,
scaled, masked, turned into probabilities, dropped out and read again. Korthikanti et al. 2022, section 4.1, list what is saved."""


@dataclass(frozen=True)
class Stack:
    """Speed of another training framework relative to this framework, to predict that framework's published runs.

    The defaults describe this framework itself.
    """

    name: str = "ours"
    flash: bool = True
    """Whether attention is a single kernel that does not save attention probabilities (flash attention)."""
    attention: float = 1.0
    """Speed of attention kernels as a multiple of the speed that the cluster file gives."""
    products: float = 1.0
    """Speed of matrix products as a multiple of the speed that the cluster file gives."""
    elementwise: float = 1.0
    """Bytes that all kernels except matrix products and attention read and write, as a multiple of this framework's bytes. Fused
    kernels read and write fewer bytes."""
    launches: float = 1.0
    """Number of kernel launches as a multiple of this framework's number; 0 with CUDA graphs."""
    hidden: float = 1.0
    """Factor by which `Cluster.hidden` is multiplied: the fraction of the computation's time during which overlapped communication
    costs no extra time."""


DEFAULT_STACK = Stack()
COMPILED_STACK = Stack("ours, compiled", elementwise=0.5, launches=0.4)
"""Stack with --compile: adjacent element-wise kernels are fused."""


class DeviceTime(NamedTuple):
    """Seconds that a device spends on some work, by activity."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Time of memory-bound kernels, and of the gaps between kernels of all kinds."""
    launching: float = 0.0
    """Time in which the device is idle because the host has not launched the next kernel yet."""

    @property
    def total(self) -> float:
        """Sum of the seconds of all activities."""
        return sum(self)


class CommGroup(NamedTuple):
    """Number of ranks of a process group, in total and on each node."""

    size: int
    ranks_per_node: float
    """Ranks of the process group on each node that has any of them; a mean if the nodes differ."""


class Durations:
    """Predicts durations of computation and communication on one cluster with one software stack. Each rank has its own device."""

    def __init__(self, cluster: Cluster, stack: Stack = DEFAULT_STACK) -> None:
        self.cluster, self.stack = cluster, stack
        self._memory_bytes_per_s = cluster.memory_gb_s * 1e9 * cluster.reached.memory

    def predict_device_time(self, work: DeviceWork, new_bytes: int = 0) -> DeviceTime:
        """Predict the seconds that a device needs for some work, by activity.

        Args:
            new_bytes: bytes that the work allocates beyond the memory that was in use before.
        """
        gemm_time = sum(count * self.predict_gemm_time(gemm) for gemm, count in work.gemms.items())
        attention_time = sum(count * self.predict_attention_time(call) for call, count in work.attention.items())
        num_kernels = work.num_kernels * self.stack.launches
        elementwise_time = (
            work.memory_bytes * self.stack.elementwise / self._memory_bytes_per_s + num_kernels * self.cluster.kernel_us * 1e-6
        )
        if self.cluster.fresh_gb_s:
            elementwise_time += new_bytes / (self.cluster.fresh_gb_s * 1e9)
        on_device = gemm_time + attention_time + elementwise_time
        return DeviceTime(
            gemm_time, attention_time, elementwise_time, max(0.0, num_kernels * self.cluster.host_us * 1e-6 - on_device)
        )

    def predict_gemm_time(self, gemm: Gemm) -> float:
        """Predict the seconds of one matrix product: its FLOPs, its memory traffic and a constant start-up time."""
        return (
            gemm.flops / self._predict_gemm_flops_per_s(gemm.dtype)
            + count_gemm_bytes(gemm) / self._memory_bytes_per_s
            + self.cluster.product_us * 1e-6
        )

    def predict_attention_time(self, work: AttentionWork) -> float:
        """Predict the seconds of one attention call. It is one fused kernel, or several kernels if the software stack has no fused
        attention kernel."""
        efficiency, peak_flops = self.cluster.reached, self.cluster.get_peak_flops(get_peak_name(work.dtype))
        if not self.stack.flash:
            num_pairs = 2 * work.num_pairs  # separate kernels compute the full square of scores
            bytes_per_pair = _UNFUSED_BACKWARD if work.backward else _UNFUSED_FORWARD
            return (
                2 * work.flops / self._predict_gemm_flops_per_s(work.dtype)
                + num_pairs * bytes_per_pair * _ITEMSIZE[work.dtype] / 2 / self._memory_bytes_per_s
            )
        fraction = efficiency.attention_backward if work.backward else efficiency.attention
        return work.flops / (peak_flops * fraction * self.stack.attention)

    def _predict_gemm_flops_per_s(self, dtype: str) -> float:
        name = get_peak_name(dtype)
        fractions = self.cluster.reached.products
        fraction = fractions.get(name, fractions.get("bfloat16", min(fractions.values())))
        return self.cluster.get_peak_flops(name) * fraction * self.stack.products

    def predict_optimizer_time(self, num_bytes: float) -> float:
        """Predict the seconds of an optimizer step that reads and writes `num_bytes`. The optimizer state is read from memory, not
        from caches."""
        efficiency = self.cluster.reached
        return num_bytes / (self.cluster.memory_gb_s * 1e9 * (efficiency.state or efficiency.memory))

    def predict_collective_time(self, num_bytes: float, num_calls: float, group: CommGroup, comm_type: str = "all-reduce") -> float:
        """Predict the seconds of `num_calls` collectives over a process group.

        If a node has several ranks of the group, each of them sends over its own network link, so that the ring uses all of these
        links.

        Args:
            num_bytes: bytes that one rank sends in all calls together.
        """
        if group.size <= 1 or not (num_bytes or num_calls):
            return 0.0
        cluster, ranks_per_node = self.cluster, min(group.ranks_per_node, group.size)
        rate, num_nodes = cluster.node_gb_s * cluster.reached.node, group.size / ranks_per_node
        if num_nodes > 1:
            rate = (
                min(rate, ranks_per_node * cluster.network_gb_s * cluster.reached.network)
                if ranks_per_node > 1
                else (cluster.network_gb_s * cluster.reached.network)
            )
        latency = (ranks_per_node - 1) * cluster.node_us + (num_nodes - 1) ** 0.5 * cluster.network_us
        rate *= cluster.operations.get(comm_type, 1.0)
        return num_bytes / (rate * 1e9) + num_calls * latency * 1e-6

    def predict_message_time(self, num_bytes: float, *, crosses_nodes: bool) -> float:
        """Predict the seconds of a message between pipeline stages."""
        cluster = self.cluster
        rate, latency = cluster.node_gb_s * cluster.reached.node, cluster.node_us
        if crosses_nodes:
            rate, latency = cluster.network_gb_s * cluster.reached.network, cluster.network_us
        return num_bytes / (rate * cluster.operations.get("send", 1.0) * 1e9) + latency * 1e-6


def count_gemm_bytes(gemm: Gemm) -> int:
    """Return the bytes that matrix products read and write. The result counts with at least 16 bits per element, also if the inputs
    have 8."""
    itemsize = _ITEMSIZE[gemm.dtype]
    return gemm.batch * ((gemm.m + gemm.n) * gemm.k * itemsize + gemm.m * gemm.n * max(itemsize, 2))


def sum_times(times: Iterable[DeviceTime]) -> DeviceTime:
    """Return the sum of several device times, by activity."""
    return DeviceTime(*(sum(column) for column in zip(*times, strict=True))) if (times := list(times)) else DeviceTime()  # type: ignore[assignment]


def get_peak_name(dtype: str) -> str:
    """Return the name under which the peak rate of a torch dtype is stored: "float8" for every float8 dtype, otherwise the name of
    the dtype."""
    return "float8" if dtype.startswith("float8") else dtype
