"""What a run says of itself when it starts: layout, model, state, pipeline and batch, and advice on its settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron.config.config import Config
from megatron.config.given import this_job
from megatron.model.build import Model
from megatron.model.gpt import residual_dtype
from megatron.parallel import torch_private
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.products import dtype_name
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.exchange import describe_receives
from megatron.pipeline_parallel.partition import describe_offload, describe_recompute, format_layer_table
from megatron.pipeline_parallel.simulate import simulate
from megatron.pipeline_parallel.validate import peak_kept, peak_live_activations
from megatron.precision.products import describe_precision
from megatron.spec.counts import flops_per_step, kept_per_token
from megatron.spec.groups import describe_groups
from megatron.spec.layers import context_ways
from megatron.spec.operations import Costs, Schedule
from megatron.spec.weights import model_weights
from megatron.training.features import Feature, RunParts
from megatron.training.progress import BatchSizePlan
from megatron.training.startup import describe_attention, device_peak
from megatron.training.step import TrainStep
from megatron_lab.monitoring.run_warnings import rate_far_off
from megatron_lab.planner.advice import advice
from megatron_lab.planner.attention_notes import describe_copies
from megatron_lab.planner.state_report import describe_state, state_report

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


def describe_context(config: Config, topology: Topology) -> Iterator[str]:
    """A line on how context ranks share sequences, if they do."""
    if topology.cp == 1:
        return
    ways = context_ways(config.model, config.parallel.cp_comm_type)
    words = [way if ways.count(way) == len(ways) else f"{way} in {ways.count(way)} layers" for way in dict.fromkeys(ways)]
    yield (
        f"{topology.cp} context ranks hold {config.tokens_per_rank:,} tokens of each sequence; they share keys and values by "
        f"{' and '.join(words)} (--cp-comm-type)"
    )


def _told_of_trained(model: Model) -> str:
    """How many parameters are trained, if not all are."""
    weights = list(model_weights(model.config, model.vocab_size))
    trained = sum(weight.numel for weight in weights if not weight.frozen)
    return f", of which {trained:,} are trained," if any(weight.frozen for weight in weights) else ""


def describe(
    config: Config,
    context: ParallelContext,
    step: TrainStep,
    num_parameters: int,
    plan: BatchSizePlan,
    consumed_samples: int,
    kernel_choice: KernelChoice | None = None,
) -> list[str]:
    """Lines of the start-up log: layout, model, layer table, state, pipeline, batch. All ranks of a pipeline call it.

    Args:
        kernel_choice: attention's, if it was measured.
    """
    model = step.model
    topology = context.topology
    peak = device_peak(context, model)
    kept = residual_dtype(model.config, model.dtype)
    lines = [
        f"{topology.world_size} ranks on {context.device.type} ({context.backend or 'one process'}): "
        f"{topology}" + (", sequence parallel" if model.sequence_parallel else ""),
        f"model of {num_parameters:,} parameters{_told_of_trained(model)} in {dtype_name(model.dtype)}, "
        f"residual stream {dtype_name(kept)}, "
        f"vocabulary {model.vocab_size:,}; {plan.total_iterations:,} steps, {plan.total_samples:,} samples",
        *([f"your own modules: {', '.join(config.training.imports)}"] if config.training.imports else []),
        *([] if model.overlap is None else [f"tensor ranks communicate beside products by {model.overlap}"]),
        *describe_precision(model.precision, model.config.num_layers, context.device, model.config.mtp_num_layers),
        *torch_private.missing_note(),
        describe_attention(config, model, context, kernel_choice),
        *describe_copies(config, on_cuda=context.device.type == "cuda"),
        *(_compilers(context) if config.speed.compile else ()),
        *describe_context(config, topology),
        *format_layer_table(model.layer_table),
        *describe_recompute(model.layer_table),
        *describe_offload(model.layer_table),
        *describe_groups(config.optimizer, model_weights(model.config, model.vocab_size)),
    ]
    schedule = step.schedule(plan.num_microbatches(plan.total_samples))  # after any ramp-up of the batch
    report = state_report(model, context, config.parallel, config.optimizer, schedule)
    reports = gather_objects(report, context.group("pp"))
    lines += describe_state(reports, config.parallel, topology, schedule.num_microbatches)
    if context.device.type == "cuda" and peak is None:
        lines.append(f"no peak FLOP/s is known for {torch.cuda.get_device_name(context.device)}: MFU is not reported")
    if topology.pp > 1:
        # Now, and after any ramp-up of the batch.
        for count in dict.fromkeys(plan.num_microbatches(samples) for samples in (consumed_samples, plan.total_samples)):
            tokens = config.training.micro_batch_size * config.tokens_per_rank
            lines += _describe_pipeline(step.schedule(count), model, tokens, topology.tp)
            if config.parallel.overlap_p2p_communication:
                connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
                lines.append(describe_receives(step.schedule(count), context.device.type, connections))
    lines += describe_rate(config, plan, model.vocab_size)
    lines.append(f"{config.model.seq_length * plan.final_global_batch_size:,} tokens a step after any ramp-up")
    return lines


def _compilers(context: ParallelContext) -> list[str]:
    """Lines on how the compilers of the ranks differ."""
    from megatron_lab.monitoring.compiler_facts import compiler_facts, describe_differences

    return [*describe_differences(gather_objects(compiler_facts(context.device), context.world))]


def _describe_pipeline(schedule: Schedule, model: Model, tokens: int, tensor_size: int) -> Iterator[str]:
    """Lines on what the schedule costs in time and memory, that of deferred weight gradients too, if there are any.

    Args:
        tokens: of a microbatch on one rank.
    """
    stages, batch = schedule.num_stages, schedule.num_microbatches
    chunks = schedule.num_chunks // stages
    bubble = simulate(schedule, Costs().divided(chunks)).bubble_share
    live = max(peak_live_activations(schedule)) / chunks
    yield (
        f"pipeline schedule {schedule.name}: {batch} microbatches through {stages} stages"
        + (f" of {chunks} chunks" if chunks > 1 else "")
        + f", {bubble:.1%} of the time idle if all operations cost the same, "
        f"at most {live:.3g} microbatches of a stage between forward and backward"
    )
    token_bytes = tokens * model.dtype.itemsize
    kept = [
        kept_per_token(
            model.config, chunk.layers, tensor_size=tensor_size, sequence_parallel=model.sequence_parallel, last=chunk.last
        )
        for chunk in model.layer_table
    ]
    peaks = peak_kept(schedule, [token_bytes * numbers for numbers in kept])
    if most := max(peaks):
        yield f"the weight gradients that it puts off keep at most {most / 2**20:,.1f} MiB on a rank (stage {peaks.index(most)})"


def describe_rate(config: Config, plan: BatchSizePlan, vocab_size: int) -> Iterator[str]:
    """A line on a learning rate far outside of what the size of the run suggests. The rule is for Adam from random weights."""
    optimizer, checkpoint = config.optimizer, config.checkpoint
    adam = optimizer.optimizer in ("adam", "adam8bit") and config.model.mup_base_width is None
    if not adam or optimizer.lr is None or checkpoint.pretrained_checkpoint is not None or checkpoint.finetune:
        return
    found = rate_far_off(optimizer.lr, flops_per_step(config.model, vocab_size, plan.total_samples))
    if found is not None:
        yield f"WARNING: {found}"


class StartUpFeature(Feature):
    """The description of every run."""

    def start_up_lines(self, run: RunParts) -> list[str]:
        """Describe the run, and advise on settings that waste much."""
        config, context, vocab_size = run.config, run.context, run.step.model.vocab_size
        found = advice(config, context.topology.world_size, this_job().gpus_per_node, vocab_size)
        return [
            *describe(config, context, run.step, run.num_parameters, run.plan, run.progress.consumed_samples, run.kernel_choice),
            *(f"advice: {line}" for line in found),
        ]
