"""Counts of parameters, FLOPs and saved elements, derived from the specifications of layers and weights.

FLOPs are those of the matrix products that the model itself requires; recomputation does not count. A multiply-add is two FLOPs.
Causal attention counts as half of the full square of tokens, or less with a window. The embedding lookup, norms, activations,
softmax and rotary embeddings count as zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.spec.layers import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    build_layer_specs,
    build_mtp_layer_specs,
    group_equal,
)
from megatron.spec.segments import Segment
from megatron.spec.weights import WeightSpec, build_output_weight, iter_layer_weights, iter_weights

T = TypeVar("T")


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the model, without vocabulary padding. A tied weight counts once."""
    return sum(weight.numel for weight in iter_weights(model, vocab_size))


def count_active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters that process one token: all parameters except those of experts to which the token is not
    routed."""
    return sum(weight.active_numel for weight in iter_weights(model, vocab_size))


def check_parameter_count(model: ModelConfig, vocab_size: int, num_params: int, subject: str) -> None:
    """Check that `num_params`, the number of parameters that were built, is the number that the model settings define.

    Args:
        num_params: sum over all ranks or stages, each parameter counted once.
        subject: subject of the error message, such as "the ranks".

    Raises:
        RuntimeError: the numbers differ.
    """
    expected = count_parameters(model, vocab_size)
    if num_params != expected:
        raise RuntimeError(
            f"internal error: {subject} together hold {num_params:,} parameters, but the settings describe {expected:,}: "
            "a layer is missing or duplicated. Please report this"
        )


def count_layer_flops(model: ModelConfig) -> tuple[int, ...]:
    """Return the forward FLOPs per token of each layer, averaged over a sequence that is a single document."""
    matmul_flops = _map_layers(model, lambda layer: 2 * sum(weight.active_numel for weight in _get_matrices(model, layer)))
    return tuple(map(operator.add, matmul_flops, count_attention_flops(model)))


def count_weight_grad_flops(model: ModelConfig) -> tuple[int, ...]:
    """Return the FLOPs per token that each layer needs for its weight gradients. Frozen weights need none."""
    return _map_layers(
        model, lambda layer: 2 * sum(weight.active_numel for weight in _get_matrices(model, layer) if not weight.frozen)
    )


def count_attention_flops(model: ModelConfig) -> tuple[int, ...]:
    """Return the forward FLOPs per token of the two attention products of each layer: q k^T, and probabilities x v. They are part
    of `count_layer_flops`."""
    # Two products over the sequence (q k^T and probabilities x v), with two FLOPs per multiply-add.
    length = model.seq_length
    return _map_layers(
        model,
        lambda layer: (
            2
            * (
                layer.attention.num_heads
                * _count_qk_v_channels(layer.attention)
                * count_attended_pairs(length, layer.attention.scores.window)
            )
            // length
            // 2
        ),
    )


def count_attended_pairs(length: int, window: int | None) -> int:
    """Return twice the number of (query, key) pairs in a document that attention computes. The pair of a token and itself counts as
    half a pair.

    Without a window the result is length^2, the full square. Causal attention computes half of it.

    Args:
        length: tokens of the document.
        window: number of previous tokens that a token attends to; None for all.
    """
    num_previous = length - 1 if window is None else min(window, length - 1)
    return 2 * length * num_previous - num_previous * (num_previous + 1) + length


def compute_window_shares(model: ModelConfig) -> dict[int | None, float]:
    """Return the share of the model's attention FLOPs that layers with each attention window take.

    The key is the window: the number of previous tokens to which a token attends, or None for all previous tokens.
    """
    flops_of_window: dict[int | None, int] = {}
    layer_flops = count_attention_flops(model)
    all_flops = (*layer_flops, *layer_flops[-1:] * model.mtp_num_layers)
    for layer_spec, flops in zip((*build_layer_specs(model), *build_mtp_layer_specs(model)), all_flops, strict=True):
        window = layer_spec.attention.scores.get_effective_window(model.seq_length)
        flops_of_window[window] = flops_of_window.get(window, 0) + flops
    return {window: flops / sum(flops_of_window.values()) for window, flops in flops_of_window.items()}


def _count_qk_v_channels(attention: AttentionSpec | LatentAttentionSpec) -> int:
    """Return the channels of a query head plus those of a value head."""
    v_head_dim = attention.v_head_dim if isinstance(attention, LatentAttentionSpec) else attention.head_size
    return attention.head_size + v_head_dim


def count_fp8_flops(model: ModelConfig, precision: PrecisionConfig) -> int:
    """Return the forward and backward FLOPs per token of the matrix products in FP8. They are part of `count_flops_per_token`."""
    layer_flops = map(operator.sub, count_layer_flops(model), count_attention_flops(model))
    matmul_flops = [*layer_flops]
    matmul_flops += matmul_flops[-1:] * model.mtp_num_layers
    return 3 * sum(flops for layer, flops in enumerate(matmul_flops) if precision.get_fp8(layer, model.num_layers))


def count_recompute_flops(model: ModelConfig, segment: Segment) -> int:
    """Return the FLOPs per token that backward recomputes for a segment, which is consecutive layers with the same recompute
    settings.

    Full recomputation runs all matrix products of the layers except the last, whose output is not needed. Selective recomputation
    of the MLP runs the first product of each MLP. Recomputed attention probabilities do not count, because it depends on the
    attention kernel whether they are saved.
    """
    matrices = _map_layers(
        model, lambda layer: [weight for weight in _get_matrices(model, layer) if model.lora_rank is None or weight.frozen]
    )
    last_two_matmul_flops = [[2 * weight.active_numel for weight in weights][-2:] for weights in matrices]
    layer_indices = [min(i, model.num_layers - 1) for i in segment.layers]  # the layer of an MTP depth equals the last layer
    if segment.is_recomputed:
        layer_flops, is_depth = count_layer_flops(model), segment.layers.start >= model.num_layers
        projection_flops = _count_mtp_projection_flops(model) if is_depth else 0
        return sum(layer_flops[i] for i in layer_indices) + projection_flops - last_two_matmul_flops[layer_indices[-1]][-1]
    return sum(last_two_matmul_flops[i][0] for i in layer_indices) if "mlp" in segment.recomputed_modules else 0


def count_output_flops(model: ModelConfig, vocab_size: int) -> int:
    """Return the forward FLOPs per token of the output layer, summed over the main model and all depths of multi-token prediction.

    Args:
        vocab_size: rows of the output layer, without padding.
    """
    return 2 * build_output_weight(model, vocab_size).numel * (1 + model.mtp_num_layers)


def count_mtp_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of multi-token prediction without its output layers, which `count_output_flops` counts."""
    return model.mtp_num_layers * (count_layer_flops(model)[-1] + _count_mtp_projection_flops(model))


def _count_mtp_projection_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of the projection [h, 2h] in one depth of multi-token prediction (`h`: hidden size)."""
    return 4 * model.hidden_size**2


def count_mtp_attention_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of the two attention products in all layers of multi-token prediction. They are part of
    `count_mtp_flops`."""
    return model.mtp_num_layers * count_attention_flops(model)[-1]


def count_flops_per_token(model: ModelConfig, vocab_size: int) -> int:
    """Return the forward and backward FLOPs per token, averaged over a sequence.

    Each matrix product in forward has two matrix products in backward (the gradients of its two factors), so the total is three
    times the forward. A product with a frozen weight has only one in backward.

    Args:
        vocab_size: rows of the output layer, without padding.
    """
    forward = sum(count_layer_flops(model)) + count_mtp_flops(model) + count_output_flops(model, vocab_size)
    return 3 * forward - count_frozen_flops(model, vocab_size)


def count_frozen_flops(model: ModelConfig, vocab_size: int) -> int:
    """Return the FLOPs per token of the weight gradients that are skipped because the weights are frozen (LoRA)."""
    if model.lora_rank is None:
        return 0
    matmul_flops = sum(map(operator.sub, count_layer_flops(model), count_attention_flops(model)))
    return matmul_flops - sum(count_weight_grad_flops(model)) + count_output_flops(model, vocab_size)


def count_flops_per_step(
    model: ModelConfig, vocab_size: int, num_sequences: int, num_attended_sequences: float | None = None
) -> float:
    """Return the forward and backward FLOPs of `num_sequences` sequences. With the global batch size, this is the FLOPs of a step
    over all devices.

    Args:
        num_attended_sequences: number of full sequences with the same attention FLOPs, if tokens attend only within their
            documents. Without windows: the sum over all documents of (document length / sequence length)^2. None: each sequence is
            one document.
    """
    total = count_flops_per_token(model, vocab_size) * model.seq_length * num_sequences
    if num_attended_sequences is None:
        return total
    attention_flops = sum(count_attention_flops(model)) + count_mtp_attention_flops(model)
    return total - 3 * attention_flops * model.seq_length * (num_sequences - num_attended_sequences)


def count_deferred_elements_per_token(
    model: ModelConfig, layer_indices: Iterable[int], *, tp: int, sequence_parallel: bool, is_last_chunk: bool = False
) -> float:
    """Return the number of tensor elements that one rank saves per token of a microbatch for deferred weight gradients.

    A model chunk saves them from its input-gradient operation to its weight-gradient operation. A linear layer saves its input and
    the gradient of its output. A tensor that is split over the tensor-parallel ranks counts with 1 / tp. Under sequence parallelism
    the other tensors (residual stream, latents) also count with 1 / tp: they are stored split over the ranks and gathered again for
    the weight gradient.

    Args:
        layer_indices: layers of the chunk. The output layer saves nothing, because its weight gradient is not deferred.
        tp: number of tensor-parallel ranks.
        is_last_chunk: whether the chunk is the last of the model, which contains multi-token prediction.
    """

    def count_elements(weights: Iterable[WeightSpec]) -> float:
        unsplit_elements = split_elements = 0
        for weight in weights:
            if weight.frozen:
                continue
            inputs, outputs = weight.shape[-1], weight.numel // weight.shape[-1]
            if not weight.splits:
                unsplit_elements += inputs + outputs
                continue
            is_row_parallel = (len(weight.shape) - 1, "tp") in weight.splits
            unsplit_elements += outputs if is_row_parallel else inputs
            split_elements += inputs if is_row_parallel else outputs
        return unsplit_elements / (tp if sequence_parallel else 1) + split_elements / tp

    elements_of_layer = _map_layers(model, lambda layer: count_elements(_get_matrices(model, layer)))
    projection = 3 * model.hidden_size / (tp if sequence_parallel else 1)
    mtp_elements = model.mtp_num_layers * (elements_of_layer[-1] + projection) if is_last_chunk and model.mtp_num_layers else 0
    return sum(elements_of_layer[i] for i in layer_indices) + mtp_elements


def _get_matrices(model: ModelConfig, layer: LayerSpec) -> list[WeightSpec]:
    return [weight for weight in iter_layer_weights(model, layer, 0) if weight.param_type == "matrix"]


def _map_layers(model: ModelConfig, count_layer: Callable[[LayerSpec], T]) -> tuple[T, ...]:
    """Return the result of `count_layer` for each layer of the model, in order. The function is called once for all layers with
    equal specifications."""
    value_of_index = {
        i: value
        for layer, indices in group_equal(build_layer_specs(model)).items()
        for value in [count_layer(layer)]
        for i in indices
    }
    return tuple(value_of_index[i] for i in range(len(value_of_index)))
