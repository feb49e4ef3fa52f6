"""Steps before the first training step: numerics settings, checks of the built model, and the start-up log."""

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

from megatron.attention.backends import find_kernel_name, get_enabled_kernels, use_backend
from megatron.attention.core import has_fused_kernel, name_kernel, view_as_sdpa_inputs
from megatron.config.checks.memory import build_attention_call
from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.model import ModelConfig
from megatron.config.outputs import DEFAULT_SAVE_MINUTES, LoggingConfig, get_run_folder
from megatron.config.precision import PrecisionConfig, SpeedConfig
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.config.version import get_extra_install_command
from megatron.metrics.measures import Timers, get_mixed_peak_flops
from megatron.model.build import Model, get_model_dtype
from megatron.parallel.collectives import all_reduce, broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import Shard
from megatron.parallel.topology import Topology
from megatron.precision.gemms import check_fp8_support
from megatron.spec.attention_backends import get_kernels_to_time
from megatron.spec.counts import check_parameter_count, count_flops_per_token, count_fp8_flops
from megatron.spec.layers import build_layer_specs, resolve_cp_comm_types
from megatron.training.failure import run_on_all_ranks
from megatron.training.progress import BatchSizePlan, LearningSchedule, compute_schedule_lengths
from megatron.training.reporter import Reporter

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


PICTURE_FILE, REPORT_FILE = "loss.png", "report.html"
"""Files in the run folder: the plot of the run's record, and the HTML report that is written at the end."""
PLOT_LIBRARY = "matplotlib"


def describe_missing_library() -> str | None:
    """Return a message that says how to install the plotting library, or None if it is installed. The run does not import the
    library, because another process plots."""
    if importlib.util.find_spec(PLOT_LIBRARY) is not None:
        return None
    return f"{PICTURE_FILE} needs {PLOT_LIBRARY}, which is not installed: {get_extra_install_command(PLOT_LIBRARY)}"


def set_logging(rank: int) -> None:
    """Show log messages of libraries from rank 0 only, but errors from all ranks."""
    logging.basicConfig(format="  %(message)s", level=logging.WARNING)
    for package in ("megatron", "megatron_lab"):
        logging.getLogger(package).setLevel(logging.INFO if rank == 0 else logging.ERROR)


def set_numerics(config: Config) -> Callable[[], None]:
    """Configure the attention kernels, the precision of float32 products, and deterministic mode. Called before the first use of a
    device.

    Deterministic mode has these effects:

    - The backward of attention accumulates in a fixed order (flash) or in a single part (memory-efficient), and cuDNN attention is
      disabled (torch, aten/src/ATen/native/transformers/cuda: attention_backward.cu, sdp_utils.cpp).
    - cuBLAS gets a workspace per stream.
    - An operation without a deterministic kernel raises an error.
    - New memory is not filled with NaN. Torch does this by default in deterministic mode, with an additional kernel per allocation.
      The framework does not need it, because it does not read uninitialised memory.

    Returns:
        a function that restores the previous configuration of attention kernels, float32 products and deterministic algorithms.
    """
    restore_stack = ExitStack()
    restore_stack.callback(use_backend(config.speed.attention_backend))
    restore_stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        restore_stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    # The older function also exists in torch 2.11. It must not be mixed with torch.backends.cuda.matmul.fp32_precision.
    torch.set_float32_matmul_precision(config.precision.fp32_matmul_precision)
    return restore_stack.close


def set_compiler_cache(speed: SpeedConfig) -> None:
    """Set the cache folder of the compiler (--compile-cache-dir). Called before anything is compiled."""
    if speed.compile and speed.compile_cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(speed.compile_cache_dir)


def resolve_batch_size(config: Config, plan: BatchSizePlan) -> Config:
    """Return the settings with an explicit --global-batch-size. Its default depends on the number of data-parallel ranks.

    Checkpoints then contain the value. If a run is resumed with another number of data-parallel ranks, a changed batch size is
    therefore detected.
    """
    training = dataclasses.replace(config.training, global_batch_size=plan.final_global_batch_size)
    return dataclasses.replace(config, training=training)


def check_precision(precision: PrecisionConfig, context: ParallelContext) -> None:
    """Check that the devices of all ranks support the number formats of the run (such as FP8).

    Raises:
        SetupError: a device does not support them.
    """
    run_on_all_ranks(context, lambda: check_fp8_support(precision, context.device))


def count_parameters(config: ModelConfig, vocab_size: int, shards: Sequence[Shard], context: ParallelContext) -> int:
    """Return the number of parameters of the built model over all ranks. Each element counts once; padding does not count.

    Args:
        shards: parameter shards of this rank.

    Raises:
        RuntimeError: the settings imply another number, so a layer is missing or duplicated.
    """
    num_local = sum(param_slice.slice.numel for shard in shards for param_slice in shard.get_norm_slices(context))
    num_built = int(all_reduce(torch.tensor(num_local, dtype=torch.int64, device=context.device), context.world))
    check_parameter_count(config, vocab_size, num_built, "the ranks")
    return num_built


def get_peak_device_flops(context: ParallelContext, model: Model) -> float | None:
    """Return the peak FLOP/s of this rank's device for the matrix products of the model. It is a mean over the number formats of
    the products, weighted by their FLOPs. None if the device is not in the table of peak rates."""
    if context.device.type != "cuda":
        return None
    fp8_fraction = count_fp8_flops(model.config, model.precision) / count_flops_per_token(model.config, model.vocab_size)
    return get_mixed_peak_flops(torch.cuda.get_device_name(context.device), str(model.dtype), fp8_fraction)


def make_timers(config: LoggingConfig, context: ParallelContext) -> Timers:
    """Create the timers of this rank. On CUDA a timer waits for the device when it starts and when it stops."""
    return Timers(config.timing_log_level, torch.cuda.synchronize if context.device.type == "cuda" else None)


def make_learning_schedule(optimizer: OptimizerConfig, training: TrainingConfig, plan: BatchSizePlan) -> LearningSchedule:
    """Build the schedules of learning rate and weight decay from the settings."""
    return LearningSchedule(
        optimizer, compute_schedule_lengths(optimizer, training, plan.count_consumed_samples, plan.total_samples)
    )


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
    """Create the reporter of the run. All ranks call this function together.

    Args:
        resumed: append to the metrics file instead of starting a new file.
        quiet: print nothing.

    Raises:
        SetupError: the metrics file or another output cannot be opened.
    """
    folder = None if config.training.skip_train else get_run_folder(config.checkpoint, config.logging)
    has_curves = context.rank == 0 and config.logging.writes_curves
    return run_on_all_ranks(
        context,
        lambda: Reporter(
            config.logging,
            model,
            context,
            timers,
            plan.total_iterations,
            total_samples=plan.total_samples,
            is_output_rank=context.rank == 0,
            quiet=quiet,
            peak_flops=get_peak_device_flops(context, model),
            resumed=resumed,
            counts_spikes=config.spikes.spike_policy != "none",
            open_curve_sinks=import_object("megatron_lab.monitoring.loggers:prepare_curve_sinks")(config) if has_curves else None,
            folder=folder,
        ),
    )


def collect_run_facts(
    record: Mapping[str, Any],
    context: ParallelContext,
    model: Model,
    plan: BatchSizePlan,
    num_parameters: int,
    kernel_choice: KernelChoice | None = None,
) -> dict[str, Any]:
    """Return the keys of this start's line in the history file of the run (`megatron/metrics/history.py`), such as layout, device
    and versions.

    Args:
        record: settings, command line and versions.
        kernel_choice: attention kernel that was chosen by measurement; None if nothing was measured.
    """
    topology, device = context.topology, context.device
    return {
        "total_iterations": plan.total_iterations,
        "total_samples": plan.total_samples,
        "seq_length": model.config.seq_length,
        "parameters": num_parameters,
        "world_size": topology.world_size,
        "layout": {axis: topology.get_size(axis) for axis in ("tp", "cp", "dp", "pp")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "peak_flops": get_peak_device_flops(context, model),
        "attention": None if kernel_choice is None else dataclasses.asdict(kernel_choice),
        **record,
    }


def build_tensorboard_command(folder: str) -> str:
    """Return the shell command that shows the curves of a run in TensorBoard, under the name of the run's folder."""
    path = Path(os.path.realpath(folder))
    name = path.parent.name if path.name in ("tensorboard", "tb", "logs") else path.name
    if "://" in folder or not re.fullmatch(r"[^,:]+", str(path)):  # --logdir_spec treats these characters as separators
        return f"tensorboard --logdir {shlex.quote(folder)}"
    return f"tensorboard --logdir_spec {shlex.quote(f'{name}:{path}')}"


def describe_outputs(config: Config, *, draw_record: bool) -> Iterator[str]:
    """Yield lines for the start-up log that say where the user can watch the run: curves, pictures and reports.

    Args:
        draw_record: whether the run plots its history file and writes a report.
    """
    folder, logging = get_run_folder(config.checkpoint, config.logging), config.logging
    if config.checkpoint.save is not None and config.checkpoint.save_interval is None:
        times = f"every {DEFAULT_SAVE_MINUTES} minutes (the newest is kept), at the end and on a signal"
        yield f"checkpoints: {times}; --save-interval N: every N steps"
    if config.training.skip_train:
        return
    if folder is None:
        yield f"no record of the run and no {PICTURE_FILE}: --save or --tensorboard-dir with a local folder would keep them there"
        return
    from megatron.metrics.history import HISTORY_FILE

    if logging.tensorboard_dir is not None:
        yield f"TensorBoard: {build_tensorboard_command(logging.tensorboard_dir)}"
    missing_library = describe_missing_library() if logging.loss_picture and draw_record else None
    picture = f", its picture is {PICTURE_FILE} there" if logging.loss_picture and draw_record and missing_library is None else ""
    report = f"{' and' if picture else ','} {REPORT_FILE} at the end" if logging.report and draw_record else ""
    yield f"the record of the run is {os.path.join(folder, HISTORY_FILE)}{picture}{report}"
    if missing_library is not None:
        yield missing_library


# ---- Choice of the attention kernel at the start of a run, the same on all ranks, and its line in the start-up log.


def _build_attention_inputs(
    config: Config, topology: Topology, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Create uninitialised attention inputs of one layer and microbatch on one rank, for measurements of kernels.

    Returns:
        queries [s, b, g, r, d], keys [s, b, g, d] and values [s, b, g, v]. `s` is the sequence length, `b` the microbatch size, `g`
        the number of key-value heads, `r` the number of query heads per key-value head. `d` and `v` are the head sizes of keys and
        values.
    """
    model, head_parallel_size = (
        config.model,
        topology.tp * topology.cp,
    )  # with context parallelism torch's kernels run on a share of the heads
    num_heads, num_kv_heads = (
        max(1, count // head_parallel_size) for count in (model.num_attention_heads, model.num_key_value_heads)
    )
    leading = (model.seq_length, config.training.micro_batch_size, num_kv_heads)
    shapes = (num_heads // num_kv_heads, model.head_size), (model.head_size,), (model.value_size or model.head_size,)
    q, k, v = (torch.empty((*leading, *shape), dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def choose_attention_kernel(config: Config, context: ParallelContext) -> tuple[KernelChoice | None, Callable[[], None]]:
    """Choose the fastest attention kernel by measurement, if --attention-backend auto allows several kernels.

    The first rank measures, and all ranks use its choice. All ranks call this function together, before the model is allocated.

    Returns:
        the choice, or None if nothing was measured; and a function that restores the previously enabled kernels.

    Raises:
        torch.OutOfMemoryError: on the first rank, if there is no memory for the queries, keys and values of one layer.
    """
    kernels = get_kernels_to_time(build_attention_call(config, on_cuda=context.device.type == "cuda"))
    if config.speed.attention_backend != "auto" or not kernels:
        return None, lambda: None

    from megatron.attention.timing import choose_on_device

    def measure() -> KernelChoice | None:
        if context.rank:
            return None
        inputs = _build_attention_inputs(config, context.topology, get_model_dtype(config.precision), context.device)
        return choose_on_device(kernels, inputs, config.model.attention_dropout)

    choice: KernelChoice = broadcast_object(run_on_all_ranks(context, measure), context.world)
    restore_backend = use_backend("auto" if choice.kernel == "flash" else choice.kernel)
    if config.speed.compile:
        import_object("megatron.model.compiled:discard_stale_graphs")()  # a model that is already built has not been traced yet
    return choice, restore_backend


def describe_attention_kernel(config: Config, model: Model, context: ParallelContext, choice: KernelChoice | None = None) -> str:
    """Return a line for the start-up log: the attention kernel of the run, the kernels that were available, and the measured times.

    Raises:
        ValueError: no enabled kernel runs on this device.
    """
    model_config, dropout = config.model, config.model.attention_dropout
    backend = config.speed.attention_backend
    inputs = (x.requires_grad_() for x in _build_attention_inputs(config, context.topology, model.dtype, context.device))
    q, k, v, grouped = view_as_sdpa_inputs(*inputs)
    kernel = find_kernel_name(q, k, v, dropout, is_grouped=grouped)
    if kernel is None:
        raise ValueError(
            f"--attention-backend {backend} has no kernel for this model on this {context.device.type} device. "
            "Use --attention-backend auto."
        )
    head = torch.empty(model_config.head_size, dtype=model.dtype, device=context.device)
    layers_per_kernel: dict[str, int] = {}
    for spec, cp_comm_type in zip(
        build_layer_specs(model_config), resolve_cp_comm_types(model_config, config.parallel.cp_comm_type), strict=True
    ):
        scores = spec.attention.scores
        layer_kernel = kernel if has_fused_kernel(scores, model_config.seq_length) else name_kernel(scores, head, head, dropout)
        if context.topology.cp > 1 and cp_comm_type != "a2a":
            layer_kernel = import_object("megatron.attention.range_pairs:name_pair_kernel")(scores, head, head, dropout)
        layers_per_kernel[layer_kernel] = layers_per_kernel.get(layer_kernel, 0) + 1
    descriptions = [
        kernel if count == model_config.num_layers else f"{kernel} in {count} layers" for kernel, count in layers_per_kernel.items()
    ]
    allowed = dict.fromkeys((*get_enabled_kernels(), *(() if choice is None else choice.milliseconds)))
    times = "" if choice is None else f"; measured, forward and backward of a layer: {choice}"
    return f"attention: {' and '.join(descriptions)} (--attention-backend {backend}, of {', '.join(allowed)}{times})"
