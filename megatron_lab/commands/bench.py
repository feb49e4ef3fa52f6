"""Run the benchmarks of this framework.

    python tools/bench.py                 all of the following
    python tools/bench.py bubble          a step of every pipeline schedule against the simulator, with operations that sleep
    python tools/bench.py activations     a step that offloads saved tensors over a slow link, against a step that does not
    python tools/bench.py overlap         exposed communication of two data ranks with and without overlap, over a slow link
    python tools/bench.py tensor          layers on tensor ranks with and without --tp-comm-overlap, over a slow link
    python tools/bench.py context         attention on context ranks: transfer of keys and values against compute, over a slow link
    python tools/bench.py optimizer       the optimizer's step against torch's fused AdamW, in several processes at once
    python tools/bench.py offload         the optimizer's step with all its state in host memory, against the update alone
    python tools/bench.py memory          planned and measured peak of activations, and step time, for each option that saves memory
    python tools/bench.py executor        overhead of the pipeline executor: per operation and at the start
    python tools/bench.py data            preprocessing against the bare tokenizer, indexes of a large dataset, samples, loader
    python tools/bench.py checkpoint      saves and loads against plain writes and reads; time that an asynchronous save blocks
    python tools/bench.py packing         attention within documents against attention over the full sample
    python tools/bench.py loss            a step with the chunked loss against a step with the full loss
    python tools/bench.py experts         experts against a plain loop, dispatchers, a step against a dense one
    python tools/bench.py single          one process, float32 and bfloat16, against a plain PyTorch loop and transformers' GPT-2
    python tools/bench.py parallel        8 processes at TP=2, PP=2, DP=2 against one, with the share of communication
    python tools/bench.py single --shape 350m --device cuda --compile

The exit status is 1 if a result misses its bound. The benchmarks experts, single and parallel have no bounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.config.parallel import ShardingStrategy
from megatron.spec.operations import OpCosts
from megatron.spec.schedules import SCHEDULES
from megatron_lab.benchmarks.shapes import SHAPES, Shape
from megatron_lab.commands.parser import ToolParser

# Benchmarks that fork come first. With CUDA, autograd starts threads at its first backward, and threads do not survive a fork.
BENCHMARKS = (
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
# optim_grads_params is missing: torch's fully_shard does its communication, and on gloo it waits for each reduction.
STRATEGIES: tuple[ShardingStrategy, ...] = ("no_shard", "optim", "optim_grads")


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, tuple[str, ...]]]:
    """Return the parser of the command line, and for each flag the benchmarks in which it takes effect."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *BENCHMARKS])
    benchmarks_by_flag: dict[str, tuple[str, ...]] = {}

    def add(name: str, benchmarks: tuple[str, ...], **kwargs: object) -> None:
        description = f"{', '.join(benchmarks)}: {kwargs.pop('help')}"
        action = parser.add_argument(name, help=description, **kwargs)  # type: ignore[arg-type]
        benchmarks_by_flag[action.dest] = benchmarks

    add("--shape", ("single", "parallel"), choices=SHAPES, default="small", help="Select the model and batch (default small).")
    add(
        "--device",
        ("single", "offload", "packing", "loss"),
        default="cpu",
        help="Train on this device; offload also runs on a GPU if one exists (default cpu).",
    )
    add(
        "--dtypes",
        ("single",),
        nargs="+",
        default=["float32", "bfloat16"],
        help="Train in these dtypes (default float32 bfloat16).",
    )
    add(
        "--pairs",
        ("single", "executor", "optimizer", "offload", "memory", "checkpoint", "data", "packing", "loss", "experts"),
        type=parse_count,
        help="Measure both sides of a comparison this many times, alternately (default 7; checkpoint 15).",
    )
    add("--steps", ("single",), type=parse_count, default=1, help="Run this many steps in each measurement (default 1).")
    add(
        "--compile",
        ("single",),
        action="store_true",
        help="Also measure compiled layers and the plain loop compiled, which takes minutes to compile.",
    )
    add("--stages", ("bubble",), type=parse_count, default=8, help="Start this many processes (default 8).")
    add("--microbatches", ("bubble",), type=parse_count, default=16, help="Run this many microbatches per step (default 16).")
    add(
        "--schedules",
        ("bubble",),
        nargs="+",
        choices=SCHEDULES,
        default=list(SCHEDULES),
        help="Measure only these schedules (default all).",
    )
    for op_name in ("forward", "input-grad", "weight-grad"):
        add(
            f"--{op_name}-ms",
            ("bubble",),
            type=parse_ms,
            default=40.0,
            help="Set the time on a full stage, which its chunks divide (default 40).",
        )
    add(
        "--recompute-ms",
        ("bubble",),
        type=parse_ms,
        default=0.0,
        help="Set the time to recompute a stage's layers before backward (default 0).",
    )
    add(
        "--hidden",
        ("bubble",),
        nargs=3,
        type=parse_count,
        default=[128, 1, 512],
        metavar=("S", "B", "H"),
        help="Send a float32 tensor of this shape between stages (default 128 1 512).",
    )
    add("--no-overlap-p2p", ("bubble",), action="store_true", help="Wait for each exchange of messages before computing further.")
    add(
        "--repeats",
        ("bubble", "overlap", "tensor", "context", "activations"),
        type=parse_count,
        default=5,
        help="Measure each schedule or strategy this many times after a warm-up (default 5).",
    )
    add(
        "--link-share",
        ("activations", "tensor"),
        type=parse_share,
        default=0.8,
        help="Set the time of a layer's copy relative to its forward, or of a gather relative to its matrix product (default 0.8).",
    )
    add(
        "--strategies",
        ("overlap",),
        nargs="+",
        choices=STRATEGIES,
        default=list(STRATEGIES),
        help="Measure only these sharding strategies (default all).",
    )
    add(
        "--accumulate",
        ("overlap",),
        nargs="+",
        type=parse_count,
        default=[1, 4],
        help="Measure steps with these numbers of microbatches (default 1 4).",
    )
    add(
        "--gpt",
        ("overlap", "memory", "experts"),
        nargs=6,
        type=parse_count,
        metavar=("LAYERS", "HIDDEN", "HEADS", "SEQ", "BATCH", "VOCAB"),
        help="Set the model and a rank's microbatch (default 8 192 4 256 4 512; memory 12 128 4 1024 1 10240; "
        "experts 4 256 4 256 4 2048).",
    )
    add(
        "--start-sizes",
        ("executor",),
        nargs="+",
        type=parse_pipeline_size,
        default=[(8, 64), (64, 512)],
        metavar="PxM",
        help="Measure the overhead at the start for these numbers of stages x microbatches (default 8x64 64x512).",
    )
    add(
        "--ranks",
        ("optimizer", "checkpoint"),
        type=parse_count,
        default=2,
        help="Let this many processes update, or save and load, at once (default 2).",
    )
    add(
        "--state-mb",
        ("checkpoint",),
        type=parse_count,
        default=256,
        help="Set the size of each process's state in MiB (default 256).",
    )
    add(
        "--folder",
        ("checkpoint",),
        type=Path,
        help="Write to this folder, to measure its disk (default: the folder for temporary files).",
    )
    add(
        "--elements",
        ("optimizer", "offload"),
        type=parse_count,
        default=25_000_000,
        help="Let each process update about this many elements (default 25000000).",
    )
    add("--megabytes", ("data",), type=parse_count, default=60, help="Preprocess this many MB of text (default 60).")
    add(
        "--stream-gb",
        ("data",),
        type=parse_gb,
        default=0.5,
        help="Measure memory while this many GB of JSON lines are read (default 0.5).",
    )
    add(
        "--documents",
        ("data",),
        type=parse_count,
        default=20_000_000,
        help="Build a synthetic index of this many documents of 1000 tokens each (default 20000000).",
    )
    return parser, benchmarks_by_flag


def parse_count(text: str) -> int:
    """Parse a command-line value that is an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parse_ms(text: str) -> float:
    """Parse a command-line value that is a time in milliseconds of at least 0."""
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a time in milliseconds, 0 or more, not {text}")
    return value


def parse_share(text: str) -> float:
    """Parse a command-line value that is a ratio above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def parse_gb(text: str) -> float:
    """Parse a command-line value that is a size in GB above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size in GB above 0, not {text}")
    return value


def parse_pipeline_size(text: str) -> tuple[int, int]:
    """Parse a command-line value such as 8x64 to (stages, microbatches)."""
    stages, separator, microbatches = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be a number of stages, x and a number of microbatches, as in 8x64, not {text!r}")
    return parse_count(stages), parse_count(microbatches)


def main() -> int:
    """Run the benchmarks that the command line selects and return the exit status."""
    parser, benchmarks_by_flag = build_parser()
    args = parser.parse_args()
    for name, benchmarks in benchmarks_by_flag.items():
        if args.part not in ("all", *benchmarks) and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} acts in {', '.join(benchmarks)}, not in {args.part}: leave it out")
    selected = BENCHMARKS if args.part == "all" else (args.part,)
    try:
        passed = [run(benchmark, args) for benchmark in selected]
    except ValueError as error:
        parser.error(str(error))
    return 0 if all(passed) else 1


def run(benchmark: str, args: argparse.Namespace) -> bool:
    """Run one benchmark and return whether its results are within their bounds (True for a benchmark without bounds).

    This function imports torch only when it is called, so that --help is fast.
    """
    pairs = args.pairs or (15 if benchmark == "checkpoint" else 7)
    if benchmark == "bubble":
        from megatron_lab.benchmarks import bubble

        config = bubble.Settings(
            schedules=tuple(args.schedules),
            stages=args.stages,
            microbatches=args.microbatches,
            costs=OpCosts(*(ms / 1e3 for ms in (args.forward_ms, args.input_grad_ms, args.weight_grad_ms, 0.0, args.recompute_ms))),
            hidden_shape=tuple(args.hidden),
            overlap=not args.no_overlap_p2p,
            repeats=args.repeats,
        )
        return bubble.run(config)
    if benchmark == "activations":
        from megatron_lab.benchmarks import activations

        return activations.run(activations.Settings(share=args.link_share, repeats=args.repeats))
    if benchmark == "overlap":
        from megatron_lab.benchmarks import overlap

        return overlap.run(
            overlap.Settings(
                Shape(*args.gpt or (8, 192, 4, 256, 4, 512)), tuple(args.strategies), tuple(args.accumulate), args.repeats
            )
        )
    if benchmark == "tensor":
        from megatron_lab.benchmarks import tensor_ranks

        passed = [tensor_ranks.run(tensor_ranks.Settings(n, share=args.link_share, repeats=args.repeats)) for n in (2, 4)]
        return all(passed)
    if benchmark == "context":
        from megatron_lab.benchmarks import context

        passed = [context.run(context.Settings(n, repeats=args.repeats)) for n in (2, 4)]
        return all(passed)
    if benchmark == "optimizer":
        from megatron_lab.benchmarks import optimizer

        return optimizer.run(args.ranks, args.elements, pairs)
    if benchmark == "offload":
        import torch

        from megatron_lab.benchmarks import offload

        devices = dict.fromkeys([args.device, *(["cuda"] if torch.cuda.is_available() else [])])
        passed = [offload.run(torch.device(device), args.elements, pairs) for device in devices]
        return all(passed)
    if benchmark == "memory":
        from megatron_lab.benchmarks import memory

        return memory.run(Shape(*args.gpt or (12, 128, 4, 1024, 1, 10240)), pairs)
    if benchmark == "executor":
        from megatron_lab.benchmarks import executor

        return executor.run(pairs, args.start_sizes)
    if benchmark == "checkpoint":
        from megatron_lab.benchmarks import checkpoint_load, checkpoint_save

        run_args = (args.ranks, args.state_mb, pairs, args.folder)
        return all([checkpoint_save.run(*run_args), checkpoint_load.run(*run_args)])
    if benchmark == "data":
        from megatron_lab.benchmarks import data_index, loader, preprocessing

        text_config = preprocessing.Settings(megabytes=args.megabytes, pairs=pairs, stream_gb=args.stream_gb)
        return all(
            [
                preprocessing.run(text_config),
                data_index.run_index(args.documents, 1000 * args.documents),
                data_index.run_samples(),
                data_index.run_blends(),
                loader.run(),
            ]
        )
    if benchmark == "packing":
        from megatron_lab.benchmarks import packing

        return packing.run(turns=pairs, device=args.device)
    if benchmark == "loss":
        from megatron_lab.benchmarks import loss

        return loss.run(pairs, args.device)
    if benchmark == "experts":
        from megatron_lab.benchmarks import experts

        return experts.run(experts.Settings(Shape(*args.gpt or (4, 256, 4, 256, 4, 2048)), pairs=pairs))
    if benchmark == "single":
        import torch

        from megatron_lab.benchmarks import single

        single.run(SHAPES[args.shape], torch.device(args.device), args.dtypes, pairs, args.steps, compiled=args.compile)
    else:
        from megatron_lab.benchmarks import parallel

        parallel.run(SHAPES[args.shape])
    return True
