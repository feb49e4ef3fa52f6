"""Benchmark of optimizer offloading: the optimizer step with all state in host memory, compared with torch's fused AdamW.

Torch's optimizer updates the same tensors in host memory. It only updates: it copies no weights to the device, and does not round
them to the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import Pending
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron_lab.benchmarks.optimizer import Times, build_torch_adamw, create_shard_groups, print_times, time_in_turns

BOUND = 1.3
"""Maximum ratio of the step to the update by torch's optimizer."""

_ADAM = OptimizerConfig(optimizer="adam")
_OFFLOADING = OptimizerConfig(optimizer="adam", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)


def _measure(dtype: torch.dtype, device: torch.device, num_elements: int, turns: int) -> Times:
    context = make_context(Topology(), 0, device)
    device_module = torch.get_device_module(device)
    groups = create_shard_groups(num_elements, dtype, device)
    optimizer = ShardedOptimizer(groups, _OFFLOADING, context)
    torch_optimizer = build_torch_adamw(optimizer, _ADAM)

    def reduce() -> None:
        for group in groups:
            group.notify_reduced(Pending(group.shards[0].grad))
        device_module.synchronize()

    def step() -> None:
        optimizer.step(1e-4, 0.1, 1.0)
        device_module.synchronize()

    def reduce_and_step() -> None:
        reduce()
        step()

    actions: dict[str, Callable[[], object]] = {"step": step, "torch's update": torch_optimizer.step}
    if not groups[0].on_reduced:
        return time_in_turns(actions, turns, device_module.synchronize)
    # As in training, the gradients are in host memory before the step begins. The last action times the step without that overlap.
    actions |= {"gradients to the host": reduce, "gradients to the host, then step": reduce_and_step}
    return time_in_turns(actions, turns, reduce)


def run(device: torch.device, num_elements: int = 50_000_000, turns: int = 9) -> bool:
    """Print the times of the framework's optimizer step and of torch's update, for weights in float32 and bfloat16.

    Args:
        device: device of the weights. The optimizer state is in host memory.
        num_elements: approximate number of elements to update.
        turns: number of repetitions; each measures one step and one update.

    Returns:
        Whether the median step takes at most `BOUND` times as long as the median update.
    """
    print(
        f"offloaded from {device.type}, {num_elements / 1e6:.0f} million elements, {torch.get_num_threads()} threads, "
        f"median (min to max) of {turns} turns"
    )
    violations = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ratio = print_times(name, _measure(dtype, device, num_elements, turns), "torch's update")
        if ratio > BOUND:
            violations.append(f"{name}: the step takes {ratio:.2f} x as long as torch's update; the limit is {BOUND}")
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
