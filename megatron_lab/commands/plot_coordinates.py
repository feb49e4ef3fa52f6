"""Check that learning rates transfer between widths (muP coordinate check): a table of activation changes in the first updates, and
a picture.

    python tools/plot_coordinates.py <the flags of pretrain_gpt.py> --widths 64,128,256,512 --output coordinates.svg

The tool trains all models in this process, with and without muP. If muP is implemented correctly, no curve rises with the width.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.parsed_flags import is_count
from megatron.config.regular_file import check_output
from megatron.config.rules import find_violations
from megatron.config.version import format_version
from megatron_lab.terminal import fill_help, fit_output_to_terminal

PROGRAM = "plot_coordinates.py"
HELP = """\
usage: python tools/plot_coordinates.py FLAGS --widths N,N,... [--updates N] [--seeds N] [--output FILE]

Train a model at several widths for a few updates on one batch, with and without muP, and print how much its activations change.
FLAGS are those of pretrain_gpt.py for one process. --hidden-size, heads and MLP set the proportions of the model. --hidden-size is
also the base width of muP unless --mup-base-width is given.

  --widths N,N,...  Train at these hidden sizes, at least two.
  --updates N       Make N updates per run (default 4).
  --seeds N         Average over N runs with different seeds (default 2).
  --output FILE     Write a picture, .svg or .png (needs matplotlib).
  --help            Print this text.
  --version         Print the version and exit.
"""
_SUFFIXES = (".svg", ".png")


@dataclass
class ToolOptions:
    """Values of the tool's own flags, which are not flags of the training run."""

    widths: tuple[int, ...] = ()
    updates: int = 4
    seeds: int = 2
    output: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, or 2 for invalid settings or a picture that cannot be written."""
    argv = sys.argv[1:] if argv is None else argv
    fit_output_to_terminal()
    if "--version" in argv:
        print(format_version())
        return 0
    if "--help" in argv:
        sys.stdout.write(fill_help(HELP))
        return 0
    try:
        run_argv, options = split_options(argv)
        return _run(load(run_argv, 1).config, options)
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
        if arg not in ("--widths", "--updates", "--seeds", "--output"):
            run_argv.append(arg)
            continue
        value = remaining.pop(0) if remaining else ""
        if arg == "--output" and value:
            options.output = Path(value)
        elif arg == "--widths" and len(widths := value.split(",")) > 1 and all(is_count(width, 10**6) for width in widths):
            options.widths = tuple(sorted(map(int, widths)))
        elif arg in ("--updates", "--seeds") and is_count(value, 1000):
            setattr(options, arg.removeprefix("--"), int(value))
        else:
            expects = {"--output": "a file", "--widths": "two or more whole numbers with commas between"}.get(
                arg, "a whole number from 1 on"
            )
            raise ValueError(f"{arg} {value}: {arg} takes {expects}.")
    if not options.widths:
        raise ValueError("--widths is missing: the hidden sizes to try, such as --widths 64,128,256.")
    if options.output is not None and options.output.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--output {options.output}: the name of a picture must end in {' or '.join(_SUFFIXES)}.")
    return run_argv, options


def _run(config: Config, options: ToolOptions) -> int:
    from megatron_lab.coordinates.check import fit_growth_exponent, measure_changes, scale_to_width
    from megatron_lab.coordinates.figure import write_figure
    from megatron_lab.schedule_plots.figure import require_matplotlib

    if options.output is not None:
        check_output("--output", str(options.output))
        require_matplotlib()
    parallel = dataclasses.replace(config.parallel, device="cpu")
    config = dataclasses.replace(config, parallel=parallel)
    base_widths = {"without muP": None, "with muP": config.model.mup_base_width or config.model.hidden_size}
    configs_by_title = {
        title: [scale_to_width(config, width, base_width) for width in options.widths] for title, base_width in base_widths.items()
    }
    for width_config in (width_config for configs in configs_by_title.values() for width_config in configs):
        if violations := find_violations(width_config, 1):
            raise ValueError("\n".join(f"{violation.message} {violation.reason}" for violation in violations))
    changes_by_title = {
        title: [measure_changes(width_config, options.updates, options.seeds) for width_config in configs]
        for title, configs in configs_by_title.items()
    }
    for title, changes_by_width in changes_by_title.items():
        print(f"{title}: change since the start (root mean square) after {options.updates} updates")
        width_header = "".join(f"{width:>12,}" for width in options.widths)
        print(f"  {'hidden size':<28}{width_header}  grows as width to the")
        for name in changes_by_width[0]:
            final_changes = [width_changes[name][-1] for width_changes in changes_by_width]
            cells = "".join(f"{value:>12.4g}" for value in final_changes)
            print(f"  {name:<28}{cells}  {fit_growth_exponent(options.widths, final_changes):>5.2f}")
    if options.output is not None:
        write_figure(options.widths, changes_by_title, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0
