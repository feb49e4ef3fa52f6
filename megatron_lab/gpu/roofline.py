"""The device and its limits: versions, rate of a large copy, rate of a large matrix product."""

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

from megatron.config.extras import PACKAGES, is_missing
from megatron.metrics.measures import peak_flops
from megatron.parallel import torch_private
from megatron_lab.gpu.context import CheckContext, Outcome
from megatron_lab.gpu.jobs import torch_device

_COMPILER = "triton"


def device_facts(context: CheckContext) -> Outcome:
    """Name the device, the versions, and the Python packages that are missing."""
    facts: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    if context.on_cuda:
        properties = torch.cuda.get_device_properties(torch_device(context.device))
        facts |= {
            "device": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    packages = [module for module in (*PACKAGES, _COMPILER) if is_missing(module)]
    missing = [*packages, *(name for name, _ in torch_private.missing()), *_missing_build_tools()]
    facts["missing"] = missing
    text = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "missing")
    return Outcome(f"{text}; missing: {', '.join(missing) or 'nothing'}", facts)


def _missing_build_tools() -> list[str]:
    """Return what triton needs to build the code that launches its kernels (triton/runtime/build.py), as far as it is missing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return [
        *([] if compiler else ["a C compiler (without it --compile does not work)"]),
        *([] if header.is_file() else [f"{header} (without it --compile does not work)"]),
    ]


def roofline(context: CheckContext) -> Outcome:
    """Measure the rate of a copy in bytes read and written, and of a bfloat16 matrix product on random data."""
    device = torch_device(context.device)
    count, size = (1 << 30, 8192) if context.on_cuda else (1 << 24, 512)
    copy_rate = _copy_rate(count, device)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product_rate = 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device)
    peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16") if context.on_cuda else None
    share = f" ({product_rate / peak:.0%} of the datasheet's {peak / 1e12:.0f})" if peak else ""
    return Outcome(
        f"copy {copy_rate / 1e9:,.0f} GB/s read and written, {size:,}^3 bfloat16 product {product_rate / 1e12:.4g} TFLOP/s{share}",
        {"copy_bytes_per_second": copy_rate, "product_flops_per_second": product_rate, "peak_flops_per_second": peak},
    )


def _copy_rate(count: int, device: torch.device) -> float:
    """Return bytes read and written per second by a copy of `count` bfloat16 numbers."""
    source = torch.empty(count, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def median_seconds(action: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Return the median time of an action on a device, after three to warm up. On CUDA it is measured by events."""
    for _ in range(3):
        action()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)) / 1e3
