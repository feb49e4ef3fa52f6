"""All that a cluster file is fitted to, measured by the ranks of one node or more; `rates.py` makes the file of it.

Ranks first try how many of them compute at once at full speed: cores may be fewer than ranks. The others rest while these measure
products, attention, memory and layers of small models. Then come the links, by size and number of ranks, inside a node and across.
"""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.given import DryRun
from megatron.config.launcher import launched
from megatron.data.tokenizer import planned_rows
from megatron.model.build import model_of
from megatron.parallel.collectives import broadcast_object, gather_objects
from megatron.parallel.context import Group, ParallelContext, connect, disconnect, make_context
from megatron.parallel.topology import Topology
from megatron.spec.operations import OpKind
from megatron.training.inputs import open_data
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.step import TrainStep
from megatron_lab.cluster.facts import num_cores
from megatron_lab.cluster.probes import (
    Beside,
    Seconds,
    Sent,
    Stopwatch,
    Timed,
    time_attention,
    time_collectives,
    time_copies,
    time_kernels,
    time_memory,
    time_overlap,
    time_products,
)
from megatron_lab.monitoring.profiler import SpanRecorder
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.step_time import updated_bytes
from megatron_lab.planner.step_work import StepWork
from megatron_lab.planner.work import MatrixProduct
from megatron_lab.verification.local_ranks import run_ranks

_STEPS = 12
_UNTIMED = 2
"""The first steps make memory and connections."""
_MOST_SHAPES = 24
_GPT = """--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-3 --eval-iters 0 --attention-dropout 0
    --hidden-dropout 0 --no-overlap-grad-reduce --num-layers 2"""
_LLAMA = f"""{_GPT} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""


@dataclass(frozen=True)
class Layers:
    """The measured step of a small model."""

    timed: tuple[Timed, ...]
    """Its forward and its backward."""
    rest: Seconds
    """What a step takes beside them."""
    state: int
    """Bytes that its update reads and writes."""


@dataclass
class Measured:
    """By one rank, or by all."""

    device: str
    torch: str
    ranks: int
    per_node: int
    threads: int
    memory: int
    """Bytes of a device."""
    cores: int
    """Of a node, where they are the device; 0 where each rank has one of its own."""
    when: str = ""
    at_once: dict[int, Seconds] = field(default_factory=dict)
    """Products by the number of ranks of a node that compute them at once."""
    timed: list[Timed] = field(default_factory=list)
    layers: list[Layers] = field(default_factory=list)
    kernels: Seconds = ()
    """Of a kernel with nothing to do."""
    copies: list[tuple[int, Seconds]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    beside: Beside | None = None

    @property
    def shared_by(self) -> int:
        """Ranks of a node that compute at once at full speed; 0: all."""
        alone = statistics.median(self.at_once[1])
        found = max(1, *(round(count * alone / statistics.median(times)) for count, times in self.at_once.items()))
        return found if found < max(self.at_once) else self.cores


@dataclass(frozen=True)
class Sizes:
    """What is measured on one kind of device."""

    layers: tuple[tuple[int, int, int, int], ...]
    """Models: hidden size, sequence length, micro batch size, vocabulary."""
    squares: tuple[int, ...]
    """Products of all dtypes."""
    dtypes: tuple[str, ...]
    """The first is that of the models."""
    attention: tuple[tuple[int, int, int, int], ...]
    memory: tuple[int, ...]
    sent: tuple[int, ...]
    bucket: int
    most_flops: float
    """Of a product of the planned shapes."""


CPU = Sizes(
    layers=(
        (64, 16, 1, 128),
        (128, 128, 1, 1024),
        (256, 128, 2, 2048),
        (256, 256, 1, 2048),
        (384, 256, 1, 2048),
        (512, 256, 1, 4096),
    ),
    squares=(64, 128, 256, 512),
    dtypes=("float32", "bfloat16"),
    attention=((1, 4, 128, 64), (1, 4, 256, 64), (1, 2, 512, 64)),
    memory=(1 << 14, 1 << 17, 1 << 20, 1 << 23),
    sent=(1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23),
    bucket=1 << 22,
    most_flops=2e9,
)
GPU = Sizes(
    layers=((256, 64, 1, 1024), (1024, 1024, 2, 8192), (2048, 2048, 2, 32768), (4096, 2048, 1, 32768), (4096, 4096, 1, 65536)),
    squares=(512, 1024, 2048, 4096, 8192),
    dtypes=("bfloat16", "float16", "float32"),
    attention=((2, 16, 1024, 64), (1, 32, 2048, 128), (1, 32, 4096, 128), (1, 32, 8192, 128)),
    memory=(1 << 20, 1 << 24, 1 << 26, 1 << 28),
    sent=(1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    bucket=1 << 27,
    most_flops=1e13,
)


def measure_here(device: str, ranks: int, planned: Sequence[str], world_size: int) -> Measured:
    """Start the ranks of this node and measure.

    Args:
        planned: flags of the run whose products are measured too; empty for none.
        world_size: ranks of that run.
    """
    found: list[Measured] = run_ranks(ranks, lambda _: measure_rank(device, planned, world_size), init=False, timeout=600.0)
    return found[0]


def measure_rank(device: str, planned: Sequence[str], world_size: int, sizes: Sizes | None = None) -> Measured:
    """This rank's part of the job that the launcher's variables describe. Rank 0 gets the medians of all.

    Raises:
        ConfigError: the flags of the run are wrong.
    """
    on_cuda = device != "cpu" and torch.cuda.is_available()
    sizes = sizes or (GPU if on_cuda else CPU)
    runs = [_model(device, sizes, *shape, llama=bool(i % 2)) for i, shape in enumerate(sizes.layers)]
    works = [_work_of(config, 1) for config in runs]
    shapes = _products([*works, *([_work_of(load(planned, world_size).config, world_size)] if planned else [])], sizes)
    context = connect(runs[0].parallel)
    try:
        return _measured(context, runs, works, shapes, sizes)
    finally:
        disconnect()


def _model(device: str, sizes: Sizes, hidden: int, length: int, batch: int, vocab: int, *, llama: bool) -> Config:
    dtype = sizes.dtypes[0]
    text = f"""{_LLAMA if llama else _GPT} --device {device} --hidden-size {hidden} --num-attention-heads {max(2, hidden // 64)}
        --seq-length {length} --max-position-embeddings {length} --micro-batch-size {batch} --global-batch-size {batch}
        --vocab-size {vocab - 1} {"--bf16" if dtype == "bfloat16" else ""}"""
    return load(shlex.split(text), 1).config


def _work_of(config: Config, world_size: int) -> StepWork:
    return Planner(config, DryRun(world_size, 8, None), planned_rows(config.data), few=True).work()


def _products(works: Sequence[StepWork], sizes: Sizes) -> list[MatrixProduct]:
    """Squares in every dtype, and shapes of the runs, evenly picked by their size."""
    squares = [MatrixProduct(1, size, size, size, dtype) for dtype in sizes.dtypes for size in sizes.squares]
    every = {one for step in works for ops in step.ops for span in ops.values() for one in span.work.products}
    fitting = sorted(
        (one for one in every if one.flops <= sizes.most_flops and one.dtype in sizes.dtypes), key=lambda one: one.flops
    )
    stride = max(1, -(-len(fitting) // _MOST_SHAPES))
    return [*squares, *fitting[::-1][::stride]]


def _measured(
    context: ParallelContext, runs: Sequence[Config], works: Sequence[StepWork], products: Sequence[MatrixProduct], sizes: Sizes
) -> Measured:
    job, device = launched(), context.device
    per_node = min(job.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size)))
    found = Measured(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch.__version__,
        job.world_size,
        per_node,
        torch.get_num_threads(),
        _memory(device, per_node),
        0 if device.type == "cuda" else max(1, num_cores() // torch.get_num_threads()),
        datetime.now().date().isoformat(),
    )
    nodes = job.world_size // per_node
    inside = {
        size: _group([node * per_node + local for local in range(size)] for node in range(nodes)) for size in _counts(per_node)
    }
    across = {size: _group([[node * per_node for node in range(size)]]) for size in _counts(nodes) if size > 1}
    biggest = max(products, key=lambda one: one.flops if one.dtype == sizes.dtypes[0] and one.batch == 1 else 0)
    for size, group in inside.items():
        if group is not None:
            (timed,) = time_products(Stopwatch(device, group), [biggest])
            found.at_once[size] = timed.seconds
    found.at_once = broadcast_object(found.at_once, context.world)  # rank 0 is in all of the groups
    found.at_once = {size: found.at_once[size] for size in inside}
    together = [size for size in inside if size <= (found.shared_by or per_node)][-1]
    if (group := inside[together]) is not None:
        watch = Stopwatch(device, group)
        found.timed += time_products(watch, products)
        found.timed += time_attention(watch, sizes.attention, getattr(torch, sizes.dtypes[0]))
        found.timed += time_memory(watch, sizes.memory, getattr(torch, sizes.dtypes[0]))
        found.kernels = time_kernels(watch)
        found.copies = time_copies(watch, [one for one in sizes.sent if one >= 1 << 17])
        found.layers = [_layers(config, work, watch) for config, work in zip(runs, works, strict=True)]
    edge = sizes.squares[-1]
    between = MatrixProduct(1, edge, edge, edge, sizes.dtypes[0])
    for size, group in inside.items():
        if group is not None:
            found.sent += time_collectives(Stopwatch(device, group), sizes.sent, size, between)
    for group in across.values():
        if group is not None:
            found.sent += time_collectives(Stopwatch(device, group), sizes.sent, 1, between)
    if nodes > 1:
        found.sent += time_collectives(Stopwatch(device, context.world), sizes.sent, per_node, between)
    if (group := inside[together]) is not None:
        found.beside = time_overlap(Stopwatch(device, group), biggest, sizes.bucket)
    return of_all(gather_objects(found, context.world))


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({*(1 << power for power in range(most.bit_length())), most} & set(range(1, most + 1)))


def _group(every: Any) -> Group | None:
    """The one of these groups of ranks that this rank is in. All ranks make all of them."""
    mine = None
    for ranks in every:
        made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if launched().rank in ranks:
            mine = Group("measured", tuple(ranks), list(ranks).index(launched().rank), made)
    return mine


def _memory(device: torch.device, per_node: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node


def _layers(config: Config, work: StepWork, watch: Stopwatch) -> Layers:
    """Steps of a model that this rank has for itself, while the others of the watch make theirs."""
    context = make_context(Topology(), 0, watch.device, alone=True)
    data = open_data(config, context)
    step = TrainStep.of(config, model_of(config, context, data.vocab_size), context)
    step.prepare(1)
    batches = data.at(Progress(), BatchSizePlan(config.training, 1, config.model.seq_length), context).training(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    computing: list[dict[OpKind, float]] = []
    rest: list[float] = []
    for number in range(_STEPS):
        recorder = step.executor.recorder = SpanRecorder(watch.device)
        (took,) = watch.times(lambda number=number: step.run(batch, iteration=number + 1, learning_rate=1e-3, weight_decay=0.0), 1)  # type: ignore[misc]
        spans = {span.op.kind: span.end - span.start for span in recorder.spans()}
        computing.append(spans)
        rest.append(max(0.0, took - sum(spans.values())))
    (ops,) = work.ops
    timed = tuple(
        Timed("layers", span.work, tuple(spans[kind] for spans in computing[_UNTIMED:]), span.peak) for kind, span in ops.items()
    )
    return Layers(timed, tuple(rest[_UNTIMED:]), updated_bytes(work.kinds[0].memory).device)


def of_all(ranks: Sequence[Measured]) -> Measured:
    """What the first rank found, with the samples of those that measured the same beside it.

    A layer's are those of the rank that took longest: in a run the others wait for it.
    """
    same = [one for one in ranks if one.timed]
    first = ranks[0]

    def joined(some: Sequence[Seconds]) -> Seconds:
        return tuple(second for seconds in some for second in seconds)

    def slowest(some: Sequence[Seconds]) -> Seconds:
        return tuple(map(max, zip(*some, strict=True)))

    return replace(
        first,
        timed=[
            replace(each[0], seconds=joined([one.seconds for one in each])) for each in zip(*(m.timed for m in same), strict=True)
        ],
        layers=[
            Layers(
                tuple(
                    replace(ops[0], seconds=slowest([one.seconds for one in ops]))
                    for ops in zip(*(one.timed for one in each), strict=True)
                ),
                slowest([one.rest for one in each]),
                each[0].state,
            )
            for each in zip(*(m.layers for m in same), strict=True)
        ],
    )
