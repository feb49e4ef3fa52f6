"""What the operations on one microbatch of a chunk do: what stays between forward and backward, what passes through, what is sent
over the tensor group. Found by running them (`chunk_run`) on tensors without memory.

Identical layers are run once: of a chunk of many layers, one of three is run, and what happened in the middle one is repeated. That
is exact, since it begins and ends as every further one would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.config.config import Config
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.partition import Chunk
from megatron.planner.activations.chunk_run import ChunkRun
from megatron.planner.activations.collective_calls import Transfer, added
from megatron.planner.activations.cuda_kernels import CudaKernels
from megatron.planner.activations.storages import Span, StorageLedger, joined
from megatron.spec.operations import OpKind
from megatron.spec.schedules import make_schedule

_LAYERS = 3
_MIDDLE = 2
"""Place of the middle layer's span in every operation."""

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
    config: Config,
    context: ParallelContext,
    *,
    device_type: str = "cuda",
    cache: dict[object, ChunkTrace] | None = None,
) -> dict[int, ChunkTrace]:
    """Of each chunk of this rank, by its index.

    Args:
        model: of this rank; its parameters may be on the meta device.
        context: with groups whose collectives return at once.
        device_type: of the job's devices, cpu or cuda, whatever this machine has.
        cache: kinds of chunks that were traced before for these settings.
    """
    cache = {} if cache is None else cache
    stages = context.topology.pp
    schedule = make_schedule(config.parallel.schedule, stages, 1, len(model.layer_table) // stages)
    splits = any(op.kind is OpKind.INPUT_GRAD for op in schedule.ops[0])
    found = {}
    for index in model.chunks:
        chunk = model.layer_table[index]
        key = (chunk.first, chunk.last, len(chunk.layers))
        if key not in cache:
            cache[key] = _trace(model, config, context, chunk, device_type, splits)
        found[index] = cache[key]
    return found


def _trace(model: Model, config: Config, context: ParallelContext, chunk: Chunk, device_type: str, splits: bool) -> ChunkTrace:
    layers, on_cuda = chunk.layers[:_LAYERS], device_type == "cuda"
    repeats = len(chunk.layers) - len(layers)
    ledger = StorageLedger()
    with CudaKernels() if on_cuda else _CpuKernels(), ledger:
        device = torch.device("meta" if on_cuda else device_type)
        spans = ChunkRun(model, config, context, replace(chunk, layers=layers), ledger, device).run(splits=splits)
    ops = {kind: _op(joined(_repeated(some, repeats)), context) for kind, some in spans.items()}
    attention = ", ".join(words for name, words in _ATTENTION.items() if name in ledger.kernels)
    sorts = config.data.reset_attention_mask and _VARIED_LENGTHS not in ledger.kernels
    return ChunkTrace(ops, device_type, attention, sorts)


def _repeated(spans: list[Span], times: int) -> list[Span]:
    """With so many more layers in the middle."""
    return spans[:_MIDDLE] + spans[_MIDDLE : _MIDDLE + 1] * (1 + times) + spans[_MIDDLE + 1 :]


def _op(whole: Span, context: ParallelContext) -> OpTrace:
    tensor_group = context.group("tp").process_group
    assert all(call.group == tensor_group for call in whole.calls), "a layer communicates outside of its tensor group"
    return OpTrace(whole.peak, whole.change, tuple(added(Transfer("tp", call.operation, 1, call.bytes) for call in whole.calls)))
