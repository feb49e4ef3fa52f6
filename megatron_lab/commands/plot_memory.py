"""Show what a rank holds over a step: a table in the terminal, and a picture.

    python tools/plot_memory.py <the flags of pretrain_gpt.py> --measure --output memory.svg

The plan needs neither the job's devices nor its data. With --measure the step is made by CPU processes of this machine as well.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.config.checks.each import LARGEST_WORLD
from megatron.config.cli import load, parse
from megatron.config.config import Config
from megatron.config.given import check_output, is_count

PROGRAM = "plot_memory.py"
HELP = """\
usage: python tools/plot_memory.py FLAGS [--world-size N] [--stage S] [--with FLAGS] [--measure] [--output FILE]

Show what a rank holds over a step. FLAGS are those of pretrain_gpt.py, as you launch it; see its --help.

  --world-size N   ranks of the job; by default tensor x pipeline size, that is data size 1
  --stage S        pipeline stage of the rank, counted from 0; by default 0
  --with FLAGS     show the job with these flags too (one word: --with "--recompute-granularity full"); may be repeated
  --measure        make the step on N CPU processes of this machine too, and compare; the plan is then that of the CPU
  --output FILE    .svg or .png: a picture (needs matplotlib)
  --help           print this
"""
_SUFFIXES = (".svg", ".png")


@dataclass
class Own:
    """The tool's own flags."""

    world_size: int | None = None
    stage: int = 0
    others: list[str] = field(default_factory=list)
    measure: bool = False
    output: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0, or 2 for settings that are wrong or a picture that cannot be written."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv:
        print(HELP, end="")
        return 0
    try:
        words, own = take(argv)
        return _run(words, own)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


def take(argv: Sequence[str]) -> tuple[list[str], Own]:
    """Part the tool's own flags from those of the run.

    Raises:
        ValueError: the tool's own are wrong.
    """
    rest, own, words = [], Own(), list(argv)
    while words:
        word = words.pop(0)
        if word == "--measure":
            own.measure = True
            continue
        if word not in ("--world-size", "--stage", "--with", "--output"):
            rest.append(word)
            continue
        if not words:
            raise ValueError(f"{word} takes one value.")
        value = words.pop(0)
        if word == "--with":
            own.others.append(value)
        elif word == "--output":
            own.output = Path(value)
        elif word == "--stage" and value.isdecimal():
            own.stage = int(value)
        elif word == "--world-size" and is_count(value, LARGEST_WORLD):
            own.world_size = int(value)
        else:
            least = 0 if word == "--stage" else 1
            raise ValueError(f"{word} {value}: {word} takes one whole number from {least} on.")
    return rest, own


def _run(words: Sequence[str], own: Own) -> int:
    if own.output is not None:
        if own.output.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"--output {own.output}: a picture is a {' or '.join(_SUFFIXES)} file.")
        check_output("--output", str(own.output))
    parallel = parse(words).parallel
    stages = parallel.pipeline_model_parallel_size
    if own.stage >= stages:
        raise ValueError(f"--stage {own.stage}: there are {stages} stages, counted from 0 (--pipeline-model-parallel-size).")
    world_size = own.world_size or max(1, parallel.tensor_model_parallel_size * stages)
    variants = {"as given": [*words]} | {f"with {flags}": [*words, *shlex.split(flags)] for flags in own.others}
    loaded = {title: settings(flags, world_size, measured=own.measure) for title, flags in variants.items()}

    from megatron_lab.memory_plots.figure import write_figure
    from megatron_lab.memory_plots.over_step import draw_table, panel_of
    from megatron_lab.schedule_plots.figure import require_matplotlib

    if own.output is not None:
        require_matplotlib()
    panels = [panel_of(title, config, world_size, own.stage, measured=own.measure) for title, config in loaded.items()]
    print("\n".join(draw_table(panels)))
    if own.output is not None:
        write_figure(panels, own.output)
        print(f"wrote {own.output}", file=sys.stderr)
    return 0


def settings(words: Sequence[str], world_size: int, *, measured: bool) -> Config:
    """Those of a job that is planned, or of one that is run on CPU too.

    Raises:
        ValueError: with all that is wrong with them.
    """
    if not measured:
        return load([*words, "--dry-run", "--world-size", str(world_size)], 1).config
    config = load(words, world_size).config
    return replace(config, parallel=replace(config.parallel, device="cpu"))
