"""Which boxes of which tensors each rank of a layout holds, computed for any layout without its ranks."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.model.build import build_model
from megatron.parallel.boxes import Box
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import table_of


def files_of_layout(
    model: ModelConfig, parallel: ParallelConfig, vocab_size: int, tensors: Collection[str]
) -> list[list[tuple[str, Box]]]:
    """The boxes of every rank of one model replica, by rank. What several ranks hold is the first one's.

    Leaves and enters the default process group, so call it in a process that has none.

    Args:
        model: shape and parts.
        parallel: sizes of tensor, pipeline and experts, schedule and split of the layers.
        vocab_size: rows of the word embedding, without padding.
        tensors: full names of what is stored, weights and moments (`model.<parameter>`, `exp_avg.<parameter>`).

    Raises:
        ValueError: the layers or the heads do not divide so.
    """
    kinds_of: dict[str, list[str]] = {}
    for full in tensors:
        kind, _, parameter = full.partition(".")
        kinds_of.setdefault(parameter, []).append(kind)
    table = table_of(model, parallel, vocab_size)
    topology = replica_of(parallel)
    files: list[list[tuple[str, Box]]] = []
    written: set[tuple[str, Box]] = set()
    for rank in range(topology.world_size):
        context = connect_fake(topology, rank)
        try:
            built = build_model(
                model, context, dtype=torch.float32, vocab_size=vocab_size, sequence_parallel=False, seed=0, table=table
            )
            held = [(entry.record.name, entry.record.held_box(context.axis_sizes, context.coordinates)) for entry in built.params]
        finally:
            disconnect()
        boxes = [each for each in held if each not in written]
        written.update(boxes)
        files.append([(f"{kind}.{name}", box) for name, box in boxes if box.numel for kind in kinds_of.get(name, ())])
    return files


def replica_of(parallel: ParallelConfig) -> Topology:
    """The fewest ranks that hold the whole model: one data rank, or as many as it takes to hold each expert."""
    tp, ep, etp = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    return Topology(tp, 1, math.lcm(tp, etp * ep) // tp, parallel.pipeline_model_parallel_size, ep=ep, expert_tensor=etp)
