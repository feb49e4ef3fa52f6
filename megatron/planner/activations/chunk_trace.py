"""What the operations on one microbatch of a chunk do: what stays between forward and backward, what passes through, what is sent
over the tensor group. Found by running them (`chunk_run`) on tensors without memory.

Of layers that are alike and lie between alike ones, few are run: of equal layers the first two and the last. What happened in the
second stands for those between: that is exact, since they begin and end as it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.config.data import DataConfig
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.partition import Chunk
from megatron.planner.activations.chunk_run import ChunkRun
from megatron.planner.activations.collective_calls import Transfer, added
from megatron.planner.activations.cuda_kernels import CudaKernels
from megatron.planner.activations.storages import Span, StorageLedger, joined
from megatron.spec.layers import LayerSpec, alike, layers
from megatron.spec.operations import OpKind

_VARIED_LENGTHS = "torch_attn::_varlen_attn"
_ATTENTION = {
    _VARIED_LENGTHS: "flash attention over documents of different lengths",
    "aten::_scaled_dot_product_flash_attention": "flash attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "the CPU's flash attention",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "aten::_safe_softmax": "attention by plain products, which keeps its probabilities",
}


@dataclass(frozen=True)
class OpTrace:
    """What one operation does on one rank."""

    peak: int
    """Bytes above those that were alive when it began, at most."""
    change: int
    """Bytes alive at its end less those at its begin, without what it received and what it gives to another chunk."""
    transfers: tuple[Transfer, ...]
    """Over the tensor group."""


@dataclass(frozen=True)
class ChunkTrace:
    """What the operations on one microbatch do."""

    ops: dict[OpKind, OpTrace]
    """Of the kinds that the schedule has."""
    device_type: str
    """Of the job's devices."""
    attention: str
    """In words: the kernel that is taken to compute attention; empty without layers."""
    sorts_documents: bool
    """Attention keeps the order of the tokens by the lengths of their documents."""


class _CpuKernels(FakeTensorMode):
    """While it is entered, tensors of the CPU have no memory."""

    @property
    def avoid_device_init(self) -> bool:
        """No: where CUDA is built in and no GPU is there, torch would put one in its place for good, for which autograd starts a
        thread; and then no process forked from this one could run a backward."""
        return False


def trace_chunks(
    model: Model,
    data: DataConfig,
    micro_batch_size: int,
    context: ParallelContext,
    *,
    splits_backward: bool,
    device_type: str = "cuda",
    cache: dict[object, ChunkTrace] | None = None,
) -> dict[int, ChunkTrace]:
    """Of each chunk of this rank, by its index.

    Args:
        model: of this rank; its parameters may be on the meta device.
        context: with groups whose collectives return at once.
        splits_backward: the schedule puts weight gradients off.
        device_type: of the job's devices, cpu or cuda, whatever this machine has.
        cache: kinds of chunks that were traced before for these settings.
    """
    cache = {} if cache is None else cache
    found, specs = {}, layers(model.config)
    for index in model.chunks:
        chunk = model.layer_table[index]
        key = (chunk.first, chunk.last, tuple(specs[layer] for layer in chunk.layers))
        if key not in cache:
            cache[key] = _trace(model, data, micro_batch_size, context, chunk, device_type, splits_backward)
        found[index] = cache[key]
    return found


def _trace(
    model: Model, data: DataConfig, micro_batch_size: int, context: ParallelContext, chunk: Chunk, device_type: str, splits: bool
) -> ChunkTrace:
    on_cuda = device_type == "cuda"
    specs = layers(model.config)
    stand_ins = layers_that_stand([specs[layer] for layer in chunk.layers])
    run = [chunk.layers[place] for place in sorted(set(stand_ins))]
    ledger = StorageLedger()
    with CudaKernels() if on_cuda else _CpuKernels(), ledger:
        device = torch.device("meta" if on_cuda else device_type)
        spans = ChunkRun(model, data, micro_batch_size, context, chunk, run, ledger, device).run(splits=splits)
    ops = {kind: _op(joined(_of_all(some, stand_ins, kind)), context) for kind, some in spans.items()}
    attention = ", ".join(words for name, words in _ATTENTION.items() if name in ledger.kernels)
    sorts = data.reset_attention_mask and _VARIED_LENGTHS not in ledger.kernels
    return ChunkTrace(ops, device_type, attention, sorts)


def layers_that_stand(specs: Sequence[LayerSpec]) -> list[int]:
    """For each layer of a chunk the place of the one that is run for it, perhaps itself.

    A stretch of layers is left out where what lies before it and behind it fit together as they do in the whole: each layer that is
    run has the neighbours that it has in the whole, and for each that is left out one with the same neighbours is run, the second
    of them. The first and the last layer of each kind are run: they may be the first and the last to use what several share.
    """
    kinds = [list(alike(specs)).index(spec) for spec in specs]
    around = list(zip((*kinds[:1], *kinds), kinds, (*kinds[1:], *kinds[-1:]), strict=False))
    latest = min((places[-1] for places in alike(kinds).values()), default=0)
    for begin in range(1, latest):
        second = {key: places[1] for key, places in alike(around[:begin]).items() if len(places) > 1}
        for end in range(latest, begin, -1):
            if kinds[begin - 1 : begin + 1] == kinds[end - 1 : end + 1] and second.keys() >= set(around[begin:end]):
                return [*range(begin), *(second[key] for key in around[begin:end]), *range(end, len(kinds))]
    return list(range(len(kinds)))


def _of_all(spans: list[Span], stand_ins: Sequence[int], kind: OpKind) -> list[Span]:
    """The spans of an operation on all layers of a chunk, from those on the layers that were run."""
    step = 1 if kind is OpKind.FORWARD else -1
    by_place = dict(zip(sorted(set(stand_ins))[::step], spans[1:], strict=True))
    return spans[:1] + [by_place[place] for place in stand_ins[::step]]


def _op(whole: Span, context: ParallelContext) -> OpTrace:
    tensor_group = context.group("tp").process_group
    assert all(call.group == tensor_group for call in whole.calls), "a layer communicates outside of its tensor group"
    return OpTrace(whole.peak, whole.change, tuple(added(Transfer("tp", call.operation, 1, call.bytes) for call in whole.calls)))
