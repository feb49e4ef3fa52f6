"""The memory that weight gradients hold while they are put off. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.activations import activation_of
from megatron.spec.operations import OpKind, Schedule


def kept_per_token(model: ModelConfig, chunk: Chunk, *, padded_vocab: int, tensor_size: int, sequence_parallel: bool) -> float:
    """Numbers that one rank keeps for each token of a microbatch between a chunk's input gradient and its weight gradient.

    A linear layer keeps its input and the gradient of its output. What is split over the tensor ranks is kept in part; the residual
    width is so under sequence parallelism, because what is gathered is gathered again.

    Args:
        padded_vocab: rows of the output layer, with padding.
    """
    residual = model.hidden_size / (tensor_size if sequence_parallel else 1)
    heads = model.num_attention_heads * model.head_size
    keys_and_values = 2 * model.num_key_value_heads * model.head_size
    up = model.ffn_size * (2 if activation_of(model).gated else 1)
    split = (heads + keys_and_values) + heads + up + model.ffn_size
    layer = 4 * residual + split / tensor_size
    return len(chunk.layers) * layer + (residual + padded_vocab / tensor_size if chunk.last else 0.0)


def peak_kept(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """For each stage, the most that is kept at once, where a microbatch keeps `kept[chunk]` between its two gradients."""
    peaks = []
    for ops in schedule.ops:
        held = peak = 0.0
        for op in ops:
            if op.kind is OpKind.INPUT_GRAD:
                held += kept[op.chunk]
                peak = max(peak, held)
            elif op.kind is OpKind.WEIGHT_GRAD:
                held -= kept[op.chunk]
        peaks.append(peak)
    return tuple(peaks)
