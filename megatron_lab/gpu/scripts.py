"""Checks that run one rank of the job of each launch script in examples/. They measure its memory, and an upper bound of its
MFU."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatron.config.parsed_flags import DryRun
from megatron.metrics.measures import get_peak_flops
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.spec.counts import count_flops_per_step
from megatron_lab.gpu.context import ROOT, CheckContext, CheckFailed, DoesNotFit, Outcome
from megatron_lab.gpu.jobs import Job, build_train_step, create_random_batch, get_torch_device, run_without_communication
from megatron_lab.planner.dry_run import build_plan
from megatron_lab.proofs.small_model import Divisors, reduce_model

_MICROBATCHES_PER_STAGE = {True: 4, False: 2}
"""Microbatches of a step per stage. Key: whether there is only one stage.

More microbatches would not change the memory, and would change the time only in proportion.
"""
_VARIABLES = ("DATA", "VOCAB", "MERGES", "TOKENIZER", "RUN", "NNODES", "HEAD", "PORT", "SKIP_CHECK")


def read_script_argv(name: str, folder: Path) -> list[str]:
    """Return the command-line arguments that a launch script passes to Python in a dry run.

    Args:
        name: name of the script in examples/, without its suffix.
        folder: folder for a temporary program that takes the place of Python and prints its arguments.

    Raises:
        CheckFailed: this is an installed package. Only a checkout has the launch scripts.
    """
    script = ROOT / f"examples/{name}.sh"
    if not script.is_file():
        raise CheckFailed(
            f"there is no {script}: only a checkout of the repository has the launch scripts. Run the check in a checkout"
        )
    print_script = folder / "echo-words"
    print_script.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    print_script.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in _VARIABLES and not key.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", str(script)],
        env={**environment, "DRY_RUN": "1", "PYTHON": str(print_script)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[1:-1]


def build_script_job(name: str, context: CheckContext) -> Job:
    """Return the training job (settings and world size) of a launch script. On a CPU, the job has the script's layout but a small
    model.

    Args:
        name: name of the script in examples/, without its suffix.
    """
    job = Job.of(read_script_argv(name, context.folder))
    if context.on_cuda:
        return job
    return _shrink(job)


def _shrink(job: Job) -> Job:
    """Return a job with the same layout but a small model.

    The model has one layer per model chunk. If --pipeline-model-parallel-layout assigns every layer to a stage, the number of
    layers stays.
    """
    config, topology = job.config, job.topology
    parallel = config.parallel
    cuts = Divisors(
        topology.tp,
        num_shards=1,
        sequence_parallel=parallel.sequence_parallel,
        cp=topology.cp,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        min_local_experts=1,
    )
    num_chunks = len(build_layer_table(config.model, parallel, job.vocab_size, config.memory))
    num_layers = config.model.num_layers if parallel.pipeline_model_parallel_layout else num_chunks
    model = reduce_model(config.model, num_layers, 8, topology.tp, cuts)
    data = replace(config.data, tokenizer_type="NullTokenizer", vocab_size=500, vocab_file=None, merge_file=None)
    parallel = replace(parallel, device="cpu")
    training = replace(config.training, micro_batch_size=1)
    return replace(job, config=replace(config, model=model, data=data, parallel=parallel, training=training))


def rank(context: CheckContext, name: str) -> Outcome:
    """Run a step on one rank of a launch script's job: the rank that uses most memory. The step has real kernels but no
    communication.

    The time excludes communication and the pipeline bubble, so the measured MFU is an upper bound.

    Args:
        name: name of the script in examples/, without its suffix.
    """
    job = build_script_job(name, context)
    num_stages = job.topology.pp
    num_microbatches = _MICROBATCHES_PER_STAGE[num_stages == 1] * num_stages
    job = job.with_microbatches(num_microbatches)
    plan = build_plan(job.config, DryRun(job.world_size, 8, None), job.vocab_size)
    profile = max(plan.profiles, key=lambda profile: profile.memory.total.device)
    predicted_bytes, device = profile.memory.total.device, get_torch_device(context.device)
    if context.on_cuda and predicted_bytes > (total_bytes := torch.cuda.get_device_properties(device).total_memory):
        raise DoesNotFit(
            f"according to the memory plan, a rank of the job {name} needs {predicted_bytes / 1e9:.1f} GB, "
            f"but the device has only {total_bytes / 1e9:.1f} GB. Run this check on a larger device"
        )
    with build_train_step(job, profile.first_rank, device, init_on_device=context.on_cuda) as step:
        step.prepare(num_microbatches)
        batch = create_random_batch(job, step)
        run_without_communication(step, batch)
        _synchronize(context)
        start = time.perf_counter()
        run_without_communication(step, batch)
        _synchronize(context)
        step_time = time.perf_counter() - start
    figure = f"rank {profile.first_rank} of {job.world_size}: {1000 * step_time:,.0f} ms for {num_microbatches} microbatches"
    if not context.on_cuda:
        return Outcome(f"{figure}, planned {predicted_bytes / 1e6:.1f} MB, a small model")
    sequences = num_microbatches * job.topology.dp * job.config.training.micro_batch_size
    flops = count_flops_per_step(job.config.model, job.vocab_size, sequences) / job.world_size
    peak_flops = get_peak_flops(torch.cuda.get_device_name(device), "bfloat16")
    measured_gb, predicted_gb = torch.cuda.max_memory_allocated() / 1e9, (predicted_bytes - profile.memory.cuda.device) / 1e9
    figure += f", peak {measured_gb:.2f} GB (planned {predicted_gb:.2f}), {flops / step_time / 1e12:.0f} TFLOP/s of an average rank"
    mfu = None if peak_flops is None else flops / step_time / peak_flops
    data = {
        "ms": 1e3 * step_time,
        "microbatches": num_microbatches,
        "peak_gb": measured_gb,
        "planned_gb": predicted_gb,
        "mfu_at_most": mfu,
    }
    return Outcome(figure + (", peak of this device unknown" if mfu is None else f", MFU at most {mfu:.1%}"), data)


def _synchronize(context: CheckContext) -> None:
    if context.on_cuda:
        torch.cuda.synchronize()
