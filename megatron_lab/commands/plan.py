"""Which layout for a job on a cluster: how fast, how long, at what cost, and why not another one.

    python tools/plan.py --model llama3-70b --cluster h100 --gpus 512 --global-batch-size 1024 --tokens 15e12

Needs neither GPUs nor data. docs/planning.md says how times come about and how sure they are.
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
from megatron.config.errors import ConfigError
from megatron.config.given import DryRun, check_output
from megatron.config.settle import with_vocabulary
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.cluster import DEFAULT, cluster_names, load_cluster
from megatron_lab.planner.garbage import collect_seldom

PROGRAM = "plan.py"
_DAY = 86_400
LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch.sh"
"""What launch scripts are made of. Only a checkout has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0, 1 if nothing fits, 2 for settings that are wrong."""
    argv = sys.argv[1:] if argv is None else argv
    collect_seldom()
    parser = _parser()
    own, words = parser.parse_known_args(argv)
    try:
        return _run(own, words)
    except (ConfigError, ValueError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(PROGRAM, description=__doc__)
    clusters = "one that is shipped, or a file; 'list' lists them"
    parser.add_argument("--cluster", "--plan-cluster", default=DEFAULT, metavar="NAME|FILE", help=clusters)
    parser.add_argument("--gpus", "--world-size", type=int, default=8, metavar="N", help="devices of the job")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="devices of a node, if not as many as the cluster has")
    parser.add_argument("--tokens", type=float, help="tokens to train on, for days and cost")
    parser.add_argument("--price", type=float, help="price of one device for an hour")
    parser.add_argument("--fix", action="append", default=[], metavar="AXIS=N", help="tensor, pipeline, context, expert or micro")
    parser.add_argument("--max-tensor", type=int, metavar="N", help="try no more tensor ranks")
    parser.add_argument("--max-pipeline", type=int, metavar="N", help="try no more stages")
    parser.add_argument("--max-context", type=int, metavar="N", help="try no more context ranks")
    parser.add_argument("--max-expert", type=int, metavar="N", help="try no more expert ranks")
    parser.add_argument("--max-micro", type=int, metavar="N", help="try no larger micro-batches")
    parser.add_argument("--why", action="append", default=[], metavar="FLAGS", help="say what these flags lose (one word)")
    parser.add_argument("--rows", type=int, default=8, help="layouts to show")
    parser.add_argument("--json", metavar="FILE", help="all that was found, as JSON")
    parser.add_argument("--output", metavar="FILE", help=".svg or .png: where the time goes, and time against memory (matplotlib)")
    parser.add_argument("--write-script", metavar="FILE", help="a launch script of the best layout")
    parser.epilog = "All other flags are those of pretrain_gpt.py: the model, the batch, and what is not searched."
    return parser


def _run(own: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron.data.tokenizer import planned_rows
    from megatron_lab.planner.search import AXES, LayoutSearch, Limits
    from megatron_lab.planner.state_report import amount

    if own.cluster == "list":
        for name in cluster_names():
            print(f"{name:<16} {load_cluster(name).name}")
        return 0
    for flag, path in (("--json", own.json), ("--write-script", own.write_script), ("--output", own.output)):
        if path is not None:
            check_output(flag, path)
    if own.output is not None and Path(own.output).suffix not in (".svg", ".png"):
        raise ValueError(f"--output {own.output}: give a name that ends in .svg or .png")
    if own.write_script is not None and not LAUNCH.is_file():
        raise ValueError(
            f"--write-script {own.write_script}: a script starts its ranks by examples/launch.sh, which only a checkout of the "
            f"repository has: there is no {LAUNCH}"
        )
    cluster = load_cluster(own.cluster)
    if own.gpus < 1 or (own.gpus_per_node or 1) < 1:
        raise ValueError("--gpus and --gpus-per-node take whole numbers from 1 on.")
    cluster = replace(cluster, gpus_per_node=own.gpus_per_node or cluster.gpus_per_node)
    given = [*_missing(words), *words]
    loaded = load(given, own.gpus)
    config, assumed = with_vocabulary(loaded.config)
    vocab_size = planned_rows(config.data)
    most = {axis: size for axis in AXES if (size := getattr(own, f"max_{axis}")) is not None}
    search = LayoutSearch(
        config, DryRun(own.gpus, cluster.gpus_per_node, None), vocab_size, cluster, Limits(_fixed(own.fix, AXES), most)
    )
    outcome = search.run()
    for note in assumed:
        print(note)
    print(f"{own.gpus} x {cluster.device} ({cluster.name}); {outcome.judged:,} layouts judged, {outcome.planned} of them exactly")
    if not outcome.found:
        if outcome.closest is None:
            print("No layout is valid for these settings and devices. Fewer --fix and --max-* leave more.")
        else:
            one = outcome.closest
            needed = amount(one.time.device_bytes)
            print(
                f"None fits {cluster.memory_gb:g} GB a device. Closest: {_shown(one, config)} needs {needed}. More devices, "
                "--optimizer-cpu-offload or a smaller --seq-length need less."
            )
        return 1
    ties = outcome.ties()
    for line in _table(outcome.found[: own.rows], len(ties), own, cluster.memory_gb, config):
        print(line)
    best = outcome.found[0]
    print(f"a step of the best: {', '.join(f'{name} {share:.1%}' for name, share in best.time.shares())}")
    for text in own.why:
        _explain(search, best, shlex.split(text), given, own.gpus, config)
    for asked in filter(None, (own.json, own.output, own.write_script)):
        Path(asked).parent.mkdir(parents=True, exist_ok=True)
    if own.json is not None:
        Path(own.json).write_text(json.dumps([_as_json(one, config) for one in outcome.found], indent=1) + "\n", encoding="utf-8")
    if own.output is not None:
        from megatron_lab.planner.figure import draw_layouts

        shown = [(f"{number}: {_short(one)}", one.time) for number, one in enumerate(outcome.found[: own.rows], 1)]
        draw_layouts(shown, cluster.memory_gb, Path(own.output))
    if own.write_script is not None:
        judged = [*words, *({PRECISION} & {*_missing(words)})]
        _write_script(Path(own.write_script), judged, _flags(best, config), best, own.gpus, cluster)
    return 0


PRECISION = "--bf16"
"""Taken where none is given. What the layout was judged by, so a script has it too."""


def _missing(words: Sequence[str]) -> list[str]:
    """Flags without which nothing loads, where a plan does not need what they say."""
    found = []
    for flag, rest, others in (
        ("--mock-data", [], ("--data-path",)),
        ("--tokenizer-type", ["NullTokenizer"], ("--vocab-file",)),
        ("--vocab-size", ["128256"], ("--vocab-file", "--tokenizer-model")),
        ("--train-iters", ["10"], ("--train-samples", "--train-tokens")),
        ("--lr", ["1e-4"], ()),
        ("--micro-batch-size", ["1"], ()),
        (PRECISION, [], ("--fp16", "--fp32", "--fp64")),
        ("--device", ["cuda"], ()),
    ):
        if not {flag, *others} & {word.partition("=")[0].replace("_", "-") for word in words}:
            found += [flag, *rest]
    return found


def _fixed(given: Sequence[str], known: Any) -> dict[str, int]:
    found = {}
    for text in given:
        axis, equals, size = text.partition("=")
        if axis not in known or not equals or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--fix {text}: give AXIS=N, with one of {', '.join(known)} and a number")
        found[axis] = int(size)
    return found


def _table(found: Sequence[Any], ties: int, own: argparse.Namespace, memory_gb: float, config: Config) -> list[str]:
    lines = [
        f"{'step':>9} {'(90 % between)':>17} {'tok/s/GPU':>10} {'MFU':>6} {'memory':>14}"
        + ("   days  GPU hours" if own.tokens else "")
    ]
    if own.tokens and own.price:
        lines[0] += "       cost"
    for number, one in enumerate(found):
        time = one.time
        line = (
            f"{time.seconds:8.3f}s {time.low:7.3f} .. {time.high:6.3f} {time.tokens_per_s:10,.0f} {time.mfu:6.1%} "
            f"{time.device_bytes / 1e9:5.1f} of {memory_gb:3.0f} GB"
        )
        if own.tokens:
            seconds = own.tokens / (time.tokens_per_s * time.world_size)
            hours = seconds / 3600 * time.world_size
            line += f" {seconds / _DAY:6.1f} {hours:10,.0f}"
            line += f" {hours * own.price:10,.0f}" if own.price else ""
        lines += [line + ("   tie" if 0 < number < ties else ""), f"          {_shown(one, config)}"]
        lines += [f"          not calibrated there: {', '.join(time.outside)}"] if time.outside else []
    return lines


def _shown(one: Any, config: Config) -> str:
    return shlex.join(_flags(one, config))


def _flags(one: Any, config: Config) -> list[str]:
    """The flags of a layout: those that are no defaults, and those that take back what was given."""
    from megatron.config.checks.finding import is_changed, shown
    from megatron_lab.planner.search import SEARCHED

    kept = [name for name in SEARCHED if is_changed(one.config, name) or is_changed(config, name)]
    return shlex.split(" ".join(shown(one.config, name) for name in kept))


def _short(one: Any) -> str:
    """A name for a picture: sizes that are not 1, schedule, sharding, recompute."""
    parallel, training, memory = one.config.parallel, one.config.training, one.config.memory
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "x": parallel.num_virtual_stages_per_pipeline_rank or 1,
    }
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    words += [parallel.schedule] if parallel.pipeline_model_parallel_size > 1 else []
    words += ["sharded"] if parallel.sharding == "optim_grads_params" else []
    return " ".join([*words, f"mb{training.micro_batch_size}", *([memory.recompute] if memory.recompute else [])])


def _explain(search: Any, best: Any, flags: Sequence[str], given: Sequence[str], gpus: int, config: Config) -> None:
    """What a layout that the user has named loses: the best one's settings with these flags."""
    from megatron.config.checks.finding import Change, value_of
    from megatron_lab.planner.search import SEARCHED, why_not

    wanted = load([*given, *_flags(best, config), *flags], gpus).config
    found = search.exactly(Change(tuple((name, value_of(wanted, name)) for name in SEARCHED)))
    text = shlex.join(flags)
    print(f"why not {text}: {'it cannot be laid out' if found is None else why_not(best, found)}")


def _as_json(one: Any, config: Config) -> dict[str, Any]:
    return {"flags": _flags(one, config), **one.time.to_json()}


def _write_script(path: Path, words: Sequence[str], layout: Sequence[str], best: Any, gpus: int, cluster: Any) -> None:
    """As those in examples/: it rehearses, checks the nodes, starts all ranks, and goes on from the newest checkpoint."""
    nodes, each = -(-gpus // cluster.gpus_per_node), min(gpus, cluster.gpus_per_node)
    has_data = {"--data-path", "--mock-data"} & {word.partition("=")[0].replace("_", "-") for word in words}
    given = "" if has_data else '--data-path "$DATA"'
    where = "on each of the nodes, with HEAD set to one of them" if nodes > 1 else "on the node"
    lines = [
        "#!/usr/bin/env bash",
        f"# Chosen by tools/plan.py for {gpus} devices ({cluster.name}).",
        f"# Predicted: {best.time.seconds:.3f} s a step ({best.time.low:.3f} to {best.time.high:.3f}), "
        f"{best.time.device_bytes / 1e9:.1f} GB on the fullest rank.",
        f"# To be started {where}, or by sbatch. Flags that are added count instead of those here: tokenizer, learning rate.",
        "# Variables: examples/launch.sh.",
        "set -euo pipefail",
        f"source {shlex.quote(str(LAUNCH))}",
        *([] if has_data else ['need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it"']),
        f"model=({shlex.join(words)})",
        f"layout=({shlex.join(layout)})",
        f"batch=() optimizer=() data=({given})",
        f'launch {nodes} {each} {shlex.quote(path.stem)} "$@"',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)
