"""8 processes at TP=2, PP=2, DP=2 against one process, by the training script itself, and the share of communication."""

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

from megatron.config.launcher import module_start
from megatron_lab.benchmarks.shapes import Shape


def run(shape: Shape) -> None:
    """Print the time of a step of both, and their ratio."""
    flags = (
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads} --seq-length {shape.seq} "
        f"--micro-batch-size 1 --global-batch-size {2 * shape.batch} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size {shape.vocab - 1} --lr 3e-4 --train-iters 8 --log-interval 4 --eval-iters 0 --attention-dropout 0 "
        "--hidden-dropout 0 --num-workers 0 --log-throughput"
    ).split()
    times = {}
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"]
    for name, ranks, layout in (("1 process", 1, []), ("8 processes", 8, split)):
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            launch, environment = module_start("torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
            threads = str(max(1, (os.cpu_count() or 1) // ranks))
            done = subprocess.run(
                [*launch, "-m", "megatron_lab.benchmarks.parallel", *flags, *layout, "--metrics-file", str(metrics)],
                check=True,
                env={**environment, "OMP_NUM_THREADS": threads},
                capture_output=True,
                text=True,
            )
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        last = rows[-1]
        times[name] = last["elapsed_ms"]
        print(f"{name}: {last['elapsed_ms']:.0f} ms a step, {last['tokens_per_s']:,.0f} tokens/s, loss {last['lm_loss']:.4f}")
        for line in done.stdout.splitlines():
            if line.startswith("share of"):
                print(line)
    print(f"1 process / 8 processes: {times['1 process'] / times['8 processes']:.2f} (on {os.cpu_count()} cores)")


def run_rank(argv: list[str]) -> None:
    """One rank of `run`: the training script, with the time spent waiting for communication added up."""
    from megatron.config.cli import load
    from megatron.parallel.collectives import Pending
    from megatron.pipeline_parallel.p2p import Messenger
    from megatron.training.failure import leave_well
    from megatron.training.step import TrainStep
    from megatron.training.trainer import Trainer

    waited, stepped = 0.0, 0.0
    depth = 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal waited, depth
            depth += 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                waited += (time.perf_counter() - began) * (depth == 0)

        return wrapper

    def stepping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal stepped, waited
            if kwargs["iteration"] == 3:  # the first steps make connections and buffers
                waited = stepped = 0.0
            began = time.perf_counter()
            result = function(*args, **kwargs)
            stepped += time.perf_counter() - began
            return result

        return wrapper

    for kind, names in ((Pending, ("wait",)), (Messenger, ("receive", "settle", "finish", "send", "post", "wait"))):
        for name in names:
            setattr(kind, name, timed(getattr(kind, name)))
    setattr(TrainStep, "run", stepping(TrainStep.run))  # noqa: B010
    world_size = int(os.environ["WORLD_SIZE"])
    with Trainer(load(argv, world_size), command=argv) as trainer:
        trainer.fit()
    if os.environ["RANK"] == "0" and world_size > 1:
        print(f"share of rank 0's steps in communication, waiting for others included: {waited / stepped:.0%}", flush=True)
    leave_well()


if __name__ == "__main__":
    run_rank(sys.argv[1:])
