"""One rank of each launch script: its memory, and an upper bound of its MFU."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatron.config.given import DryRun
from megatron.metrics.measures import peak_flops
from megatron.pipeline_parallel.partition import table_of
from megatron.spec.counts import flops_per_step
from megatron_lab.gpu.context import ROOT, CheckContext, CheckFailed, DoesNotFit, Outcome
from megatron_lab.gpu.jobs import Job, random_batch, run_without_messages, torch_device, train_step_of
from megatron_lab.planner.dry_run import make_plan
from megatron_lab.proofs.small_model import Cuts, reduced_model

_MICROBATCHES = {True: 4, False: 2}
"""Of a step, for each stage, without and with a pipeline: more would change memory no more, and time in proportion."""
_VARIABLES = ("DATA", "VOCAB", "MERGES", "TOKENIZER", "RUN", "NNODES", "HEAD", "PORT", "SKIP_CHECK")


def script_line(name: str, folder: Path) -> list[str]:
    """Return the command line that a launch script passes to Python for a dry run.

    Raises:
        CheckFailed: this is no checkout, which alone has the scripts.
    """
    script = ROOT / f"examples/{name}.sh"
    if not script.is_file():
        raise CheckFailed(f"only a checkout has the launch scripts: there is no {script}")
    echo = folder / "echo-words"
    echo.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    echo.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in _VARIABLES and not key.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", str(script)],
        env={**kept, "DRY_RUN": "1", "PYTHON": str(echo)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[1:-1]


def job_of_script(name: str, context: CheckContext) -> Job:
    """Return a script's job. On a CPU it has the script's layout and a small model."""
    job = Job.of(script_line(name, context.folder))
    if context.on_cuda:
        return job
    return _small(job)


def _small(job: Job) -> Job:
    """Return the job with its layout and a small model: one layer per chunk, or all layers where the layout names them."""
    config, topology = job.config, job.topology
    parallel = config.parallel
    cuts = Cuts(
        topology.tp,
        parts=1,
        sequence=parallel.sequence_parallel,
        context=topology.cp,
        experts=parallel.expert_model_parallel_size,
        of_expert=parallel.expert_tensor_size,
        experts_each=1,
    )
    chunks = len(table_of(config.model, parallel, job.vocab_size, config.memory))
    num_layers = config.model.num_layers if parallel.pipeline_model_parallel_layout else chunks
    model = reduced_model(config.model, num_layers, 8, topology.tp, cuts)
    data = replace(config.data, tokenizer_type="NullTokenizer", vocab_size=500, vocab_file=None, merge_file=None)
    parallel = replace(parallel, device="cpu")
    training = replace(config.training, micro_batch_size=1)
    return replace(job, config=replace(config, model=model, data=data, parallel=parallel, training=training))


def rank(context: CheckContext, name: str) -> Outcome:
    """Run a step of the rank that takes most memory, with real kernels and messages that return at once.

    The time holds no communication and no idle pipeline, so the MFU that follows from it is an upper bound.
    """
    job = job_of_script(name, context)
    stages = job.topology.pp
    count = _MICROBATCHES[stages == 1] * stages
    job = job.of_microbatches(count)
    plan = make_plan(job.config, DryRun(job.world_size, 8, None), job.vocab_size)
    fullest = max(plan.kinds, key=lambda kind: kind.memory.total.device)
    needed, device = fullest.memory.total.device, torch_device(context.device)
    if context.on_cuda and needed > (total := torch.cuda.get_device_properties(device).total_memory):
        raise DoesNotFit(f"planned {needed / 1e9:.1f} GB, the device has {total / 1e9:.1f} GB")
    with train_step_of(job, fullest.first_rank, device, drawn_on_device=context.on_cuda) as step:
        step.prepare(count)
        batch = random_batch(job, step)
        run_without_messages(step, batch)
        _synchronize(context)
        began = time.perf_counter()
        run_without_messages(step, batch)
        _synchronize(context)
        seconds = time.perf_counter() - began
    figure = f"rank {fullest.first_rank} of {job.world_size}: {1000 * seconds:,.0f} ms for {count} microbatches"
    if not context.on_cuda:
        return Outcome(f"{figure}, planned {needed / 1e6:.1f} MB, a small model")
    sequences = count * job.topology.dp * job.config.training.micro_batch_size
    flops = flops_per_step(job.config.model, job.vocab_size, sequences) / job.world_size
    peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16")
    measured, planned = torch.cuda.max_memory_allocated() / 1e9, (needed - fullest.memory.cuda.device) / 1e9
    figure += f", peak {measured:.2f} GB (planned {planned:.2f}), {flops / seconds / 1e12:.0f} TFLOP/s of an average rank"
    mfu = None if peak is None else flops / seconds / peak
    data = {"ms": 1e3 * seconds, "microbatches": count, "peak_gb": measured, "planned_gb": planned, "mfu_at_most": mfu}
    return Outcome(figure + (", peak of this device unknown" if mfu is None else f", MFU at most {mfu:.1%}"), data)


def _synchronize(context: CheckContext) -> None:
    if context.on_cuda:
        torch.cuda.synchronize()
