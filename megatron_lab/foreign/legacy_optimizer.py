"""Optimizer state in Megatron-LM's checkpoints of the format `torch`: which tensor belongs to which parameter.

It has no names: parameters stand there by their number, or in flat buffers. Numbers and places follow from the order in which the
model declares its parameters, which is that of its state in the same file.
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
from megatron_lab.foreign.flat_buffers import MAIN, FlatParam, lay_out, most_elements, places
from megatron_lab.foreign.legacy_files import LegacyChunk, RankFiles, chunk_keys, open_file
from megatron_lab.foreign.megatron_source import LEFT_OUT, MOMENTS, OUTPUT, WEIGHTS_ALONE, WORD
from megatron_lab.foreign.torch_file import TorchFile

OPTIMIZER_FILE = "distrib_optim.pt"
"""The file beside each model_optim_rng.pt that holds the state of a sharded optimizer."""

_ByKind = dict[str, dict[str, torch.Tensor]]
"""Tensors of a chunk by kind (`WEIGHT`, a moment) and by their name of the parameter."""


def optimizer_chunks(args: Namespace, files: RankFiles, chunks: Sequence[LegacyChunk]) -> dict[str, list[LegacyChunk]]:
    """Main parameters and moments in the form of the chunks of weights. Without `WEIGHT` the parameters are the main ones.

    Raises:
        CheckpointError: the state does not fit the parameters, or lies in a form that has no names and no order.
        DamagedCheckpointError: a file is missing or damaged.
    """
    found: dict[tuple[int, int], tuple[TorchFile, dict[str, _ByKind]]] = {}
    for key, file in files.items():
        params = {name: list(_params(file.content[name], args)) for name in chunk_keys(file)}
        beside = file.path.parent / OPTIMIZER_FILE
        if beside.exists() or vars(args).get("use_distributed_optimizer"):
            sharded = open_file(beside)
            found[key] = sharded, _from_buffers(sharded, params, args, stage=key[1])
        else:
            found[key] = file, _by_number(file, params, args)
    kinds = (*MOMENTS, *([WEIGHT] if WEIGHT in next(iter(found[0, 0][1].values())) else []))

    def of(chunk: LegacyChunk, kind: str) -> LegacyChunk:
        ranks = (found[tensor, chunk.stage] for tensor in range(len(chunk.states)))
        return replace(chunk, states=[(file, state[chunk.key][kind]) for file, state in ranks], expected=set())

    return {kind: [of(chunk, kind) for chunk in chunks] for kind in kinds}


def _params(state: dict[str, Any], args: Namespace) -> Iterator[FlatParam]:
    """The parameters of a chunk on one rank, in the order of their declaration."""
    tied = not vars(args).get("untie_embeddings_and_output_weights")
    shared = tied and (vars(args).get("pipeline_model_parallel_size") or 1) > 1
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and not name.endswith(LEFT_OUT):
            yield FlatParam(name, tuple(tensor.shape), alone=shared and name in (WORD, OUTPUT))


def _from_buffers(file: TorchFile, params: dict[str, list[FlatParam]], args: Namespace, stage: int) -> dict[str, _ByKind]:
    """The tensors of every chunk out of its flat buffers."""
    if not file.content.get("buckets_coalesced"):
        raise CheckpointError(
            f"{file.path} is of Megatron-Core before 0.7, which did not say where its buckets end: load and save it with a newer "
            f"one. {WEIGHTS_ALONE}"
        )
    found: dict[str, _ByKind] = {}
    for number, (key, some) in enumerate(params.items()):
        by_dtype = file.content.get(number)
        if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
            raise CheckpointError(
                f"{file.path} has no one buffer for {key}: parameters of several dtypes are not read. {WEIGHTS_ALONE}"
            )
        (buffers,) = by_dtype.values()
        total = sum(param.numel for param in some)
        buckets = lay_out(some, most_elements(args, stage, number, total))
        kinds = {WEIGHT: MAIN, **{kind: kind for kind in MOMENTS}}
        flat = {kind: buffers.get(theirs) if isinstance(buffers, dict) else None for kind, theirs in kinds.items()}
        numel = sum(bucket.numel for bucket in buckets)
        for kind, buffer in flat.items():
            if not isinstance(buffer, torch.Tensor) or buffer.shape != (numel,):
                held = f"{buffer.numel():,}" if isinstance(buffer, torch.Tensor) else "no"
                raise CheckpointError(
                    f"{file.path}: the buffer {kinds[kind]} of {key} has {held} elements, and the parameters take {numel:,}. "
                    f"{WEIGHTS_ALONE}"
                )
        starts, shapes = dict(places(buckets)), {param.name: param.shape for param in some}
        found[key] = {
            kind: {name: buffer[starts[name] :][: math.prod(shape)].view(shape) for name, shape in shapes.items()}
            for kind, buffer in flat.items()
            if buffer is not None
        }
    return found


def _by_number(file: TorchFile, params: dict[str, list[FlatParam]], args: Namespace) -> dict[str, _ByKind]:
    """The tensors of all chunks where the optimizer has one state a parameter."""
    optimizer = file.content["optimizer"]
    inner, mains = optimizer.get("optimizer", optimizer), optimizer.get("fp32_from_fp16_params")
    every = [(key, param) for key, some in params.items() for param in some]
    found: dict[str, _ByKind] = {key: {} for key in params}
    for number, group in enumerate(inner["param_groups"]):
        members = [(key, param) for key, param in every if _kind_of(param, args) == _kind_of_group(group, args)]
        every = [one for one in every if one not in members]
        if len(members) != len(group["params"]):
            raise CheckpointError(
                f"{file.path}: group {number} of the optimizer has {len(group['params'])} parameters, and {len(members)} have its "
                f"weight decay and rate. {WEIGHTS_ALONE}"
            )
        for place, ((key, param), index) in enumerate(zip(members, group["params"], strict=True)):
            state = inner["state"].get(index, {})
            tensors = {kind: state.get(kind) for kind in MOMENTS}
            if mains is not None:
                tensors[WEIGHT] = mains[number][place]
            for kind, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != param.shape:
                    raise CheckpointError(f"{file.path}: {kind} of parameter {index} is not that of {param.name}. {WEIGHTS_ALONE}")
                found[key].setdefault(kind, {})[param.name] = tensor
    if every:
        raise CheckpointError(f"{file.path}: no group of the optimizer has {every[0][1].name}. {WEIGHTS_ALONE}")
    return found


def _kind_of(param: FlatParam, args: Namespace) -> tuple[bool, bool]:
    """Whether a parameter decays, and whether it has the rates of --decoupled-lr."""
    decoupled = vars(args).get("decoupled_lr") is not None and param.name in (WORD, OUTPUT)
    return not (param.name.endswith(".bias") or len(param.shape) == 1), decoupled


def _kind_of_group(group: dict[str, Any], args: Namespace) -> tuple[bool, bool]:
    rate = vars(args).get("decoupled_lr")
    decoupled = rate is not None and bool(group.get("is_decoupled_lr") or group.get("max_lr") == rate)
    return bool(group.get("wd_mult", group.get("weight_decay"))), decoupled
