"""Description of a run that is logged when the run starts: layout, model, state, pipeline and batch, and advice on its settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron.config.config import Config
from megatron.config.outputs import get_run_folder
from megatron.config.parsed_flags import get_current_job
from megatron.metrics.log_line import format_duration
from megatron.model.build import Model
from megatron.model.gpt import get_residual_dtype
from megatron.parallel import torch_private
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.matmul import get_dtype_name
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.exchange import describe_receive_plans
from megatron.pipeline_parallel.partition import describe_offload, describe_recompute, format_layer_table
from megatron.pipeline_parallel.simulate import simulate
from megatron.pipeline_parallel.validate import compute_peak_deferred_memory, compute_peak_live_activations
from megatron.precision.gemms import format_precision
from megatron.spec.counts import count_deferred_elements_per_token, count_flops_per_step
from megatron.spec.groups import format_groups
from megatron.spec.layers import resolve_cp_comm_types
from megatron.spec.operations import OpCosts, Schedule
from megatron.spec.weights import iter_weights
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import BatchSizePlan
from megatron.training.startup import describe_attention_kernel, get_peak_device_flops
from megatron.training.step import TrainStep
from megatron_lab.monitoring.run_warnings import check_learning_rate
from megatron_lab.planner.advice import build_advice
from megatron_lab.planner.attention_notes import format_copy_notes
from megatron_lab.planner.state_report import build_state_report, format_state_report

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


def describe_context_parallelism(config: Config, topology: Topology) -> Iterator[str]:
    """Yield a log line that says how sequences are split over context-parallel ranks. Without context parallelism yield nothing."""
    if topology.cp == 1:
        return
    comm_types = resolve_cp_comm_types(config.model, config.parallel.cp_comm_type)
    descriptions = [
        comm_type if comm_types.count(comm_type) == len(comm_types) else f"{comm_type} in {comm_types.count(comm_type)} layers"
        for comm_type in dict.fromkeys(comm_types)
    ]
    yield (
        f"{topology.cp} context ranks hold {config.tokens_per_rank:,} tokens of each sequence; they share keys and values by "
        f"{' and '.join(descriptions)} (--cp-comm-type)"
    )


def _format_trained_params(model: Model) -> str:
    """Format the number of trained parameters for a log line, if some parameters of the model are not trained; "" if all are
    trained."""
    weights = list(iter_weights(model.config, model.vocab_size))
    trained = sum(weight.numel for weight in weights if not weight.frozen)
    return f", of which {trained:,} are trained," if any(weight.frozen for weight in weights) else ""


def describe_run(
    config: Config,
    context: ParallelContext,
    step: TrainStep,
    plan: BatchSizePlan,
    consumed_samples: int,
    kernel_choice: KernelChoice | None = None,
) -> list[str]:
    """Return the lines of the start-up log that describe the run in detail: layers of each stage, memory of the state, pipeline and
    batch.

    All ranks of a pipeline must call the function.

    Args:
        plan: batch size over the course of the run.
        consumed_samples: samples that the run has consumed before this start.
        kernel_choice: selected attention kernel, if the kernels were measured.
    """
    model = step.model
    topology = context.topology
    peak_flops = get_peak_device_flops(context, model)
    lines = [
        *([f"your own modules: {', '.join(config.training.imports)}"] if config.training.imports else []),
        *([] if model.overlap is None else [f"communication of tensor ranks overlaps with matrix products: {model.overlap}"]),
        *format_precision(model.precision, model.config.num_layers, context.device, model.config.mtp_num_layers),
        *torch_private.format_missing_note(),
        describe_attention_kernel(config, model, context, kernel_choice),
        *format_copy_notes(config, on_cuda=context.device.type == "cuda"),
        *(_describe_compiler_differences(context) if config.speed.compile else ()),
        *describe_context_parallelism(config, topology),
        *format_layer_table(model.layer_table),
        *describe_recompute(model.layer_table),
        *describe_offload(model.layer_table),
        *([] if config.training.skip_train else format_groups(config.optimizer, iter_weights(model.config, model.vocab_size))),
    ]
    schedule = step.get_schedule(plan.get_num_microbatches(plan.total_samples))  # after any ramp-up of the batch
    report = build_state_report(model, context, config.parallel, config.optimizer, schedule)
    reports = gather_objects(report, context.group("pp"))
    lines += format_state_report(reports, config.parallel, topology, schedule.num_microbatches)
    if context.device.type == "cuda" and peak_flops is None:
        lines.append(f"no peak FLOP/s is known for {torch.cuda.get_device_name(context.device)}: MFU is not reported")
    if topology.pp > 1:
        # Describe the current batch size, and the one after any ramp-up.
        for num_microbatches in dict.fromkeys(
            plan.get_num_microbatches(samples) for samples in (consumed_samples, plan.total_samples)
        ):
            tokens = config.training.micro_batch_size * config.tokens_per_rank
            lines += _describe_pipeline(step.get_schedule(num_microbatches), model, tokens, topology.tp)
            if config.parallel.overlap_p2p_communication:
                connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
                lines.append(describe_receive_plans(step.get_schedule(num_microbatches), context.device.type, connections))
    return [*lines, *describe_learning_rate(config, plan, model.vocab_size)]


def _describe_compiler_differences(context: ParallelContext) -> list[str]:
    """Return warnings about versions and environment variables that differ between ranks and affect the kernels of
    torch.compile."""
    from megatron_lab.monitoring.compiler_inputs import collect_compiler_inputs, describe_differences

    return [*describe_differences(gather_objects(collect_compiler_inputs(context.device), context.world))]


def _describe_pipeline(schedule: Schedule, model: Model, tokens: int, tensor_size: int) -> Iterator[str]:
    """Yield log lines about the pipeline schedule: the schedule's idle time, its activation memory and the memory of deferred
    weight gradients.

    Args:
        tokens: tokens of a microbatch on this rank.
        tensor_size: tensor-parallel size.
    """
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    chunks_per_stage = schedule.num_chunks // num_stages
    bubble = simulate(schedule, OpCosts().divide_by_chunks(chunks_per_stage)).bubble_share
    live_microbatches = max(compute_peak_live_activations(schedule)) / chunks_per_stage
    yield (
        f"pipeline schedule {schedule.name}: {num_microbatches} microbatches through {num_stages} stages"
        + (f" of {chunks_per_stage} chunks" if chunks_per_stage > 1 else "")
        + f", {bubble:.1%} of the time idle if all operations cost the same, "
        f"at most {live_microbatches:.3g} microbatches of activations on a stage"
    )
    token_bytes = tokens * model.dtype.itemsize
    deferred_elements = [
        count_deferred_elements_per_token(
            model.config, chunk.layers, tp=tensor_size, sequence_parallel=model.sequence_parallel, is_last_chunk=chunk.is_last
        )
        for chunk in model.layer_table
    ]
    peaks = compute_peak_deferred_memory(schedule, [token_bytes * elements for elements in deferred_elements])
    if max_bytes := max(peaks):
        yield (f"deferred weight gradients take at most {max_bytes / 2**20:,.1f} MiB on a rank (stage {peaks.index(max_bytes)})")


def describe_learning_rate(config: Config, plan: BatchSizePlan, vocab_size: int) -> Iterator[str]:
    """Yield a warning if the learning rate is far above the usual rate for a run of this size.

    The usual rate is only known for Adam and training from random weights, so other runs are not checked.
    """
    optimizer, checkpoint = config.optimizer, config.checkpoint
    adam = optimizer.optimizer in ("adam", "adam8bit") and config.model.mup_base_width is None
    if not adam or optimizer.lr is None or checkpoint.pretrained_checkpoint is not None or checkpoint.finetune:
        return
    warning = check_learning_rate(optimizer.lr, count_flops_per_step(config.model, vocab_size, plan.total_samples))
    if warning is not None:
        yield f"WARNING: {warning}"


def summarize_run(run: RunComponents) -> list[str]:
    """Return the first three lines of the start-up log: model, layout, and data with the length of the run."""
    model, topology, context = run.step.model, run.context.topology, run.context
    stream_dtype = get_residual_dtype(model.config, model.dtype)
    stream = f", residual stream {get_dtype_name(stream_dtype)}" if stream_dtype != model.dtype else ""
    ranks = f"{topology.world_size} rank{'s' if topology.world_size > 1 else ''} on {context.device.type}"
    return [
        f"model of {run.num_parameters:,} parameters{_format_trained_params(model)} in {get_dtype_name(model.dtype)}{stream}, "
        f"vocabulary {model.vocab_size:,}",
        f"{ranks} ({context.backend or 'one process'}): {topology}" + (", sequence parallel" if model.sequence_parallel else ""),
        describe_length(run),
    ]


def describe_length(run: RunComponents) -> str:
    """Return the line of the start-up log about the size of the training data and the length of the run. A resumed run estimates
    its remaining time from the speed of its previous start."""
    plan, progress, seq_length = run.plan, run.progress, run.config.model.seq_length
    if run.config.training.skip_train:
        return f"evaluation only (--skip-train), in batches of {seq_length * plan.final_global_batch_size:,} tokens"
    num_tokens = run.data.corpus.num_tokens
    total_tokens = plan.total_samples * seq_length
    length = f"{plan.total_iterations:,} steps of {seq_length * plan.final_global_batch_size:,} tokens"
    if num_tokens is not None:
        text = f"{num_tokens:,} training tokens: {length}"
        if not run.config.data.whole_documents:  # samples of whole documents contain padding; a line about the data has the epochs
            text += f", {total_tokens / num_tokens:,.3g} epochs"
    else:
        text = f"{'made-up training tokens (--mock-data)' if run.config.data.mock_data else 'training tokens'}: {length}"
    folder = get_run_folder(run.config.checkpoint, run.config.logging)
    if run.resume_point.path is None or folder is None or run.context.rank != 0:
        return text
    from megatron_lab.monitoring.durations import read_seconds_per_sample  # a new run does not need it

    seconds_per_sample = read_seconds_per_sample(folder)
    remaining_samples = plan.total_samples - progress.consumed_samples
    if seconds_per_sample is None or remaining_samples <= 0:
        return text
    return f"{text}; about {format_duration(remaining_samples * seconds_per_sample)} left"


class StartUpFeature(Feature):
    """Feature that logs a description of the run when it starts. It is enabled in every run."""

    def get_summary_lines(self, run: RunComponents) -> list[str]:
        """Return the lines about model, layout and data."""
        return summarize_run(run)

    def get_startup_lines(self, run: RunComponents) -> list[str]:
        """Return the log lines that describe the run, and advice on inefficient settings."""
        config, context, vocab_size = run.config, run.context, run.step.model.vocab_size
        advice = build_advice(config, context.topology.world_size, get_current_job().gpus_per_node, vocab_size)
        return [
            *describe_run(config, context, run.step, run.plan, run.progress.consumed_samples, run.kernel_choice),
            *(f"advice: {line}" for line in advice),
        ]
