"""Measurements of one rank: matrix products, attention, memory, kernel launches, host copies, collectives, and their overlap with
computation.

The code is the same for every type of device. On a device that works asynchronously to the host, device events measure the time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.parallel.collectives import Pending, gather_objects, start_all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.context import Group
from megatron_lab.planner.device_work import AttentionWork, DeviceWork, Gemm

Durations = tuple[float, ...]
"""Seconds of one call, in several samples."""
_MIN_SAMPLE_S, _MIN_COLLECTIVE_SAMPLE_S = 0.01, 0.05
"""Minimum seconds of a sample, reached by repeating the action. Samples in which ranks wait for each other are longer."""
_NUM_SAMPLES = 7


@dataclass(frozen=True)
class WorkTiming:
    """A computation on a device, and its measured durations."""

    name: str
    """Type of the computation: "products" (a matrix product), "attention", "attention backward", "memory" (an element-wise kernel)
    or "layers" (forward or backward of the layers of a small model)."""
    work: DeviceWork
    durations: Durations
    new_bytes: int = 0
    """Peak bytes of memory that the computation allocates."""


@dataclass(frozen=True)
class CollectiveTiming:
    """Measured durations of one collective with one message size. Of its `group_size` ranks, `ranks_per_node` are on each node."""

    operation: str
    """Name of the collective: "all-reduce", "all-gather" or "reduce-scatter"; "send" for a message between two ranks."""
    group_size: int
    ranks_per_node: int
    num_bytes: float
    """Bytes that one rank sends."""
    durations: Durations


@dataclass(frozen=True)
class OverlapTiming:
    """Durations of matrix products and of an all-reduce, executed separately, and of both executed at the same time."""

    gemms: Durations
    all_reduce: Durations
    both: Durations


class Stopwatch:
    """Timer of actions that several ranks run at the same time.

    Args:
        group: ranks that time an action together. A barrier precedes each sample.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self.device, self.group = device, group
        self._is_async = device.type == "cuda"

    def time_repeated(
        self, action: Callable[[], object], preceding: Callable[[], object] | None = None, min_sample_s: float = _MIN_SAMPLE_S
    ) -> Durations:
        """Time an action. Each of the returned samples is the mean duration of several repetitions, in seconds.

        Args:
            preceding: work that keeps the device busy while the host launches the actions, so that launch times are not measured.
            min_sample_s: seconds that the repetitions of a sample take at least.
        """
        action()
        single_s = self._time_sample(action, 1, None)
        local_repeats = max(1, min(1000, round(min_sample_s / max(single_s, 1e-7))))
        num_repeats = max(gather_objects(local_repeats, self.group))
        return tuple(self._time_sample(action, num_repeats, preceding) / num_repeats for _ in range(_NUM_SAMPLES))

    def time_calls(self, action: Callable[[], object], num_samples: int) -> Durations:
        """Time each of `num_samples` calls of an action. Return the durations in seconds."""
        return tuple(self._time_sample(action, 1, None) for _ in range(num_samples))

    def _time_sample(self, action: Callable[[], object], num_repeats: int, preceding: Callable[[], object] | None) -> float:
        self._synchronize()
        if self.group.size > 1:
            dist.barrier(self.group.process_group)
        if not self._is_async:
            start_time = time.perf_counter()
            for _ in range(num_repeats):
                action()
            return time.perf_counter() - start_time
        if preceding is not None:
            preceding()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(num_repeats):
            action()
        end.record()
        self._synchronize()
        return start.elapsed_time(end) / 1000.0

    def _synchronize(self) -> None:
        if self._is_async:
            torch.cuda.synchronize(self.device)


def time_gemms(stopwatch: Stopwatch, gemms: Sequence[Gemm]) -> Iterator[WorkTiming]:
    """Time matrix products, and yield the durations of each."""
    for gemm in gemms:
        dtype = getattr(torch, gemm.dtype)
        a = torch.randn(gemm.batch, gemm.m, gemm.k, device=stopwatch.device).to(dtype)
        b = torch.randn(gemm.batch, gemm.k, gemm.n, device=stopwatch.device).to(dtype)
        if gemm.batch == 1:
            a, b = a[0], b[0]
        out = torch.empty((*a.shape[:-1], gemm.n), device=stopwatch.device, dtype=dtype)
        action = partial(torch.matmul, a, b, out=out)
        yield WorkTiming("products", DeviceWork(Counter({gemm: 1}), num_kernels=1), stopwatch.time_repeated(action))


def time_attention(stopwatch: Stopwatch, shapes: Sequence[tuple[int, int, int, int]], dtype: torch.dtype) -> Iterator[WorkTiming]:
    """Time forward and backward of causal attention, and yield the durations of each.

    Args:
        shapes: shapes [micro batch size, heads, sequence length, head size] of query, key and value.
    """
    for shape in shapes:
        batch, heads, seq_length, head_dim = shape
        q, k, v = (torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_() for _ in range(3))
        pairs = batch * heads * seq_length * (seq_length + 1) // 2
        dtype_name = str(dtype).removeprefix("torch.")
        works = [
            DeviceWork(
                attention=Counter({AttentionWork(pairs, 2 * head_dim, seq_length, is_backward, dtype_name): 1}), num_kernels=1
            )
            for is_backward in (False, True)
        ]
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            yield WorkTiming("attention", works[0], stopwatch.time_repeated(forward))
        out = forward()
        run_backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        yield WorkTiming("attention backward", works[1], stopwatch.time_repeated(run_backward))


def time_elementwise_kernels(stopwatch: Stopwatch, sizes: Sequence[int], dtype: torch.dtype) -> Iterator[WorkTiming]:
    """Time an addition and a copy of existing tensors, and yield the durations of each.

    Args:
        sizes: numbers of elements of the tensors.
    """
    for size in sizes:
        a, b, out = (torch.ones(size, device=stopwatch.device, dtype=dtype) for _ in range(3))
        for num_bytes, action in ((3 * a.nbytes, partial(torch.add, a, b, out=out)), (2 * a.nbytes, partial(out.copy_, a))):
            yield WorkTiming("memory", DeviceWork(memory_bytes=num_bytes, num_kernels=1), stopwatch.time_repeated(action))


def time_empty_kernel(stopwatch: Stopwatch) -> Durations:
    """Time a kernel with almost no work, launched while the device is still busy."""
    scalar = torch.zeros(1, device=stopwatch.device)
    matrix_size = 8192 if stopwatch.device.type == "cuda" else 64
    matrix = torch.zeros(matrix_size, matrix_size, device=stopwatch.device)
    return stopwatch.time_repeated(lambda: scalar.add_(1.0), preceding=lambda: torch.mm(matrix, matrix))


def time_host_copies(stopwatch: Stopwatch, sizes: Sequence[int]) -> list[tuple[int, Durations]]:
    """Time copies from the host to the device and back.

    Args:
        sizes: bytes of a copy in one direction.

    Returns:
        for each size, the total bytes of both copies and the durations.
    """
    results = []
    for size in sizes:
        device_buffer = torch.zeros(size, dtype=torch.uint8, device=stopwatch.device)
        host_buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=stopwatch.device.type == "cuda")

        def copy_both_ways(device_buffer: torch.Tensor = device_buffer, host_buffer: torch.Tensor = host_buffer) -> None:
            device_buffer.copy_(host_buffer, non_blocking=True)
            host_buffer.copy_(device_buffer, non_blocking=True)

        results.append((2 * size, stopwatch.time_repeated(copy_both_ways)))
    return results


def time_collectives(stopwatch: Stopwatch, sizes: Sequence[int], ranks_per_node: int, gemm: Gemm) -> Iterator[CollectiveTiming]:
    """Time an all-reduce, an all-gather and a reduce-scatter among the ranks of the stopwatch. With two ranks, also time messages
    between them.

    A matrix product precedes each collective, as in a layer. Ranks then arrive at the collective at different times and wait for
    each other. The duration of the product is subtracted.

    Args:
        sizes: bytes of the full (not scattered) buffer.
        ranks_per_node: number of these ranks on each node.
        gemm: matrix product that precedes each collective.
    """
    group, size = stopwatch.group, stopwatch.group.size
    if size == 1:
        return
    multiply = _build_matmul(gemm, stopwatch.device)
    gemm_s = statistics.median(stopwatch.time_repeated(multiply, min_sample_s=_MIN_COLLECTIVE_SAMPLE_S))
    for buffer_bytes in sizes:
        full_buffer = torch.zeros(max(1, buffer_bytes // 4 // size) * size, device=stopwatch.device)
        shard = full_buffer[: len(full_buffer) // size].clone()
        remote_bytes = (size - 1) / size * full_buffer.nbytes
        actions: dict[str, tuple[float, Callable[[], object]]] = {
            "all-reduce": (2 * remote_bytes, _run_and_wait(start_all_reduce, full_buffer, group)),
            "all-gather": (remote_bytes, _run_and_wait(start_all_gather, shard, group)),
            "reduce-scatter": (remote_bytes, _run_and_wait(start_reduce_scatter, full_buffer, group)),
        }
        if size == 2:
            actions["send"] = (full_buffer.nbytes, _build_exchange(full_buffer, group))
        for operation, (num_bytes, action) in actions.items():
            durations = stopwatch.time_repeated(lambda action=action: (multiply(), action()), min_sample_s=_MIN_COLLECTIVE_SAMPLE_S)  # type: ignore[misc]
            yield CollectiveTiming(
                operation, size, ranks_per_node, num_bytes, tuple(max(1e-6, duration - gemm_s) for duration in durations)
            )


def _run_and_wait(start: Callable[[torch.Tensor, Group], Pending], tensor: torch.Tensor, group: Group) -> Callable[[], object]:
    return lambda: start(tensor, group).wait()


def _build_matmul(gemm: Gemm, device: torch.device) -> Callable[[], object]:
    dtype = getattr(torch, gemm.dtype)
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n)))
    return lambda: torch.mm(a, b)


def _build_exchange(values: torch.Tensor, group: Group) -> Callable[[], None]:
    """Build a function with which the two ranks of a process group send each other a tensor at the same time."""
    (peer,) = (rank for rank in group.ranks if rank != group.ranks[group.rank])
    received = torch.empty_like(values)

    def action() -> None:
        ops = [dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return action


def time_overlap(stopwatch: Stopwatch, gemm: Gemm, num_bytes: int) -> OverlapTiming | None:
    """Time matrix products, an all-reduce, and both at the same time. Return None with one rank.

    Args:
        gemm: matrix product, repeated until the products take about as long as the all-reduce.
        num_bytes: size of the all-reduce in bytes.
    """
    if stopwatch.group.size == 1:
        return None
    run_gemm = _build_matmul(gemm, stopwatch.device)
    bucket = torch.zeros(num_bytes // 4, device=stopwatch.device)
    all_reduce_s = stopwatch.time_repeated(lambda: start_all_reduce(bucket, stopwatch.group).wait())
    gemm_s = stopwatch.time_repeated(run_gemm)
    num_gemms = max(gather_objects(max(1, round(min(all_reduce_s) / min(gemm_s))), stopwatch.group))

    def multiply() -> None:
        for _ in range(num_gemms):
            run_gemm()

    def multiply_and_reduce() -> None:
        pending = start_all_reduce(bucket, stopwatch.group)
        multiply()
        pending.wait()

    reduce = lambda: start_all_reduce(bucket, stopwatch.group).wait()  # noqa: E731
    samples = [
        tuple(stopwatch.time_calls(action, 1)[0] for action in (multiply, reduce, multiply_and_reduce))
        for _ in range(3 * _NUM_SAMPLES)
    ]
    return OverlapTiming(*zip(*samples, strict=True))
