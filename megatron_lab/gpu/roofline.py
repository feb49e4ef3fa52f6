"""Checks of the device: its software versions, and its limits, which are the rate of a large copy and the rate of a large matrix
product."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.config.optional_packages import PACKAGES, is_missing
from megatron.metrics.measures import get_peak_flops
from megatron.parallel import torch_private
from megatron_lab.gpu.context import CheckContext, Outcome
from megatron_lab.gpu.jobs import get_torch_device

_COMPILER = "triton"


def device_facts(context: CheckContext) -> Outcome:
    """Report the device and the versions of its software, and which Python packages and build tools are missing."""
    info: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    if context.on_cuda:
        properties = torch.cuda.get_device_properties(get_torch_device(context.device))
        info |= {
            "device": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    packages = [module for module in (*PACKAGES, _COMPILER) if is_missing(module)]
    missing = [*packages, *(name for name, _ in torch_private.list_missing()), *_find_missing_build_tools()]
    info["missing"] = missing
    text = ", ".join(f"{name} {value}" for name, value in info.items() if name != "missing")
    return Outcome(f"{text}; missing: {', '.join(missing) or 'nothing'}", info)


def _find_missing_build_tools() -> list[str]:
    """Find the build tools that triton needs to compile its kernel launchers (triton/runtime/build.py) but that are missing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return [
        *([] if compiler else ["a C compiler (without it --compile does not work)"]),
        *([] if header.is_file() else [f"{header} (without it --compile does not work)"]),
    ]


def roofline(context: CheckContext) -> Outcome:
    """Measure the two limits of the device: the rate of a large copy, in bytes read and written, and the rate of a bfloat16 matrix
    product on random data."""
    device = get_torch_device(context.device)
    count, size = (1 << 30, 8192) if context.on_cuda else (1 << 24, 512)
    copy_rate = _measure_copy_rate(count, device)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product_rate = 2 * size**3 / measure_median(lambda: torch.mm(a, b, out=out), device)
    peak_flops = get_peak_flops(torch.cuda.get_device_name(device), "bfloat16") if context.on_cuda else None
    share = f" ({product_rate / peak_flops:.0%} of the datasheet's {peak_flops / 1e12:.0f})" if peak_flops else ""
    return Outcome(
        f"copy {copy_rate / 1e9:,.0f} GB/s read and written, {size:,}^3 bfloat16 product {product_rate / 1e12:.4g} TFLOP/s{share}",
        {"copy_bytes_per_second": copy_rate, "product_flops_per_second": product_rate, "peak_flops_per_second": peak_flops},
    )


def _measure_copy_rate(count: int, device: torch.device) -> float:
    """Measure the rate of a copy of `count` bfloat16 numbers: bytes read and written per second."""
    source = torch.empty(count, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure_median(lambda: target.copy_(source), device)


def measure_median(action: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Measure the median duration of an action on a device in seconds, after three warm-up calls.

    On CUDA the duration is measured with events.

    Args:
        repeats: number of measured calls.
    """
    for _ in range(3):
        action()
    if device.type != "cuda":
        durations = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            durations.append(time.perf_counter() - start)
        return statistics.median(durations)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(start_event.elapsed_time(end_event) for start_event, end_event in itertools.pairwise(events)) / 1e3
