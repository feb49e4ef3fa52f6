"""Measurements from which `rates.py` builds a cluster file, executed by the ranks of one or more nodes.

A node may have fewer cores than ranks. The ranks therefore first determine how many of them can compute at full speed at the same
time. Only that many ranks then measure matrix products, attention, memory and the layers of small models; the others are idle.
Last, the ranks measure the links inside and between nodes, by message size and number of ranks.
"""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.launcher import read_process_info
from megatron.config.parsed_flags import DryRun
from megatron.data.tokenizer import predict_embedding_rows
from megatron.model.build import build_model_from_config
from megatron.parallel.collectives import broadcast_object, gather_objects
from megatron.parallel.context import Group, ParallelContext, connect, disconnect, make_context
from megatron.parallel.topology import Topology
from megatron.spec.operations import OpType
from megatron.training.inputs import open_data
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.step import TrainStep
from megatron_lab.cluster.node_info import count_cores
from megatron_lab.cluster.probes import (
    CollectiveTiming,
    Durations,
    OverlapTiming,
    Stopwatch,
    WorkTiming,
    time_attention,
    time_collectives,
    time_elementwise_kernels,
    time_empty_kernel,
    time_gemms,
    time_host_copies,
    time_overlap,
)
from megatron_lab.monitoring.profiler import SpanRecorder
from megatron_lab.planner.device_work import Gemm
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.step_time import count_update_bytes
from megatron_lab.planner.step_work import StepWork
from megatron_lab.verification.local_ranks import run_ranks

_NUM_STEPS = 12
_NUM_WARMUP_STEPS = 2
"""Number of first steps that are not timed, because they allocate memory and open connections."""
_MAX_GEMM_SHAPES = 24
_GPT_FLAGS = """--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-3 --eval-iters 0 --attention-dropout 0
    --hidden-dropout 0 --no-overlap-grad-reduce --num-layers 2"""
_LLAMA_FLAGS = f"""{_GPT_FLAGS} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""


@dataclass(frozen=True)
class LayerTimes:
    """Measured durations of the training steps of a small model: forward and backward of its layers, and the remainder of the
    step."""

    timings: tuple[WorkTiming, ...]
    """Forward and backward of the layers: for each, the computation and its duration in each measured step."""
    remaining: Durations
    """Duration of each measured step outside of forward and backward."""
    update_bytes: int
    """Bytes that the optimizer update reads and writes."""


@dataclass
class Measurement:
    """All measurements from which a cluster file is built: of one rank, or of all ranks after `merge_measurements`."""

    device: str
    """Name of the GPU, or "cpu"."""
    torch_version: str
    num_ranks: int
    ranks_per_node: int
    num_threads: int
    memory_bytes: int
    """Memory of one GPU. On CPUs: memory of the node divided by its number of ranks."""
    num_cores: int
    """On CPUs: number of ranks that the cores of a node can run, with `num_threads` threads each. 0 for GPUs."""
    date: str = ""
    """Date of the measurement, in ISO format."""
    concurrent_gemms: dict[int, Durations] = field(default_factory=dict)
    """Durations of one matrix product, by the number of ranks of a node that compute at the same time. They show whether ranks
    slow each other down."""
    work_timings: list[WorkTiming] = field(default_factory=list)
    """Durations of matrix products, attention and element-wise kernels."""
    layers: list[LayerTimes] = field(default_factory=list)
    """Durations of the training steps of small models."""
    empty_kernel: Durations = ()
    """Durations of a kernel with almost no work, that is, of a kernel launch."""
    host_copies: list[tuple[int, Durations]] = field(default_factory=list)
    """Copies from host to device and back: the total bytes of both copies, and their durations."""
    collectives: list[CollectiveTiming] = field(default_factory=list)
    """Durations of collectives, and of messages between two ranks."""
    overlap: OverlapTiming | None = None
    """Durations of matrix products and an all-reduce, executed separately and at the same time; None with one rank."""

    @property
    def num_concurrent_ranks(self) -> int:
        """Number of ranks of a node that can compute at full speed at the same time; 0 if there is no limit.

        If even the largest measured number of ranks showed no slowdown, this is `num_cores`: the number of ranks that the cores of
        a CPU node can run, or 0 for GPUs.
        """
        single_rank_s = statistics.median(self.concurrent_gemms[1])
        num_concurrent = max(
            1, *(round(count * single_rank_s / statistics.median(times)) for count, times in self.concurrent_gemms.items())
        )
        return num_concurrent if num_concurrent < max(self.concurrent_gemms) else self.num_cores


@dataclass(frozen=True)
class MeasurementSizes:
    """Sizes of the matrix products, models and messages that are measured, for one type of device."""

    model_shapes: tuple[tuple[int, int, int, int], ...]
    """Hidden size, sequence length, micro batch size and vocabulary size of each small model."""
    gemm_sizes: tuple[int, ...]
    """Side lengths of the square matrices that are multiplied. Each size is measured in each dtype."""
    dtypes: tuple[str, ...]
    """Dtypes in which matrix products are measured. The small models use the first."""
    attention_shapes: tuple[tuple[int, int, int, int], ...]
    """Shapes [micro batch size, heads, sequence length, head size] of the query, key and value of attention."""
    elementwise_sizes: tuple[int, ...]
    """Numbers of elements of the tensors on which element-wise kernels are measured."""
    message_bytes: tuple[int, ...]
    """Sizes in bytes of the buffers of collectives and of copies to the host."""
    bucket_bytes: int
    """Size in bytes of the all-reduce that is overlapped with matrix products."""
    max_gemm_flops: float
    """Limit on the FLOPs of a matrix product that is measured. Products of a run's training step with more FLOPs are left out
    of the measurement."""


CPU = MeasurementSizes(
    model_shapes=(
        (64, 16, 1, 128),
        (128, 128, 1, 1024),
        (256, 128, 2, 2048),
        (256, 256, 1, 2048),
        (384, 256, 1, 2048),
        (512, 256, 1, 4096),
    ),
    gemm_sizes=(64, 128, 256, 512),
    dtypes=("float32", "bfloat16"),
    attention_shapes=((1, 4, 128, 64), (1, 4, 256, 64), (1, 2, 512, 64)),
    elementwise_sizes=(1 << 14, 1 << 17, 1 << 20, 1 << 23),
    message_bytes=(1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23),
    bucket_bytes=1 << 22,
    max_gemm_flops=2e9,
)
GPU = MeasurementSizes(
    model_shapes=(
        (256, 64, 1, 1024),
        (1024, 1024, 2, 8192),
        (2048, 2048, 2, 32768),
        (4096, 2048, 1, 32768),
        (4096, 4096, 1, 65536),
    ),
    gemm_sizes=(512, 1024, 2048, 4096, 8192),
    dtypes=("bfloat16", "float16", "float32"),
    attention_shapes=((2, 16, 1024, 64), (1, 32, 2048, 128), (1, 32, 4096, 128), (1, 32, 8192, 128)),
    elementwise_sizes=(1 << 20, 1 << 24, 1 << 26, 1 << 28),
    message_bytes=(1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    bucket_bytes=1 << 27,
    max_gemm_flops=1e13,
)


def measure_on_local_ranks(device: str, num_ranks: int, run_flags: Sequence[str], world_size: int) -> Measurement:
    """Start ranks on this node, and measure the cluster with them.

    Args:
        device: value of --device: auto, cpu or cuda.
        num_ranks: number of ranks to start.
        run_flags: command line of a run. The matrix products of that run are measured too, in their shapes. Empty for no run.
        world_size: number of ranks of that run.
    """
    measurements: list[Measurement] = run_ranks(
        num_ranks, lambda _: measure_rank(device, run_flags, world_size), init=False, timeout=600.0
    )
    return measurements[0]


def measure_rank(device: str, run_flags: Sequence[str], world_size: int, sizes: MeasurementSizes | None = None) -> Measurement:
    """Measure the cluster as one of several ranks, which the launcher's environment variables describe. All ranks call the function
    together.

    Args:
        device: value of --device: auto, cpu or cuda.
        run_flags: command line of a run. The matrix products of that run are measured too, in their shapes. Empty for no run.
        world_size: number of ranks of that run.
        sizes: sizes to measure; by default those for the type of device.

    Returns:
        the merged measurements of all ranks.

    Raises:
        ConfigError: the flags of the run are invalid.
    """
    on_cuda = device != "cpu" and torch.cuda.is_available()
    sizes = sizes or (GPU if on_cuda else CPU)
    configs = [_build_config(device, sizes, *shape, llama=bool(i % 2)) for i, shape in enumerate(sizes.model_shapes)]
    step_works = [_compute_step_work(config, 1) for config in configs]
    gemms = _select_gemms(
        [*step_works, *([_compute_step_work(load(run_flags, world_size).config, world_size)] if run_flags else [])], sizes
    )
    context = connect(configs[0].parallel)
    try:
        return _measure(context, configs, step_works, gemms, sizes)
    finally:
        disconnect()


def _build_config(
    device: str, sizes: MeasurementSizes, hidden_size: int, seq_length: int, batch_size: int, vocab_size: int, *, llama: bool
) -> Config:
    dtype = sizes.dtypes[0]
    flags = f"""{_LLAMA_FLAGS if llama else _GPT_FLAGS} --device {device} --hidden-size {hidden_size}
        --num-attention-heads {max(2, hidden_size // 64)} --seq-length {seq_length} --max-position-embeddings {seq_length}
        --micro-batch-size {batch_size} --global-batch-size {batch_size}
        --vocab-size {vocab_size - 1} {"--bf16" if dtype == "bfloat16" else ""}"""
    return load(shlex.split(flags), 1).config


def _compute_step_work(config: Config, world_size: int) -> StepWork:
    return Planner(config, DryRun(world_size, 8, None), predict_embedding_rows(config.data), shortened=True).compute_step_work()


def _select_gemms(step_works: Sequence[StepWork], sizes: MeasurementSizes) -> list[Gemm]:
    """Select the matrix products to measure: square ones in every dtype, and up to 24 products of the runs, whose sizes are spread
    evenly.

    Args:
        step_works: for each run, the computation of one step, with its matrix products.
        sizes: sizes of the square products, and the limit on FLOPs of a product.
    """
    square_gemms = [Gemm(1, size, size, size, dtype) for dtype in sizes.dtypes for size in sizes.gemm_sizes]
    run_gemms = {gemm for step_work in step_works for ops in step_work.ops for span in ops.values() for gemm in span.work.gemms}
    sorted_gemms = sorted(
        (gemm for gemm in run_gemms if gemm.flops <= sizes.max_gemm_flops and gemm.dtype in sizes.dtypes),
        key=lambda gemm: gemm.flops,
    )
    stride = max(1, -(-len(sorted_gemms) // _MAX_GEMM_SHAPES))
    return [*square_gemms, *sorted_gemms[::-1][::stride]]


def _measure(
    context: ParallelContext,
    configs: Sequence[Config],
    step_works: Sequence[StepWork],
    gemms: Sequence[Gemm],
    sizes: MeasurementSizes,
) -> Measurement:
    process_info, device = read_process_info(), context.device
    ranks_per_node = min(process_info.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", process_info.world_size)))
    measurement = Measurement(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch.__version__,
        process_info.world_size,
        ranks_per_node,
        torch.get_num_threads(),
        _get_memory_bytes(device, ranks_per_node),
        0 if device.type == "cuda" else max(1, count_cores() // torch.get_num_threads()),
        datetime.now().date().isoformat(),
    )
    num_nodes = process_info.world_size // ranks_per_node
    intra_node_groups = {
        size: _create_groups([node * ranks_per_node + local for local in range(size)] for node in range(num_nodes))
        for size in _list_group_sizes(ranks_per_node)
    }
    inter_node_groups = {
        size: _create_groups([[node * ranks_per_node for node in range(size)]]) for size in _list_group_sizes(num_nodes) if size > 1
    }
    largest_gemm = max(gemms, key=lambda gemm: gemm.flops if gemm.dtype == sizes.dtypes[0] and gemm.batch == 1 else 0)
    for size, group in intra_node_groups.items():
        if group is not None:
            (timing,) = time_gemms(Stopwatch(device, group), [largest_gemm])
            measurement.concurrent_gemms[size] = timing.durations
    measurement.concurrent_gemms = broadcast_object(measurement.concurrent_gemms, context.world)  # rank 0 is in every group
    measurement.concurrent_gemms = {size: measurement.concurrent_gemms[size] for size in intra_node_groups}
    num_concurrent = [size for size in intra_node_groups if size <= (measurement.num_concurrent_ranks or ranks_per_node)][-1]
    if (group := intra_node_groups[num_concurrent]) is not None:
        stopwatch = Stopwatch(device, group)
        measurement.work_timings += time_gemms(stopwatch, gemms)
        measurement.work_timings += time_attention(stopwatch, sizes.attention_shapes, getattr(torch, sizes.dtypes[0]))
        measurement.work_timings += time_elementwise_kernels(stopwatch, sizes.elementwise_sizes, getattr(torch, sizes.dtypes[0]))
        measurement.empty_kernel = time_empty_kernel(stopwatch)
        measurement.host_copies = time_host_copies(
            stopwatch, [num_bytes for num_bytes in sizes.message_bytes if num_bytes >= 1 << 17]
        )
        measurement.layers = [_measure_layers(config, work, stopwatch) for config, work in zip(configs, step_works, strict=True)]
    gemm_size = sizes.gemm_sizes[-1]
    preceding_gemm = Gemm(1, gemm_size, gemm_size, gemm_size, sizes.dtypes[0])
    for size, group in intra_node_groups.items():
        if group is not None:
            measurement.collectives += time_collectives(Stopwatch(device, group), sizes.message_bytes, size, preceding_gemm)
    for group in inter_node_groups.values():
        if group is not None:
            measurement.collectives += time_collectives(Stopwatch(device, group), sizes.message_bytes, 1, preceding_gemm)
    if num_nodes > 1:
        measurement.collectives += time_collectives(
            Stopwatch(device, context.world), sizes.message_bytes, ranks_per_node, preceding_gemm
        )
    if (group := intra_node_groups[num_concurrent]) is not None:
        measurement.overlap = time_overlap(Stopwatch(device, group), largest_gemm, sizes.bucket_bytes)
    return merge_measurements(gather_objects(measurement, context.world))


def _list_group_sizes(max_size: int) -> list[int]:
    """Return the numbers of ranks with which collectives are measured: the powers of two below `max_size`, and `max_size`."""
    return sorted({*(1 << power for power in range(max_size.bit_length())), max_size} & set(range(1, max_size + 1)))


def _create_groups(rank_lists: Any) -> Group | None:
    """Create a process group for each list of ranks. All ranks must call this function together, with equal arguments.

    Args:
        rank_lists: global ranks of each process group.

    Returns:
        the process group that contains this rank; None if there is no such group.
    """
    local_group = None
    for ranks in rank_lists:
        process_group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if read_process_info().rank in ranks:
            local_group = Group("measured", tuple(ranks), list(ranks).index(read_process_info().rank), process_group)
    return local_group


def _get_memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node


def _measure_layers(config: Config, step_work: StepWork, stopwatch: Stopwatch) -> LayerTimes:
    """Time training steps of a small model on this rank, without communication. The ranks of the stopwatch run each step at the
    same time.

    Args:
        config: settings of the small model.
        step_work: computation of one step of that model.
    """
    context = make_context(Topology(), 0, stopwatch.device, local_groups_only=True)
    data = open_data(config, context)
    step = TrainStep.of(config, build_model_from_config(config, context, data.vocab_size), context)
    step.prepare(1)
    batches = data.create_batches(
        Progress(), BatchSizePlan(config.training, 1, config.model.seq_length), context
    ).iter_training_batches(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    op_durations: list[dict[OpType, float]] = []
    remaining: list[float] = []
    for i in range(_NUM_STEPS):
        recorder = step.executor.recorder = SpanRecorder(stopwatch.device)
        run_step = partial(step.run, batch, iteration=i + 1, learning_rate=1e-3, weight_decay=0.0)
        (elapsed,) = stopwatch.time_calls(run_step, 1)
        durations = {span.op.type: span.end - span.start for span in recorder.get_op_spans()}
        op_durations.append(durations)
        remaining.append(max(0.0, elapsed - sum(durations.values())))
    (ops,) = step_work.ops
    timings = tuple(
        WorkTiming(
            "layers", span.work, tuple(durations[op_type] for durations in op_durations[_NUM_WARMUP_STEPS:]), span.peak_bytes
        )
        for op_type, span in ops.items()
    )
    return LayerTimes(timings, tuple(remaining[_NUM_WARMUP_STEPS:]), count_update_bytes(step_work.profiles[0].memory).device)


def merge_measurements(measurements: Sequence[Measurement]) -> Measurement:
    """Merge the measurements of all ranks into one.

    Durations of matrix products, attention and element-wise kernels are concatenated. For the steps of small models the durations
    of the slowest rank are taken, because in a run the other ranks wait for it. All other measurements are those of the first rank.

    Args:
        measurements: measurement of each rank, by rank.
    """
    concurrent = [measurement for measurement in measurements if measurement.work_timings]

    def concatenate(samples: Sequence[Durations]) -> Durations:
        return tuple(duration for durations in samples for duration in durations)

    def take_slowest(samples: Sequence[Durations]) -> Durations:
        return tuple(map(max, zip(*samples, strict=True)))

    return replace(
        measurements[0],
        work_timings=[
            replace(timings[0], durations=concatenate([timing.durations for timing in timings]))
            for timings in zip(*(measurement.work_timings for measurement in concurrent), strict=True)
        ],
        layers=[
            LayerTimes(
                tuple(
                    replace(timings[0], durations=take_slowest([timing.durations for timing in timings]))
                    for timings in zip(*(layer_times.timings for layer_times in rank_times), strict=True)
                ),
                take_slowest([layer_times.remaining for layer_times in rank_times]),
                rank_times[0].update_bytes,
            )
            for rank_times in zip(*(measurement.layers for measurement in concurrent), strict=True)
        ],
    )
