"""Notes on attention kernels for a plan and the start-up log: which kernels a run measures to choose the fastest, and which keys
and values are copied for kernels without grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.attention.core import has_fused_kernel
from megatron.config.checks.memory import build_attention_call
from megatron.config.config import Config
from megatron.spec.attention_backends import get_kernels, get_kernels_to_time
from megatron.spec.layers import build_layer_specs, resolve_cp_comm_types
from megatron_lab.planner.units import format_bytes


def format_kernel_notes(config: Config, *, on_cuda: bool) -> Iterator[str]:
    """Yield the notes on attention kernels that a plan prints: which kernels a run will time, and the memory of copied keys and
    values."""
    yield from format_timing_notes(config, on_cuda=on_cuda)
    yield from format_copy_notes(config, on_cuda=on_cuda)


def format_timing_notes(config: Config, *, on_cuda: bool) -> Iterator[str]:
    """Yield a note that names the attention kernels, if a run times several of them and takes the fastest."""
    kernels = get_kernels_to_time(build_attention_call(config, on_cuda=on_cuda))
    if config.speed.attention_backend == "auto" and kernels:
        yield f"a run first times {' and '.join(kernels)} attention and takes the faster; both need as much memory"


def format_copy_notes(config: Config, *, on_cuda: bool) -> Iterator[str]:
    """Yield a note if attention over packed documents or in sliding windows copies the keys and values for every query head.

    Before version 2.13, torch's flash attention for these cases does not support grouped-query attention.
    """
    num_bytes, num_layers = count_copied_bytes(config, on_cuda=on_cuda)
    if num_bytes:
        yield (
            f"attention over documents and in windows takes no grouped heads in torch {torch.__version__} (it does from 2.13 on): "
            f"{num_layers} layers copy keys and values for every query head, {format_bytes(num_bytes)} a layer and "
            "microbatch until backward"
        )


def count_copied_bytes(config: Config, *, on_cuda: bool) -> tuple[int, int]:
    """Count the bytes of keys and values that are copied for every query head, because a kernel does not support grouped-query
    attention.

    Returns:
        Bytes of the copies for one layer and microbatch on one rank, and the number of layers of the model that copy. Both are 0 if
        no layer copies.
    """
    model, parallel = config.model, config.parallel
    call = replace(
        build_attention_call(config, on_cuda=on_cuda), has_window=True, has_softcap_or_sinks=False, is_context_parallel=False
    )
    if (
        not call.is_grouped_query
        or "flash" not in get_kernels(config.speed.attention_backend)
        or call.find_obstacle("flash") is not None
    ):
        return 0, 0
    # With all-to-all context parallelism, each rank computes some heads for all tokens.
    num_ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    num_heads = max(1, model.num_attention_heads // num_ranks)
    if num_heads == max(1, model.num_key_value_heads // num_ranks):
        return 0, 0
    from megatron.attention.documents import count_bytes_copied_for_groups

    num_layers = 0
    for spec, comm_type in zip(build_layer_specs(model), resolve_cp_comm_types(model, parallel.cp_comm_type), strict=True):
        scores = spec.attention.scores
        is_fused = has_fused_kernel(scores, model.seq_length)
        window_only = scores.softcap is None and scores.softmax == "vanilla"
        if parallel.context_parallel_size == 1 or comm_type == "a2a":
            num_layers += window_only and (config.data.reset_attention_mask or not is_fused)
    num_tokens = model.seq_length * config.training.micro_batch_size
    num_bytes = (
        count_bytes_copied_for_groups(num_tokens, num_heads, model.head_size, config.precision.itemsize) if num_layers else 0
    )
    return num_bytes, num_layers if num_bytes else 0
