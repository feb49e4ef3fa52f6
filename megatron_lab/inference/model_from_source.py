"""Loading of a model for inference from any source of weights, such as a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import torch

from megatron.checkpoint.errors import CheckpointError, format_list
from megatron.config.checks.experts import check_expert_width_divisible_by_etp, check_shared_expert_width_divisible_by_tp
from megatron.config.checks.parallel import check_heads_divisible_by_tp, check_mlp_width_divisible_by_tp, check_query_groups_fit_tp
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.model.build import Model, build_model
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import materialize
from megatron.spec.layers import resolve_cp_comm_types
from megatron_lab.foreign.inference_source import build_inference_source
from megatron_lab.foreign.source import WeightSource, find_mismatches

_TENSOR_PARALLEL_CHECKS = (
    *(check_heads_divisible_by_tp, check_query_groups_fit_tp, check_mlp_width_divisible_by_tp),
    *(check_expert_width_divisible_by_etp, check_shared_expert_width_divisible_by_tp),
)
"""Checks that tensor parallel ranks can divide heads, MLP and experts."""


def load_model(source: WeightSource, context: ParallelContext, dtype: torch.dtype) -> Model:
    """Build this rank's part of a model, and load its weights from the source, rounded to `dtype`.

    Settings and parameters that only training uses, such as multi-token-prediction layers, are left out.

    Args:
        source: weights and model settings, from a checkpoint or a folder of another framework.

    Raises:
        CheckpointError: the source lacks parameters of its model, or is damaged.
        ValueError: the parallel layout cannot split the model.
    """
    source = build_inference_source(source)
    topology = context.topology
    parallel = ParallelConfig(tensor_model_parallel_size=topology.tp, expert_tensor_parallel_size=topology.expert_tensor)
    config = Config(model=source.model, parallel=parallel)
    for check in _TENSOR_PARALLEL_CHECKS:
        for violation in check(config, context.topology.world_size):
            raise ValueError(f"{source.name}: {violation.message}\n  {violation.reason}")
    model = build_model(
        source.model,
        context,
        dtype=dtype,
        vocab_size=source.vocab_size,
        sequence_parallel=False,
        seed=0,
        cp_comm_types=resolve_cp_comm_types(source.model, ()),
        should_materialize=False,  # no initial values: every weight comes from the source
    )
    for chunk in model.chunks.values():
        materialize(chunk, model.params, context.device)
    load_weights(model, context, source)
    return model


def select_default_dtype(source: WeightSource, context: ParallelContext) -> torch.dtype:
    """Return the dtype in which the source stores the weights.

    If the dtype is float16 and the device is a CPU, return float32, because CPUs have no float16 matrix products.
    """
    dtype = source.weights["embedding.word.weight"].dtype
    return torch.float32 if dtype == torch.float16 and context.device.type == "cpu" else dtype


@torch.no_grad()
def load_weights(model: Model, context: ParallelContext, source: WeightSource) -> None:
    """Copy the weights of the source to this rank's parameters, rounded to the model's dtype. Padding rows become 0.

    The memory of the parameters must have been allocated before (they must not be on the meta device).

    Raises:
        CheckpointError: the source lacks parameters of the model, or has them in other shapes.
    """
    mismatches = find_mismatches(source.weights, {entry.record.name: entry.record.shape for entry in model.params})
    if mismatches:
        raise CheckpointError(
            f"{source.name} does not hold the weights of this model: {format_list(mismatches)}. The checkpoint is damaged (copy it "
            "again), or was written for another model"
        )
    sizes, coordinates = context.axis_sizes, context.coordinates
    for entry in model.params:
        local_slice = entry.record.get_local_slice(sizes, coordinates)
        flat_param = entry.param.detach().view(-1)
        if local_slice.numel < flat_param.numel():
            flat_param.zero_()  # only the first dimension is padded, so the local values come first
        if local_slice.numel:
            flat_param[: local_slice.numel].copy_(source.read(entry.record.name, local_slice).view(-1))
