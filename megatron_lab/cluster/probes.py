"""What a rank measures of its device and of its links: products, attention, memory, launches, copies, collectives, overlap.

Everything is timed by the same code on every device. Where a device works beside its host, events on it are the clock.
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
from megatron_lab.planner.work import AttentionWork, DeviceWork, MatrixProduct

Seconds = tuple[float, ...]
"""Of one call, in each of several samples."""
_LEAST_S, _LONG_S = 0.01, 0.05
"""How long a sample takes at least, by repeating; where ranks wait for each other, longer."""
_SAMPLES = 7


@dataclass(frozen=True)
class Timed:
    """Some work of the device, and how long it took."""

    what: str
    work: DeviceWork
    seconds: Seconds
    fresh: int = 0
    """Bytes of memory that it takes beside what there was."""


@dataclass(frozen=True)
class Sent:
    """A collective of so many ranks, of which a node has `per_node`."""

    what: str
    size: int
    per_node: int
    num_bytes: float
    """That one rank sends."""
    seconds: Seconds


@dataclass(frozen=True)
class Beside:
    """Products, an all-reduce, and both at once."""

    products: Seconds
    reduction: Seconds
    both: Seconds


class Stopwatch:
    """Times what ranks do at once.

    Args:
        group: the ranks that time the same; each sample begins with all of them.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self.device, self.group = device, group
        self._beside_host = device.type == "cuda"

    def of(self, action: Callable[[], object], ahead: Callable[[], object] | None = None, least_s: float = _LEAST_S) -> Seconds:
        """Seconds of a call.

        Args:
            ahead: what the device gets to do first, so that it finds the calls launched when it is done.
            least_s: how long a sample takes at least, by repeating.
        """
        action()
        once = self._elapsed(action, 1, None)
        wanted = max(1, min(1000, round(least_s / max(once, 1e-7))))
        repeats = max(gather_objects(wanted, self.group))
        return tuple(self._elapsed(action, repeats, ahead) / repeats for _ in range(_SAMPLES))

    def times(self, action: Callable[[], object], samples: int) -> Seconds:
        """Seconds of single calls."""
        return tuple(self._elapsed(action, 1, None) for _ in range(samples))

    def _elapsed(self, action: Callable[[], object], repeats: int, ahead: Callable[[], object] | None) -> float:
        self._wait()
        if self.group.size > 1:
            dist.barrier(self.group.process_group)
        if not self._beside_host:
            began = time.perf_counter()
            for _ in range(repeats):
                action()
            return time.perf_counter() - began
        if ahead is not None:
            ahead()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            action()
        end.record()
        self._wait()
        return begin.elapsed_time(end) / 1000.0

    def _wait(self) -> None:
        if self._beside_host:
            torch.cuda.synchronize(self.device)


def time_products(watch: Stopwatch, products: Sequence[MatrixProduct]) -> Iterator[Timed]:
    """Each product by itself."""
    for one in products:
        dtype = getattr(torch, one.dtype)
        a = torch.randn(one.batch, one.m, one.k, device=watch.device).to(dtype)
        b = torch.randn(one.batch, one.k, one.n, device=watch.device).to(dtype)
        if one.batch == 1:
            a, b = a[0], b[0]
        out = torch.empty((*a.shape[:-1], one.n), device=watch.device, dtype=dtype)
        action = partial(torch.matmul, a, b, out=out)
        yield Timed("products", DeviceWork(Counter({one: 1}), kernels=1), watch.of(action))


def time_attention(watch: Stopwatch, shapes: Sequence[tuple[int, int, int, int]], dtype: torch.dtype) -> Iterator[Timed]:
    """Causal attention, forward and backward, by shapes [b, heads, s, d]."""
    for shape in shapes:
        batch, heads, length, size = shape
        q, k, v = (torch.randn(shape, device=watch.device).to(dtype).requires_grad_() for _ in range(3))
        pairs = batch * heads * length * (length + 1) // 2
        name = str(dtype).removeprefix("torch.")
        works = [
            DeviceWork(attention=Counter({AttentionWork(pairs, 2 * size, length, backward, name): 1}), kernels=1)
            for backward in (False, True)
        ]
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            yield Timed("attention", works[0], watch.of(attend))
        out = attend()
        back = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        yield Timed("attention backward", works[1], watch.of(back))


def time_memory(watch: Stopwatch, sizes: Sequence[int], dtype: torch.dtype) -> Iterator[Timed]:
    """Element-wise kernels over tensors of so many elements, which are there already."""
    for size in sizes:
        a, b, out = (torch.ones(size, device=watch.device, dtype=dtype) for _ in range(3))
        for moved, action in ((3 * a.nbytes, partial(torch.add, a, b, out=out)), (2 * a.nbytes, partial(out.copy_, a))):
            yield Timed("memory", DeviceWork(moved=moved, kernels=1), watch.of(action))


def time_kernels(watch: Stopwatch) -> Seconds:
    """A kernel with nothing to do, launched while the device is still busy."""
    one = torch.zeros(1, device=watch.device)
    many = 8192 if watch.device.type == "cuda" else 64
    long = torch.zeros(many, many, device=watch.device)
    return watch.of(lambda: one.add_(1.0), ahead=lambda: torch.mm(long, long))


def time_copies(watch: Stopwatch, sizes: Sequence[int]) -> list[tuple[int, Seconds]]:
    """Bytes between the device and its host, in both directions in turn."""
    found = []
    for size in sizes:
        there = torch.zeros(size, dtype=torch.uint8, device=watch.device)
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")

        def copies(there: torch.Tensor = there, here: torch.Tensor = here) -> None:
            there.copy_(here, non_blocking=True)
            here.copy_(there, non_blocking=True)

        found.append((2 * size, watch.of(copies)))
    return found


def time_collectives(watch: Stopwatch, sizes: Sequence[int], per_node: int, product: MatrixProduct) -> Iterator[Sent]:
    """Sums, gathers and scattered sums of so many bytes over the watch's ranks, and a message between two.

    Each follows a product, as in a layer: ranks that compute are never done at once, and wait for each other. What the product
    takes by itself is taken off.

    Args:
        per_node: how many of the ranks a node has.
    """
    group, size = watch.group, watch.group.size
    if size == 1:
        return
    multiply = _multiplication(product, watch.device)
    alone = statistics.median(watch.of(multiply, least_s=_LONG_S))
    for total in sizes:
        whole = torch.zeros(max(1, total // 4 // size) * size, device=watch.device)
        part = whole[: len(whole) // size].clone()
        share = (size - 1) / size * whole.nbytes
        actions: dict[str, tuple[float, Callable[[], object]]] = {
            "all-reduce": (2 * share, _waited(start_all_reduce, whole, group)),
            "all-gather": (share, _waited(start_all_gather, part, group)),
            "reduce-scatter": (share, _waited(start_reduce_scatter, whole, group)),
        }
        if size == 2:
            actions["send"] = (whole.nbytes, _exchange(whole, group))
        for what, (num_bytes, action) in actions.items():
            both = watch.of(lambda action=action: (multiply(), action()), least_s=_LONG_S)  # type: ignore[misc]
            yield Sent(what, size, per_node, num_bytes, tuple(max(1e-6, seconds - alone) for seconds in both))


def _waited(start: Callable[[torch.Tensor, Group], Pending], tensor: torch.Tensor, group: Group) -> Callable[[], object]:
    return lambda: start(tensor, group).wait()


def _in_turn(*actions: Callable[[], object]) -> None:
    for action in actions:
        action()


def _multiplication(product: MatrixProduct, device: torch.device) -> Callable[[], object]:
    dtype = getattr(torch, product.dtype)
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((product.m, product.k), (product.k, product.n)))
    return lambda: torch.mm(a, b)


def _exchange(values: torch.Tensor, group: Group) -> Callable[[], None]:
    """Two ranks send to each other."""
    (peer,) = (rank for rank in group.ranks if rank != group.ranks[group.index])
    received = torch.empty_like(values)

    def action() -> None:
        ops = [dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return action


def time_overlap(watch: Stopwatch, product: MatrixProduct, num_bytes: int) -> Beside | None:
    """An all-reduce of a bucket beside as many products as take about as long; None without other ranks."""
    if watch.group.size == 1:
        return None
    once = _multiplication(product, watch.device)
    bucket = torch.zeros(num_bytes // 4, device=watch.device)
    reduction = watch.of(lambda: start_all_reduce(bucket, watch.group).wait())
    one = watch.of(once)
    times = max(gather_objects(max(1, round(min(reduction) / min(one))), watch.group))

    def multiply() -> None:
        for _ in range(times):
            once()

    def both() -> None:
        pending = start_all_reduce(bucket, watch.group)
        multiply()
        pending.wait()

    reduce = lambda: start_all_reduce(bucket, watch.group).wait()  # noqa: E731
    rounds = [tuple(watch.times(action, 1)[0] for action in (multiply, reduce, both)) for _ in range(3 * _SAMPLES)]
    return Beside(*zip(*rounds, strict=True))
