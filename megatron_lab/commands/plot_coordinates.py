"""Check that learning rates hold at other widths (muP): a table of how much activations change in the first updates, and a picture.

    python tools/plot_coordinates.py <the flags of pretrain_gpt.py> --widths 64,128,256,512 --output coordinates.svg

Everything is trained in this process, without muP and with it. Where muP is right, no line rises with the width.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.given import check_output, is_count
from megatron.config.rules import violations
from megatron.config.version import version_line

PROGRAM = "plot_coordinates.py"
HELP = """\
usage: python tools/plot_coordinates.py FLAGS --widths N,N,... [--updates N] [--seeds N] [--output FILE]

Train a model at several widths for a few updates, each time on one batch, without muP and with it, and tell how much what it
computes changes. FLAGS are those of pretrain_gpt.py for one process; --hidden-size with its heads and MLP gives the proportions,
and the base of muP unless --mup-base-width does.

  --widths N,N,...  hidden sizes to try, two at least
  --updates N       updates of each (4)
  --seeds N         runs of each, whose mean is told (2)
  --output FILE     .svg or .png: a picture (needs matplotlib)
  --help            print this
  --version         say which version this is
"""
_SUFFIXES = (".svg", ".png")


@dataclass
class OwnFlags:
    """The tool's own flags."""

    widths: tuple[int, ...] = ()
    updates: int = 4
    seeds: int = 2
    output: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0, or 2 for settings that are wrong or a picture that cannot be written."""
    argv = sys.argv[1:] if argv is None else argv
    if "--version" in argv:
        print(version_line())
        return 0
    if "--help" in argv:
        print(HELP, end="")
        return 0
    try:
        words, own = take(argv)
        return _run(load(words, 1).config, own)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


def take(argv: Sequence[str]) -> tuple[list[str], OwnFlags]:
    """Part the tool's own flags from those of the run.

    Raises:
        ValueError: the tool's own are wrong.
    """
    rest, own, words = [], OwnFlags(), list(argv)
    while words:
        word = words.pop(0)
        if word not in ("--widths", "--updates", "--seeds", "--output"):
            rest.append(word)
            continue
        value = words.pop(0) if words else ""
        if word == "--output" and value:
            own.output = Path(value)
        elif word == "--widths" and len(parts := value.split(",")) > 1 and all(is_count(part, 10**6) for part in parts):
            own.widths = tuple(sorted(map(int, parts)))
        elif word in ("--updates", "--seeds") and is_count(value, 1000):
            setattr(own, word.removeprefix("--"), int(value))
        else:
            expects = {"--output": "a file", "--widths": "two or more whole numbers with commas between"}.get(
                word, "a whole number from 1 on"
            )
            raise ValueError(f"{word} {value}: {word} takes {expects}.")
    if not own.widths:
        raise ValueError("--widths is missing: the hidden sizes to try, such as --widths 64,128,256.")
    if own.output is not None and own.output.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--output {own.output}: a picture is a {' or '.join(_SUFFIXES)} file.")
    return rest, own


def _run(config: Config, own: OwnFlags) -> int:
    from megatron_lab.coordinates.check import at_width, changes, growth
    from megatron_lab.coordinates.figure import write_figure
    from megatron_lab.schedule_plots.figure import require_matplotlib

    if own.output is not None:
        check_output("--output", str(own.output))
        require_matplotlib()
    parallel = dataclasses.replace(config.parallel, device="cpu")
    config = dataclasses.replace(config, parallel=parallel)
    bases = {"without muP": None, "with muP": config.model.mup_base_width or config.model.hidden_size}
    settings = {title: [at_width(config, width, base) for width in own.widths] for title, base in bases.items()}
    for one in (one for several in settings.values() for one in several):
        if wrong := violations(one, 1):
            raise ValueError("\n".join(f"{problem.message} {problem.rule}" for problem in wrong))
    rows = {title: [changes(one, own.updates, own.seeds) for one in several] for title, several in settings.items()}
    for title, sizes in rows.items():
        print(f"{title}: change since the start (root mean square) after {own.updates} updates")
        columns = "".join(f"{width:>12,}" for width in own.widths)
        print(f"  {'hidden size':<28}{columns}  grows as width to the")
        for name in sizes[0]:
            last = [one[name][-1] for one in sizes]
            print(f"  {name:<28}{''.join(f'{value:>12.4g}' for value in last)}  {growth(own.widths, last):>5.2f}")
    if own.output is not None:
        write_figure(own.widths, rows, own.output)
        print(f"wrote {own.output}", file=sys.stderr)
    return 0
