"""The table of a profiled step as text. Imports nothing that needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAME_WIDTH = 62
_DROPPED = ("at::native::", "(anonymous namespace)::", "<unnamed>::", "cutlass::", "std::")


def format_profile(title: str, profile: Mapping[str, Any], num_kernels: int) -> list[str]:
    """Return a profile, as `kernel_table.profile` stores it, in lines of at most 110 characters."""
    lines = [
        f"{title}: {profile['milliseconds']:.1f} ms on the device, {idle_text(profile)}, "
        f"{profile['launches']} launches, attention by {profile['attention']}",
        f"{'ms':>8} {'share':>6} {'calls':>5} {'GB/s':>6} {'TFLOP/s':>8}  kernel (operation)",
    ]
    total = sum(use["microseconds"] for use in profile["kernels"]) + profile["rest_microseconds"]
    for use in profile["kernels"][:num_kernels]:
        seconds = use["microseconds"] / 1e6
        rates = f"{use['bytes'] / seconds / 1e9:6.0f} {use['flops'] / seconds / 1e12:8.1f}" if seconds else f"{'-':>6} {'-':>8}"
        name, operation = short_name(use["kernel"]), use["operation"].removeprefix("aten::")
        text = name if use["kernel"] == use["operation"] else f"{name[: _NAME_WIDTH - len(operation) - 3]} ({operation})"
        share = use["microseconds"] / total if total else 0.0
        lines.append(f"{1e3 * seconds:8.3f} {share:6.1%} {use['launches']:5} {rates}  {text[:_NAME_WIDTH]}")
    return lines


def idle_text(profile: Mapping[str, Any]) -> str:
    """Return the idle share of a profile, and that of a step without the profiler, which makes the host slower."""
    real = profile.get("idle_share_of_timed_step")
    return f"idle {profile['idle_share']:.1%}" + ("" if real is None else f" ({real:.1%} without the profiler)")


def short_name(kernel: str) -> str:
    """Return a kernel's name without its return type, its arguments and namespaces that only lengthen it."""
    name = kernel.removeprefix("void ")
    for words in _DROPPED:
        name = name.replace(words, "")
    name = _without_arguments(name)
    return name.removeprefix("aten::")


def _without_arguments(name: str) -> str:
    """Return a demangled name without the parentheses at its end. Those inside of template arguments stay."""
    if not name.endswith(")"):
        return name
    depth = 0
    for place in range(len(name) - 1, -1, -1):
        depth += (name[place] == ")") - (name[place] == "(")
        if depth == 0:
            return name[:place] or name
    return name
