"""Numbers of parameters, FLOPs and elements kept for deferred weight gradients, counted from the model's specs and weights.

FLOPs are those that the model itself needs in matrix products. A multiply-add is two; causal attention does half of the full
square, less with a window; the lookup of the embedding does none. Norms, activations, softmax and rotation do not count, nor does
anything that is computed a second time to save memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.spec.layers import AttentionSpec, LatentAttentionSpec, LayerSpec, alike, depths, layers
from megatron.spec.segments import Segment
from megatron.spec.weights import Weight, layer_weights, model_weights, output_matrix

Found = TypeVar("Found")


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, with each tied weight once and without padding of the vocabulary."""
    return sum(weight.numel for weight in model_weights(model, vocab_size))


def count_active(model: ModelConfig, vocab_size: int) -> int:
    """Parameters that a token meets: all but the experts that it does not pass."""
    return sum(weight.active for weight in model_weights(model, vocab_size))


def check_count(model: ModelConfig, vocab_size: int, held: int, holders: str) -> None:
    """Check that so many parameters are all of the model.

    Raises:
        RuntimeError: they are not. The message names the holders.
    """
    expected = count_parameters(model, vocab_size)
    if held != expected:
        raise RuntimeError(
            f"{holders} together hold {held:,} parameters, but the settings describe {expected:,}: a layer is lost or doubled"
        )


def layer_flops(model: ModelConfig) -> tuple[int, ...]:
    """Forward FLOPs of each layer for one token, averaged over a sequence that is one document."""
    products = _of_layers(model, lambda layer: 2 * sum(weight.active for weight in _matrices(model, layer)))
    return tuple(map(operator.add, products, attention_flops(model)))


def weight_gradient_flops(model: ModelConfig) -> tuple[int, ...]:
    """FLOPs of the gradients of each layer's weights for one token: of its products in the forward, but for what is frozen."""
    return _of_layers(model, lambda layer: 2 * sum(weight.active for weight in _matrices(model, layer) if not weight.frozen))


def attention_flops(model: ModelConfig) -> tuple[int, ...]:
    """The part of `layer_flops` that the products q k^T and scores x v take."""
    # Two products over the sequence, of two FLOPs each.
    length = model.seq_length
    return _of_layers(
        model,
        lambda layer: (
            2
            * (layer.attention.heads * _channels(layer.attention) * attended(length, layer.attention.scores.window))
            // length
            // 2
        ),
    )


def attended(length: int, window: int | None) -> int:
    """Twice the pairs of a token and one that it attends to, in a document of a length; a token and itself are half a pair. Without
    a window it is the full square, of which causal attention is half."""
    before = length - 1 if window is None else min(window, length - 1)
    return 2 * length * before - before * (before + 1) + length


def attention_shares(model: ModelConfig) -> dict[int | None, float]:
    """The part of each window (None: all tokens before) in the FLOPs of attention."""
    each: dict[int | None, int] = {}
    each_layer = attention_flops(model)
    of_all = (*each_layer, *each_layer[-1:] * model.mtp_num_layers)
    for layer, flops in zip((*layers(model), *depths(model)), of_all, strict=True):
        window = layer.attention.scores.reach(model.seq_length)
        each[window] = each.get(window, 0) + flops
    return {window: flops / sum(each.values()) for window, flops in each.items()}


def _channels(attention: AttentionSpec | LatentAttentionSpec) -> int:
    """Channels of a query and a value head together."""
    values = attention.value_size if isinstance(attention, LatentAttentionSpec) else attention.head_size
    return attention.head_size + values


def flops_in_8_bits(model: ModelConfig, precision: PrecisionConfig) -> int:
    """The part of `flops_per_token` that is done in 8 bits."""
    products = map(operator.sub, layer_flops(model), attention_flops(model))
    each = [*products]
    each += each[-1:] * model.mtp_num_layers
    return 3 * sum(number for layer, number in enumerate(each) if precision.fp8_of(layer, model.num_layers))


def recompute_flops(model: ModelConfig, segment: Segment) -> int:
    """FLOPs for one token of what backward computes again of neighbouring layers: all but the last product, whose result is not
    needed; of an MLP alone, its first product. (Probabilities are left out: whether they are kept depends on the kernel.)"""
    own = _of_layers(
        model, lambda layer: [weight for weight in _matrices(model, layer) if model.lora_rank is None or weight.frozen]
    )
    products = [[2 * weight.active for weight in weights][-2:] for weights in own]
    numbers = [min(number, model.num_layers - 1) for number in segment.layers]  # a depth's layer is as the last one
    if segment.recomputed:
        forward, is_depth = layer_flops(model), segment.layers.start >= model.num_layers
        projection = _projection_flops(model) if is_depth else 0
        return sum(forward[number] for number in numbers) + projection - products[numbers[-1]][-1]
    return sum(products[number][0] for number in numbers) if "mlp" in segment.selective else 0


def output_flops(model: ModelConfig, vocab_size: int) -> int:
    """Forward FLOPs of the output layer for one token, of all depths together. `vocab_size` counts its rows, without padding."""
    return 2 * output_matrix(model, vocab_size).numel * (1 + model.mtp_num_layers)


def depth_flops(model: ModelConfig) -> int:
    """Forward FLOPs of multi-token prediction for one token, without its output layers (`output_flops` counts them)."""
    return model.mtp_num_layers * (layer_flops(model)[-1] + _projection_flops(model))


def _projection_flops(model: ModelConfig) -> int:
    """Those of a depth's product [h, 2h]."""
    return 4 * model.hidden_size**2


def depth_attention_flops(model: ModelConfig) -> int:
    """The part of `depth_flops` that the products q k^T and scores x v take."""
    return model.mtp_num_layers * attention_flops(model)[-1]


def flops_per_token(model: ModelConfig, vocab_size: int) -> int:
    """Forward and backward FLOPs for one token, averaged over a sequence.

    Each product of forward has two in backward (the gradients of both factors), so the whole is three times forward; that of a
    frozen weight has one.

    Args:
        model: shape of the model.
        vocab_size: rows of the output layer, without padding.
    """
    forward = sum(layer_flops(model)) + depth_flops(model) + output_flops(model, vocab_size)
    return 3 * forward - frozen_flops(model, vocab_size)


def frozen_flops(model: ModelConfig, vocab_size: int) -> int:
    """FLOPs of the weight gradients for one token that are not computed, as the weights are frozen (LoRA)."""
    if model.lora_rank is None:
        return 0
    products = sum(map(operator.sub, layer_flops(model), attention_flops(model)))
    return products - sum(weight_gradient_flops(model)) + output_flops(model, vocab_size)


def flops_per_step(model: ModelConfig, vocab_size: int, num_sequences: int, attended_sequences: float | None = None) -> float:
    """Forward and backward FLOPs of `num_sequences` sequences (over all devices when that is the global batch size).

    Args:
        attended_sequences: how many whole sequences need as much attention, where tokens attend only within their documents:
            without windows the sum over all documents of (length / sequence length) squared. By default each sequence is one
            document.
    """
    whole = flops_per_token(model, vocab_size) * model.seq_length * num_sequences
    if attended_sequences is None:
        return whole
    attention = sum(attention_flops(model)) + depth_attention_flops(model)
    return whole - 3 * attention * model.seq_length * (num_sequences - attended_sequences)


def kept_per_token(
    model: ModelConfig, numbers: Iterable[int], *, tensor_size: int, sequence_parallel: bool, last: bool = False
) -> float:
    """Elements that one rank keeps for each token of a microbatch between a chunk's input gradient and its weight gradient.

    A linear layer keeps its input and the gradient of its output. Of what is split over the tensor ranks it keeps a part; under
    sequence parallelism also of the rest (the residual width, latents), because what is gathered is gathered again.

    Args:
        numbers: the chunk's layers. The output layer keeps nothing: its weight gradient is not deferred.
        last: whether the chunk is the last, which has multi-token prediction.
    """

    def of(weights: Iterable[Weight]) -> float:
        residual = split = 0
        for weight in weights:
            if weight.frozen:
                continue
            inputs, outputs = weight.shape[-1], weight.numel // weight.shape[-1]
            if not weight.splits:
                residual += inputs + outputs
                continue
            by_input = (len(weight.shape) - 1, "tp") in weight.splits
            residual += outputs if by_input else inputs
            split += inputs if by_input else outputs
        return residual / (tensor_size if sequence_parallel else 1) + split / tensor_size

    each = _of_layers(model, lambda layer: of(_matrices(model, layer)))
    projection = 3 * model.hidden_size / (tensor_size if sequence_parallel else 1)
    of_depths = model.mtp_num_layers * (each[-1] + projection) if last and model.mtp_num_layers else 0
    return sum(each[number] for number in numbers) + of_depths


def _matrices(model: ModelConfig, layer: LayerSpec) -> list[Weight]:
    return [weight for weight in layer_weights(model, layer, 0) if weight.kind == "matrix"]


def _of_layers(model: ModelConfig, count: Callable[[LayerSpec], Found]) -> tuple[Found, ...]:
    """What is counted for each layer; equal layers are counted once."""
    counts = {place: number for layer, places in alike(layers(model)).items() for number in [count(layer)] for place in places}
    return tuple(counts[place] for place in range(len(counts)))
