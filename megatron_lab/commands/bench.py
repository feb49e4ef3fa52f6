"""Measure this framework.

    python tools/bench.py                 all of what follows
    python tools/bench.py bubble          the step of every pipeline schedule against the simulator, with sleeping operations
    python tools/bench.py activations     a step whose saved tensors go to the host and back over a slow link, against one without
    python tools/bench.py overlap         exposed communication of two data ranks with overlap off and on, behind a slowed link
    python tools/bench.py tensor          layers of tensor ranks with --tp-comm-overlap and without, behind a slow link
    python tools/bench.py context         attention of context ranks, keys and values beside products, behind a slow link
    python tools/bench.py optimizer       the optimizer's step against torch's fused AdamW, in processes that update at once
    python tools/bench.py offload         the optimizer's step with all its state in host memory against the update alone
    python tools/bench.py memory          activations at their peak, planned and measured, and step time, for each way to hold less
    python tools/bench.py executor        what the pipeline executor costs for each operation, and at start
    python tools/bench.py data            preprocessing against the bare tokenizer, indexes of a large dataset, samples, loader
    python tools/bench.py checkpoint      saves and loads against plain writes and reads, what a save in the background holds up
    python tools/bench.py packing         attention within documents against attention over the whole sample
    python tools/bench.py loss            the step with its loss in chunks against the step with the whole loss
    python tools/bench.py experts         experts against a plain loop, their ways between ranks, a step against a dense one
    python tools/bench.py single          one process, float32 and bfloat16, against a loop written by hand and transformers' GPT-2
    python tools/bench.py parallel        8 processes at TP=2, PP=2, DP=2 against one, with the share of communication
    python tools/bench.py single --shape 350m --device cuda --compile

The exit status is 1 if a bound is missed; experts, single and parallel ask for none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.config.parallel import ShardingStrategy
from megatron.spec.operations import Costs
from megatron.spec.schedules import SCHEDULES
from megatron_lab.benchmarks.shapes import SHAPES, Shape
from megatron_lab.commands.parser import ToolParser

# Those that fork are first: where there is CUDA, autograd starts threads at its first backward, which do not survive that.
PARTS = (
    *(
        "bubble",
        "activations",
        "overlap",
        "tensor",
        "context",
        "optimizer",
        "offload",
        "memory",
        "executor",
        "checkpoint",
        "data",
        "packing",
        "loss",
    ),
    *("experts", "single", "parallel"),
)
# Under optim_grads_params torch's fully_shard communicates, and on gloo it waits for each reduction.
STRATEGIES: tuple[ShardingStrategy, ...] = ("no_shard", "optim", "optim_grads")


def parser() -> tuple[argparse.ArgumentParser, dict[str, tuple[str, ...]]]:
    """The flags, and for each the parts in which it acts."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("part", nargs="?", default="all", choices=["all", *PARTS])
    acts: dict[str, tuple[str, ...]] = {}

    def add(name: str, parts: tuple[str, ...], **settings: object) -> None:
        acts[flags.add_argument(name, help=f"{', '.join(parts)}: {settings.pop('help')}", **settings).dest] = parts  # type: ignore[arg-type]

    add("--shape", ("single", "parallel"), choices=SHAPES, default="small", help="model and batch (small)")
    add(
        "--device",
        ("single", "offload", "packing", "loss"),
        default="cpu",
        help="where to train; offload is timed on a GPU too, if there is one (cpu)",
    )
    add("--dtypes", ("single",), nargs="+", default=["float32", "bfloat16"], help="what to train in (float32 bfloat16)")
    add(
        "--pairs",
        ("single", "executor", "optimizer", "offload", "memory", "checkpoint", "data", "packing", "loss", "experts"),
        type=count,
        help="turns of the two that are compared (7; checkpoint 15)",
    )
    add("--steps", ("single",), type=count, default=1, help="steps in each half of a pair (1)")
    add(
        "--compile",
        ("single",),
        action="store_true",
        help="compiled layers, and the loop by hand compiled, take part too (minutes to compile)",
    )
    add("--stages", ("bubble",), type=count, default=8, help="processes (8)")
    add("--microbatches", ("bubble",), type=count, default=16, help="microbatches of a step (16)")
    add("--schedules", ("bubble",), nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="which ones (all)")
    for what in ("forward", "input-grad", "weight-grad"):
        add(f"--{what}-ms", ("bubble",), type=milliseconds, default=40.0, help="time on a whole stage, which its chunks share (40)")
    add(
        "--recompute-ms",
        ("bubble",),
        type=milliseconds,
        default=0.0,
        help="time to run a stage's layers again ahead of backward (0)",
    )
    add(
        "--hidden",
        ("bubble",),
        nargs=3,
        type=count,
        default=[128, 1, 512],
        metavar=("S", "B", "H"),
        help="float32 tensor that travels (128 1 512)",
    )
    add("--no-overlap-p2p", ("bubble",), action="store_true", help="wait for each exchange of messages before computing on")
    add(
        "--repeats",
        ("bubble", "overlap", "tensor", "context", "activations"),
        type=count,
        default=5,
        help="measurements of each schedule or strategy, after a first (5)",
    )
    add(
        "--link-share",
        ("activations", "tensor"),
        type=share,
        default=0.8,
        help="time of a layer's copy over that of its forward, or of a gather over that of its product (0.8)",
    )
    add("--strategies", ("overlap",), nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="of sharding (all)")
    add("--accumulate", ("overlap",), nargs="+", type=count, default=[1, 4], help="microbatches of a step, one after another (1 4)")
    add(
        "--gpt",
        ("overlap", "memory", "experts"),
        nargs=6,
        type=count,
        metavar=("LAYERS", "HIDDEN", "HEADS", "SEQ", "BATCH", "VOCAB"),
        help="model and microbatch of a rank (8 192 4 256 4 512; memory 12 128 4 1024 1 10240; experts 4 256 4 256 4 2048)",
    )
    add(
        "--start-sizes",
        ("executor",),
        nargs="+",
        type=size,
        default=[(8, 64), (64, 512)],
        metavar="PxM",
        help="stages x microbatches for the cost at start (8x64 64x512)",
    )
    add("--ranks", ("optimizer", "checkpoint"), type=count, default=2, help="processes that update, or save and load, at once (2)")
    add("--state-mb", ("checkpoint",), type=count, default=256, help="state of each process, in MiB (256)")
    add("--folder", ("checkpoint",), type=Path, help="where to write, to measure that disk (the folder for temporary files)")
    add(
        "--elements",
        ("optimizer", "offload"),
        type=count,
        default=25_000_000,
        help="about how many each of them updates (25000000)",
    )
    add("--megabytes", ("data",), type=count, default=60, help="text to preprocess (60)")
    add("--stream-gb", ("data",), type=gigabytes, default=0.5, help="JSON lines over which memory is watched, in GB (0.5)")
    add("--documents", ("data",), type=count, default=20_000_000, help="in the synthetic index, of 1000 tokens each (20000000)")
    return flags, acts


def count(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def milliseconds(text: str) -> float:
    """A time from 0 on."""
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a time from 0 on, not {text}")
    return number


def share(text: str) -> float:
    """A share above 0."""
    number = float(text)
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def gigabytes(text: str) -> float:
    """A size above 0."""
    number = float(text)
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size above 0, not {text}")
    return number


def size(text: str) -> tuple[int, int]:
    """Stages x microbatches, as in 8x64."""
    stages, separator, microbatches = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be stages x microbatches, as in 8x64, not {text!r}")
    return count(stages), count(microbatches)


def main() -> int:
    """Run the parts; returns the exit status."""
    flags, acts = parser()
    args = flags.parse_args()
    for name, parts in acts.items():
        if args.part not in ("all", *parts) and getattr(args, name) != flags.get_default(name):
            flags.error(f"--{name.replace('_', '-')} acts in {', '.join(parts)}, not in {args.part}: leave it out")
    chosen = PARTS if args.part == "all" else (args.part,)
    try:
        good = [run(part, args) for part in chosen]
    except ValueError as error:
        flags.error(str(error))
    return 0 if all(good) else 1


def run(part: str, args: argparse.Namespace) -> bool:
    """One part; returns whether what it asks for holds. Imports torch only here, after --help."""
    pairs = args.pairs or (15 if part == "checkpoint" else 7)
    if part == "bubble":
        from megatron_lab.benchmarks import bubble

        settings = bubble.Settings(
            schedules=tuple(args.schedules),
            stages=args.stages,
            microbatches=args.microbatches,
            costs=Costs(*(ms / 1e3 for ms in (args.forward_ms, args.input_grad_ms, args.weight_grad_ms, 0.0, args.recompute_ms))),
            hidden=tuple(args.hidden),
            overlap=not args.no_overlap_p2p,
            repeats=args.repeats,
        )
        return bubble.run(settings)
    if part == "activations":
        from megatron_lab.benchmarks import activations

        return activations.run(activations.Settings(share=args.link_share, repeats=args.repeats))
    if part == "overlap":
        from megatron_lab.benchmarks import overlap

        return overlap.run(
            overlap.Settings(
                Shape(*args.gpt or (8, 192, 4, 256, 4, 512)), tuple(args.strategies), tuple(args.accumulate), args.repeats
            )
        )
    if part == "tensor":
        from megatron_lab.benchmarks import tensor_ranks

        held = [tensor_ranks.run(tensor_ranks.Settings(n, share=args.link_share, repeats=args.repeats)) for n in (2, 4)]
        return all(held)
    if part == "context":
        from megatron_lab.benchmarks import context

        held = [context.run(context.Settings(n, repeats=args.repeats)) for n in (2, 4)]
        return all(held)
    if part == "optimizer":
        from megatron_lab.benchmarks import optimizer

        return optimizer.run(args.ranks, args.elements, pairs)
    if part == "offload":
        import torch

        from megatron_lab.benchmarks import offload

        devices = dict.fromkeys([args.device, *(["cuda"] if torch.cuda.is_available() else [])])
        good = [offload.run(torch.device(device), args.elements, pairs) for device in devices]
        return all(good)
    if part == "memory":
        from megatron_lab.benchmarks import memory

        return memory.run(Shape(*args.gpt or (12, 128, 4, 1024, 1, 10240)), pairs)
    if part == "executor":
        from megatron_lab.benchmarks import executor

        return executor.run(pairs, args.start_sizes)
    if part == "checkpoint":
        from megatron_lab.benchmarks import checkpoint_load, checkpoint_save

        wanted = (args.ranks, args.state_mb, pairs, args.folder)
        return all([checkpoint_save.run(*wanted), checkpoint_load.run(*wanted)])
    if part == "data":
        from megatron_lab.benchmarks import data_index, loader, preprocessing

        settings_of_text = preprocessing.Settings(megabytes=args.megabytes, pairs=pairs, stream_gb=args.stream_gb)
        return all(
            [
                preprocessing.run(settings_of_text),
                data_index.run_index(args.documents, 1000 * args.documents),
                data_index.run_samples(),
                data_index.run_blends(),
                loader.run(),
            ]
        )
    if part == "packing":
        from megatron_lab.benchmarks import packing

        return packing.run(turns=pairs, device=args.device)
    if part == "loss":
        from megatron_lab.benchmarks import loss

        return loss.run(pairs, args.device)
    if part == "experts":
        from megatron_lab.benchmarks import experts

        return experts.run(experts.Settings(Shape(*args.gpt or (4, 256, 4, 256, 4, 2048)), pairs=pairs))
    if part == "single":
        import torch

        from megatron_lab.benchmarks import single

        single.run(SHAPES[args.shape], torch.device(args.device), args.dtypes, pairs, args.steps, compiled=args.compile)
    else:
        from megatron_lab.benchmarks import parallel

        parallel.run(SHAPES[args.shape])
    return True
