"""Formatting of the profile of a training step as a text table. The module imports nothing that needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAME_WIDTH = 62
_DROPPED_NAMESPACES = ("at::native::", "(anonymous namespace)::", "<unnamed>::", "cutlass::", "std::")


def format_profile(title: str, profile: Mapping[str, Any], num_kernels: int) -> list[str]:
    """Format the profile of a training step as lines of at most 110 characters: a title with totals, and a table of the kernels
    that take most time.

    Args:
        profile: fields of a `StepProfile`, and the fields that `profiles.profile` adds.
        num_kernels: maximum number of kernels in the table.
    """
    rows = [
        f"{title}: {profile['milliseconds']:.1f} ms on the device, {format_idle_share(profile)}, "
        f"{profile['launches']} launches, attention by {profile['attention']}",
        f"{'ms':>8} {'share':>6} {'calls':>5} {'GB/s':>6} {'TFLOP/s':>8}  kernel (operation)",
    ]
    total = sum(use["microseconds"] for use in profile["kernels"]) + profile["rest_microseconds"]
    for use in profile["kernels"][:num_kernels]:
        seconds = use["microseconds"] / 1e6
        rates = f"{use['bytes'] / seconds / 1e9:6.0f} {use['flops'] / seconds / 1e12:8.1f}" if seconds else f"{'-':>6} {'-':>8}"
        name, operation = shorten_kernel_name(use["kernel"]), use["operation"].removeprefix("aten::")
        text = name if use["kernel"] == use["operation"] else f"{name[: _NAME_WIDTH - len(operation) - 3]} ({operation})"
        share = use["microseconds"] / total if total else 0.0
        rows.append(f"{1e3 * seconds:8.3f} {share:6.1%} {use['launches']:5} {rates}  {text[:_NAME_WIDTH]}")
    return rows


def format_idle_share(profile: Mapping[str, Any]) -> str:
    """Format the share of the step time in which no kernel ran. The text gives the share of the profiled step, and that of a step
    without the profiler if it was measured.

    The profiler slows the host down, so the two shares differ.
    """
    real = profile.get("idle_share_of_timed_step")
    return f"idle {profile['idle_share']:.1%}" + ("" if real is None else f" ({real:.1%} without the profiler)")


def shorten_kernel_name(kernel: str) -> str:
    """Return a kernel's C++ name without its return type, its arguments, and namespaces that carry no information."""
    name = kernel.removeprefix("void ")
    for namespace in _DROPPED_NAMESPACES:
        name = name.replace(namespace, "")
    name = _strip_arguments(name)
    return name.removeprefix("aten::")


def _strip_arguments(name: str) -> str:
    """Return a demangled C++ function name without the argument list at its end. Parentheses inside template arguments stay."""
    if not name.endswith(")"):
        return name
    depth = 0
    for i in range(len(name) - 1, -1, -1):
        depth += (name[i] == ")") - (name[i] == "(")
        if depth == 0:
            return name[:i] or name
    return name
