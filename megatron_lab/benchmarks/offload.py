"""The optimizer's step with everything in host memory, against torch's fused AdamW there alone, which moves and rounds nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import Pending
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron_lab.benchmarks.optimizer import Times, show, slice_groups, timed_in_turns, torch_on_the_same

BOUND = 1.3
"""Times the update alone that a step may take."""

_ADAM = OptimizerConfig(optimizer="adam")
_OFFLOADING = OptimizerConfig(optimizer="adam", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)


def _measure(dtype: torch.dtype, device: torch.device, elements: int, turns: int) -> Times:
    context = make_context(Topology(), 0, device)
    streams = torch.get_device_module(device)
    groups = slice_groups(elements, dtype, device)
    optimizer = ShardedOptimizer(groups, _OFFLOADING, context)
    update = torch_on_the_same(optimizer, _ADAM)

    def reduce() -> None:
        for group in groups:
            group.announce(Pending(group.shards[0].grad))
        streams.synchronize()

    def step() -> None:
        optimizer.step(1e-4, 0.1, 1.0)
        streams.synchronize()

    def all_at_the_end() -> None:
        reduce()
        step()

    actions: dict[str, Callable[[], object]] = {"step": step, "update alone": update.step}
    if not groups[0].on_reduced:
        return timed_in_turns(actions, turns, streams.synchronize)
    # As in training, gradients are there before the step begins. What it would be without overlap is timed too.
    actions |= {"gradients to the host": reduce, "gradients to the host, then step": all_at_the_end}
    return timed_in_turns(actions, turns, reduce)


def run(device: torch.device, elements: int = 50_000_000, turns: int = 9) -> bool:
    """Print both for a device, for weights in float32 and bfloat16; returns whether the bound holds.

    Args:
        elements: about how many are updated.
        turns: measurements of each.
    """
    print(
        f"offloaded from {device.type}, {elements / 1e6:.0f} million elements, {torch.get_num_threads()} threads, "
        f"median (min to max) of {turns} turns"
    )
    missed = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ratio = show(name, _measure(dtype, device, elements, turns), "update alone")
        if ratio > BOUND:
            missed.append(f"{name}: the step takes {ratio:.2f} x the update alone; at most {BOUND} is asked for")
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bound holds", flush=True)
    return not missed
