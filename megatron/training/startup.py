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

from megatron.attention.backends import use_backend
from megatron.config.config import Config
from megatron.config.imports import named
from megatron.config.model import ModelConfig
from megatron.config.outputs import LoggingConfig, run_folder
from megatron.config.precision import PrecisionConfig
from megatron.config.save import to_dict
from megatron.config.speed import SpeedConfig
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.config.version import how_to_install
from megatron.metrics.device_peaks import mixed_peak_flops
from megatron.metrics.run_warnings import STARTS, Corpus, LossWarnings
from megatron.metrics.timers import Timers
from megatron.model.build import Model
from megatron.optimizer.lr_schedule import schedule_lengths
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard
from megatron.precision.device import check_device
from megatron.spec.counts import check_count, flops_in_8_bits, flops_per_token
from megatron.training.failure import together
from megatron.training.progress import BatchSizePlan, LearningSchedule
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
    corpus: Corpus | None = None,
    quiet: bool = False,
) -> Reporter:
    """Make the reporter of the run. All ranks call it together.

    Args:
        corpus: the training data, for warnings about losses; none are given without it.
        quiet: print nothing.

    Raises:
        SetupError: the metrics file or another sink cannot be opened.
    """
    folder = run_folder(config.checkpoint, config.logging)
    first: list[float] = []
    if resumed and folder is not None and context.rank == 0:
        first = named("megatron.metrics.history:first_losses")(folder, STARTS)
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
            warnings=None if corpus is None else LossWarnings(plan.total_iterations, corpus, first),
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
