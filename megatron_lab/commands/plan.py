"""Find the best layout for a job on a cluster: its speed, its duration and price, and why other layouts are worse.

    python tools/plan.py --model llama3-70b --cluster h100 --gpus 512 --global-batch-size 1024 --tokens 15e12

The tool needs neither GPUs nor data. docs/planning.md explains how it predicts step times and how accurate they are.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.parsed_flags import LIST_NAME, DryRun
from megatron.config.regular_file import check_output
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.cluster import DEFAULT_CLUSTER, list_cluster_names, load_cluster
from megatron_lab.planner.garbage_collection import collect_garbage_rarely
from megatron_lab.planner.vocabulary import assume_vocab_size
from megatron_lab.resilience.pipes import copy_pipes
from megatron_lab.terminal import get_terminal_width, wrap_command

PROGRAM = "plan.py"
_DAY = 86_400
_FIRST_STEPS = tuple(
    f"{command:<52}{text}"
    for command, text in (
        (f"python tools/{PROGRAM} --model {LIST_NAME}", "models by name"),
        (f"python tools/{PROGRAM} --model llama3-8b --gpus 64", "plan for 64 GPUs"),
        (f"python tools/{PROGRAM} --help", "all flags"),
    )
)
"""Commands to show to a user who has given no model."""
LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch.sh"
"""Script that generated launch scripts source. Only a checkout has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit status: 0 for success, 1 if no layout fits, 2 for invalid settings."""
    argv = sys.argv[1:] if argv is None else argv
    collect_garbage_rarely()
    parser = _build_parser()
    args, model_argv = parser.parse_known_args(argv)
    try:
        return _run(args, model_argv)
    except (ConfigError, ValueError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


def _build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(PROGRAM, description=__doc__)
    clusters = f"Plan for this cluster: a built-in name or a file; 'list' prints the names (default {DEFAULT_CLUSTER})."
    parser.add_argument("--cluster", "--plan-cluster", default=DEFAULT_CLUSTER, metavar="NAME|FILE", help=clusters)
    parser.add_argument(
        "--gpus", "--world-size", type=int, default=8, metavar="N", help="Set the number of devices of the job (default 8)."
    )
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="Set the number of devices per node (default: that of the cluster)."
    )
    parser.add_argument("--tokens", type=float, help="Set the number of training tokens, to print days and cost.")
    parser.add_argument("--price", type=float, help="Set the price of one device per hour.")
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="AXIS=N",
        help="Fix the size of an axis: tensor, pipeline, context, expert or micro.",
    )
    parser.add_argument("--max-tensor", type=int, metavar="N", help="Try at most N tensor ranks.")
    parser.add_argument("--max-pipeline", type=int, metavar="N", help="Try at most N pipeline stages.")
    parser.add_argument("--max-context", type=int, metavar="N", help="Try at most N context ranks.")
    parser.add_argument("--max-expert", type=int, metavar="N", help="Try at most N expert ranks.")
    parser.add_argument("--max-micro", type=int, metavar="N", help="Try micro-batches of at most N samples.")
    parser.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="FLAGS",
        help="Explain how much slower the best layout is with these flags (one quoted argument).",
    )
    parser.add_argument("--rows", type=int, default=8, help="Print at most this many layouts (default 8).")
    parser.add_argument("--json", metavar="FILE", help="Write all layouts as JSON.")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="Write a picture (.svg or .png) of the use of time, and of time against memory; needs matplotlib.",
    )
    parser.add_argument("--write-script", metavar="FILE", help="Write a launch script of the best layout.")
    parser.epilog = "All other flags are those of pretrain_gpt.py: model, batch, and settings that are not searched."
    return parser


def _run(args: argparse.Namespace, model_argv: Sequence[str]) -> int:
    """Search layouts, print the table and write the requested files. Return the exit status."""
    from megatron.data.tokenizer import predict_embedding_rows
    from megatron_lab.planner.search import SIZE_SETTINGS, LayoutSearch, Limits
    from megatron_lab.planner.units import format_bytes

    if args.cluster == "list":
        for name in list_cluster_names():
            print(f"{name:<16} {load_cluster(name).name}")
        return 0
    for flag, path in (("--json", args.json), ("--write-script", args.write_script), ("--output", args.output)):
        if path is not None:
            check_output(flag, path)
    if args.output is not None and Path(args.output).suffix not in (".svg", ".png"):
        raise ValueError(f"--output {args.output}: give a name that ends in .svg or .png")
    if args.write_script is not None and not LAUNCH.is_file():
        raise ValueError(
            f"--write-script {args.write_script}: the script needs examples/launch.sh, which only a checkout of the repository "
            f"has, but there is no {LAUNCH}. Run this tool in a checkout, or leave --write-script out"
        )
    cluster = load_cluster(args.cluster)
    if args.gpus < 1 or (args.gpus_per_node or 1) < 1:
        raise ValueError(
            f"--gpus {args.gpus}, --gpus-per-node {args.gpus_per_node or cluster.gpus_per_node}: both must "
            "be at least 1. Correct these flags."
        )
    cluster = replace(cluster, gpus_per_node=args.gpus_per_node or cluster.gpus_per_node)
    if not model_argv:
        raise ConfigError([Violation((), "no model is given. Start with one of these commands:", table=_FIRST_STEPS)])
    model_argv = copy_pipes(model_argv)  # --why reads the settings again
    full_argv = [*_list_default_argv(model_argv), *model_argv]
    loaded = load(full_argv, args.gpus)
    config, notes = assume_vocab_size(loaded.config)
    vocab_size = predict_embedding_rows(config.data)
    max_sizes = {axis: size for axis in SIZE_SETTINGS if (size := getattr(args, f"max_{axis}")) is not None}
    search = LayoutSearch(
        config,
        DryRun(args.gpus, cluster.gpus_per_node, None),
        vocab_size,
        cluster,
        Limits(_parse_fixed_sizes(args.fix, SIZE_SETTINGS), max_sizes),
    )
    outcome = search.run()
    for note in notes:
        print(note)
    print(
        f"{args.gpus} x {cluster.device} ({cluster.name}); {outcome.num_estimated:,} layouts estimated, "
        f"{outcome.num_planned} of them planned in full"
    )
    if not outcome.layouts:
        if outcome.smallest_layout is None:
            print("No layout is valid for these settings and devices. Remove some of --fix and --max-*.")
        else:
            smallest = outcome.smallest_layout
            needed = format_bytes(smallest.time.device_bytes)
            print(
                f"None fits {cluster.memory_gb:g} GB a device. Closest: {_format_layout(smallest, config)} needs {needed}. "
                "More devices, --optimizer-cpu-offload or a smaller --seq-length need less."
            )
        return 1
    ties = outcome.find_tied_layouts()
    for line in _format_table(outcome.layouts[: args.rows], len(ties), args, cluster.memory_gb, config):
        print(line)
    best = outcome.layouts[0]
    print(f"a step of the best: {', '.join(f'{name} {share:.1%}' for name, share in best.time.find_largest_shares())}")
    for text in args.why:
        _print_difference(search, best, shlex.split(text), full_argv, args.gpus, config)
    for output_path in filter(None, (args.json, args.output, args.write_script)):
        Path(output_path).parent.mkdir(parents=True, exist_ok=True)
    if args.json is not None:
        Path(args.json).write_text(
            json.dumps([_layout_to_json(layout, config) for layout in outcome.layouts], indent=1) + "\n", encoding="utf-8"
        )
    if args.output is not None:
        from megatron_lab.planner.figure import draw_layouts

        labelled_times = [
            (f"{position}: {_format_label(layout)}", layout.time) for position, layout in enumerate(outcome.layouts[: args.rows], 1)
        ]
        draw_layouts(labelled_times, cluster.memory_gb, Path(args.output))
    if args.write_script is not None:
        script_argv = [*model_argv, *({DEFAULT_PRECISION} & {*_list_default_argv(model_argv)})]
        _write_script(Path(args.write_script), script_argv, _build_layout_argv(best, config), best, args.gpus, cluster)
    return 0


DEFAULT_PRECISION = "--bf16"
"""Precision if the user sets none. Predictions assume it, so a generated script contains it too."""


def _list_default_argv(model_argv: Sequence[str]) -> list[str]:
    """Return default flags for settings that a run or a prediction needs, such as the data and the precision, unless the user has
    set them."""
    defaults = []
    for flag, values, alternatives in (
        ("--mock-data", [], ("--data-path",)),
        ("--tokenizer-type", ["NullTokenizer"], ("--vocab-file",)),
        ("--vocab-size", ["128256"], ("--vocab-file", "--tokenizer-model")),
        ("--train-iters", ["10"], ("--train-samples", "--train-epochs", "--train-tokens")),
        ("--lr", ["1e-4"], ()),
        ("--micro-batch-size", ["1"], ()),
        (DEFAULT_PRECISION, [], ("--fp16", "--fp32", "--fp64")),
        ("--device", ["cuda"], ()),
    ):
        if not {flag, *alternatives} & {word.partition("=")[0].replace("_", "-") for word in model_argv}:
            defaults += [flag, *values]
    return defaults


def _parse_fixed_sizes(assignments: Sequence[str], axes: Any) -> dict[str, int]:
    """Parse the values of --fix, which fix some parallel sizes for the search of layouts. Return the fixed sizes, by axis such as
    "tensor".

    Args:
        assignments: values such as "tensor=8".
        axes: valid names of axes.

    Raises:
        ValueError: a value is not AXIS=N.
    """
    sizes = {}
    for text in assignments:
        axis, equals, size = text.partition("=")
        if axis not in axes or not equals or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--fix {text}: give AXIS=N, where AXIS is one of {', '.join(axes)} and N is a whole number")
        sizes[axis] = int(size)
    return sizes


def _format_table(layouts: Sequence[Any], num_ties: int, args: argparse.Namespace, memory_gb: float, config: Config) -> list[str]:
    """Format a table of layouts, best first.

    Args:
        num_ties: number of layouts, from the first on, that the prediction cannot distinguish from the best. They are marked as
            ties.
        memory_gb: memory of a device in GB.
    """
    rows = [["step", "90 % between", "tok/s/GPU", "MFU", "memory", *(["days", "GPU hours"] if args.tokens else []), ""]]
    if args.tokens and args.price:
        rows[0].insert(-1, "cost")
    for position, layout in enumerate(layouts):
        time = layout.time
        row = [f"{time.seconds:.3f}s", f"{time.low:.3f}..{time.high:.3f}", f"{time.tokens_per_s:,.0f}", f"{time.mfu:.1%}"]
        row.append(f"{time.device_bytes / 1e9:.1f} of {memory_gb:.0f} GB")
        if args.tokens:
            run_seconds = args.tokens / (time.tokens_per_s * time.world_size)
            gpu_hours = run_seconds / 3600 * time.world_size
            row += [f"{run_seconds / _DAY:.1f}", f"{gpu_hours:,.0f}", *([f"{gpu_hours * args.price:,.0f}"] if args.price else [])]
        rows.append([*row, "tie" if 0 < position < num_ties else ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *lines = [" ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    table = [heading]
    for line, layout in zip(lines, layouts, strict=True):
        table += [line, *wrap_command(f"    {_format_layout(layout, config)}", get_terminal_width())]
        sizes = layout.time.uncalibrated_sizes
        table += [f"    not calibrated there: {', '.join(sizes)}"] if sizes else []
    return table


def _format_layout(layout: Any, config: Config) -> str:
    return shlex.join(_build_layout_argv(layout, config))


def _build_layout_argv(layout: Any, config: Config) -> list[str]:
    """Return the flags of a layout: the searched settings that differ from their default, or that the user's command line sets."""
    from megatron.config.checks.finding import format_setting, is_set
    from megatron_lab.planner.search import SEARCHED_SETTINGS

    settings = [name for name in SEARCHED_SETTINGS if is_set(layout.config, name) or is_set(config, name)]
    return shlex.split(" ".join(format_setting(layout.config, name) for name in settings))


def _format_label(layout: Any) -> str:
    """Return a short label of a layout for the picture of --output: parallel sizes above 1, pipeline schedule, sharding, micro-
    batch size, recomputation."""
    parallel, training, memory = layout.config.parallel, layout.config.training, layout.config.memory
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "x": parallel.num_virtual_stages_per_pipeline_rank or 1,
    }
    labels = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    labels += [parallel.schedule] if parallel.pipeline_model_parallel_size > 1 else []
    labels += ["sharded"] if parallel.sharding == "optim_grads_params" else []
    return " ".join(
        [*labels, f"mb{training.micro_batch_size}", *([memory.effective_granularity] if memory.effective_granularity else [])]
    )


def _print_difference(
    search: Any, best: Any, extra_argv: Sequence[str], full_argv: Sequence[str], gpus: int, config: Config
) -> None:
    """Answer a question of the user (--why): print why a layout is slower than the best layout, and by how much.

    Args:
        best: the best layout.
        extra_argv: flags of the question. They change the best layout into the layout to explain.
        full_argv: flags of the job.
        config: settings of the job.
    """
    from megatron.config.checks.finding import Change, get_value
    from megatron_lab.planner.search import SEARCHED_SETTINGS, explain_difference

    requested = load([*full_argv, *_build_layout_argv(best, config), *extra_argv], gpus).config
    layout = search.predict(Change(tuple((name, get_value(requested, name)) for name in SEARCHED_SETTINGS)))
    text = shlex.join(extra_argv)
    print(f"why not {text}: {'this layout is not valid' if layout is None else explain_difference(best, layout)}")


def _layout_to_json(layout: Any, config: Config) -> dict[str, Any]:
    return {"flags": _build_layout_argv(layout, config), **layout.time.to_json()}


def _write_script(path: Path, model_argv: Sequence[str], layout_argv: Sequence[str], best: Any, gpus: int, cluster: Any) -> None:
    """Write a launch script for the best layout, like the scripts in examples/.

    The script makes a test run, checks the nodes, starts all ranks, and continues from the newest checkpoint.

    Args:
        model_argv: flags of the job: model, batch and all settings that are not searched.
        layout_argv: flags of the best layout.
    """
    num_nodes, gpus_per_node = -(-gpus // cluster.gpus_per_node), min(gpus, cluster.gpus_per_node)
    has_data = {"--data-path", "--mock-data"} & {word.partition("=")[0].replace("_", "-") for word in model_argv}
    data_flag = "" if has_data else '--data-path "$DATA"'
    start_hint = "on each of the nodes, with HEAD set to one of them" if num_nodes > 1 else "on the node"
    lines = [
        "#!/usr/bin/env bash",
        f"# Chosen by tools/plan.py for {gpus} devices ({cluster.name}).",
        f"# Predicted: {best.time.seconds:.3f} s a step ({best.time.low:.3f} to {best.time.high:.3f}), "
        f"{best.time.device_bytes / 1e9:.1f} GB on the fullest rank.",
        f"# Start it {start_hint}, or with sbatch. Flags of its command line override those here: tokenizer, learning rate.",
        "# Variables: examples/launch.sh.",
        "set -euo pipefail",
        f"source {shlex.quote(str(LAUNCH))}",
        *([] if has_data else ['need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it"']),
        f"model=({shlex.join(model_argv)})",
        f"layout=({shlex.join(layout_argv)})",
        f"batch=() optimizer=() data=({data_flag})",
        f'launch {num_nodes} {gpus_per_node} {shlex.quote(path.stem)} "$@"',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)
