"""Profile of one training step by its kernels, from a trace of torch's profiler.

For each kernel, the trace names the operation that launched it ("External id"). For each operation, the trace has the sizes and
types of the inputs. FLOPs are counted for matrix products and attention. Bytes are the minimum that an operation reads and writes:
its inputs and its output. The output of a matrix product has its exact size; any other output is assumed to be as large as the
largest input.
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
_MATMULS = re.compile(r"aten::(mm|addmm|addmm_|bmm|baddbmm|baddbmm_|_scaled_mm|_grouped_mm)$")
_FIRST_FACTOR = {"addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
_ATTENTION = re.compile(r"attention|varlen_attn")
ATTENTION_KERNELS = (
    ("cudnn", re.compile(r"cudnn.*(sdpa|fmha|flash|attention)|(sdpa|flash).*cudnn", re.IGNORECASE)),
    ("flash", re.compile(r"flash_(fwd|bwd)|flash::|flash_attention", re.IGNORECASE)),
    ("efficient", re.compile(r"fmha_cutlass|AttentionKernel|AttentionBackward|efficient_attention", re.IGNORECASE)),
)
"""Name patterns of attention kernels, for kernels and for CPU operations: cuDNN, flash attention and memory-efficient attention."""


@dataclass
class KernelUse:
    """Totals of one kernel in one step: number of launches, time, bytes and FLOPs. Launches by different torch operations are
    counted separately."""

    kernel: str
    operation: str
    launches: int = 0
    microseconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0


@dataclass
class StepProfile:
    """Profile of one step: its kernels, and the share of the time in which none of them ran."""

    kernels: list[KernelUse] = field(default_factory=list)
    """Kernels of the step, those with the longest total time first."""
    milliseconds: float = 0.0
    """Time between the start of the first kernel and the end of the last kernel."""
    idle_share: float = 0.0
    """Share of `milliseconds` in which no kernel ran."""
    launches: int = 0
    attention: str = "unknown"
    """Names of the attention kernels that ran."""


def profile_step(step: Step, folder: Path, device: torch.device) -> StepProfile:
    """Run one step under torch's profiler and return its profile: the times of its kernels. One step runs first without the
    profiler, as a warm-up.

    Args:
        folder: folder for the trace file of the profiler.
    """
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
    """Use torch's profiler once in this process, so that all later measurements are slowed down equally.

    After the first use, torch's tracing may stay enabled and slow the host down.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True):
        torch.zeros(1, device=device)


def detect_attention_kernels(step: Step, device: torch.device) -> str:
    """Run one step under the profiler and return the names of the attention kernels that ran."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        step()
    return find_attention_kernels(event.name for event in profiler.events() or [])


def read_trace(events: Sequence[Mapping[str, Any]], *, on_device: bool) -> StepProfile:
    """Build the profile of a step from the events of a Chrome trace, as torch's profiler writes it.

    Args:
        events: events of the trace.
        on_device: whether to profile the kernels of a GPU. Otherwise, the CPU operations that call no other operation are profiled.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    operations = [event for event in complete if event.get("cat") == "cpu_op"]
    by_id = {event.get("args", {}).get("External id"): event for event in operations}
    executions = [event for event in complete if event.get("cat") in _ON_DEVICE] if on_device else _find_leaf_operations(operations)
    uses: dict[tuple[str, str], KernelUse] = {}
    for event in executions:
        operation = by_id.get(event.get("args", {}).get("External id"), {}) if on_device else event
        name = str(operation.get("name", "?"))
        use = uses.setdefault((str(event["name"]), name), KernelUse(str(event["name"]), name))
        use.launches += 1
        use.microseconds += float(event.get("dur", 0.0))
        num_bytes, flops = _count_bytes_and_flops(name, operation.get("args", {}))
        use.bytes += num_bytes
        use.flops += flops
    intervals = sorted((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))) for event in executions)
    total = max((end for _, end in intervals), default=0.0) - (intervals[0][0] if intervals else 0.0)
    busy = _sum_covered_time(intervals)
    return StepProfile(
        sorted(uses.values(), key=lambda use: -use.microseconds),
        total / 1e3,
        1 - busy / total if total else 0.0,
        len(executions),
        find_attention_kernels(str(event["name"]) for event in (*executions, *operations)),
    )


def _find_leaf_operations(operations: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the CPU operations that call no other operation, thread by thread. On a CPU they take the place of kernels in the
    profile."""
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


def _sum_covered_time(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the total time that (start, end) intervals cover. Overlaps count once. The intervals must be sorted."""
    covered, covered_until = 0.0, -math.inf
    for start, end in intervals:
        covered += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return covered


def _count_bytes_and_flops(name: str, arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Return the minimum bytes that an operation reads and writes, and its FLOPs.

    Args:
        name: name of the operation in the trace.
        arguments: sizes and types of the operation's inputs, as the profiler writes them.
    """
    sizes = [tuple(size) for size in arguments.get("Input Dims", []) if _is_size(size)]
    dtypes = [
        dtype
        for size, dtype in zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False)
        if _is_size(size)
    ]
    input_bytes = [math.prod(size) * _get_item_size(dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
    if not input_bytes:
        return 0.0, 0.0
    product = _MATMULS.search(name)
    if product and len(sizes) >= 2:
        first = _FIRST_FACTOR.get(product[1], 0)
        if len(sizes) >= first + 2:
            a, b = sizes[first], sizes[first + 1]
            batch = a[0] if len(a) == 3 and len(b) == 3 else 1
            rows, inner, columns = a[-2], a[-1], b[-1]
            return sum(input_bytes) + batch * rows * columns * _get_item_size(dtypes[first]), 2.0 * batch * rows * inner * columns
    flops = _count_attention_flops(name, sizes) if _ATTENTION.search(name) else 0.0
    return sum(input_bytes) + max(input_bytes), flops


def _is_size(size: Any) -> bool:
    return isinstance(size, list) and bool(size) and all(isinstance(n, int) for n in size)


def _get_item_size(dtype: Any) -> int:
    """Return the bytes per element of a dtype, which the profiler gives by its C++ name."""
    name = str(dtype)
    if name in _ITEM_SIZES:
        return _ITEM_SIZES[name]
    return 2 if "BFloat16" in name or "Half" in name else 1 if "Float8" in name else 4


def _count_attention_flops(name: str, sizes: Sequence[tuple[int, ...]]) -> float:
    """Return the FLOPs of an operation of causal attention over tensors [samples, heads, sequence, channels].

    Forward has two matrix products, backward has five.

    Args:
        name: name of the operation in the trace.
        sizes: sizes of the operation's inputs.
    """
    shape = next((size for size in sizes if len(size) == 4), None)
    if shape is None:
        return 0.0
    samples, heads, length, channels = shape
    if "_flash_attention_" in name and "scaled_dot" not in name:  # [samples, sequence, heads, channels]
        heads, length = length, heads
    return (2.5 if "backward" in name else 1.0) * 2 * samples * heads * length**2 * channels


def find_attention_kernels(names: Iterable[str]) -> str:
    """Return the attention kernels that occur in the names of a step's kernels and operations, as text such as "flash and
    efficient". The text is "products of matrices" if no attention kernel occurs."""
    names = list(names)
    kernels = [kernel for kernel, pattern in ATTENTION_KERNELS if any(pattern.search(name) for name in names)]
    return " and ".join(kernels) or "products of matrices"
