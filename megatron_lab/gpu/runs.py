"""Checks that are runs of pretrain_gpt.py in processes of their own."""

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

from megatron_lab.benchmarks.shapes import LLAMA_FLAGS, command_line
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
"""The run for which tests/program/test_run_curves.py has bands around the float64 curve."""
_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    **{name: {"data_parallel_sharding_strategy": name} for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
}

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment for processes that speak with each other here: without a network, a look-up of the host's name may take long."""


class Run:
    """Ranks of pretrain_gpt.py with the flags of `TINY` and changes. Several ranks share one device and speak over gloo."""

    def __init__(self, context: CheckContext, ranks: int = 1, **flags: Any) -> None:
        shared = {"distributed_backend": "gloo"} if ranks > 1 else {}
        self._flags = command_line({**TINY, "device": context.device, **shared, **flags})
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

    def last_lines(self, rank: int = 0) -> str:
        """Return the end of a rank's output, which has the reason of a failure."""
        lines = [line.strip() for line in self._logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-400:] or "no output"

    def wait(self) -> None:
        """Wait for all ranks.

        Raises:
            CheckFailed: a rank failed.
        """
        for rank, process in enumerate(self.processes):
            if status := process.wait():
                raise CheckFailed(f"pretrain_gpt.py {' '.join(self._flags)} ended with {status}: {self.last_lines(rank)}")


def save_trace(context: CheckContext, name: str, ranks: int = 1, **flags: Any) -> Path:
    """Run four steps, in float64 unless the flags name another dtype, and return the file with their tensors."""
    file = context.folder / name
    Run(context, ranks, **{"fp64": True, "save_trace": file, "trace_steps": 4, **flags}).wait()
    return file


def losses(context: CheckContext, name: str, ranks: int = 1, **flags: Any) -> list[float]:
    """Run and return the loss of every step."""
    Run(context, ranks, **{"metrics_file": context.folder / name, **flags}).wait()
    return [line["lm_loss"] for line in metrics(context, name) if "lm_loss" in line]


def metrics(context: CheckContext, name: str) -> list[dict[str, Any]]:
    """Return the lines of a metrics file."""
    return [json.loads(line) for line in (context.folder / name).read_text().splitlines()]


def largest_difference(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two loss curves.

    Raises:
        CheckFailed: they differ in length.
    """
    if len(values) != len(others):
        raise CheckFailed(f"one run has {len(values)} losses, the other {len(others)}")
    return max(abs(a - b) for a, b in zip(values, others, strict=True))


def compare_traces(trace: Path, reference: Path) -> str:
    """Return the largest difference of two traces.

    Raises:
        CheckFailed: a tensor differs by more than its band.
    """
    from megatron_lab.proofs.traces import compare_files

    comparison = compare_files(str(trace), str(reference))
    if comparison.parts or comparison.largest is None:
        raise CheckFailed("; ".join(part.line() for part in comparison.first[:2]) or "nothing could be compared")
    largest = comparison.largest
    return f"largest difference {largest.relative:.1e} (at most {largest.allowed:.0e}) in steps 1 to {comparison.steps[-1]}"


def two_ranks(context: CheckContext, layout: str) -> Outcome:
    """Compare two ranks that share one device, over gloo, with one rank."""
    two = Run(context, 2, fp64=True, save_trace=context.folder / "two", trace_steps=4, **LLAMA, **_LAYOUTS[layout])
    one = Run(context, 1, fp64=True, save_trace=context.folder / "one", trace_steps=4, **LLAMA)
    two.wait()
    one.wait()
    return Outcome(compare_traces(context.folder / "two", context.folder / "one"))


def kill_and_resume(context: CheckContext) -> Outcome:
    """Kill a run after its first complete checkpoint, and compare the losses of the resumed run with an uninterrupted one."""
    flags: dict[str, Any] = {"fp64": True, "train_iters": 12, **DROPOUT}
    saves: dict[str, Any] = {
        "save": context.folder / "saves",
        "load": context.folder / "saves",
        "save_interval": 4,
        "async_save": True,
    }
    killed = Run(context, **flags, **saves, exit_interval=10)
    whole = losses(context, "whole", **flags)
    (process,), latest = killed.processes, context.folder / "saves/latest_checkpointed_iteration.txt"
    while process.poll() is None and not (latest.exists() and latest.read_text().strip() not in ("", "0")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    if not latest.exists():
        raise CheckFailed(f"the run ended before a checkpoint was complete: {killed.last_lines()}")
    resumed_at = int(latest.read_text())
    rest = losses(context, "rest", **flags, **saves)
    difference = largest_difference(rest, whole[resumed_at:])
    return Outcome(require_at_most(difference, 0.0, f"killed, resumed at step {resumed_at} of 12; difference of losses"))


def checkpoint_across(context: CheckContext) -> Outcome:
    """Train two steps on the CPU, two on the device and two on the CPU, against six on the CPU."""
    cpu, saves = replace(context, device="cpu"), context.folder / "saves"
    flags: dict[str, Any] = {"fp64": True, "train_iters": 6, **LLAMA}
    whole, parts = losses(cpu, "whole", **flags), list[float]()
    for number, where in enumerate((cpu, context, cpu)):
        parts += losses(where, f"part{number}", **flags, save=saves, load=saves, exit_interval=2)
    return Outcome(require_at_most(largest_difference(parts, whole), 1e-10, "largest difference of the loss"))


def bf16_band(context: CheckContext) -> Outcome:
    """Compare 50 steps in bfloat16 with float64."""
    exact = losses(context, "float64", fp64=True, **_CURVE)
    difference = largest_difference(losses(context, "bf16", bf16=True, **_CURVE), exact)
    return Outcome(require_at_most(difference, 5e-3, "largest difference of the loss"))


def fp8_band(context: CheckContext) -> Outcome:
    """Compare 50 steps with products in 8 bits with float64, by each recipe without blocks."""
    exact, figures = losses(context, "float64", fp64=True, **_CURVE), []
    for recipe, form, band in (("tensorwise", "hybrid", 2.4e-2), ("rowwise", "e4m3", 2.8e-2)):
        curve = losses(context, recipe, **_CURVE, bf16=True, fp8_format=form, fp8_recipe=recipe)
        figures.append(require_at_most(largest_difference(curve, exact), band, f"{recipe}: largest difference of the loss"))
    return Outcome("; ".join(figures))


def overflow(context: CheckContext) -> Outcome:
    """Start float16 with a loss scale that no gradient survives."""
    file = context.folder / "metrics"
    Run(context, metrics_file=file, fp16=True, initial_loss_scale=2.0**40, hysteresis=1, train_iters=30).wait()
    steps = [line for line in metrics(context, "metrics") if "loss_scale" in line]
    skipped, scales = [line["skipped"] for line in steps], [line["loss_scale"] for line in steps]
    figure = f"{sum(skipped):.0f} of {len(steps)} steps skipped, scale {scales[0]:.0e} to {scales[-1]:.0e}"
    if not skipped[0] or skipped[-1] or scales[-1] >= scales[0]:
        raise CheckFailed(figure)
    return Outcome(figure)


def offload(context: CheckContext) -> Outcome:
    """Compare a run whose activations go to host memory and back with one that keeps them."""
    flags: dict[str, Any] = {"num_layers": 4, **LLAMA}
    moved = save_trace(context, "moved", cpu_offload_activations=True, **flags)
    return Outcome(compare_traces(moved, save_trace(context, "kept", **flags)))


def compiled(context: CheckContext) -> Outcome:
    """Compare compiled layers with eager ones in float64. On a CPU the traced graphs run by torch's kernels."""
    backend = "inductor" if context.on_cuda else "aot_eager"
    cache: dict[str, Any] = {"compile_cache_dir": context.folder / "cache"} if context.on_cuda else {}
    trace = save_trace(context, "compiled", compile=True, compile_backend=backend, **cache, **LLAMA)
    return Outcome(f"{backend}: {compare_traces(trace, save_trace(context, 'eager', **LLAMA))}")


_NCCL = """
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
_NCCL_SECONDS = 40


def nccl_alone(context: CheckContext) -> Outcome:
    """Run each collective over NCCL with one rank, and measure the memory of a communicator."""
    environment = {**os.environ, **_LOOPBACK, "NCCL_SOCKET_IFNAME": "lo"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _NCCL],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NCCL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace").splitlines()
        raise CheckFailed(f"no end after {_NCCL_SECONDS} s: {' / '.join(printed[-3:])[-400:]}") from None
    result = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not result:
        raise CheckFailed(f"ended with {done.returncode}: {' / '.join(done.stderr.splitlines()[-3:])[-400:]}")
    first, second = map(int, result[0])
    figure = f"all collectives right; the first communicator takes {first} MB of the device, the second {second} MB"
    return Outcome(figure, {"communicator_mb": [first, second]})
