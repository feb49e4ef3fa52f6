"""The most expensive kernels of one training step, from a trace of torch's profiler.

The trace names, for each kernel, the operation that launched it ("External id"), and for each operation the sizes and types of its
inputs. FLOPs are counted for matrix products and attention, bytes for what an operation reads and writes at least: its inputs, and
an output as large as the largest of them, or as the product makes it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_lab.benchmarks.peers import Step

_ITEM_SIZES = {"float": 4, "double": 8, "long": 8, "long int": 8, "int": 4, "bool": 1, "unsigned char": 1, "signed char": 1}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_PRODUCTS = re.compile(r"aten::(mm|addmm|addmm_|bmm|baddbmm|baddbmm_|_scaled_mm|_grouped_mm)$")
_FIRST_FACTOR = {"addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
_ATTENTION = re.compile(r"attention|varlen_attn")
ATTENTION_KERNELS = (
    ("cudnn", re.compile(r"cudnn.*(sdpa|fmha|flash|attention)|(sdpa|flash).*cudnn", re.IGNORECASE)),
    ("flash", re.compile(r"flash_(fwd|bwd)|flash::|flash_attention", re.IGNORECASE)),
    ("efficient", re.compile(r"fmha_cutlass|AttentionKernel|AttentionBackward|efficient_attention", re.IGNORECASE)),
)
"""Names of attention kernels: of cuDNN (also for CPU operations), of flash attention, of memory-efficient attention."""


@dataclass
class KernelUse:
    """All launches of one kernel for one kind of operation in a step."""

    kernel: str
    operation: str
    launches: int = 0
    microseconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0


@dataclass
class StepProfile:
    """One step on the device."""

    kernels: list[KernelUse] = field(default_factory=list)
    """Most expensive first."""
    milliseconds: float = 0.0
    """Time between the start of the first kernel and the end of the last one."""
    idle_share: float = 0.0
    """Share of `milliseconds` in which no kernel ran."""
    launches: int = 0
    attention: str = "unknown"
    """The attention kernels that ran."""


def profile_step(step: Step, folder: Path, device: torch.device) -> StepProfile:
    """Run one step under the profiler and return what it did."""
    on_cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_cuda else [])]
    step()
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    return read_trace(events, on_device=on_cuda)


@functools.cache
def start_profiler(device: torch.device) -> None:
    """Use the profiler once in this process, so that what it leaves switched on slows all later measurements alike."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True):
        torch.zeros(1, device=device)


def attention_of(step: Step, device: torch.device) -> str:
    """Run one step under the profiler and return the attention kernels that ran."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        step()
    return attention_in(event.name for event in profiler.events() or [])


def read_trace(events: Sequence[Mapping[str, Any]], *, on_device: bool) -> StepProfile:
    """Return the profile of the events of a Chrome trace.

    Args:
        on_device: look at kernels of a GPU. Otherwise, at operations of the CPU, without those that they call.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    operations = [event for event in complete if event.get("cat") == "cpu_op"]
    by_id = {event.get("args", {}).get("External id"): event for event in operations}
    runs = [event for event in complete if event.get("cat") in _ON_DEVICE] if on_device else _leaves(operations)
    uses: dict[tuple[str, str], KernelUse] = {}
    for event in runs:
        operation = by_id.get(event.get("args", {}).get("External id"), {}) if on_device else event
        name = str(operation.get("name", "?"))
        use = uses.setdefault((str(event["name"]), name), KernelUse(str(event["name"]), name))
        use.launches += 1
        use.microseconds += float(event.get("dur", 0.0))
        read_and_written, flops = _work(name, operation.get("args", {}))
        use.bytes += read_and_written
        use.flops += flops
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))) for event in runs)
    whole = max((end for _, end in spans), default=0.0) - (spans[0][0] if spans else 0.0)
    busy = _union(spans)
    return StepProfile(
        sorted(uses.values(), key=lambda use: -use.microseconds),
        whole / 1e3,
        1 - busy / whole if whole else 0.0,
        len(runs),
        attention_in(str(event["name"]) for event in (*runs, *operations)),
    )


def _leaves(operations: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the operations that call no other, of each thread."""
    leaves = []
    by_thread: dict[Any, list[Mapping[str, Any]]] = {}
    for event in operations:
        by_thread.setdefault(event.get("tid"), []).append(event)
    for thread in by_thread.values():
        ordered = sorted(thread, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        for event, following in zip(ordered, [*ordered[1:], None], strict=True):
            if following is None or following["ts"] >= event["ts"] + event.get("dur", 0.0):
                leaves.append(event)
    return leaves


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the time that sorted spans cover together."""
    covered, reached = 0.0, -math.inf
    for begin, end in spans:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _work(name: str, arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Return bytes and FLOPs of an operation with these profiler arguments."""
    sizes = [tuple(size) for size in arguments.get("Input Dims", []) if _is_size(size)]
    kinds = [
        kind for size, kind in zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False) if _is_size(size)
    ]
    read = [math.prod(size) * _item_size(kind) for size, kind in zip(sizes, kinds, strict=False)]
    if not read:
        return 0.0, 0.0
    product = _PRODUCTS.search(name)
    if product and len(sizes) >= 2:
        first = _FIRST_FACTOR.get(product[1], 0)
        if len(sizes) >= first + 2:
            a, b = sizes[first], sizes[first + 1]
            batch = a[0] if len(a) == 3 and len(b) == 3 else 1
            rows, inner, columns = a[-2], a[-1], b[-1]
            return sum(read) + batch * rows * columns * _item_size(kinds[first]), 2.0 * batch * rows * inner * columns
    flops = _attention_flops(name, sizes) if _ATTENTION.search(name) else 0.0
    return sum(read) + max(read), flops


def _is_size(size: Any) -> bool:
    return isinstance(size, list) and bool(size) and all(isinstance(number, int) for number in size)


def _item_size(kind: Any) -> int:
    """Return the bytes of an element of a type as the profiler names it."""
    name = str(kind)
    if name in _ITEM_SIZES:
        return _ITEM_SIZES[name]
    return 2 if "BFloat16" in name or "Half" in name else 1 if "Float8" in name else 4


def _attention_flops(name: str, sizes: Sequence[tuple[int, ...]]) -> float:
    """Return the FLOPs of causal attention over [samples, heads, sequence, channels]: two products forward, five backward."""
    shape = next((size for size in sizes if len(size) == 4), None)
    if shape is None:
        return 0.0
    samples, heads, length, channels = shape
    if "_flash_attention_" in name and "scaled_dot" not in name:  # [samples, sequence, heads, channels]
        heads, length = length, heads
    return (2.5 if "backward" in name else 1.0) * 2 * samples * heads * length**2 * channels


def attention_in(names: Iterable[str]) -> str:
    """Return which attention kernels occur among the names of kernels and operations."""
    names = list(names)
    kinds = [kind for kind, pattern in ATTENTION_KERNELS if any(pattern.search(name) for name in names)]
    return " and ".join(kinds) or "products of matrices"
