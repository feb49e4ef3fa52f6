"""How unevenly a table of layers loads the stages, and what a split by cost would gain."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.pipeline_parallel.partition import Chunk, layer_table, table_of
from megatron.spec.counts import layer_flops, output_flops

_WORTH_SAYING = 0.03  # of the slowest stage's time; FLOPs foretell it no better


def stage_costs(chunks: Sequence[Chunk], layer_costs: Sequence[float], embedding_cost: float, loss_cost: float) -> list[float]:
    """What one microbatch costs on each stage, all its chunks together, in the unit of the costs."""
    costs: list[float] = [0] * (max(chunk.stage for chunk in chunks) + 1)
    for chunk in chunks:
        costs[chunk.stage] += sum(layer_costs[layer] for layer in chunk.layers)
        costs[chunk.stage] += embedding_cost * chunk.first + loss_cost * chunk.last
    return costs


def imbalance(chunks: Sequence[Chunk], layer_costs: Sequence[float], embedding_cost: float, loss_cost: float) -> float:
    """Cost of the dearest stage over the mean: 1 is perfect; at the number of stages one does all the work."""
    costs = stage_costs(chunks, layer_costs, embedding_cost, loss_cost)
    return max(costs) * len(costs) / sum(costs)


def split_advice(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> str | None:
    """A line on what `--pipeline-split balanced` would gain, or None where that is little or sizes are given by hand.

    It is an estimate: costs are FLOPs (`megatron.spec.counts`), which leave out what memory traffic takes.
    """
    by_hand = (
        parallel.pipeline_model_parallel_layout,
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    if parallel.pipeline_split == "balanced" or any(by_hand):
        return None
    table = table_of(model, parallel, vocab_size)
    layers, loss = layer_flops(model), output_flops(model, vocab_size)
    if model.num_layers < len(table) - 1:  # a split by cost leaves only the last chunk without a layer
        return None
    balanced = layer_table(model.num_layers, [chunk.stage for chunk in table], layer_costs=layers, loss_cost=loss)
    now, then = (stage_costs(chunks, layers, 0, loss) for chunks in (table, balanced))
    gain = 1 - max(then) / max(now)
    if gain < _WORTH_SAYING:
        return None
    return (
        f"stage {now.index(max(now))} is the slowest, with {imbalance(table, layers, 0, loss):.2f} times the mean work "
        f"(the loss costs as much as {loss * len(layers) / sum(layers):.1f} layers): "
        f"{_asking(parallel, len(table))} would shorten it by {100 * gain:.0f} %"
    )


def _asking(parallel: ParallelConfig, num_chunks: int) -> str:
    """How to ask for a balanced split of as many chunks: the flag, what goes with it and what it takes the place of."""
    flags, instead = ["--pipeline-split balanced"], []
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {num_chunks // parallel.pipeline_model_parallel_size}")
        instead.append("--num-layers-per-virtual-pipeline-stage")
    if parallel.account_for_embedding_in_pipeline_split:
        instead.append("--account-for-embedding-in-pipeline-split")
    if parallel.account_for_loss_in_pipeline_split:
        instead.append("--account-for-loss-in-pipeline-split")
    return " ".join(flags) + (f" in place of {' and '.join(instead)}" if instead else "")
