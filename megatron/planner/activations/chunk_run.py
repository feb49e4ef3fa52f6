"""One microbatch through one chunk of the model, forward and backward, in the code of training on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from megatron.config.data import DataConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.model.build import Model
from megatron.model.gpt import GPTChunk
from megatron.parallel.accumulate import Deferred, GradSink, deferring
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamTable, materialize
from megatron.parallel.scope import Scope
from megatron.pipeline_parallel.partition import Chunk
from megatron.planner.activations.microbatch import make_inputs
from megatron.planner.activations.storages import Span, StorageLedger
from megatron.spec.operations import OpKind
from megatron.spec.weights import model_weights


class ChunkRun:
    """A chunk with parameters, gradients and inputs. All of it lives before the first operation, so none of it is counted.

    The spans of each operation are cut where a layer begins, in its own order: what comes before the first layer that runs, that
    layer, and so on; the last span ends with the operation.

    Args:
        layers: those of the chunk that run.
        ledger: entered, on top of what makes tensors of `device` take no memory.
    """

    def __init__(
        self,
        model: Model,
        data: DataConfig,
        micro_batch_size: int,
        context: ParallelContext,
        chunk: Chunk,
        layers: Sequence[int],
        ledger: StorageLedger,
        device: torch.device,
    ) -> None:
        self._ledger = ledger
        table = ParamTable()
        weights = {weight.name: weight for weight in model_weights(model.config, model.vocab_size)}
        scope = Scope(context, table, weights, model.dtype, model.sequence_parallel, chunk=chunk.index, num_chunks=chunk.num_chunks)
        self._module = GPTChunk(scope, model.config, chunk, layers)
        if device.type != "meta":
            materialize(self._module, table, device)
        for entry in table:
            dtype = main_grad_dtype(entry.param.dtype)
            gradient = torch.empty(entry.param.shape, dtype=dtype, device=device)
            sink = GradSink(dtype, partial(self._wrote, entry.record.name), main_grad=gradient)
            entry.param.grad_sink = sink  # type: ignore[attr-defined]
        self._inputs = make_inputs(model, data, micro_batch_size, device)
        hidden = model.boundary(micro_batch_size, context.topology.tp)["hidden"]
        self._received = self._gradient = None
        if not chunk.first:
            self._received = torch.empty(hidden.shape, dtype=hidden.dtype, device=device, requires_grad=True)
        if not chunk.last:
            self._gradient = torch.empty(hidden.shape, dtype=hidden.dtype, device=device)
        self._scale = torch.ones((), dtype=torch.promote_types(model.dtype, torch.float32), device=device)
        self._spans: list[Span] = []
        self._first_products = {f"layers.{layer}.mlp.down.weight" for layer in layers}
        self._runs_products = False
        for layer in self._module.layers:
            layer.register_forward_pre_hook(self._cut)
            layer.register_forward_hook(self._behind_layer)

    def run(self, *, splits: bool) -> dict[OpKind, list[Span]]:
        """The spans of each operation.

        Args:
            splits: backward is an input gradient and a weight gradient, as in zero-bubble schedules.
        """
        found: dict[OpKind, list[Span]] = {}
        with self._operation(found, OpKind.FORWARD):
            out = self._module(self._inputs, self._received)
            # As the executor: only the way back is kept.
            edge = get_gradient_edge(out if self._gradient is not None else out * self._scale)
            del out
        if not splits:
            with self._operation(found, OpKind.BACKWARD):
                self._backward(edge)
            return found
        with self._operation(found, OpKind.INPUT_GRAD), deferring() as deferred:
            self._backward(edge)
        with self._operation(found, OpKind.WEIGHT_GRAD):
            self._weight_gradients(deferred)
        return found

    def _backward(self, edge: torch.autograd.graph.GradientEdge) -> None:
        torch.autograd.backward([edge], [self._gradient])
        if self._received is not None:
            self._received.grad = None  # on its way to the chunk before: counted with the messages

    def _weight_gradients(self, deferred: Deferred) -> None:
        self._runs_products = True
        deferred.run()

    @contextlib.contextmanager
    def _operation(self, found: dict[OpKind, list[Span]], kind: OpKind) -> Iterator[None]:
        self._ledger.cut()
        self._spans = found[kind] = []
        yield
        self._cut()

    def _cut(self, *_: object) -> None:
        self._spans.append(self._ledger.cut())

    def _behind_layer(self, layer: object, inputs: object, out: torch.Tensor) -> None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(self._cut)  # backward enters the layer where forward left it

    def _wrote(self, name: str) -> None:
        if self._runs_products and name in self._first_products:
            self._cut()
