"""Optimizer state in Megatron-LM's checkpoint format `torch`: assignment of state tensors to parameters.

The optimizer state has no parameter names. It lists parameters by index, or stores flat buffers. The index, or the offset in the
buffer, follows from the order in which the model declares its parameters. This is the order of the model state in the same file.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import WEIGHT
from megatron_lab.foreign.flat_buffers import MAIN_PARAM, FlatParam, infer_bucket_size, iter_joined_offsets, plan_buckets
from megatron_lab.foreign.legacy_files import LegacyChunk, RankFiles, list_chunk_keys, open_file
from megatron_lab.foreign.megatron_source import EMBEDDING_KEY, MOMENTS, NON_PARAM_SUFFIXES, OUTPUT_KEY, WEIGHTS_ONLY_HINT
from megatron_lab.foreign.torch_file import TorchFile

OPTIMIZER_FILE = "distrib_optim.pt"
"""File next to each model_optim_rng.pt with the state of the distributed optimizer."""

_StateTensors = dict[str, dict[str, torch.Tensor]]
"""Tensors of one chunk: state type (`WEIGHT` or a moment) -> Megatron-LM parameter name -> tensor."""


def build_optimizer_chunks(args: Namespace, rank_files: RankFiles, chunks: Sequence[LegacyChunk]) -> dict[str, list[LegacyChunk]]:
    """Return the optimizer state in the form of model chunks, so that it can be read like weights.

    Returns:
        The model chunks by type of state, which is `WEIGHT` for main parameters or the name of a moment. The key `WEIGHT` is
        missing if the optimizer updates the parameters themselves and has no main parameters.

    Raises:
        CheckpointError: the state does not fit the parameters, or its format does not determine their order.
        DamagedCheckpointError: a file is missing or damaged.
    """
    states_by_rank: dict[tuple[int, int], tuple[TorchFile, dict[str, _StateTensors]]] = {}
    for key, file in rank_files.items():
        params = {name: list(_iter_params(file.content[name], args)) for name in list_chunk_keys(file)}
        optimizer_path = file.path.parent / OPTIMIZER_FILE
        if optimizer_path.exists() or vars(args).get("use_distributed_optimizer"):
            sharded = open_file(optimizer_path)
            states_by_rank[key] = sharded, _split_flat_buffers(sharded, params, args, stage=key[1])
        else:
            states_by_rank[key] = file, _get_param_states(file, params, args)
    state_types = (*MOMENTS, *([WEIGHT] if WEIGHT in next(iter(states_by_rank[0, 0][1].values())) else []))

    def build_chunk(chunk: LegacyChunk, state_type: str) -> LegacyChunk:
        rank_states = (states_by_rank[tp_rank, chunk.stage] for tp_rank in range(len(chunk.states)))
        return replace(chunk, states=[(file, state[chunk.key][state_type]) for file, state in rank_states], expected=set())

    return {state_type: [build_chunk(chunk, state_type) for chunk in chunks] for state_type in state_types}


def _iter_params(state: dict[str, Any], args: Namespace) -> Iterator[FlatParam]:
    """Yield the parameters of a model chunk on one rank, in the order in which the model declares them."""
    is_tied = not vars(args).get("untie_embeddings_and_output_weights")
    is_shared = is_tied and (vars(args).get("pipeline_model_parallel_size") or 1) > 1
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and not name.endswith(NON_PARAM_SUFFIXES):
            yield FlatParam(name, tuple(tensor.shape), has_separate_bucket=is_shared and name in (EMBEDDING_KEY, OUTPUT_KEY))


def _split_flat_buffers(
    file: TorchFile, params: dict[str, list[FlatParam]], args: Namespace, stage: int
) -> dict[str, _StateTensors]:
    """Return the main parameters and moments of every model chunk, as views of the flat buffers in a rank's file.

    Args:
        file: file with the state of the distributed optimizer.
        params: parameters of each model chunk on the rank, by the chunk's key.
        args: arguments of the run.
        stage: pipeline stage of the rank.

    Returns:
        The tensors by key of the chunk, type of state (`WEIGHT` or a moment) and Megatron-LM parameter name.
    """
    if not file.content.get("buckets_coalesced"):
        raise CheckpointError(
            f"{file.path} was saved by Megatron-Core before 0.7, which did not record where the buckets of optimizer state end. "
            f"Load the checkpoint with a newer version and save it again. {WEIGHTS_ONLY_HINT}"
        )
    chunk_states: dict[str, _StateTensors] = {}
    for chunk_index, (key, chunk_params) in enumerate(params.items()):
        by_dtype = file.content.get(chunk_index)
        if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
            raise CheckpointError(
                f"{file.path} does not have exactly one buffer of optimizer state for the model chunk {key}. Parameters of "
                f"several dtypes, which have several buffers, are not supported. {WEIGHTS_ONLY_HINT}"
            )
        (buffers,) = by_dtype.values()
        total = sum(param.numel for param in chunk_params)
        buckets = plan_buckets(chunk_params, infer_bucket_size(args, stage, chunk_index, total))
        buffer_names = {WEIGHT: MAIN_PARAM, **{state_type: state_type for state_type in MOMENTS}}
        flat_buffers = {
            state_type: buffers.get(buffer_name) if isinstance(buffers, dict) else None
            for state_type, buffer_name in buffer_names.items()
        }
        numel = sum(bucket.numel for bucket in buckets)
        for state_type, buffer in flat_buffers.items():
            if not isinstance(buffer, torch.Tensor) or buffer.shape != (numel,):
                stored_numel = f"{buffer.numel():,}" if isinstance(buffer, torch.Tensor) else "no"
                raise CheckpointError(
                    f"{file.path}: the buffer {buffer_names[state_type]} of the model chunk {key} has {stored_numel} elements, but "
                    f"the parameters need {numel:,}: the checkpoint is damaged, or from another model. {WEIGHTS_ONLY_HINT}"
                )
        offsets, shapes = dict(iter_joined_offsets(buckets)), {param.name: param.shape for param in chunk_params}
        chunk_states[key] = {
            state_type: {name: buffer[offsets[name] :][: math.prod(shape)].view(shape) for name, shape in shapes.items()}
            for state_type, buffer in flat_buffers.items()
            if buffer is not None
        }
    return chunk_states


def _get_param_states(file: TorchFile, params: dict[str, list[FlatParam]], args: Namespace) -> dict[str, _StateTensors]:
    """Return the main parameters and moments of every model chunk, for an optimizer that stores the state of each parameter
    separately.

    Args:
        file: file of the rank.
        params: parameters of each model chunk on the rank, by the chunk's key.
        args: arguments of the run.

    Returns:
        The tensors by key of the chunk, type of state (`WEIGHT` or a moment) and Megatron-LM parameter name.
    """
    optimizer = file.content["optimizer"]
    inner_optimizer, main_params = optimizer.get("optimizer", optimizer), optimizer.get("fp32_from_fp16_params")
    remaining = [(key, param) for key, chunk_params in params.items() for param in chunk_params]
    chunk_states: dict[str, _StateTensors] = {key: {} for key in params}
    for group_index, group in enumerate(inner_optimizer["param_groups"]):
        members = [(key, param) for key, param in remaining if _get_param_group_key(param, args) == _get_group_key(group, args)]
        remaining = [entry for entry in remaining if entry not in members]
        if len(members) != len(group["params"]):
            raise CheckpointError(
                f"{file.path}: parameter group {group_index} of the optimizer has {len(group['params'])} parameters. "
                f"According to the arguments of the run (args), {len(members)} parameters of the model belong to this "
                f"group (equal weight decay and learning rate). The arguments do not describe the model or the settings of this "
                f"optimizer. {WEIGHTS_ONLY_HINT}"
            )
        for position, ((key, param), param_index) in enumerate(zip(members, group["params"], strict=True)):
            state = inner_optimizer["state"].get(param_index, {})
            tensors = {state_type: state.get(state_type) for state_type in MOMENTS}
            if main_params is not None:
                tensors[WEIGHT] = main_params[group_index][position]
            for state_type, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != param.shape:
                    raise CheckpointError(
                        f"{file.path}: {state_type} of parameter {param_index} in the optimizer is missing or does not have the "
                        f"shape of {param.name}, to which this state should belong. The checkpoint is damaged, or from another "
                        f"model. {WEIGHTS_ONLY_HINT}"
                    )
                chunk_states[key].setdefault(state_type, {})[param.name] = tensor
    if remaining:
        raise CheckpointError(
            f"{file.path}: no parameter group of the optimizer contains the parameter {remaining[0][1].name}. The checkpoint is "
            f"damaged, or from another model. {WEIGHTS_ONLY_HINT}"
        )
    return chunk_states


def _get_param_group_key(param: FlatParam, args: Namespace) -> tuple[bool, bool]:
    """Return the two properties that determine a parameter's group in the optimizer: whether the parameter has weight decay, and
    whether it uses the learning rate of --decoupled-lr."""
    is_decoupled = vars(args).get("decoupled_lr") is not None and param.name in (EMBEDDING_KEY, OUTPUT_KEY)
    return not (param.name.endswith(".bias") or len(param.shape) == 1), is_decoupled


def _get_group_key(group: dict[str, Any], args: Namespace) -> tuple[bool, bool]:
    """Return the two properties that all parameters of an optimizer's parameter group share: whether they have weight decay, and
    whether they use the learning rate of --decoupled-lr.

    A parameter belongs to the group whose properties equal the result of `_get_param_group_key` for the parameter.
    """
    decoupled_lr = vars(args).get("decoupled_lr")
    is_decoupled = decoupled_lr is not None and bool(group.get("is_decoupled_lr") or group.get("max_lr") == decoupled_lr)
    return bool(group.get("wd_mult", group.get("weight_decay"))), is_decoupled
