"""Lines on attention's kernel for a plan and the start-up log: what a run measures first, and what is copied for the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.attention.core import one_kernel
from megatron.config.checks.memory import attention_call
from megatron.config.config import Config
from megatron.spec.attention_backends import kernels_of, kernels_to_time
from megatron.spec.layers import context_ways, layers
from megatron_lab.planner.state_report import amount


def describe_kernel(config: Config, *, on_cuda: bool) -> Iterator[str]:
    """Yield the lines of a plan."""
    yield from describe_timing(config, on_cuda=on_cuda)
    yield from describe_copies(config, on_cuda=on_cuda)


def describe_timing(config: Config, *, on_cuda: bool) -> Iterator[str]:
    """Yield a line where a run chooses attention's kernel by measurement."""
    kernels = kernels_to_time(attention_call(config, on_cuda=on_cuda))
    if config.speed.attention_backend == "auto" and kernels:
        yield f"a run first times {' and '.join(kernels)} attention and takes the faster; both need as much memory"


def describe_copies(config: Config, *, on_cuda: bool) -> Iterator[str]:
    """Yield a line where attention over documents or in windows copies keys and values: torch 2.11 has no grouped heads there."""
    copied, num_layers = bytes_copied(config, on_cuda=on_cuda)
    if copied:
        yield (
            f"attention over documents and in windows takes no grouped heads in torch {torch.__version__} (it does from 2.13 on): "
            f"{num_layers} layers copy keys and values for every query head, {amount(copied)} a layer and microbatch until backward"
        )


def bytes_copied(config: Config, *, on_cuda: bool) -> tuple[int, int]:
    """Return the bytes that a layer copies on one rank in a microbatch, and how many layers of the model do so."""
    sizes, parallel = config.model, config.parallel
    by_flash = replace(attention_call(config, on_cuda=on_cuda), window=True, shaped=False, in_parts=False)
    if not by_flash.grouped or "flash" not in kernels_of(config.speed.attention_backend) or by_flash.obstacle("flash") is not None:
        return 0, 0
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size  # all layers below hold all tokens of some heads
    heads = max(1, sizes.num_attention_heads // ranks)
    if heads == max(1, sizes.num_key_value_heads // ranks):
        return 0, 0
    from megatron.attention.documents import bytes_copied_for_groups

    num_layers = 0
    for spec, way in zip(layers(sizes), context_ways(sizes, parallel.cp_comm_type), strict=True):
        scores = spec.attention.scores
        plain = one_kernel(scores, sizes.seq_length)
        window_only = scores.softcap is None and scores.softmax == "vanilla"
        if parallel.context_parallel_size == 1 or way == "a2a":
            num_layers += window_only and (config.data.reset_attention_mask or not plain)
    tokens = sizes.seq_length * config.training.micro_batch_size
    copied = bytes_copied_for_groups(tokens, heads, sizes.head_size, config.precision.itemsize) if num_layers else 0
    return copied, num_layers if copied else 0
