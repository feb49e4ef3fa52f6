"""Slices of tensors that each rank of a layout holds and writes, computed in a single process."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.model.build import build_model
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.tensor_slice import TensorSlice
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table


def plan_layout_files(
    model: ModelConfig, parallel: ParallelConfig, vocab_size: int, tensors: Collection[str]
) -> list[list[tuple[str, TensorSlice]]]:
    """Return the tensor slices that each rank of one model replica writes to a checkpoint. If several ranks hold a slice, only the
    first of them writes it.

    The function creates the default process group and destroys it, so call it in a process without one.

    Args:
        model: architecture of the model.
        parallel: tensor-, pipeline- and expert-parallel sizes, schedule, and split of the layers.
        vocab_size: rows of the word embedding, without padding.
        tensors: full names of the stored tensors, weights and moments (`model.<parameter>`, `exp_avg.<parameter>`).

    Returns:
        For each rank, pairs of the full name of a tensor and a slice of it.

    Raises:
        ValueError: the layers or heads are not divisible by this layout.
    """
    prefixes: dict[str, list[str]] = {}
    for full_name in tensors:
        prefix, _, parameter = full_name.partition(".")
        prefixes.setdefault(parameter, []).append(prefix)
    table = build_layer_table(model, parallel, vocab_size)
    topology = build_replica_topology(parallel)
    rank_slices: list[list[tuple[str, TensorSlice]]] = []
    assigned: set[tuple[str, TensorSlice]] = set()
    for rank in range(topology.world_size):
        context = connect_fake(topology, rank)
        try:
            chunk_model = build_model(
                model, context, dtype=torch.float32, vocab_size=vocab_size, sequence_parallel=False, seed=0, table=table
            )
            local_slices = [
                (param.record.name, param.record.get_local_slice(context.axis_sizes, context.coordinates))
                for param in chunk_model.params
            ]
        finally:
            disconnect()
        new_slices = [item for item in local_slices if item not in assigned]
        assigned.update(new_slices)
        rank_slices.append(
            [
                (f"{prefix}.{name}", tensor_slice)
                for name, tensor_slice in new_slices
                if tensor_slice.numel
                for prefix in prefixes.get(name, ())
            ]
        )
    return rank_slices


def build_replica_topology(parallel: ParallelConfig) -> Topology:
    """Build the topology of one model replica, the smallest that holds the complete model. It has one data-parallel rank, or more
    if expert parallelism needs them."""
    tp, ep, etp = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    return Topology(tp, 1, math.lcm(tp, etp * ep) // tp, parallel.pipeline_model_parallel_size, ep=ep, expert_tensor=etp)
