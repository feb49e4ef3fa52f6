"""Show the memory of a rank over a step: a table in the terminal, and a picture.

    python tools/plot_memory.py <the flags of pretrain_gpt.py> --measure --output memory.svg

The prediction needs neither the job's devices nor its data. With --measure, CPU processes of this machine also run the step.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.config.checks.single_settings import MAX_WORLD_SIZE
from megatron.config.cli import load, parse
from megatron.config.config import Config
from megatron.config.parsed_flags import is_count
from megatron.config.regular_file import check_output
from megatron_lab.terminal import fill_help, fit_output_to_terminal, get_terminal_width

PROGRAM = "plot_memory.py"
HELP = """\
usage: python tools/plot_memory.py FLAGS [--world-size N] [--stage S] [--with FLAGS] [--measure] [--output FILE]

Show the memory of a rank over a step. FLAGS are those of your launch command for pretrain_gpt.py; see its --help.

  --world-size N   Set the number of ranks of the job (default: tensor x pipeline size, that is data-parallel size 1).
  --stage S        Show a rank of this pipeline stage, counted from 0 (default 0).
  --with FLAGS     Also show the job with these flags (one quoted argument: --with "--recompute-granularity full"); may be repeated.
  --measure        Also run the step on N CPU processes of this machine and compare; the plan is then that of the CPU.
  --output FILE    Write a picture, .svg or .png (needs matplotlib).
  --help           Print this text.
"""
_SUFFIXES = (".svg", ".png")


@dataclass
class ToolOptions:
    """Values of the tool's own flags, which are not flags of the training run."""

    world_size: int | None = None
    stage: int = 0
    variants: list[str] = field(default_factory=list)
    measures: bool = False
    output: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, or 2 for invalid settings or a picture that cannot be written."""
    argv = sys.argv[1:] if argv is None else argv
    fit_output_to_terminal()
    if "--help" in argv:
        sys.stdout.write(fill_help(HELP))
        return 0
    try:
        run_argv, options = split_options(argv)
        return _run(run_argv, options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


def split_options(argv: Sequence[str]) -> tuple[list[str], ToolOptions]:
    """Separate the tool's own flags from the flags of the training run.

    Returns:
        The command line of the run, and the values of the tool's flags.

    Raises:
        ValueError: a flag of the tool is invalid.
    """
    run_argv, options, remaining = [], ToolOptions(), list(argv)
    while remaining:
        arg = remaining.pop(0)
        if arg == "--measure":
            options.measures = True
            continue
        if arg not in ("--world-size", "--stage", "--with", "--output"):
            run_argv.append(arg)
            continue
        if not remaining:
            raise ValueError(f"{arg} has no value. Give one value after the flag.")
        value = remaining.pop(0)
        if arg == "--with":
            options.variants.append(value)
        elif arg == "--output":
            options.output = Path(value)
        elif arg == "--stage" and value.isdecimal():
            options.stage = int(value)
        elif arg == "--world-size" and is_count(value, MAX_WORLD_SIZE):
            options.world_size = int(value)
        else:
            min_value = 0 if arg == "--stage" else 1
            raise ValueError(f"{arg} {value}: the value must be a whole number of at least {min_value}. Correct it.")
    return run_argv, options


def _run(run_argv: Sequence[str], options: ToolOptions) -> int:
    if options.output is not None:
        if options.output.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"--output {options.output}: the name of a picture must end in {' or '.join(_SUFFIXES)}.")
        check_output("--output", str(options.output))
    parallel = parse(run_argv).parallel
    num_stages = parallel.pipeline_model_parallel_size
    if options.stage >= num_stages:
        raise ValueError(
            f"--stage {options.stage}: there are {num_stages} stages, counted from 0 (--pipeline-model-parallel-size). "
            f"Choose a stage from 0 to {num_stages - 1}."
        )
    world_size = options.world_size or max(1, parallel.tensor_model_parallel_size * num_stages)
    argv_by_title = {"as given": [*run_argv]} | {
        f"with {variant}": [*run_argv, *shlex.split(variant)] for variant in options.variants
    }
    configs = {
        title: load_run_config(variant_argv, world_size, measures=options.measures) for title, variant_argv in argv_by_title.items()
    }

    from megatron_lab.memory_plots.figure import write_figure
    from megatron_lab.memory_plots.step_memory import build_panel, format_panel_table
    from megatron_lab.schedule_plots.figure import require_matplotlib

    if options.output is not None:
        require_matplotlib()
    panels = [build_panel(title, config, world_size, options.stage, measures=options.measures) for title, config in configs.items()]
    print("\n".join(format_panel_table(panels, get_terminal_width())))
    if options.output is not None:
        write_figure(panels, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


def load_run_config(run_argv: Sequence[str], world_size: int, *, measures: bool) -> Config:
    """Return the settings of a training run.

    Args:
        run_argv: flags of the run.
        world_size: number of ranks.
        measures: whether a step also runs on CPU processes. If not, the settings are only checked for a plan, as with --dry-run.

    Raises:
        ValueError: the settings are invalid. The message lists all problems.
    """
    if not measures:
        return load([*run_argv, "--dry-run", "--world-size", str(world_size)], 1).config
    config = load(run_argv, world_size).config
    return replace(config, parallel=replace(config.parallel, device="cpu"))
