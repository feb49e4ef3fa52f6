"""Speed and memory, as ratios within one run: this framework against a plain PyTorch loop of the same shape.

    python tools/bench.py                 one process, float32 and bfloat16, against the plain loop; then 8 processes
    python tools/bench.py single          only the first part
    python tools/bench.py parallel        only 8 processes at TP=2, PP=2, DP=2, with the share of communication
    python tools/bench.py single --shape 350m --device cuda

The plain loop is what one would write by hand: scaled_dot_product_attention, fused AdamW, gradient clipping; in bfloat16 it is
autocast over float32 parameters. Both train on the same tokens from memory. Runs alternate and medians are compared, because
machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.metrics.device_peaks import peak_flops
from megatron.metrics.flops import count_parameters, flops_per_step
from megatron.model.build import build_model
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import ConstantGradScaler
from megatron.parallel.collectives import Pending
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.p2p import Messenger
from megatron.training.failure import leave_well
from megatron.training.step import TrainStep


@dataclass(frozen=True)
class Shape:
    """What is trained."""

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    vocab: int


SHAPES = {
    "small": Shape(6, 512, 8, 512, 4, 8192),
    "tiny": Shape(2, 128, 4, 128, 2, 1024),
    "350m": Shape(24, 1024, 16, 1024, 16, 50304),
}
_LR, _WEIGHT_DECAY, _CLIP = 3e-4, 0.01, 1.0


class PlainBlock(nn.Module):
    """A GPT-2 layer as one writes it without parallelism."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """A GPT-2 as one writes it without parallelism."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.head.weight = self.word.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


Step = Callable[[], float]


def plain_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """A step of the plain loop; returns the loss."""
    torch.manual_seed(0)
    model = PlainGPT(shape).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LR, fused=True)
    tokens, labels = _tokens(shape, device)

    def step() -> float:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """The same step by the framework, in one process."""
    context = make_context(Topology(), 0, device)
    config = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=shape.seq,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = build_model(config, context, dtype=dtype, vocab_size=shape.vocab, sequence_parallel=False, seed=0)
    train = TrainStep(
        model,
        context,
        ConstantGradScaler(1.0),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(clip_grad=_CLIP),
        micro_batch_size=shape.batch,
        skip_overflow=False,
    )
    tokens, labels = _tokens(shape, device)
    positions = torch.arange(shape.seq, device=device).unsqueeze(1).expand(-1, shape.batch)
    mask = torch.ones(shape.seq, shape.batch, device=device)
    inputs = ModelInputs(positions, tokens.t().contiguous(), labels.t().contiguous(), mask)

    def step() -> float:
        return train.run([inputs], iteration=1, learning_rate=_LR, weight_decay=_WEIGHT_DECAY).loss

    return step


def _tokens(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    window = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0))
    return window[:, :-1].to(device), window[:, 1:].to(device)


def _synchronize() -> None:
    """Wait for the device: a step may leave its update running."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _timed(step: Step, steps: int) -> float:
    """Seconds a step."""
    _synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    return (time.perf_counter() - began) / steps


def bench_single(shape: Shape, device: torch.device, dtypes: list[torch.dtype], pairs: int, steps: int) -> None:
    """Alternating pairs of plain and our steps."""
    flops = flops_per_step(_model(shape), shape.vocab, shape.batch)
    print(f"{count_parameters(_model(shape), shape.vocab):,} parameters, {shape}, {torch.get_num_threads()} threads, {device}")
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        plain, ours = plain_step(shape, dtype, device), our_step(shape, dtype, device)
        losses = [plain(), ours()]
        plain(), ours()
        times: dict[str, list[float]] = {"plain": [], "ours": []}
        for i in range(pairs):
            for which, step in (("plain", plain), ("ours", ours)) if i % 2 else (("ours", ours), ("plain", plain)):
                times[which].append(_timed(step, steps))
        ratios = [p / o for p, o in zip(times["plain"], times["ours"], strict=True)]
        for which, found in times.items():
            middle = statistics.median(found)
            line = (
                f"{name:9} {which:6} {1000 * middle:9.1f} ms a step (spread {1000 * min(found):.1f} to {1000 * max(found):.1f}), "
            )
            line += f"{shape.batch * shape.seq / middle:,.0f} tokens/s, {flops / middle / 1e12:.3f} TFLOP/s"
            peak = peak_flops(torch.cuda.get_device_name(device), name) if device.type == "cuda" else None
            print(line + (f", MFU {flops / middle / peak:.1%}" if peak else ""))
        print(
            f"{name:9} speed of ours / plain: {statistics.median(ratios):.3f} "
            f"(median of {pairs} pairs, {min(ratios):.3f} to {max(ratios):.3f}); first losses {losses[0]:.3f} and {losses[1]:.3f}"
        )
        del plain, ours, step
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        peaks = {which: _peak_memory(which, shape, dtype, device) for which in ("plain", "ours")}
        print(
            f"{name:9} peak memory: plain {peaks['plain'] / 2**20:.0f} MiB, ours {peaks['ours'] / 2**20:.0f} MiB, "
            f"ours / plain {peaks['ours'] / peaks['plain']:.3f}"
        )


def _peak_memory(which: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    """Peak bytes of a few steps in a fresh process, above what the process held before the model was made."""
    command = [sys.executable, __file__, "memory", which, json.dumps(asdict(shape)), str(dtype).removeprefix("torch."), str(device)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(which: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """The inner process of `_peak_memory`."""
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    before = _memory("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = (plain_step if which == "plain" else our_step)(shape, dtype, device)
    for _ in range(3):
        step()
    if device.type == "cuda":
        print(torch.cuda.max_memory_allocated())
    else:
        print(_memory("VmHWM") - before)


def _memory(field: str) -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at the peak (getrusage would count the parent's peak too)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def bench_parallel(shape: Shape) -> None:
    """8 processes at TP=2, PP=2, DP=2 against one process, by the training script itself, and the share of communication."""
    root = Path(__file__).resolve().parent.parent
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
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                __file__,
                "rank",
            ]
            threads = str(max(1, (os.cpu_count() or 1) // ranks))
            done = subprocess.run(
                [*launch, *flags, *layout, "--metrics-file", str(metrics)],
                check=True,
                cwd=root,
                env={**os.environ, "OMP_NUM_THREADS": threads},
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
    """One rank of `bench_parallel`: the training script, with the time spent waiting for communication added up."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import pretrain_gpt
    from megatron.config.cli import load

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

    for kind, names in ((Pending, ("wait",)), (Messenger, ("receive", "settle", "finish", "send", "post"))):
        for name in names:
            setattr(kind, name, timed(getattr(kind, name)))
    setattr(TrainStep, "run", stepping(TrainStep.run))  # noqa: B010
    world_size = int(os.environ["WORLD_SIZE"])
    pretrain_gpt.pretrain(load(argv, world_size), argv, time.monotonic())
    if os.environ["RANK"] == "0" and world_size > 1:
        print(f"share of rank 0's steps in communication, waiting for others included: {waited / stepped:.0%}", flush=True)
    leave_well()


def _model(shape: Shape) -> ModelConfig:
    return ModelConfig(num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads, seq_length=shape.seq)


def main() -> None:
    """Parse the command line and run. "memory" and "rank" are the processes that it starts itself."""
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2:])
        return
    if sys.argv[1:2] == ["memory"]:
        which, shape, dtype, device = sys.argv[2:]
        measure_memory(which, Shape(**json.loads(shape)), getattr(torch, dtype), torch.device(device))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all", choices=["all", "single", "parallel"])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps in each half of a pair")
    args = parser.parse_args()
    if args.part in ("all", "single"):
        bench_single(
            SHAPES[args.shape], torch.device(args.device), [getattr(torch, d) for d in args.dtypes], args.pairs, args.steps
        )
    if args.part in ("all", "parallel"):
        bench_parallel(SHAPES[args.shape])


if __name__ == "__main__":
    main()
