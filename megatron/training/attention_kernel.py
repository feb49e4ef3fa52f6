"""Choice of attention's kernel at the start of a run, the same on all ranks, and its line in the start-up log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron.attention.backends import chosen_kernel, kernels_in_use, use_backend
from megatron.attention.core import as_samples, one_kernel, shaped_kernel
from megatron.config.checks.speed import attention_call
from megatron.config.config import Config
from megatron.config.imports import named
from megatron.model.build import Model, model_dtype
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import Topology
from megatron.spec.attention_backends import kernels_to_time
from megatron.spec.layers import context_ways, layers
from megatron.training.failure import together

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


def _attention_inputs(
    config: Config, topology: Topology, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make uninitialised queries [s, b, g, r, d], keys and values [s, b, g, channels] of a layer and microbatch on one rank."""
    sizes, ranks = config.model, topology.tp * topology.cp  # context ranks that call a kernel of torch have shared the heads
    heads, kv_heads = (max(1, count // ranks) for count in (sizes.num_attention_heads, sizes.num_key_value_heads))
    leading = (sizes.seq_length, config.training.micro_batch_size, kv_heads)
    shapes = (heads // kv_heads, sizes.head_size), (sizes.head_size,), (sizes.value_size or sizes.head_size,)
    q, k, v = (torch.empty((*leading, *shape), dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def choose_attention(config: Config, context: ParallelContext) -> tuple[KernelChoice | None, Callable[[], None]]:
    """Choose between attention's kernels by measurement, if --attention-backend auto leaves a choice.

    The first rank measures, and all ranks take its choice. They call this together, before the model takes memory.

    Returns:
        the choice, or None where nothing was measured; and what brings back the kernels that were in use before.

    Raises:
        torch.OutOfMemoryError: on the first rank, which lacks the memory for the queries, keys and values of one layer.
    """
    kernels = kernels_to_time(attention_call(config, on_cuda=context.device.type == "cuda"))
    if config.speed.attention_backend != "auto" or not kernels:
        return None, lambda: None

    from megatron.attention.timing import choose_on_device

    def measure() -> KernelChoice | None:
        if context.rank:
            return None
        inputs = _attention_inputs(config, context.topology, model_dtype(config.precision), context.device)
        return choose_on_device(kernels, inputs, config.model.attention_dropout)

    choice: KernelChoice = broadcast_object(together(context, measure), context.world)
    bring_back = use_backend("auto" if choice.kernel == "flash" else choice.kernel)
    if config.speed.compile:
        named("megatron.model.compiled:separate_graphs")()  # a model that was built before has not been traced yet
    return choice, bring_back


def describe_attention(config: Config, model: Model, context: ParallelContext, choice: KernelChoice | None = None) -> str:
    """Name the kernel that computes attention, the kernels to choose from, and measured times.

    Raises:
        ValueError: this device has none that is allowed.
    """
    sizes, dropout = config.model, config.model.attention_dropout
    backend = config.speed.attention_backend
    inputs = (x.requires_grad_() for x in _attention_inputs(config, context.topology, model.dtype, context.device))
    q, k, v, grouped = as_samples(*inputs)
    kernel = chosen_kernel(q, k, v, dropout, grouped=grouped)
    if kernel is None:
        raise ValueError(f"--attention-backend {backend} has no kernel that runs on this {context.device.type} device. Use auto.")
    head = torch.empty(sizes.head_size, dtype=model.dtype, device=context.device)
    found: dict[str, int] = {}
    for spec, way in zip(layers(sizes), context_ways(sizes, config.parallel.cp_comm_type), strict=True):
        scores = spec.attention.scores
        own = kernel if one_kernel(scores, sizes.seq_length) else shaped_kernel(scores, head, head, dropout)
        if context.topology.cp > 1 and way != "a2a":
            own = named("megatron.attention.parts:kernel_in_words")(scores, head, head, dropout)
        found[own] = found.get(own, 0) + 1
    words = [kernel if count == sizes.num_layers else f"{kernel} in {count} layers" for kernel, count in found.items()]
    allowed = dict.fromkeys((*kernels_in_use(), *(() if choice is None else choice.milliseconds)))
    times = "" if choice is None else f"; measured, forward and backward of a layer: {choice}"
    return f"attention: {' and '.join(words)} (--attention-backend {backend}, of {', '.join(allowed)}{times})"
