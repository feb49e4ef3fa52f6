"""Benchmark of the optimizer step, compared with torch's fused AdamW on the same tensors, in several processes at the same time.

The processes share the memory bandwidth, which limits an update. The two optimizers update the same main parameters, gradients and
moments alternately, so they differ only in their code.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.config.training import OptimizerConfig
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.params import ParamRecord, Shard, ShardGroup
from megatron.parallel.tensor_slice import FlatRange
from megatron.parallel.topology import Topology
from megatron_lab.benchmarks.runner import make_timer, run_in_turns
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.1
"""Maximum ratio of the step to torch's update."""

_HIDDEN = 1024
_TIMEOUT_S = 600.0

Times = dict[str, list[float]]


def create_shard_groups(num_elements: int, dtype: torch.dtype, device: torch.device) -> list[ShardGroup]:
    """Create random parameters and gradients for the optimizer, with about `num_elements` parameter elements in total.

    Each returned shard group has the parameters of one GPT block, unsharded. The hidden size is 1024, or smaller if a block of that
    size has more than `num_elements` elements.
    """
    grad_dtype = torch.promote_types(dtype, torch.float32)
    h = min(_HIDDEN, max(8, math.isqrt(num_elements // 12)))
    block_sizes = [h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h]
    groups = []
    for block_index in range(max(1, round(num_elements / sum(block_sizes)))):
        weights = torch.randn(sum(block_sizes), device=device).mul_(0.02).to(dtype).split(block_sizes)
        grads = torch.randn(sum(block_sizes), device=device, dtype=grad_dtype).mul_(1e-3).split(block_sizes)
        shards = []
        for param_index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            record = ParamRecord(
                f"{block_index}.{param_index}", (weight.numel(),), param_type="matrix" if weight.numel() > 4 * h else "vector"
            )
            shards.append(Shard(record, FlatRange(0, weight.numel()), weight, grad, range(weight.numel())))
        groups.append(ShardGroup(shards))
    return groups


def build_torch_adamw(optimizer: ShardedOptimizer, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build torch's fused AdamW that updates the main parameters and moments of the framework's optimizer, with its gradients.

    It has two parameter groups: with and without weight decay.
    """
    groups = []
    for has_decay in (True, False):
        main_params = [shard.main_param for shard in optimizer.shards if shard.record.has_weight_decay is has_decay]
        groups.append({"params": main_params, "weight_decay": 0.1 if has_decay else 0.0})
    adamw = torch.optim.AdamW(groups, lr=1e-4, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True)
    for shard in optimizer.shards:
        shard.main_param.grad = shard.grad.to(shard.main_param.device)
        step = torch.zeros((), dtype=torch.float32, device=shard.main_param.device)
        adamw.state[shard.main_param].update(step=step, **shard.moments)
    return adamw


def time_in_turns(actions: dict[str, Callable[[], object]], turns: int, setup: Callable[[], object]) -> Times:
    """Time each action once per repetition.

    Args:
        actions: functions by name.
        turns: number of repetitions.
        setup: called before each action; its time does not count.

    Returns:
        The seconds of each repetition, by the name of the action.
    """
    return run_in_turns({name: make_timer(action, setup) for name, action in actions.items()}, turns)


def print_times(name: str, times: Times, reference: str) -> float:
    """Print the median, minimum and maximum time of each action.

    Args:
        name: first column of the printed lines.
        times: seconds of each repetition, by the name of the action.
        reference: name of the action with which the others are compared.

    Returns:
        The ratio of the first action's median time to the median time of the action `reference`.
    """
    medians = {action: statistics.median(durations) for action, durations in times.items()}
    for action, durations in times.items():
        ratio = medians[action] / medians[reference]
        print(
            f"{name:10}{action:32}{1e3 * medians[action]:9.2f} ms ({1e3 * min(durations):.2f} to {1e3 * max(durations):.2f})"
            f"{'':4}{ratio:.3f} x {reference}"
        )
    return medians[next(iter(times))] / medians[reference]


def _measure_rank(dtype: torch.dtype, num_elements: int, turns: int) -> Times:
    """Return the seconds of the framework's optimizer step and of torch's update in this process, by the name of the action."""
    context: ParallelContext = make_context(Topology(), 0, torch.device("cpu"))
    config = OptimizerConfig(optimizer="adam")
    optimizer = ShardedOptimizer(create_shard_groups(num_elements, dtype, context.device), config, context)
    torch_optimizer = build_torch_adamw(optimizer, config)
    weights, main_params = [shard.weights for shard in optimizer.shards], [shard.main_param for shard in optimizer.shards]
    actions: dict[str, Callable[[], object]] = {
        "step": lambda: optimizer.step(1e-4, 0.1, 1.0),
        "step with clipping": lambda: optimizer.step(1e-4, 0.1, 0.999),
        "torch's update": torch_optimizer.step,
    }
    if dtype != torch.float32:

        def update_and_round() -> None:
            torch_optimizer.step()
            torch._foreach_copy_(weights, main_params)

        actions["torch's update, then rounding"] = update_and_round
    return time_in_turns(actions, turns, dist.barrier)


def _merge_ranks(rank_times: Sequence[Times]) -> Times:
    return {name: [duration for times in rank_times for duration in times[name]] for name in rank_times[0]}


def run(num_ranks: int = 2, num_elements: int = 25_000_000, turns: int = 9) -> bool:
    """Print the times of the framework's optimizer step and of torch's update.

    The function forks processes, so call it before this process has run a backward.

    For float32 weights the step is compared with torch's update. For bfloat16 weights, the step also rounds the main parameters to
    the weights' dtype, which torch's update does not do. So it is compared with torch's update followed by such a rounding.

    Args:
        num_ranks: number of processes, with one thread each.
        num_elements: approximate number of elements that each process updates.
        turns: number of repetitions; each measures every action once.

    Returns:
        Whether the median step takes at most `BOUND` times as long as the median update, for both dtypes.
    """
    print(f"{num_ranks} processes, {num_elements / 1e6:.0f} million elements each, median (min to max) of {turns} turns")
    violations = []
    for dtype, reference in ((torch.float32, "torch's update"), (torch.bfloat16, "torch's update, then rounding")):
        name = str(dtype).removeprefix("torch.")
        rank_times = run_ranks(num_ranks, lambda rank: _measure_rank(dtype, num_elements, turns), timeout=_TIMEOUT_S)  # noqa: B023 - called before the next turn
        ratio = print_times(name, _merge_ranks(rank_times), reference)
        if ratio > BOUND:
            violations.append(f"{name}: the step takes {ratio:.2f} x as long as {reference}; the limit is {BOUND}")
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
