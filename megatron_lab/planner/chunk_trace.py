"""What the operations on one microbatch of a chunk do: the bytes that stay between forward and backward, those that are freed
within, and those sent over the tensor group. They are found by running the chunk (`ChunkRun`) on tensors without memory.

Only a few of equal segments (mostly single layers) with equal neighbours are run: the first two and the last. What happened in the
second stands for those between. That is exact, since each of them begins and ends as it does. The chunks of a loss are the same
case (`few_turns`), and so is an operation on shapes on which it ran before (`known_ops.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron.attention.backends import BLOCK_BY_BLOCK
from megatron.attention.largest import LargestScores
from megatron.config.data import DataConfig
from megatron.config.memory import RecomputeModule
from megatron.config.model import LoraTarget, ModelConfig
from megatron.config.parallel import ContextWay
from megatron.config.precision import Fp8, PrecisionConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.data_parallel.traffic import axes_in_words
from megatron.memory.host import HostBuffer, HostMemory
from megatron.memory.recompute import Kept, keeping
from megatron.model.build import Model
from megatron.model.experts import Experts
from megatron.model.gpt import GPTChunk
from megatron.moe.balance import Balance
from megatron.parallel.accumulate import GradSink, deferring
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.layers import LayerSpec, alike, layers
from megatron.spec.operations import OpKind
from megatron.spec.segments import Segment
from megatron.spec.weights import LORA_B, model_weights
from megatron.tensor_parallel.chunked_loss import few_turns
from megatron.tensor_parallel.cross_entropy import minimised
from megatron_lab.planner.cpu_kernels import CpuKernels
from megatron_lab.planner.kernel_memory import CudaKernels
from megatron_lab.planner.planned_inputs import PlaceOfDocuments, PlannedDocuments, make_inputs
from megatron_lab.planner.storages import MemorySpan, StorageLedger, joined

_VARIED_LENGTHS = "torch_attn::_varlen_attn"
_ATTENTION = {
    _VARIED_LENGTHS: "flash attention over documents or in windows",
    "aten::_flash_attention_forward": "flash attention in parts",
    "aten::_scaled_dot_product_flash_attention": "flash attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "the CPU's flash attention",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN's attention",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "aten::_safe_softmax": "attention by plain products, which keeps its probabilities",
    "aten::log_": BLOCK_BY_BLOCK,  # only `block_attention` calls it in this form
}


@dataclass(frozen=True)
class ChunkTrace:
    """What the operations on one microbatch do."""

    ops: dict[OpKind, MemorySpan]
    """One entry for each kind of operation in the schedule. Its memory is without what it received and what it gives to another
    chunk."""
    attention: str
    """The kernel that computes attention, in words; empty without layers."""
    kept_of_documents: frozenset[PlaceOfDocuments]
    """What attention keeps of where documents lie."""
    leaving: int = 0
    """Bytes that the forward has moved to the host last: they are free on the device when the next operation has ended."""
    fetched: dict[OpKind, int] = field(default_factory=dict)
    """Bytes that come back to the device for an operation while the one before it runs."""
    away: tuple[tuple[int, ...], ...] = ()
    """Bytes of each storage that is moved to the host, for each layer that is chosen for that, in the order of the forward."""
    last_remade_ahead: bool = False
    """Whether the last of these runs again in an operation of its own."""
    soon: ChunkTrace | None = None
    """The same for a microbatch that comes back so soon that its last chosen layer stays on the device."""


def _first_products(model: ModelConfig) -> list[str]:
    """The weights of a layer, one of which is the first to get a gradient of those that are put off."""
    if model.lora_rank is None:
        return ["mlp.down.weight", "mlp.experts.down.weight"]
    last = [target for target in get_args(LoraTarget) if target in model.lora_targets][-1]
    return [f"{last}.{LORA_B}"]


class _CountedHost(HostMemory):
    """Takes no memory; what comes back does."""

    def move(self, source: torch.Tensor) -> HostBuffer:
        """See `HostMemory`."""
        return HostBuffer(source.new_empty(0))

    def moved(self) -> None:
        """See `HostMemory`."""

    def bring(self, buffers: Sequence[HostBuffer], sizes: Sequence[int]) -> tuple[list[torch.Tensor], None]:
        """See `HostMemory`."""
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes], None

    def wait(self, mark: object) -> None:
        """See `HostMemory`."""


Traces = dict[object, ChunkTrace]
"""Traces by kind of chunk."""


def trace_chunks(
    model: Model,
    data: DataConfig,
    micro_batch_size: int,
    context: ParallelContext,
    *,
    splits_backward: bool,
    device_type: str,
    cache: Traces | None = None,
    expert_imbalance: float = 1.0,
) -> dict[int, ChunkTrace]:
    """Trace each chunk of this rank; the keys are chunk indices.

    Args:
        model: this rank's part; its parameters may be on the meta device.
        context: its groups' collectives return at once.
        splits_backward: whether the schedule defers weight gradients.
        device_type: type of the job's devices, cpu or cuda, whatever this machine has.
        cache: traces made before with these settings, by kind of chunk.
        expert_imbalance: how many times the mean of choices the experts of this rank are taken to get.
    """
    cache = {} if cache is None else cache
    found, kinds = {}, layer_kinds(model.config, model.precision, model.context_ways)
    for index in model.chunks:
        chunk = model.layer_table[index]
        key = kind_of(chunk, kinds)
        if key not in cache:
            trace = partial(_trace, model, data, micro_batch_size, context, chunk, splits_backward, device_type, expert_imbalance)
            cache[key] = trace()
            if any(segment.offloaded for segment in chunk.segments):
                cache[key] = replace(cache[key], soon=trace(back_soon=True))
        found[index] = cache[key]
    return found


LayerKind = tuple[LayerSpec, Fp8 | None, ContextWay | None, int | None]
"""What a layer is, how it computes in 8 bits, how context ranks share its keys and values, and of which depth of multi-token
prediction it is."""


def layer_kinds(model: ModelConfig, precision: PrecisionConfig, ways: Sequence[ContextWay] = ()) -> list[LayerKind]:
    """The kind of each layer of the model, and of each depth behind them."""
    specs = layers(model)
    each: Sequence[ContextWay | None] = ways or [None] * len(specs)
    found = [
        (spec, precision.fp8_of(layer, len(specs)), way, None) for layer, (spec, way) in enumerate(zip(specs, each, strict=True))
    ]
    return [*found, *((*found[-1][:3], k) for k in range(model.mtp_num_layers))]


SegmentKind = tuple[tuple[LayerKind, ...], frozenset[RecomputeModule], bool, bool, str]
"""What a segment is: its layers, the parts of each that are computed again, whether the layers as a whole are run again in
backward, whether that is done ahead of it, and of those moved to the host, which it is: the last may stay, and of the first a
received input does."""


def kind_of(chunk: Chunk, kinds: Sequence[LayerKind]) -> tuple[bool, bool, tuple[SegmentKind, ...]]:
    """What is the same for chunks that are alike but for the numbers of their layers.

    Args:
        kinds: those of all layers of the model.
    """
    again = [segment for segment in chunk.segments if segment.recomputed]
    moved = [segment for segment in chunk.segments if segment.offloaded]
    segments = (
        (
            tuple(kinds[layer] for layer in segment.layers),
            segment.selective,
            segment.recomputed,
            segment in again[-1:],
            "last" if segment in moved[-1:] else "first" if segment in moved[:1] else "moved" if segment in moved else "",
        )
        for segment in chunk.segments
    )
    return chunk.first, chunk.last, tuple(segments)


def _trace(
    model: Model,
    data: DataConfig,
    micro_batch_size: int,
    context: ParallelContext,
    chunk: Chunk,
    splits: bool,
    device_type: str,
    expert_imbalance: float,
    *,
    back_soon: bool = False,
) -> ChunkTrace:
    on_cuda = device_type == "cuda"
    stand_ins = segments_that_stand(kind_of(chunk, layer_kinds(model.config, model.precision, model.context_ways))[-1])
    run = sorted(set(stand_ins))
    shared = ((group.process_group, "cp") for group in (context.context_group, *context.context_rings))
    wider = ((context.group(*axes).process_group, axes_in_words(axes, context)) for axes in (("tp", "cp"), ("etp", "ep")))
    ledger = StorageLedger([(context.group("tp").process_group, "tp"), *shared, *wider])
    with CudaKernels() if on_cuda else CpuKernels(), ledger, few_turns(ledger.repeated):
        device = torch.device("meta" if on_cuda else device_type)
        chunk_run = ChunkRun(
            model, data, micro_batch_size, context, chunk, [chunk.segments[place] for place in run], ledger, device
        )
        chunk_run.let_experts_get(expert_imbalance)
        chunk_run.run(splits=splits, back_soon=back_soon)
    ops: dict[OpKind, MemorySpan] = {}
    for kind, spans in chunk_run.spans.items():
        if kind is OpKind.RECOMPUTE:  # it runs one segment, in one span
            ops[kind] = joined(spans)
            continue
        step = 1 if kind is OpKind.FORWARD else -1
        of_segment = dict(zip(run[::step], spans[1:], strict=True))
        ops[kind] = joined([spans[0], *(of_segment[place] for place in stand_ins[::step])])
    attention = ", ".join(words for name, words in _ATTENTION.items() if name in ledger.kernels)
    moved = iter(chunk_run.away)
    of_moved = {place: next(moved) for place in run if chunk.segments[place].offloaded}
    return ChunkTrace(
        ops,
        attention,
        chunk_run.kept_of_documents,
        chunk_run.leaving,
        chunk_run.fetched,
        tuple(of_moved[stand_ins[place]] for place, segment in enumerate(chunk.segments) if segment.offloaded),
        chunk_run.last_remade_ahead,
    )


def segments_that_stand(specs: Sequence[Hashable]) -> list[int]:
    """For each segment of a chunk, the index of the one that is run in its place, perhaps itself.

    The longest stretch of segments is left out whose neighbours fit together as they do in the whole. So each segment that is run
    has the neighbours that it has in the whole. For each one that is left out, one with the same neighbours is run, the second of
    its kind. The first and the last of each kind are run: they may be the first and the last to use what several layers share.
    """
    kinds = [list(alike(specs)).index(spec) for spec in specs]
    around = list(zip((*kinds[:1], *kinds), kinds, (*kinds[1:], *kinds[-1:]), strict=False))
    lasts = [places[-1] for places in alike(kinds).values()]
    longest = range(0)
    for begin in range(1, len(kinds)):
        second = {key: places[1] for key, places in alike(around[:begin]).items() if len(places) > 1}
        latest = min(last for last in lasts if last >= begin)
        end = begin
        while end < latest and around[end] in second:
            end += 1
        while kinds[begin - 1 : begin + 1] != kinds[end - 1 : end + 1]:
            end -= 1
        if end - begin > len(longest):
            longest, stand_ins = range(begin, end), [second[key] for key in around[begin:end]]
    if longest:
        return [*range(longest.start), *stand_ins, *range(longest.stop, len(kinds))]
    return list(range(len(kinds)))


class ChunkRun:
    """A chunk with parameters, gradients and inputs. All of it lives before the first operation, so none of it is counted.

    The spans of each operation are cut where a segment begins, in its own order: what comes before the first one that runs, that
    segment, and so on; the last span ends with the operation.

    Args:
        segments: those of the chunk that run.
        ledger: entered, on top of what makes tensors of `device` take no memory.
    """

    def __init__(
        self,
        model: Model,
        data: DataConfig,
        micro_batch_size: int,
        context: ParallelContext,
        chunk: Chunk,
        segments: Sequence[Segment],
        ledger: StorageLedger,
        device: torch.device,
    ) -> None:
        self._ledger = ledger
        table = ParamTable()
        weights = {weight.name: weight for weight in model_weights(model.config, model.vocab_size)}
        scope = Scope(
            context,
            table,
            weights,
            model.dtype,
            model.sequence_parallel,
            model.overlap,
            context_ways=model.context_ways,
            gathers_tokens=model.gathers_tokens,
            lora_scale=model.config.lora_scale,
            chunk=chunk.index,
            num_chunks=chunk.num_chunks,
        )
        self._module = GPTChunk(scope, model.config, chunk, segments, loss=model.loss, precision=model.precision)
        self._largest = None if model.largest is None else LargestScores.of(model.config, model.dtype, device)
        if self._largest is not None:
            self._module.watch_scores(self._largest)
        self._balance: Balance | None = None
        if model.balance is not None:
            self._balance = Balance(model.config, context.sequence_group, device)
            self._module.watch_routers(self._balance)
        if device.type != "meta":
            materialize(self._module, table, device)
        for entry in table:
            if entry.record.frozen:
                continue
            dtype = main_grad_dtype(entry.param.dtype)
            provide = partial(torch.empty, entry.param.shape, dtype=dtype, device=device)
            sink = GradSink(dtype, partial(self._wrote, entry.record.name), provide)
            sink.main_grad = provide()
            entry.param.grad_sink = sink  # type: ignore[attr-defined]
        self._inputs = make_inputs(model, data, micro_batch_size, context.context_group, device)
        hidden = model.boundary(micro_batch_size, context.topology)["hidden"]
        boundary = partial(torch.empty, hidden.shape, dtype=hidden.dtype, device=device)
        self._received = None if chunk.first else boundary(requires_grad=True)
        self._gradient = None if chunk.last else boundary()
        self._scale = torch.ones((), dtype=torch.promote_types(model.dtype, torch.float32), device=device)
        self.spans: dict[OpKind, list[MemorySpan]] = {}
        """The spans of each operation that has run."""
        self.leaving, self.last_remade_ahead = 0, False
        self.fetched: dict[OpKind, int] = {}
        self.away: list[tuple[int, ...]] = []
        """As in `ChunkTrace`, of the segments that run."""
        self._host = _CountedHost(device)
        self._kind = OpKind.FORWARD
        modules: list[nn.Module] = [*self._module.layers, *([] if self._module.mtp is None else self._module.mtp.depths)]
        numbers = [segment.layers[-1] for segment in segments]
        own = [f"mtp.{k - model.config.num_layers}.layer" if k >= model.config.num_layers else f"layers.{k}" for k in numbers]
        self._first_products = {f"{name}.{product}" for name in own for product in _first_products(model.config)}
        place = 0
        for segment in segments:
            modules[place].register_forward_pre_hook(self._cut)
            place += len(segment.layers)
            modules[place - 1].register_forward_hook(self._after_segment)

    def let_experts_get(self, imbalance: float) -> None:
        """Let the experts of this rank get so many times the mean of choices."""
        for module in self._module.modules():
            if isinstance(module, Experts):
                module.dispatcher = replace(module.dispatcher, planned=imbalance)

    def run(self, *, splits: bool, back_soon: bool) -> None:
        """Run all operations.

        Args:
            splits: backward is an input gradient and a weight gradient, as in zero-bubble schedules.
            back_soon: the last layer that is chosen to be moved to the host stays.
        """
        with contextlib.nullcontext() if self._balance is None else self._balance.watching(1.0):
            self._run(splits, back_soon)

    def _run(self, splits: bool, back_soon: bool) -> None:
        backward = OpKind.INPUT_GRAD if splits else OpKind.BACKWARD
        kept = Kept(host=self._host, back_soon=back_soon, living=[] if self._received is None else [self._received])
        watching = contextlib.nullcontext() if self._largest is None else self._largest.watching()
        with self._operation(OpKind.FORWARD), keeping(kept), watching:
            out = self._module(self._inputs, self._received)
            # As the executor does: only the gradient edge is kept.
            edge = get_gradient_edge(out if self._gradient is not None else minimised(out) * self._scale)
            del out
        self.away = [tuple(layer.sizes) for layer in kept.layers]
        self.last_remade_ahead = bool(kept.layers) and kept.layers[-1].remade_ahead
        self.leaving = -self._change(kept.settle)
        if kept.remakes:
            self.fetched[OpKind.RECOMPUTE] = self._change(partial(kept.fetch, for_remake=True))
            with self._operation(OpKind.RECOMPUTE):
                kept.remake_last()
        self.fetched[backward] = self._change(partial(kept.fetch, for_remake=False))
        with (
            self._operation(backward),
            deferring() if splits else contextlib.nullcontext() as deferred,
        ):
            torch.autograd.backward([edge], [self._gradient])
            del edge  # as the executor does: with it goes what operations hold beside saved tensors
            if self._received is not None:
                self._received.grad = None  # on its way to the chunk before: counted with the messages
        if deferred is not None:
            with self._operation(OpKind.WEIGHT_GRAD):
                deferred.run()

    @property
    def kept_of_documents(self) -> frozenset[PlaceOfDocuments]:
        """As in `ChunkTrace`."""
        documents = self._inputs.documents
        return frozenset(documents.asked) if isinstance(documents, PlannedDocuments) else frozenset()

    def _change(self, action: Callable[[], None]) -> int:
        """Bytes alive after it less those alive before."""
        self._ledger.cut()
        action()
        return self._ledger.cut().change

    @contextlib.contextmanager
    def _operation(self, kind: OpKind) -> Iterator[None]:
        self._ledger.cut()
        self._kind, self.spans[kind] = kind, []
        yield
        self._cut()

    def _cut(self, *_: object) -> None:
        self.spans[self._kind].append(self._ledger.cut())

    def _after_segment(self, block: object, inputs: object, out: torch.Tensor) -> None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(self._cut)  # backward enters the segment where forward left it

    def _wrote(self, name: str) -> None:
        if self._kind is OpKind.WEIGHT_GRAD and name in self._first_products:
            self._cut()
