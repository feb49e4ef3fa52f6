"""Traces of the operations on one microbatch of a model chunk: memory and communication, recorded without allocating memory.

A trace holds the bytes that stay between forward and backward, the temporary bytes, and the bytes sent to other ranks. It is
recorded by running the chunk (`ChunkRun`) on meta or fake tensors (shapes without data).

A chunk consists of segments, mostly of a single layer. Of equal segments with equal neighbors, only the first two and the last run,
and the second represents those in between. This is exact, because the memory state is the same at the start and at the end of each
of them.

Two other repetitions also run only in part: a loss that is computed in chunks of tokens (`sample_iterations`), and operations on
shapes that ran before (`op_cache.py`).
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

from megatron.attention.backends import BLOCKWISE_KERNEL_NAME
from megatron.attention.max_logits import MaxLogitTracker
from megatron.config.data import DataConfig
from megatron.config.memory import RecomputeModule
from megatron.config.model import LoraTarget, ModelConfig
from megatron.config.parallel import CpCommType
from megatron.config.precision import Fp8, PrecisionConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.data_parallel.traffic import format_axes
from megatron.memory.host_buffers import HostBuffer, HostBufferPool
from megatron.memory.recompute import ActivationStore, storing_activations
from megatron.model.build import Model
from megatron.model.experts import MoELayer
from megatron.model.gpt import GPTChunk
from megatron.moe.balance import RouterTracker
from megatron.parallel.accumulate import GradSink, deferring
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.layers import LayerSpec, build_layer_specs, group_equal
from megatron.spec.operations import OpType
from megatron.spec.segments import Segment
from megatron.spec.weights import LORA_B, iter_weights
from megatron.tensor_parallel.chunked_loss import sample_iterations
from megatron.tensor_parallel.cross_entropy import compute_total_loss
from megatron_lab.planner.cpu_kernels import CpuKernels
from megatron_lab.planner.kernel_memory import CudaKernels
from megatron_lab.planner.planned_inputs import DocumentTensor, PlannedDocuments, build_inputs
from megatron_lab.planner.storages import MemorySpan, StorageLedger, join_spans

_VARLEN_ATTENTION = "torch_attn::_varlen_attn"
_ATTENTION_NAMES = {
    _VARLEN_ATTENTION: "flash attention over documents or in windows",
    "aten::_flash_attention_forward": "flash attention in parts",
    "aten::_scaled_dot_product_flash_attention": "flash attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "the CPU's flash attention",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN's attention",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "aten::_safe_softmax": "attention by plain products, which keeps its probabilities",
    "aten::log_": BLOCKWISE_KERNEL_NAME,  # only `block_attention` calls this variant of log
}


@dataclass(frozen=True)
class ChunkTrace:
    """Memory and communication of each operation (forward, backward, ...) on one microbatch of a model chunk."""

    ops: dict[OpType, MemorySpan]
    """Memory and communication of each type of operation in the schedule. Messages from and to other chunks are not
    included."""
    attention_kernel: str
    """Description of the kernel that computes attention in the chunk, for the plan's notes; empty if the chunk has no layers."""
    document_tensors: frozenset[DocumentTensor]
    """Names of the tensors about document boundaries that attention saves for the backward. They count as inputs of the step."""
    leaving_bytes: int = 0
    """Device bytes of the last offloaded layer. When the forward ends, this layer is still being copied to the host; its bytes are
    free when the next operation ends."""
    fetched_bytes: dict[OpType, int] = field(default_factory=dict)
    """Bytes of offloaded activations that are copied back to the device before an operation starts, by type of the operation
    that needs them. The copy runs during the previous operation."""
    offloaded_sizes: tuple[tuple[int, ...], ...] = ()
    """Bytes of each tensor storage that is moved to the host, by offloaded layer in the order of the forward."""
    is_last_recomputed_ahead: bool = False
    """Whether the last offloaded layer of the chunk is recomputed in a separate operation, ahead of the backward."""
    immediate_trace: ChunkTrace | None = None
    """Trace of this chunk for microbatches whose backward directly follows their forward. For these, the last offloaded layer
    stays on
    the device. None if nothing is offloaded."""


def _list_first_deferred_weights(model: ModelConfig) -> list[str]:
    """Return names of weights within a layer, one of which is the first to get its gradient in a weight-gradient operation. By that
    gradient, a trace notices that the operation has reached the next layer."""
    if model.lora_rank is None:
        return ["mlp.down.weight", "mlp.experts.down.weight"]
    last = [target for target in get_args(LoraTarget) if target in model.lora_targets][-1]
    return [f"{last}.{LORA_B}"]


class _CountingHostPool(HostBufferPool):
    """Pool of host buffers that take no memory, for a trace. An offloaded activation thus takes no memory until it is copied back
    to the device."""

    def start_copy_to_host(self, source: torch.Tensor) -> HostBuffer:
        """Return an empty host buffer; nothing is copied."""
        return HostBuffer(source.new_empty(0))

    def record_copies_to_host(self) -> None:
        """Do nothing. In a run, this method returns an event that completes with the copies to the host; here no data is copied."""

    def start_copy_to_device(self, buffers: Sequence[HostBuffer], sizes: Sequence[int]) -> tuple[list[torch.Tensor], None]:
        """Return new device tensors of the given sizes in bytes. The second value is None, because there is no copy to wait for."""
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes], None

    def wait(self, event: object) -> None:
        """Do nothing. In a run, this method lets the device wait for a copy; here no data is copied."""


TraceCache = dict[object, ChunkTrace]
"""Traces by chunk key (`build_chunk_key`)."""


def trace_chunks(
    model: Model,
    data: DataConfig,
    micro_batch_size: int,
    context: ParallelContext,
    *,
    splits_backward: bool,
    device_type: str,
    cache: TraceCache | None = None,
    expert_imbalance: float = 1.0,
) -> dict[int, ChunkTrace]:
    """Run each model chunk of this rank on tensors without data, and record the memory and communication of its operations.

    Args:
        model: model of this rank. Its parameters may be on the meta device.
        context: parallel context with fake process groups, whose collectives return at once.
        splits_backward: whether the schedule defers weight gradients.
        device_type: type of the job's devices, "cpu" or "cuda". This machine may have another type.
        cache: traces of earlier calls with these settings, by chunk key (`build_chunk_key`). New traces are added.
        expert_imbalance: assumed number of token assignments to the experts of this rank, as a multiple of the mean over the ranks.

    Returns:
        Trace of each chunk, by chunk index.
    """
    cache = {} if cache is None else cache
    traces, layer_keys = {}, build_layer_keys(model.config, model.precision, model.cp_comm_types)
    for index in model.chunks:
        chunk = model.layer_table[index]
        key = build_chunk_key(chunk, layer_keys)
        if key not in cache:
            trace = partial(
                _trace_chunk, model, data, micro_batch_size, context, chunk, splits_backward, device_type, expert_imbalance
            )
            cache[key] = trace()
            if any(segment.is_offloaded for segment in chunk.segments):
                cache[key] = replace(cache[key], immediate_trace=trace(is_backward_next=True))
        traces[index] = cache[key]
    return traces


LayerKey = tuple[LayerSpec, Fp8 | None, CpCommType | None, int | None]
"""Everything on which a layer's trace depends: its spec, its FP8 settings, its context-parallel communication type, and its
depth of multi-token prediction (None for the layers of the main model)."""


def build_layer_keys(model: ModelConfig, precision: PrecisionConfig, cp_comm_types: Sequence[CpCommType] = ()) -> list[LayerKey]:
    """Return a key for each layer of the model, followed by a key for each MTP (multi-token prediction) layer. Layers with equal
    keys use equal memory and communicate equally, so that one trace is enough for them.

    Args:
        cp_comm_types: context-parallel communication type of each layer; empty without context parallelism.
    """
    specs = build_layer_specs(model)
    comm_types: Sequence[CpCommType | None] = cp_comm_types or [None] * len(specs)
    layer_keys = [
        (spec, precision.get_fp8(layer, len(specs)), comm_type, None)
        for layer, (spec, comm_type) in enumerate(zip(specs, comm_types, strict=True))
    ]
    return [*layer_keys, *((*layer_keys[-1][:3], k) for k in range(model.mtp_num_layers))]


SegmentKey = tuple[tuple[LayerKey, ...], frozenset[RecomputeModule], bool, bool, str]
"""Everything on which a segment's trace depends: the keys of its layers, the modules that are recomputed in each, whether its
layers are recomputed in full, whether they are recomputed ahead of the backward, and its position among the offloaded segments
("first", "moved", "last", or "" if not offloaded). The last offloaded segment may stay on the device; the first may hold a
received input."""


def build_chunk_key(chunk: Chunk, layer_keys: Sequence[LayerKey]) -> tuple[bool, bool, tuple[SegmentKey, ...]]:
    """Return a key of a model chunk. Chunks that differ only in the indices of their layers have equal keys. They use equal memory
    and communicate equally, so that one trace is enough for them.

    Args:
        layer_keys: keys of all layers of the model (`build_layer_keys`).
    """
    recomputed = [segment for segment in chunk.segments if segment.is_recomputed]
    offloaded = [segment for segment in chunk.segments if segment.is_offloaded]
    segments = (
        (
            tuple(layer_keys[layer] for layer in segment.layers),
            segment.recomputed_modules,
            segment.is_recomputed,
            segment in recomputed[-1:],
            "last"
            if segment in offloaded[-1:]
            else "first"
            if segment in offloaded[:1]
            else "moved"
            if segment in offloaded
            else "",
        )
        for segment in chunk.segments
    )
    return chunk.is_first, chunk.is_last, tuple(segments)


def _trace_chunk(
    model: Model,
    data: DataConfig,
    micro_batch_size: int,
    context: ParallelContext,
    chunk: Chunk,
    splits_backward: bool,
    device_type: str,
    expert_imbalance: float,
    *,
    is_backward_next: bool = False,
) -> ChunkTrace:
    on_cuda = device_type == "cuda"
    representatives = choose_representatives(
        build_chunk_key(chunk, build_layer_keys(model.config, model.precision, model.cp_comm_types))[-1]
    )
    run_indices = sorted(set(representatives))
    cp_groups = ((group.process_group, "cp") for group in (context.context_group, *context.context_rings))
    combined_groups = ((context.group(*axes).process_group, format_axes(axes, context)) for axes in (("tp", "cp"), ("etp", "ep")))
    ledger = StorageLedger([(context.group("tp").process_group, "tp"), *cp_groups, *combined_groups])
    with CudaKernels() if on_cuda else CpuKernels(), ledger, sample_iterations(ledger.repeat):
        device = torch.device("meta" if on_cuda else device_type)
        chunk_run = ChunkRun(
            model, data, micro_batch_size, context, chunk, [chunk.segments[i] for i in run_indices], ledger, device
        )
        chunk_run.set_expert_imbalance(expert_imbalance)
        chunk_run.run(splits_backward=splits_backward, is_backward_next=is_backward_next)
    ops: dict[OpType, MemorySpan] = {}
    for op_type, spans in chunk_run.spans.items():
        if op_type is OpType.RECOMPUTE:  # recomputes one segment, so there are no further spans
            ops[op_type] = join_spans(spans)
            continue
        step = 1 if op_type is OpType.FORWARD else -1
        span_of_segment = dict(zip(run_indices[::step], spans[1:], strict=True))
        ops[op_type] = join_spans([spans[0], *(span_of_segment[i] for i in representatives[::step])])
    attention = ", ".join(description for name, description in _ATTENTION_NAMES.items() if name in ledger.op_names)
    sizes = iter(chunk_run.offloaded_sizes)
    sizes_of_segment = {i: next(sizes) for i in run_indices if chunk.segments[i].is_offloaded}
    return ChunkTrace(
        ops,
        attention,
        chunk_run.document_tensors,
        chunk_run.leaving_bytes,
        chunk_run.fetched_bytes,
        tuple(sizes_of_segment[representatives[i]] for i, segment in enumerate(chunk.segments) if segment.is_offloaded),
        chunk_run.is_last_recomputed_ahead,
    )


def choose_representatives(specs: Sequence[Hashable]) -> list[int]:
    """Choose which segments of a chunk to run. Return, for each segment, the index of the segment whose memory and communication
    are taken for it: its own index if it runs.

    The function skips the longest range of consecutive segments whose removal is not visible: every segment that remains still has
    neighbors equal to its neighbors in the full chunk. A skipped segment is represented by the second of the segments that equal it
    and have equal neighbors.

    The first and the last of equal segments always run, because they may be the first and the last user of a tensor that several
    layers share.

    Args:
        specs: key of each segment; equal keys mean equal segments.
    """
    first_equal = [list(group_equal(specs)).index(spec) for spec in specs]
    neighbors = list(zip((*first_equal[:1], *first_equal), first_equal, (*first_equal[1:], *first_equal[-1:]), strict=False))
    last_indices = [indices[-1] for indices in group_equal(first_equal).values()]
    skipped = range(0)
    for start in range(1, len(first_equal)):
        second_indices = {key: indices[1] for key, indices in group_equal(neighbors[:start]).items() if len(indices) > 1}
        max_end = min(last for last in last_indices if last >= start)
        end = start
        while end < max_end and neighbors[end] in second_indices:
            end += 1
        while first_equal[start - 1 : start + 1] != first_equal[end - 1 : end + 1]:
            end -= 1
        if end - start > len(skipped):
            skipped, representatives = range(start, end), [second_indices[key] for key in neighbors[start:end]]
    if skipped:
        return [*range(skipped.start), *representatives, *range(skipped.stop, len(first_equal))]
    return list(range(len(first_equal)))


class ChunkRun:
    """Model chunk with parameters, gradients and inputs, whose operations run on meta or fake tensors (shapes without data).

    Parameters, gradients and inputs exist before the first operation, so the trace does not count them. The memory of an operation
    is recorded as consecutive spans of time: first the span before the first segment runs, then one span for each segment in
    execution order. The last span ends with the operation.

    Args:
        segments: segments of the chunk that run. A segment is a range of consecutive layers, mostly a single layer.
        ledger: active `StorageLedger`, which records memory and communication. Enter the mode for meta or fake tensors first,
            then the ledger, and create this object last.
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
        weights = {weight.name: weight for weight in iter_weights(model.config, model.vocab_size)}
        scope = Scope(
            context,
            table,
            weights,
            model.dtype,
            model.sequence_parallel,
            model.overlap,
            cp_comm_types=model.cp_comm_types,
            uses_allgather_dispatch=model.uses_allgather_dispatch,
            lora_scale=model.config.lora_scale,
            chunk=chunk.index,
            num_chunks=chunk.num_chunks,
        )
        self._module = GPTChunk(scope, model.config, chunk, segments, loss=model.loss, precision=model.precision)
        self._logit_tracker = None if model.logit_tracker is None else MaxLogitTracker.of(model.config, model.dtype, device)
        if self._logit_tracker is not None:
            self._module.track_max_logits(self._logit_tracker)
        self._router_tracker: RouterTracker | None = None
        if model.router_tracker is not None:
            self._router_tracker = RouterTracker(model.config, context.sequence_group, device)
            self._module.track_routers(self._router_tracker)
        if device.type != "meta":
            materialize(self._module, table, device)
        for entry in table:
            if entry.record.frozen:
                continue
            dtype = main_grad_dtype(entry.param.dtype)
            allocate = partial(torch.empty, entry.param.shape, dtype=dtype, device=device)
            sink = GradSink(dtype, partial(self._on_grad_written, entry.record.name), allocate)
            sink.main_grad = allocate()
            entry.param.grad_sink = sink  # type: ignore[attr-defined]
        self._inputs = build_inputs(model, data, micro_batch_size, context.context_group, device)
        hidden = model.get_stage_boundary(micro_batch_size, context.topology)["hidden"]
        empty_hidden = partial(torch.empty, hidden.shape, dtype=hidden.dtype, device=device)
        self._received_hidden = None if chunk.is_first else empty_hidden(requires_grad=True)
        self._received_grad = None if chunk.is_last else empty_hidden()
        self._scale = torch.ones((), dtype=torch.promote_types(model.dtype, torch.float32), device=device)
        self.spans: dict[OpType, list[MemorySpan]] = {}
        """Spans of each operation that has run."""
        self.leaving_bytes, self.is_last_recomputed_ahead = 0, False
        self.fetched_bytes: dict[OpType, int] = {}
        self.offloaded_sizes: list[tuple[int, ...]] = []
        """Like `ChunkTrace.offloaded_sizes`, for the segments that run."""
        self._host = _CountingHostPool(device)
        self._op_type = OpType.FORWARD
        modules: list[nn.Module] = [*self._module.layers, *([] if self._module.mtp is None else self._module.mtp.depths)]
        last_layers = [segment.layers[-1] for segment in segments]
        layer_names = [
            f"mtp.{k - model.config.num_layers}.layer" if k >= model.config.num_layers else f"layers.{k}" for k in last_layers
        ]
        self._first_deferred_weights = {
            f"{name}.{weight_name}" for name in layer_names for weight_name in _list_first_deferred_weights(model.config)
        }
        module_index = 0
        for segment in segments:
            modules[module_index].register_forward_pre_hook(self._end_span)
            module_index += len(segment.layers)
            modules[module_index - 1].register_forward_hook(self._after_segment)

    def set_expert_imbalance(self, imbalance: float) -> None:
        """Set the number of token assignments to the experts of this rank, as a multiple of the mean over the ranks."""
        for module in self._module.modules():
            if isinstance(module, MoELayer):
                module.dispatcher = replace(module.dispatcher, assumed_imbalance=imbalance)

    def run(self, *, splits_backward: bool, is_backward_next: bool) -> None:
        """Run all operations of the chunk (forward, backward and so on) on one microbatch.

        Args:
            splits_backward: run the backward as an input-gradient and a weight-gradient operation, as zero-bubble schedules do.
            is_backward_next: keep the last offloaded layer on the device, because the backward directly follows the forward.
        """
        with contextlib.nullcontext() if self._router_tracker is None else self._router_tracker.recording(1.0):
            self._run(splits_backward, is_backward_next)

    def _run(self, splits_backward: bool, is_backward_next: bool) -> None:
        backward = OpType.INPUT_GRAD if splits_backward else OpType.BACKWARD
        store = ActivationStore(
            host_pool=self._host,
            is_backward_next=is_backward_next,
            live_tensors=[] if self._received_hidden is None else [self._received_hidden],
        )
        logit_recording = contextlib.nullcontext() if self._logit_tracker is None else self._logit_tracker.recording()
        with self._record_op(OpType.FORWARD), storing_activations(store), logit_recording:
            out = self._module(self._inputs, self._received_hidden)
            # Keep only the gradient edge of the output, as the executor does.
            edge = get_gradient_edge(out if self._received_grad is not None else compute_total_loss(out) * self._scale)
            del out
        self.offloaded_sizes = [tuple(layer.offloaded_sizes) for layer in store.offloaders]
        self.is_last_recomputed_ahead = bool(store.offloaders) and store.offloaders[-1].is_recomputed_ahead
        self.leaving_bytes = -self._measure_net_bytes(store.release_device_copies)
        if store.recomputations:
            self.fetched_bytes[OpType.RECOMPUTE] = self._measure_net_bytes(partial(store.fetch, for_recompute=True))
            with self._record_op(OpType.RECOMPUTE):
                store.recompute_last()
        self.fetched_bytes[backward] = self._measure_net_bytes(partial(store.fetch, for_recompute=False))
        with (
            self._record_op(backward),
            deferring() if splits_backward else contextlib.nullcontext() as deferred,
        ):
            torch.autograd.backward([edge], [self._received_grad])
            del edge  # as the executor does; this frees tensors that graph nodes hold in addition to saved tensors
            if self._received_hidden is not None:
                self._received_hidden.grad = None  # counted as a message to the previous chunk
        if deferred is not None:
            with self._record_op(OpType.WEIGHT_GRAD):
                deferred.run()

    @property
    def document_tensors(self) -> frozenset[DocumentTensor]:
        """Names of the tensors about document boundaries that attention has used in the operations run so far."""
        documents = self._inputs.documents
        return frozenset(documents.used_tensors) if isinstance(documents, PlannedDocuments) else frozenset()

    def _measure_net_bytes(self, action: Callable[[], None]) -> int:
        """Run `action` and return how many bytes it allocated minus how many it freed."""
        self._ledger.take_span()
        action()
        return self._ledger.take_span().net_bytes

    @contextlib.contextmanager
    def _record_op(self, op_type: OpType) -> Iterator[None]:
        self._ledger.take_span()
        self._op_type, self.spans[op_type] = op_type, []
        yield
        self._end_span()

    def _end_span(self, *_: object) -> None:
        self.spans[self._op_type].append(self._ledger.take_span())

    def _after_segment(self, module: object, inputs: object, out: torch.Tensor) -> None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(self._end_span)  # the backward of the segment starts at its output

    def _on_grad_written(self, name: str) -> None:
        if self._op_type is OpType.WEIGHT_GRAD and name in self._first_deferred_weights:
            self._end_span()
