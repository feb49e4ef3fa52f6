"""Checks that profile one step of the two slowest models of the speed checks. The slowest are those whose step takes longest
relative to the plain loop (the same model written by hand in plain torch).

A profile lists the kernels that take most time.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import torch

from megatron_lab.gpu import speed
from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome
from megatron_lab.gpu.jobs import get_torch_device
from megatron_lab.gpu.profile_text import format_idle_share, shorten_kernel_name
from megatron_lab.gpu.trace import StepProfile, profile_step

NUM_KERNELS = 25


def rank_models(context: CheckContext) -> list[str]:
    """Return the names of the speed checks' models, slowest first: by the framework's eager speed relative to the plain loop (the
    same model in plain torch).

    Models without a measurement come last.
    """
    ratios = {}
    for data in context.data.values():
        times = {row["loop"]: row for row in data.get("rows", []) if row["mode"] == "eager"}
        if {"ours", "plain"} <= times.keys():
            ratios[times["ours"]["model"]] = times["plain"]["milliseconds"] / times["ours"]["milliseconds"]
    return sorted(speed.MODELS, key=lambda model: ratios.get(model, math.inf))


def profiler_works(context: CheckContext) -> Outcome:
    """Check that torch's profiler records the kernel of a matrix product, because the speed checks use the profiler.

    The check first sends a partial result that says that the profiler does not work. This result stays if the profiler kills the
    process.
    """
    context.send_partial(Outcome("", {"works": False}))
    device = get_torch_device(context.device)
    matrix = torch.ones(256, 256, device=device)
    result = profile_step(lambda: float((matrix @ matrix).sum()), context.folder, device)
    _require_kernels(result)
    return Outcome(f"torch's profiler sees {result.launches} launches of a product", {"works": True})


def _require_kernels(result: StepProfile) -> None:
    """Raise `CheckFailed` if a profile contains no kernels."""
    if not result.kernels:
        raise CheckFailed(
            "the profiler's trace has no kernels. Check that CUPTI is installed, and that this user may read the GPU's counters"
        )


def profile(context: CheckContext, position: str) -> Outcome:
    """Profile one eager step of one of the two slowest models of the speed checks. The slowest are those whose step takes longest
    relative to the plain loop (the same model in plain torch).

    Args:
        position: "1" for the slowest model, "2" for the second slowest.
    """
    model, device = rank_models(context)[int(position) - 1], get_torch_device(context.device)
    job, _ = speed.build_job(model, context.device)
    with speed.build_framework_step(job, device) as step:
        step()
        result = profile_step(step, context.folder, device)
    _require_kernels(result)
    top_kernel = result.kernels[0]
    top_kernels = result.kernels[:NUM_KERNELS]
    profile = {
        **asdict(result),
        "kernels": [asdict(use) for use in top_kernels],
        "rest_microseconds": sum(use.microseconds for use in result.kernels[NUM_KERNELS:]),
        "idle_share_of_timed_step": _estimate_idle_share(context, model, result),
    }
    figure = f"{model}: {result.milliseconds:.1f} ms, {format_idle_share(profile)}, {result.launches} launches, attention by "
    figure += f"{result.attention}; most expensive: {shorten_kernel_name(top_kernel.kernel)[:60]}"
    return Outcome(figure, {"model": model, "profile": profile})


def _estimate_idle_share(context: CheckContext, model: str, result: StepProfile) -> float | None:
    """Estimate the share of the step time in which no kernel runs, without the profiler's overhead. Return None if the speed check
    of the model did not run.

    The profiler slows the host down, so the idle share of the profiled step is too large. This function divides the profiled kernel
    time by the step time that the speed check measured.

    Args:
        model: name of the model.
        result: profile of one step of the model.
    """
    rows = [row for data in context.data.values() for row in data.get("rows", [])]
    times = [row["milliseconds"] for row in rows if (row["model"], row["mode"], row["loop"]) == (model, "eager", "ours")]
    return max(0.0, 1 - (1 - result.idle_share) * result.milliseconds / times[0]) if times else None
