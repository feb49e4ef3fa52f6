"""Benchmark of 8 processes with TP=2, PP=2, DP=2, compared with one process.

Both run the training script. The benchmark prints step times, and the share of the time that rank 0 spends in communication.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config.launcher import build_module_command
from megatron_lab.benchmarks.shapes import Shape


def run(shape: Shape) -> None:
    """Train the model with one process and with eight processes. Print both step times and their ratio."""
    train_args = (
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads} --seq-length {shape.seq} "
        f"--micro-batch-size 1 --global-batch-size {2 * shape.batch} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size {shape.vocab - 1} --lr 3e-4 --train-iters 8 --log-interval 4 --eval-iters 0 --attention-dropout 0 "
        "--hidden-dropout 0 --num-workers 0 --log-throughput"
    ).split()
    times = {}
    layout_args = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"]
    for name, num_ranks, extra_args in (("1 process", 1, []), ("8 processes", 8, layout_args)):
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            launch, environment = build_module_command("torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
            threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
            done = subprocess.run(
                [*launch, "-m", "megatron_lab.benchmarks.parallel", *train_args, *extra_args, "--metrics-file", str(metrics)],
                check=True,
                env={**environment, "OMP_NUM_THREADS": threads},
                capture_output=True,
                text=True,
            )
            rows = [json.loads(row) for row in metrics.read_text().splitlines()]
        last = rows[-1]
        times[name] = last["elapsed_ms"]
        print(f"{name}: {last['elapsed_ms']:.0f} ms per step, {last['tokens_per_s']:,.0f} tokens/s, loss {last['lm_loss']:.4f}")
        for output_line in done.stdout.splitlines():
            if output_line.startswith("share of"):
                print(output_line)
    print(f"1 process / 8 processes: {times['1 process'] / times['8 processes']:.2f} (on {os.cpu_count()} cores)")


def run_rank(argv: list[str]) -> None:
    """Train with the given flags as one rank, and measure for how long the rank waits for communication.

    `run` starts this function in the processes of the job.

    Args:
        argv: flags of the training script.
    """
    from megatron.config.cli import load
    from megatron.parallel.collectives import Pending
    from megatron.pipeline_parallel.p2p import Messenger
    from megatron.training.failure import exit_immediately
    from megatron.training.step import TrainStep
    from megatron.training.trainer import Trainer

    waiting_time, step_time = 0.0, 0.0
    depth = 0

    def count_as_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal waiting_time, depth
            depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                waiting_time += (time.perf_counter() - start) * (depth == 0)

        return wrapper

    def count_as_step(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal step_time, waiting_time
            if kwargs["iteration"] == 3:  # the first steps open connections and allocate buffers
                waiting_time = step_time = 0.0
            start = time.perf_counter()
            result = function(*args, **kwargs)
            step_time += time.perf_counter() - start
            return result

        return wrapper

    for cls, names in ((Pending, ("wait",)), (Messenger, ("receive", "wait_sent", "finish", "send", "post_receive", "wait_all"))):
        for name in names:
            setattr(cls, name, count_as_waiting(getattr(cls, name)))
    setattr(TrainStep, "run", count_as_step(TrainStep.run))  # noqa: B010
    world_size = int(os.environ["WORLD_SIZE"])
    with Trainer(load(argv, world_size), command=argv) as trainer:
        trainer.fit()
    if os.environ["RANK"] == "0" and world_size > 1:
        print(f"share of rank 0's steps in communication, waiting for others included: {waiting_time / step_time:.0%}", flush=True)
    exit_immediately()


if __name__ == "__main__":
    run_rank(sys.argv[1:])
