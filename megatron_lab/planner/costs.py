"""FLOPs of the operations of a pipeline schedule, and the pipeline idle time that follows from them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.pipeline_parallel.partition import Chunk
from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.counts import (
    count_attention_flops,
    count_layer_flops,
    count_mtp_attention_flops,
    count_mtp_flops,
    count_output_flops,
    count_recompute_flops,
    count_weight_grad_flops,
)
from megatron.spec.operations import OpCosts, Schedule
from megatron.spec.weights import pad_vocab_size
from megatron.tensor_parallel.cross_entropy import LossOptions


def recomputes_logits(config: Config, vocab_size: int) -> bool:
    """Return whether the backward computes the logits again, because the loss is computed in chunks of tokens."""
    return get_loss_chunk_tokens(config, vocab_size) > 0


def get_loss_chunk_tokens(config: Config, vocab_size: int) -> int:
    """Return the number of tokens in a chunk if the loss is computed chunk by chunk (--loss-chunk-tokens); 0 if the loss of a
    microbatch is computed at once."""
    model, training, tp_size = config.model, config.training, config.parallel.tensor_model_parallel_size
    vocab_shard_size = pad_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tp_size) // tp_size
    return LossOptions.from_config(config.memory, training).resolve_chunk_tokens(
        training.micro_batch_size * config.tokens_per_rank, vocab_shard_size
    )


def compute_bubble_share(
    model: ModelConfig, vocab_size: int, table: Sequence[Chunk], schedule: Schedule, *, recomputes_logits: bool = False
) -> float:
    """Return the share of a step's time in which pipeline stages are idle, as a mean over the stages. The time of an operation is
    assumed to be proportional to its FLOPs, and messages to take no time.

    Args:
        table: model chunks, with the stage and the layers of each.
        recomputes_logits: whether the backward computes the logits again.
    """
    op_costs = compute_chunk_costs(model, vocab_size, table, recomputes_logits=recomputes_logits)
    return simulate(schedule, lambda op: op_costs[op.chunk].get_duration(op)).bubble_share


def compute_chunk_costs(
    model: ModelConfig, vocab_size: int, table: Sequence[Chunk], *, recomputes_logits: bool = False
) -> list[OpCosts]:
    """Return, for each model chunk, the FLOPs per token of each operation type.

    The two matrix products of the attention core have no weights, so both of their gradients count as input gradients. The weight
    gradient of the output layer also counts as an input gradient, because it is not deferred. Recomputation within the backward
    counts as an input gradient, too.

    Args:
        table: model chunks, with the layers of each.
        recomputes_logits: whether the backward computes the logits again.
    """
    layer_flops, attention_flops, weight_grad_flops = (
        count_layer_flops(model),
        count_attention_flops(model),
        count_weight_grad_flops(model),
    )
    op_costs = []
    for chunk in table:
        attention = sum(attention_flops[layer] for layer in chunk.layers)
        linear, output = (
            sum(layer_flops[layer] for layer in chunk.layers) - attention,
            chunk.is_last * count_output_flops(model, vocab_size),
        )
        linear += chunk.is_last * (count_mtp_flops(model) - count_mtp_attention_flops(model))
        attention += chunk.is_last * count_mtp_attention_flops(model)
        recompute = [count_recompute_flops(model, segment) for segment in chunk.segments]
        recompute_ahead = next(
            (flops for flops, segment in reversed([*zip(recompute, chunk.segments, strict=True)]) if segment.is_recomputed), 0
        )
        weight_grad = linear if model.lora_rank is None else sum(weight_grad_flops[layer] for layer in chunk.layers)
        input_grad = (
            linear + 2 * attention + sum(recompute) - recompute_ahead + (1 + recomputes_logits + (model.lora_rank is None)) * output
        )
        op_costs.append(OpCosts(linear + attention + output, input_grad, weight_grad, recompute=recompute_ahead))
    return op_costs
