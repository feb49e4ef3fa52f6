"""Optimizer state of the form `dp_reshardable` in a checkpoint of Megatron-Core: the buckets of flat buffers, as ranks hold them.

There are no names in them. Which parameters a buffer holds follows from the layout of the run, and their order from the model. Both
are found to be right, or refused, by a comparison of main parameters with weights.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.boxes import Box
from megatron.parallel.params import ParamRecord
from megatron.spec.weights import OUTPUT, WORD_EMBEDDING, in_layer
from megatron_lab.foreign.distcp_files import DistcpFiles
from megatron_lab.foreign.flat_buffers import MAIN, FlatParam, refill
from megatron_lab.foreign.megatron_source import MOMENTS, WEIGHTS_ALONE, their_shape

_START = "optimizer.distributed.dp_group_idx_{rank}."
_BUCKET = _START + "gbuf_idx_{chunk}.dtype_{dtype}.bucket_idx_{bucket}.{kind}"
_ATTENTION = ("attention.output", "attention.qkv", "attention.q_norm", "attention.k_norm")
_ORDERS = (
    ("attention_norm", *_ATTENTION, "mlp_norm", "mlp.up", "mlp.down"),
    ("attention.output", "attention_norm", *_ATTENTION[1:], "mlp_norm", "mlp.up", "mlp.down"),
)
"""Orders in which a layer of Megatron-Core declares its modules: with norms of their own, and with those of Transformer Engine."""
_BEFORE, _BEHIND = ("embedding.word", "embedding.position"), ("final_norm", "output")


@dataclass(frozen=True)
class _Piece:
    """A parameter's part on one tensor rank: the tensor of its bucket, without the kind, and its first element there."""

    bucket: str
    start: int


class FlatState:
    """Main parameters and moments out of the buckets.

    Args:
        pieces: of each parameter by tensor rank.
        optimizer: state of the optimizer without tensors.
    """

    def __init__(self, files: DistcpFiles, pieces: Mapping[str, Sequence[_Piece]], padded: int, optimizer: dict[str, Any]) -> None:
        self._files, self._pieces, self._padded, self.optimizer = files, pieces, padded, optimizer

    def dtype(self, kind: str) -> torch.dtype:
        """The dtype of main parameters (`WEIGHT`) or of a moment."""
        return self._files.tensors[f"{self._pieces[WORD_EMBEDDING][0].bucket}{_theirs(kind)}"].dtype

    def read(self, kind: str, record: ParamRecord, box: Box) -> torch.Tensor:
        """A box of a main parameter or a moment; a new contiguous tensor."""
        found = torch.empty(box.sizes, dtype=self.dtype(kind))
        pieces = self._pieces[record.name] if record.splits else self._pieces[record.name][:1]
        local = local_shape(record, len(pieces), self._padded)
        for rank, piece in enumerate(pieces):
            offsets = [0] * len(local)
            for split in record.splits:
                offsets[split.dim] = rank * local[split.dim]
            held = Box(tuple(offsets), tuple(local))
            if (common := held.intersect(box)) is not None:
                flat = self._files.read(f"{piece.bucket}{_theirs(kind)}", Box((piece.start,), (held.numel,)))
                found[common.relative_to(box).index] = flat.view(local)[common.relative_to(held).index]
        return found


def find_buffers(
    files: DistcpFiles, args: Namespace, records: Mapping[str, ParamRecord], weight: Callable[[str], torch.Tensor], padded: int
) -> FlatState:
    """The state of every parameter.

    Args:
        weight: reads a parameter.
        padded: rows of the word embedding with padding.

    Raises:
        CheckpointError: the buckets do not hold the parameters in any order that is known.
    """
    problem = "no layer in them is as the weights say"
    for order in _ORDERS:
        try:
            state = FlatState(files, _pieces(files, args, records, order, padded), padded, _beside(files))
        except ValueError as error:
            problem = str(error)
            continue
        first = [record for record in records.values() if in_layer(record.name)[0] in (None, 0)]
        if all(_agrees(state, record, weight(record.name)) for record in first):
            return state
    raise CheckpointError(
        f"{files.folder}: its optimizer state lies in flat buffers (dp_reshardable), and what is in them cannot be told "
        f"({problem}). Load and save it with Megatron-LM's --dist-ckpt-optim-fully-reshardable. {WEIGHTS_ALONE}"
    )


def _agrees(state: FlatState, record: ParamRecord, weight: torch.Tensor) -> bool:
    return torch.equal(state.read(WEIGHT, record, Box.whole(record.shape)).to(weight.dtype), weight)


def _theirs(kind: str) -> str:
    return MAIN if kind == WEIGHT else kind


def local_shape(record: ParamRecord, ranks: int, padded: int) -> list[int]:
    """The shape of a parameter's part on one of so many tensor ranks, with padding."""
    shape = list(record.shape)
    for split in record.splits:
        shape[split.dim] = (padded if split.padded_size is not None else shape[split.dim]) // ranks
    return shape


def _beside(files: DistcpFiles) -> dict[str, Any]:
    """What the first rank says of the optimizer beside tensors."""
    found = {}
    for name in files.objects:
        start, _, rest = name.partition(_START.format(rank=0))
        if not start and rest and (key := rest.partition("/")[0]) in ("optimizer", "grad_scaler"):
            content = files.read_object(name)
            found[key] = content[0] if isinstance(content, list) and content else content
    return found


def _pieces(
    files: DistcpFiles, args: Namespace, records: Mapping[str, ParamRecord], order: Sequence[str], padded: int
) -> dict[str, list[_Piece]]:
    """Where each parameter lies, on every tensor rank.

    Raises:
        ValueError: not in these buckets.
    """
    tensor, stages, virtual = (
        vars(args).get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline", "virtual_pipeline")
    )
    found: dict[str, list[_Piece]] = {}
    used = set()
    for depth, names in enumerate(_chunks(records, order, stages * virtual)):
        chunk, stage = divmod(depth, stages)
        shared = OUTPUT not in records and stages > 1
        params = [
            FlatParam(
                name,
                tuple(their_shape(records[name], local_shape(records[name], tensor, padded))),
                alone=shared and name == WORD_EMBEDDING,
            )
            for name in names
        ]
        if shared and depth == stages * virtual - 1:  # the copy for the output layer
            word = local_shape(records[WORD_EMBEDDING], tensor, padded)
            params.append(replace(FlatParam(OUTPUT, tuple(word)), alone=True))
        for rank in range(tensor):
            buckets = list(_buckets(files, stage * tensor + rank, chunk))
            used |= {f"{bucket}{kind}" for bucket in buckets for kind in (MAIN, *MOMENTS)}
            numels = [files.tensors[f"{bucket}{MAIN}"].shape[0] for bucket in buckets]
            for bucket, content in zip(buckets, refill(params, numels), strict=True):
                for name, start in content.starts.items():
                    found.setdefault(name, []).append(_Piece(bucket, start))
    if others := {name for name in files.tensors if name.startswith("optimizer.")} ^ used:
        raise ValueError(f"{sorted(others)[0]} and {len(others) - 1} others are not what a run of its layout saves")
    return found


def _buckets(files: DistcpFiles, rank: int, chunk: int) -> Iterator[str]:
    """The names of the buckets of a buffer, without kind."""
    start = _START.format(rank=rank) + f"gbuf_idx_{chunk}.dtype_"
    dtypes = {name[len(start) :].partition(".bucket_idx_")[0] for name in files.tensors if name.startswith(start)}
    if len(dtypes) != 1:
        raise ValueError(f"{len(dtypes)} buffers of chunk {chunk} of model-parallel rank {rank}")
    (dtype,) = dtypes
    bucket = 0
    while True:
        name = _BUCKET.format(rank=rank, chunk=chunk, dtype=dtype, bucket=bucket, kind="")
        if f"{name}{MAIN}" not in files.tensors:
            return
        yield name
        bucket += 1


def _chunks(records: Mapping[str, ParamRecord], order: Sequence[str], number: int) -> Iterator[list[str]]:
    """The parameters of each chunk in the order of their declaration, all chunks with as many layers."""
    layers = 1 + max(layer for name in records if (layer := in_layer(name)[0]) is not None)
    if layers % number:
        raise ValueError(f"{layers} layers on {number} chunks")
    each = layers // number

    def of(modules: Sequence[str], start: str = "") -> list[str]:
        wanted = (f"{start}{module}.{part}" for module in modules for part in ("weight", "bias"))
        return [name for name in wanted if name in records]

    for depth in range(number):
        inside = [name for layer in range(depth * each, (depth + 1) * each) for name in of(order, f"layers.{layer}.")]
        yield [*(of(_BEFORE) if depth == 0 else []), *inside, *(of(_BEHIND) if depth == number - 1 else [])]
