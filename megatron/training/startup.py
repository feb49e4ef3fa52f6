"""What precedes the first step: numerics switches, checks of the built model, and the start-up log."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.attention.backends import chosen_kernel, kernels_in_use, use_backend
from megatron.attention.core import as_samples, one_kernel, shaped_kernel
from megatron.config.checks.memory import attention_call
from megatron.config.config import Config
from megatron.config.imports import named
from megatron.config.model import ModelConfig
from megatron.config.outputs import LoggingConfig, run_folder
from megatron.config.precision import PrecisionConfig, SpeedConfig
from megatron.config.save import to_dict
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.config.version import how_to_install
from megatron.metrics.measures import Timers, mixed_peak_flops
from megatron.model.build import Model, model_dtype
from megatron.parallel.collectives import all_reduce, broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import Shard
from megatron.parallel.topology import Topology
from megatron.precision.products import check_device
from megatron.spec.attention_backends import kernels_to_time
from megatron.spec.counts import check_count, flops_in_8_bits, flops_per_token
from megatron.spec.layers import context_ways, layers
from megatron.training.failure import together
from megatron.training.progress import BatchSizePlan, LearningSchedule, schedule_lengths
from megatron.training.reporter import Reporter

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


PICTURE, REPORT = "loss.png", "report.html"
"""Files in the folder of a run: the picture of its record, and the page that is made at its end."""
LIBRARY = "matplotlib"


def missing_library() -> str | None:
    """What to install for the picture, if it is not there. The library is not imported: the run has no need of it."""
    if importlib.util.find_spec(LIBRARY) is not None:
        return None
    return f"{PICTURE} needs {LIBRARY}, which is not installed: {how_to_install(LIBRARY)}"


def set_logging(rank: int) -> None:
    """Show the log messages of libraries once: from rank 0, and errors from all ranks."""
    logging.basicConfig(format="  %(message)s", level=logging.WARNING)
    for package in ("megatron", "megatron_lab"):
        logging.getLogger(package).setLevel(logging.INFO if rank == 0 else logging.ERROR)


def set_numerics(config: Config) -> Callable[[], None]:
    """Choose the kernels, before the first use of a device; returns what brings back those that were chosen before.

    Deterministic: attention's backward adds in one order (flash) or in one part (memory-efficient) and cuDNN's kernel is left out
    (torch, aten/src/ATen/native/transformers/cuda: attention_backward.cu, sdp_utils.cpp); cuBLAS has a workspace for each stream;
    an operation without a deterministic kernel is an error. New memory stays as it is: torch would fill it with NaN, a kernel for
    each allocation, and nothing here reads what was not written.
    """
    chosen = ExitStack()
    chosen.callback(use_backend(config.speed.attention_backend))
    chosen.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        chosen.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    # The old way to say it, which 2.11 has too; torch.backends.cuda.matmul.fp32_precision must then be left alone.
    torch.set_float32_matmul_precision(config.precision.fp32_matmul_precision)
    return chosen.close


def set_compiler_cache(speed: SpeedConfig) -> None:
    """Choose the compiler's cache folder. Called before anything is compiled."""
    if speed.compile and speed.compile_cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(speed.compile_cache_dir)


def with_batch_size(config: Config, plan: BatchSizePlan) -> Config:
    """The settings with --global-batch-size written out, since its default depends on the number of data ranks. So it is saved, and
    compared when the run is resumed on another number of them."""
    training = dataclasses.replace(config.training, global_batch_size=plan.final_global_batch_size)
    return dataclasses.replace(config, training=training)


def check_precision(precision: PrecisionConfig, context: ParallelContext) -> None:
    """Check that the devices of all ranks compute in the formats of the run.

    Raises:
        SetupError: one does not.
    """
    together(context, lambda: check_device(precision, context.device))


def check_parameter_count(config: ModelConfig, vocab_size: int, shards: Sequence[Shard], context: ParallelContext) -> int:
    """Number of parameters of the built model, summed over all ranks, each element once and without padding.

    Args:
        shards: this rank's.

    Raises:
        RuntimeError: the sum differs from what the settings say: a layer is lost or doubled.
    """
    mine = sum(placed.box.numel for shard in shards for placed in shard.counted_boxes(context))
    built = int(all_reduce(torch.tensor(mine, dtype=torch.int64, device=context.device), context.world))
    check_count(config, vocab_size, built, "the ranks")
    return built


def device_peak(context: ParallelContext, model: Model) -> float | None:
    """Peak FLOP/s of this rank's device for the model's products, each in its own format, if the table has them."""
    if context.device.type != "cuda":
        return None
    share = flops_in_8_bits(model.config, model.precision) / flops_per_token(model.config, model.vocab_size)
    return mixed_peak_flops(torch.cuda.get_device_name(context.device), str(model.dtype), share)


def make_timers(config: LoggingConfig, context: ParallelContext) -> Timers:
    """The timers of this rank; on CUDA they wait for the device."""
    return Timers(config.timing_log_level, torch.cuda.synchronize if context.device.type == "cuda" else None)


def make_learning_schedule(optimizer: OptimizerConfig, training: TrainingConfig, plan: BatchSizePlan) -> LearningSchedule:
    """The schedules of learning rate and weight decay that the settings describe."""
    return LearningSchedule(optimizer, schedule_lengths(optimizer, training, plan.samples_after, plan.total_samples))


def make_reporter(
    config: Config,
    context: ParallelContext,
    model: Model,
    plan: BatchSizePlan,
    timers: Timers,
    *,
    resumed: bool,
    quiet: bool = False,
) -> Reporter:
    """Make the reporter of the run. All ranks call it together.

    Args:
        quiet: print nothing.

    Raises:
        SetupError: the metrics file or another sink cannot be opened.
    """
    folder = run_folder(config.checkpoint, config.logging)
    return together(
        context,
        lambda: Reporter(
            config.logging,
            model,
            context,
            timers,
            plan.total_iterations,
            total_samples=plan.total_samples,
            speaks=context.rank == 0,
            quiet=quiet,
            peak=device_peak(context, model),
            resumed=resumed,
            judges=config.spikes.spike_policy != "none",
            settings=to_dict(config),
            folder=folder,
        ),
    )


def facts(
    record: Mapping[str, Any],
    context: ParallelContext,
    model: Model,
    plan: BatchSizePlan,
    num_parameters: int,
    kernel_choice: KernelChoice | None = None,
) -> dict[str, Any]:
    """What the record of a run tells of a start: see `megatron/metrics/history.py`.

    Args:
        record: settings, command line and versions.
        kernel_choice: attention's, if it was measured.
    """
    topology, device = context.topology, context.device
    return {
        "total_iterations": plan.total_iterations,
        "total_samples": plan.total_samples,
        "seq_length": model.config.seq_length,
        "parameters": num_parameters,
        "world_size": topology.world_size,
        "layout": {axis: topology.size(axis) for axis in ("tp", "cp", "dp", "pp")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "peak_flops": device_peak(context, model),
        "attention": None if kernel_choice is None else dataclasses.asdict(kernel_choice),
        **record,
    }


def tensorboard_command(folder: str) -> str:
    """The command that shows the curves of a run, under the name of its folder."""
    path = Path(folder).resolve()
    name = path.parent.name if path.name in ("tensorboard", "tb", "logs") else path.name
    if "://" in folder or not re.fullmatch(r"[^,:]+", str(path)):  # which have a meaning in the longer form
        return f"tensorboard --logdir {shlex.quote(folder)}"
    return f"tensorboard --logdir_spec {shlex.quote(f'{name}:{path}')}"


def describe_outputs(config: Config, *, draws: bool) -> Iterator[str]:
    """Lines of the start-up log on where the run can be watched.

    Args:
        draws: whether there is a program that draws the record.
    """
    folder, logging = run_folder(config.checkpoint, config.logging), config.logging
    if folder is None:
        yield f"no record of the run and no {PICTURE}: --save or --tensorboard-dir with a local folder would keep them there"
        return
    from megatron.metrics.history import HISTORY

    if logging.tensorboard_dir is not None:
        yield f"TensorBoard: {tensorboard_command(logging.tensorboard_dir)}"
    lacks = missing_library() if logging.loss_picture and draws else None
    picture = f", its picture is {PICTURE} there" if logging.loss_picture and draws and lacks is None else ""
    report = f"{' and' if picture else ','} {REPORT} at the end" if logging.report and draws else ""
    yield f"the record of the run is {os.path.join(folder, HISTORY)}{picture}{report}"
    if lacks is not None:
        yield lacks


# ---- Choice of attention's kernel at the start of a run, the same on all ranks, and its line in the start-up log.


def _attention_inputs(
    config: Config, topology: Topology, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make uninitialised queries [s, b, g, r, d], keys and values [s, b, g, channels] of a layer and microbatch on one rank."""
    sizes, ranks = config.model, topology.tp * topology.cp  # context ranks that call a kernel of torch have shared the heads
    heads, kv_heads = (max(1, count // ranks) for count in (sizes.num_attention_heads, sizes.num_key_value_heads))
    leading = (sizes.seq_length, config.training.micro_batch_size, kv_heads)
    shapes = (heads // kv_heads, sizes.head_size), (sizes.head_size,), (sizes.value_size or sizes.head_size,)
    q, k, v = (torch.empty((*leading, *shape), dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def choose_attention(config: Config, context: ParallelContext) -> tuple[KernelChoice | None, Callable[[], None]]:
    """Choose between attention's kernels by measurement, if --attention-backend auto leaves a choice.

    The first rank measures, and all ranks take its choice. They call this together, before the model takes memory.

    Returns:
        the choice, or None where nothing was measured; and what brings back the kernels that were in use before.

    Raises:
        torch.OutOfMemoryError: on the first rank, which lacks the memory for the queries, keys and values of one layer.
    """
    kernels = kernels_to_time(attention_call(config, on_cuda=context.device.type == "cuda"))
    if config.speed.attention_backend != "auto" or not kernels:
        return None, lambda: None

    from megatron.attention.timing import choose_on_device

    def measure() -> KernelChoice | None:
        if context.rank:
            return None
        inputs = _attention_inputs(config, context.topology, model_dtype(config.precision), context.device)
        return choose_on_device(kernels, inputs, config.model.attention_dropout)

    choice: KernelChoice = broadcast_object(together(context, measure), context.world)
    bring_back = use_backend("auto" if choice.kernel == "flash" else choice.kernel)
    if config.speed.compile:
        named("megatron.model.compiled:separate_graphs")()  # a model that was built before has not been traced yet
    return choice, bring_back


def describe_attention(config: Config, model: Model, context: ParallelContext, choice: KernelChoice | None = None) -> str:
    """Name the kernel that computes attention, the kernels to choose from, and measured times.

    Raises:
        ValueError: this device has none that is allowed.
    """
    sizes, dropout = config.model, config.model.attention_dropout
    backend = config.speed.attention_backend
    inputs = (x.requires_grad_() for x in _attention_inputs(config, context.topology, model.dtype, context.device))
    q, k, v, grouped = as_samples(*inputs)
    kernel = chosen_kernel(q, k, v, dropout, grouped=grouped)
    if kernel is None:
        raise ValueError(f"--attention-backend {backend} has no kernel that runs on this {context.device.type} device. Use auto.")
    head = torch.empty(sizes.head_size, dtype=model.dtype, device=context.device)
    found: dict[str, int] = {}
    for spec, way in zip(layers(sizes), context_ways(sizes, config.parallel.cp_comm_type), strict=True):
        scores = spec.attention.scores
        own = kernel if one_kernel(scores, sizes.seq_length) else shaped_kernel(scores, head, head, dropout)
        if context.topology.cp > 1 and way != "a2a":
            own = named("megatron.attention.parts:kernel_in_words")(scores, head, head, dropout)
        found[own] = found.get(own, 0) + 1
    words = [kernel if count == sizes.num_layers else f"{kernel} in {count} layers" for kernel, count in found.items()]
    allowed = dict.fromkeys((*kernels_in_use(), *(() if choice is None else choice.milliseconds)))
    times = "" if choice is None else f"; measured, forward and backward of a layer: {choice}"
    return f"attention: {' and '.join(words)} (--attention-backend {backend}, of {', '.join(allowed)}{times})"
