"""Checks that run pretrain_gpt.py in separate processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lab.benchmarks.shapes import LLAMA_FLAGS, build_argv
from megatron_lab.gpu.context import ROOT, CheckContext, CheckFailed, Outcome, require_at_most

TINY: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-2,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 60,
    "num_workers": 0,
    "eval_iters": 0,
    "log_interval": 1,
    "train_iters": 4,
}
"""Flags of a small training run, by field name."""
LLAMA: Mapping[str, Any] = {**LLAMA_FLAGS, "group_query_attention": True, "num_query_groups": 2}
DROPOUT: Mapping[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_CURVE: Mapping[str, Any] = {
    "train_iters": 50,
    "lr_warmup_iters": 5,
    "lr_decay_style": "cosine",
    "hidden_size": 32,
    "seq_length": 16,
    "micro_batch_size": 4,
    **LLAMA,
}
"""Flags of the run for which tests/program/test_run_curves.py has bands around the float64 curve."""
_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    **{name: {"data_parallel_sharding_strategy": name} for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
}

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment of processes that communicate on this machine. Without a network, a look-up of the host name can take long."""


class TrainingRun:
    """Training run in progress: the processes of all its ranks, which run pretrain_gpt.py.

    If there are several ranks, they share one device and communicate over gloo.

    Args:
        context: device, and folder for the output of the ranks.
        ranks: number of ranks.
        flags: flags that differ from those of `TINY` (a small model), by field name.
    """

    def __init__(self, context: CheckContext, ranks: int = 1, **flags: Any) -> None:
        shared = {"distributed_backend": "gloo"} if ranks > 1 else {}
        self._flags = build_argv({**TINY, "device": context.device, **shared, **flags})
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        self.processes, self._logs = [], []
        for rank in range(ranks):
            job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in job.items()}, "MASTER_ADDR": "127.0.0.1"}
            environment |= {**_LOOPBACK, "CUDA_VISIBLE_DEVICES": first_gpu} if ranks > 1 else {}
            self._logs.append(context.folder / f"log-{port}-{rank}")
            with self._logs[-1].open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "pretrain_gpt.py"), *self._flags],
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def format_last_lines(self, rank: int = 0) -> str:
        """Return the last lines of a rank's output as one line, because they usually contain the reason of a failure."""
        lines = [line.strip() for line in self._logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-400:] or "no output"

    def wait(self) -> None:
        """Wait until all ranks have ended.

        Raises:
            CheckFailed: a rank ended with a nonzero exit status.
        """
        for rank, process in enumerate(self.processes):
            if status := process.wait():
                raise CheckFailed(
                    f"pretrain_gpt.py {' '.join(self._flags)} ended with exit status {status}. Correct the cause in "
                    f"its last output: {self.format_last_lines(rank)}"
                )


def run_and_save_trace(context: CheckContext, name: str, ranks: int = 1, **flags: Any) -> Path:
    """Run training on a small model for four steps, and return the path of its trace file. A trace records signatures of all
    gradients and weights, to compare runs.

    The run uses float64, unless the flags select another dtype.

    Args:
        name: name of the trace file.
        ranks: number of ranks.
        flags: flags that differ from those of `TINY`, by field name.
    """
    file = context.folder / name
    TrainingRun(context, ranks, **{"fp64": True, "save_trace": file, "trace_steps": 4, **flags}).wait()
    return file


def run_and_read_losses(context: CheckContext, name: str, ranks: int = 1, **flags: Any) -> list[float]:
    """Run training on a small model, and return the loss of every step.

    Args:
        name: name of the run's metrics file.
        ranks: number of ranks.
        flags: flags of the run, by field name. They replace those of `TINY`, the settings of the small model.
    """
    TrainingRun(context, ranks, **{"metrics_file": context.folder / name, **flags}).wait()
    return [record["lm_loss"] for record in read_metrics(context, name) if "lm_loss" in record]


def read_metrics(context: CheckContext, name: str) -> list[dict[str, Any]]:
    """Return the JSON records of a run's metrics file, one per line of the file."""
    return [json.loads(row) for row in (context.folder / name).read_text().splitlines()]


def compute_max_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest absolute difference of two loss curves.

    Args:
        losses: loss of each step.
        reference: loss of each step of the run to compare with.

    Raises:
        CheckFailed: the curves differ in length.
    """
    if len(losses) != len(reference):
        raise CheckFailed(
            f"the run logged the losses of {len(losses)} steps, but the run to compare with logged those of {len(reference)} "
            "steps: one of the runs ended early. Read the output of both runs"
        )
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def compare_traces(trace: Path, reference: Path) -> str:
    """Compare the gradients and weights in two trace files of runs. Return a text with the largest difference.

    Raises:
        CheckFailed: a loss, gradient or weight differs by more than its tolerance.
    """
    from megatron_lab.proofs.traces import compare_files

    comparison = compare_files(str(trace), str(reference))
    if comparison.differs or comparison.max_difference is None:
        raise CheckFailed(
            "; ".join(difference.format() for difference in comparison.first[:2])
            or f"the traces {trace} and {reference} have no tensor in common, so nothing could be compared. Please report this"
        )
    max_difference = comparison.max_difference
    return (
        f"largest difference {max_difference.relative:.1e} (at most {max_difference.allowed:.0e}) "
        f"in steps 1 to {comparison.steps[-1]}"
    )


def two_ranks(context: CheckContext, layout: str) -> Outcome:
    """Check that training on two ranks gives the same gradients and weights as on one rank. The two ranks share one device and
    communicate over gloo.

    Args:
        layout: name of the layout of the two ranks, a key of `_LAYOUTS`.
    """
    two_rank_run = TrainingRun(context, 2, fp64=True, save_trace=context.folder / "two", trace_steps=4, **LLAMA, **_LAYOUTS[layout])
    one_rank_run = TrainingRun(context, 1, fp64=True, save_trace=context.folder / "one", trace_steps=4, **LLAMA)
    two_rank_run.wait()
    one_rank_run.wait()
    return Outcome(compare_traces(context.folder / "two", context.folder / "one"))


def kill_and_resume(context: CheckContext) -> Outcome:
    """Check that a run that is killed after its first checkpoint resumes with exactly the losses of an uninterrupted run."""
    flags: dict[str, Any] = {"fp64": True, "train_iters": 12, **DROPOUT}
    save_flags: dict[str, Any] = {
        "save": context.folder / "saves",
        "load": context.folder / "saves",
        "save_interval": 4,
        "async_save": True,
    }
    killed_run = TrainingRun(context, **flags, **save_flags, exit_interval=10)
    uninterrupted = run_and_read_losses(context, "whole", **flags)
    (process,), latest_file = killed_run.processes, context.folder / "saves/latest_checkpointed_iteration.txt"
    while process.poll() is None and not (latest_file.exists() and latest_file.read_text().strip() not in ("", "0")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    if not latest_file.exists():
        raise CheckFailed(
            f"the run ended before a checkpoint was complete. Find the cause in its last output: {killed_run.format_last_lines()}"
        )
    resumed_at = int(latest_file.read_text())
    resumed = run_and_read_losses(context, "rest", **flags, **save_flags)
    difference = compute_max_difference(resumed, uninterrupted[resumed_at:])
    return Outcome(require_at_most(difference, 0.0, f"killed, resumed at step {resumed_at} of 12; difference of losses"))


def checkpoint_across(context: CheckContext) -> Outcome:
    """Check that a run can continue on the CPU from a checkpoint of the device, and the other way round.

    A run trains two steps on the CPU, two on the device and two on the CPU. Each pair of steps loads the checkpoint of the previous
    pair. The losses must be those of six steps on the CPU.
    """
    cpu_context, save_folder = replace(context, device="cpu"), context.folder / "saves"
    flags: dict[str, Any] = {"fp64": True, "train_iters": 6, **LLAMA}
    reference, run_losses = run_and_read_losses(cpu_context, "whole", **flags), list[float]()
    for i, run_context in enumerate((cpu_context, context, cpu_context)):
        run_losses += run_and_read_losses(run_context, f"part{i}", **flags, save=save_folder, load=save_folder, exit_interval=2)
    return Outcome(require_at_most(compute_max_difference(run_losses, reference), 1e-10, "largest difference of the loss"))


def bf16_band(context: CheckContext) -> Outcome:
    """Check that the losses of 50 steps in bfloat16 stay close to those in float64."""
    exact = run_and_read_losses(context, "float64", fp64=True, **_CURVE)
    difference = compute_max_difference(run_and_read_losses(context, "bf16", bf16=True, **_CURVE), exact)
    return Outcome(require_at_most(difference, 5e-3, "largest difference of the loss"))


def fp8_band(context: CheckContext) -> Outcome:
    """Check that the losses of 50 steps with 8-bit matrix products stay close to those in float64.

    The check runs the tensorwise and the rowwise recipe (one scale per tensor, and one per row).
    """
    exact, figures = run_and_read_losses(context, "float64", fp64=True, **_CURVE), []
    for recipe, fp8_format, band in (("tensorwise", "hybrid", 2.4e-2), ("rowwise", "e4m3", 2.8e-2)):
        curve = run_and_read_losses(context, recipe, **_CURVE, bf16=True, fp8_format=fp8_format, fp8_recipe=recipe)
        figures.append(require_at_most(compute_max_difference(curve, exact), band, f"{recipe}: largest difference of the loss"))
    return Outcome("; ".join(figures))


def overflow(context: CheckContext) -> Outcome:
    """Check that float16 training skips updates and lowers the loss scale after an overflow.

    The run starts with a loss scale at which all gradients overflow.
    """
    file = context.folder / "metrics"
    TrainingRun(context, metrics_file=file, fp16=True, initial_loss_scale=2.0**40, hysteresis=1, train_iters=30).wait()
    steps = [record for record in read_metrics(context, "metrics") if "loss_scale" in record]
    skipped, scales = [step["skipped"] for step in steps], [step["loss_scale"] for step in steps]
    figure = f"{sum(skipped):.0f} of {len(steps)} steps skipped, scale {scales[0]:.0e} to {scales[-1]:.0e}"
    if not skipped[0] or skipped[-1] or scales[-1] >= scales[0]:
        raise CheckFailed(figure)
    return Outcome(figure)


def offload(context: CheckContext) -> Outcome:
    """Check that offloading activations to host memory does not change the gradients and weights of a run."""
    flags: dict[str, Any] = {"num_layers": 4, **LLAMA}
    offloaded_trace = run_and_save_trace(context, "moved", cpu_offload_activations=True, **flags)
    return Outcome(compare_traces(offloaded_trace, run_and_save_trace(context, "kept", **flags)))


def compiled(context: CheckContext) -> Outcome:
    """Check that compiled layers (--compile) give the same gradients and weights as eager layers, in float64.

    On a CPU the layers are only traced, and torch's kernels run the traced graphs.
    """
    backend = "inductor" if context.on_cuda else "aot_eager"
    cache: dict[str, Any] = {"compile_cache_dir": context.folder / "cache"} if context.on_cuda else {}
    trace = run_and_save_trace(context, "compiled", compile=True, compile_backend=backend, **cache, **LLAMA)
    return Outcome(f"{backend}: {compare_traces(trace, run_and_save_trace(context, 'eager', **LLAMA))}")


_NCCL_PROGRAM = """
import torch, torch.distributed as dist, tempfile, os
torch.cuda.set_device(0)
torch.ones(1, device="cuda")
def used():
    free, total = torch.cuda.mem_get_info()
    return total - free
store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
before = used()
x = torch.arange(8.0, device="cuda")
dist.all_reduce(x)
first = used() - before
group = dist.new_group([0])
dist.all_reduce(x, group=group)
second = used() - before - first
y, z = torch.empty_like(x), torch.empty_like(x)
dist.all_gather_into_tensor(y, x)
dist.reduce_scatter_tensor(z, x)
dist.all_to_all_single(y, z)
dist.broadcast(y, 0)
dist.all_reduce(torch.ones(1))
torch.cuda.synchronize()
assert y.tolist() == list(range(8)), y
print(f"RESULT {first / 1e6:.0f} {second / 1e6:.0f}")
dist.destroy_process_group()
"""
_NCCL_TIMEOUT_S = 40


def nccl_alone(context: CheckContext) -> Outcome:
    """Check each collective over NCCL with a single rank, and measure how much device memory an NCCL communicator takes."""
    environment = {**os.environ, **_LOOPBACK, "NCCL_SOCKET_IFNAME": "lo"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _NCCL_PROGRAM],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NCCL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace").splitlines()
        raise CheckFailed(
            f"the NCCL program did not end within {_NCCL_TIMEOUT_S} s. Check the GPUs and their links. Its last output: "
            f"{' / '.join(printed[-3:])[-400:]}"
        ) from None
    result = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not result:
        raise CheckFailed(
            f"the NCCL program ended with exit status {done.returncode}. Correct the cause in its last output: "
            f"{' / '.join(done.stderr.splitlines()[-3:])[-400:]}"
        )
    first, second = map(int, result[0])
    figure = f"all collectives right; the first communicator takes {first} MB of the device, the second {second} MB"
    return Outcome(figure, {"communicator_mb": [first, second]})
