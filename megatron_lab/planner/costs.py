"""What the operations of a schedule cost in FLOPs, and how long stages wait for each other by that."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.pipeline_parallel.partition import Chunk
from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.counts import (
    attention_flops,
    depth_attention_flops,
    depth_flops,
    layer_flops,
    output_flops,
    recompute_flops,
    weight_gradient_flops,
)
from megatron.spec.operations import Costs, Schedule
from megatron.spec.weights import padded_vocab_size
from megatron.tensor_parallel.cross_entropy import LossForm


def loss_again(config: Config, vocab_size: int) -> bool:
    """Whether backward computes the logits again."""
    return loss_chunk(config, vocab_size) > 0


def loss_chunk(config: Config, vocab_size: int) -> int:
    """Tokens of a chunk of the loss, 0 where it is whole."""
    model, training, ranks = config.model, config.training, config.parallel.tensor_model_parallel_size
    columns = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, ranks) // ranks
    return LossForm.of(config.memory, training).chunk(training.micro_batch_size * config.tokens_per_rank, columns)


def idle_share(
    model: ModelConfig, vocab_size: int, table: Sequence[Chunk], schedule: Schedule, *, loss_again: bool = False
) -> float:
    """The share of their time in which stages wait, for each other and for the slowest of them."""
    costs = chunk_costs(model, vocab_size, table, loss_again=loss_again)
    return simulate(schedule, lambda op: costs[op.chunk].of(op)).bubble_share


def chunk_costs(model: ModelConfig, vocab_size: int, table: Sequence[Chunk], *, loss_again: bool = False) -> list[Costs]:
    """FLOPs of the operations on each chunk for one token. The two products in attention have no weights, so both their gradients
    count as input gradients, and so do the weight gradient of the output layer, which is not deferred, and what is computed again
    within backward."""
    layers, scores, trained = layer_flops(model), attention_flops(model), weight_gradient_flops(model)
    costs = []
    for chunk in table:
        attention = sum(scores[layer] for layer in chunk.layers)
        products, output = sum(layers[layer] for layer in chunk.layers) - attention, chunk.last * output_flops(model, vocab_size)
        products += chunk.last * (depth_flops(model) - depth_attention_flops(model))
        attention += chunk.last * depth_attention_flops(model)
        again = [recompute_flops(model, segment) for segment in chunk.segments]
        ahead = next((flops for flops, segment in reversed([*zip(again, chunk.segments, strict=True)]) if segment.recomputed), 0)
        of_weights = products if model.lora_rank is None else sum(trained[layer] for layer in chunk.layers)
        input_grad = products + 2 * attention + sum(again) - ahead + (1 + loss_again + (model.lora_rank is None)) * output
        costs.append(Costs(products + attention + output, input_grad, of_weights, recompute=ahead))
    return costs
