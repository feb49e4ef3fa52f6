"""The most expensive kernels of the models that are slowest beside the plain loop."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch

from megatron_lab.gpu import speed
from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome
from megatron_lab.gpu.jobs import torch_device
from megatron_lab.gpu.profile_text import idle_text, short_name
from megatron_lab.gpu.trace import StepProfile, profile_step

NUM_KERNELS = 25


def slowest_models(context: CheckContext) -> list[str]:
    """Return the models by their eager speed relative to the plain loop, slowest first. Unmeasured ones come last."""
    ratios = {}
    for data in context.data.values():
        times = {row["loop"]: row for row in data.get("rows", []) if row["mode"] == "eager"}
        if {"ours", "plain"} <= times.keys():
            ratios[times["ours"]["model"]] = times["plain"]["milliseconds"] / times["ours"]["milliseconds"]
    return sorted(speed.MODELS, key=lambda model: ratios.get(model, math.inf))


def profiler_works(context: CheckContext) -> Outcome:
    """Profile one matrix product, before the speed checks rely on the profiler.

    A partial result says that it does not work. It stands if the profiler takes the process with it.
    """
    context.send_partial(Outcome("", {"works": False}))
    device = torch_device(context.device)
    matrix = torch.ones(256, 256, device=device)
    result = profile_step(lambda: float((matrix @ matrix).sum()), context.folder, device)
    _require_kernels(result)
    return Outcome(f"torch's profiler sees {result.launches} launches of a product", {"works": True})


def _require_kernels(result: StepProfile) -> None:
    """Check that a profile has kernels.

    Raises:
        CheckFailed: it has none.
    """
    if not result.kernels:
        raise CheckFailed("the profiler's trace has no kernels: is CUPTI there, and may this user read its counters?")


def profile(context: CheckContext, position: str) -> Outcome:
    """Profile one eager step of the slowest model, or of the second slowest."""
    model, device = slowest_models(context)[int(position) - 1], torch_device(context.device)
    job, _ = speed.job_of(model, context.device)
    with speed.our_step_of(job, device) as step:
        step()
        result = profile_step(step, context.folder, device)
    _require_kernels(result)
    first = result.kernels[0]
    top = result.kernels[:NUM_KERNELS]
    profile = {
        **asdict(result),
        "kernels": [asdict(use) for use in top],
        "rest_microseconds": sum(use.microseconds for use in result.kernels[NUM_KERNELS:]),
        "idle_share_of_timed_step": _idle_share_of_timed_step(context, model, result),
    }
    figure = f"{model}: {result.milliseconds:.1f} ms, {idle_text(profile)}, {result.launches} launches, attention by "
    figure += f"{result.attention}; most expensive: {short_name(first.kernel)[:60]}"
    return Outcome(figure, {"model": model, "profile": profile})


def _idle_share_of_timed_step(context: CheckContext, model: str, result: StepProfile) -> float | None:
    """Return which share of the step that the speed check timed is not covered by kernels; None if it did not run.

    The profiler makes the host slower, so the idle share of the profiled step is too large.
    """
    rows = [row for data in context.data.values() for row in data.get("rows", [])]
    times = [row["milliseconds"] for row in rows if (row["model"], row["mode"], row["loop"]) == (model, "eager", "ours")]
    return max(0.0, 1 - (1 - result.idle_share) * result.milliseconds / times[0]) if times else None
