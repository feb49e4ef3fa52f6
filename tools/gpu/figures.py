"""Checks whose result is a figure: memory and time of one rank of a launch script, and speed beside the plain loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import torch

from megatron.config.given import DryRun
from megatron.metrics.device_peaks import peak_flops
from megatron.planner.dry_run import make_plan
from megatron.spec.counts import flops_per_step
from tools.gpu.isolated import ROOT
from tools.gpu.place import Failure, Place, Unfit, last_words
from tools.gpu.ranks import Job, alone, batch_of, device_of, whole_step

_MICROBATCHES = {True: 4, False: 2}
"""Of a step, for each stage: with a pipeline more would change memory no more, and time in proportion."""


def script_line(name: str, place: Place) -> list[str]:
    """The command line that a launch script hands to its Python for a dry run."""
    echo = place.folder / "echo-words"
    echo.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    echo.chmod(0o755)
    own = ("DATA", "VOCAB", "MERGES", "TOKENIZER", "RUN", "NNODES", "HEAD", "PORT", "SKIP_CHECK")
    kept = {key: value for key, value in os.environ.items() if key not in own and not key.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", str(ROOT / f"examples/{name}.sh")],
        env={**kept, "DRY_RUN": "1", "PYTHON": str(echo)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[1:-1]


def job_of(name: str, place: Place) -> Job:
    """A script's job; on a CPU with its layout and a small model of as many layers as its stages take."""
    job = Job.of(script_line(name, place))
    if place.on_cuda:
        return job
    model = replace(
        job.config.model,
        num_layers=len(_stages(job)),
        hidden_size=16 * (heads := 8),
        num_attention_heads=heads,
        num_query_groups=heads,
        ffn_hidden_size=256,
        seq_length=32,
        max_position_embeddings=32,
    )
    data = replace(job.config.data, tokenizer_type="NullTokenizer", vocab_size=500, vocab_file=None, merge_file=None)
    training = replace(job.config.training, micro_batch_size=1)
    return replace(job, config=replace(job.config, model=model, data=data, training=training))


def _stages(job: Job) -> range:
    """Chunks of the model, one layer each."""
    parallel = job.config.parallel
    each = parallel.num_virtual_stages_per_pipeline_rank or 1
    if per := parallel.num_layers_per_virtual_pipeline_stage:
        each = job.config.model.num_layers // (parallel.pipeline_model_parallel_size * per)
    return range(parallel.pipeline_model_parallel_size * each)


def rank(place: Place, name: str) -> str:
    """The rank that takes most memory, with real kernels and messages that return at once.

    The time holds no communication and no idle pipeline, so what follows from it is an upper bound of MFU.
    """
    job = job_of(name, place)
    stages = job.config.parallel.pipeline_model_parallel_size
    job = job.of_microbatches(_MICROBATCHES[stages == 1] * stages)
    plan = make_plan(job.config, DryRun(job.world_size, 8, None), job.vocab_size)
    fullest = max(plan.kinds, key=lambda kind: kind.memory.total.device)
    needed, device = fullest.memory.total.device, device_of(place)
    if place.on_cuda and needed > (total := torch.cuda.get_device_properties(device).total_memory):
        raise Unfit(f"planned {needed / 1e9:.1f} GB, the device has {total / 1e9:.1f} GB")
    with alone(job, fullest.first_rank, place) as step:
        count = _MICROBATCHES[stages == 1] * stages
        step.prepare(count)
        batch = batch_of(job, place)
        whole_step(step, batch)
        _wait(place)
        began = time.perf_counter()
        whole_step(step, batch)
        _wait(place)
        seconds = time.perf_counter() - began
    told = f"rank {fullest.first_rank} of {job.world_size}: {1000 * seconds:,.0f} ms for {count} microbatches"
    if not place.on_cuda:
        return f"{told}, planned {needed / 1e6:.1f} MB, a small model"
    sequences = count * job.topology.dp * job.config.training.micro_batch_size
    flops = flops_per_step(job.config.model, job.vocab_size, sequences) / job.world_size
    peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16")
    measured, exact = torch.cuda.max_memory_allocated(), needed - fullest.memory.cuda.device
    told += f", peak {measured / 1e9:.2f} GB (planned {exact / 1e9:.2f}), {flops / seconds / 1e12:.0f} TFLOP/s of an average rank"
    return told + (f", MFU at most {flops / seconds / peak:.1%}" if peak else ", peak of this device unknown")


def _wait(place: Place) -> None:
    if place.on_cuda:
        torch.cuda.synchronize()


def bench(place: Place, shape: str) -> str:
    """`tools/bench.py single` in bfloat16; on a CPU its smallest shape."""
    size = ["--shape", shape if place.on_cuda else "tiny", "--pairs", "5" if place.on_cuda else "3"]
    line = [
        sys.executable,
        "tools/bench.py",
        "single",
        *size,
        "--device",
        place.device,
        "--dtypes",
        "bfloat16",
        *(["--compile"] if place.on_cuda else []),
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"tools/bench.py ended with {done.returncode}: {last_words(done.stderr)}")
    found = [line.split(None, 1)[1] for line in done.stdout.splitlines() if re.search(r"ours|ratio|/ plain", line)]
    if not found:
        raise Failure(f"tools/bench.py told nothing: {last_words(done.stdout)}")
    return "; ".join(" ".join(line.split()) for line in found)
