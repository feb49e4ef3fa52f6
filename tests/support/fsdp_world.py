"""A small model under `fully_shard` on some ranks, driven without the training step, and a trace of its collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._dynamo  # FSDP's hooks import it at their first call: here once, not in every rank
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.memory import MemoryConfig
from megatron.config.parallel import FsdpReshard, ParallelConfig
from megatron.data_parallel.fsdp import FullyShardedParams
from megatron.data_parallel.fsdp_plan import FsdpPolicy, is_fully_sharded
from megatron.data_parallel.provider import GradInspector
from megatron.memory.recompute import ActivationStore, storing_activations
from megatron.model.build import Model, build_model, fill
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table
from megatron_lab.verification.reference.shape import ReferenceShape
from tests.support.layout import microbatches, model_config
from tests.support.lone_rank import CPU
from tests.support.reference_runs import gpt2_like, llama_like, random_batches
from tests.support.warm import run_warm_ranks

SEED = 1
MICROBATCHES = 2
UNTIED = llama_like(num_layers=3, hidden=16, ffn=24, heads=4, kv_heads=2, head_size=4, vocab=32, seq=8)
TIED = gpt2_like(num_layers=2, hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=32, seq=8)
NUM_UNITS = 5
"""Of the untied model: the embedding, three blocks, and the final norm with the output layer."""


def build(
    context: ParallelContext,
    shape: ReferenceShape = UNTIED,
    dtype: torch.dtype = torch.float32,
    *,
    sequence_parallel: bool = False,
    materialized: bool = False,
    memory: MemoryConfig | None = None,
) -> Model:
    config = model_config(shape)
    return build_model(
        config,
        context,
        dtype=dtype,
        vocab_size=shape.vocab,
        sequence_parallel=sequence_parallel,
        seed=SEED,
        should_materialize=materialized,
        table=build_layer_table(config, ParallelConfig(pipeline_model_parallel_size=context.topology.pp), shape.vocab, memory),
    )


def shard(model: Model, context: ParallelContext, reshard: FsdpReshard = "always", **policy: Any) -> FullyShardedParams:
    entries = [entry for entry in model.params if is_fully_sharded(entry, context)]
    chunks = {number: (chunk, chunk.get_units()) for number, chunk in model.chunks.items()}
    return FullyShardedParams(
        entries, chunks, context, dtype=model.dtype, fill=partial(fill, seed=SEED), policy=FsdpPolicy(reshard, **policy)
    )


def in_world(topology: Topology, function: Callable[[ParallelContext], Any], fsdp_shard_size: int | None = None) -> list[Any]:
    """Return the result of a function, which can be pickled, on every rank. Over gloo, since `Trace` sees only groups of torch."""
    return run_warm_ranks(topology.world_size, _on_rank, topology, function, fsdp_shard_size, timeout=60.0, backend="gloo")


def _on_rank(rank: int, topology: Topology, function: Callable[[ParallelContext], Any], fsdp_shard_size: int | None) -> Any:
    found = function(make_context(topology, rank, CPU, fsdp_shard_size=fsdp_shard_size))
    dist.barrier()
    return found


def inputs(context: ParallelContext) -> list[ModelInputs]:
    """This rank's microbatches of a step."""
    (batch,) = random_batches(UNTIED, 1, 2 * MICROBATCHES * context.topology.dp, 2, seed=2)
    return microbatches(batch, context, 2)


def backward(provider: FullyShardedParams, loss: torch.Tensor) -> None:
    provider.before_backward(0)
    torch.autograd.backward([get_gradient_edge(loss)])


def step(
    model: Model,
    provider: FullyShardedParams,
    batch: Sequence[ModelInputs],
    *,
    factors: Sequence[float] = (1.0,) * 9,
    inspect: GradInspector | None = None,
) -> None:
    """Gradients of a step, the loss of each microbatch times a factor."""
    provider.start_step(len(batch), inspect=inspect)
    for microbatch, factor in zip(batch, factors, strict=False):
        with storing_activations(ActivationStore(provider.before_recompute)) as kept:
            loss = model.chunks[0](microbatch) * factor
        if kept.recomputations:
            kept.recompute_last()
        backward(provider, loss)


def numel(model: Model) -> int:
    return sum(math.prod(entry.record.shape) for entry in model.params)


KINDS = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "reduce"}


class Trace(TorchDispatchMode):
    """Notes every collective (kind, elements of the whole tensor, dtype), and what else it is told."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.events: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        if space == "c10d":
            kind = KINDS[name]
            if kind == "gather" and not (len(args) < 4 or args[3]):  # the fourth says whether to return at once, by default yes
                kind = "blocking gather"
            tensor = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            self.events.append((kind, tensor.numel() * (self.ranks if kind == "scatter" else 1), tensor.dtype))
        return func(*args, **(kwargs or {}))

    def sizes(self, kind: str) -> list[int]:
        return [event[1] for event in self.events if event[0] == kind]
