"""Prove that a layout trains as one process does, for the flags that you launch with.

    python tools/verify_layout.py <the flags of pretrain_gpt.py> [--world-size N]

The model is made small, keeping what matters of the layout, and trained for a few steps in float64 on local CPU processes, and in
one process by a plain reference. Loss, every gradient and every weight are compared. No GPU, no launcher and no data are needed.
The exit status is 0 if all is equal, 1 if anything differs or the layout does not run, 2 if the settings are wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron.config.checks.ranges import LARGEST_WORLD
from megatron.config.cli import LoadedConfig, load, parse
from megatron.config.errors import ConfigError, Violation
from megatron.config.given import is_count, split

PROGRAM = "verify_layout.py"
HELP = """\
usage: python tools/verify_layout.py FLAGS [--world-size N] [--steps N] [--max-ranks N] [--quick] [--json FILE]
       python tools/verify_layout.py FLAGS --trace FILE
       python tools/verify_layout.py --trace FILE --trace FILE

Prove that a layout trains as one process does. FLAGS are those of pretrain_gpt.py, as you launch it; see its --help. The model is
made small, keeping what matters of the layout, and trained for a few steps in float64 on CPU processes of this machine, and by a
plain reference in one process. No GPU, launcher, dataset or tokenizer file is needed.

  --world-size N   ranks of the job; by default tensor x pipeline size, that is data size 1
  --steps N        steps to train; by default 4
  --max-ranks N    processes to run at most; larger layouts are reduced axis by axis; by default 8
  --quick          when something differs, do not look for the settings with which it comes and goes
  --json FILE      write what is found as JSON too
  --trace FILE     compare with a trace that --save-trace wrote; given twice, compare the two and run nothing.
                   With FLAGS, what this tool runs is compared with a trace that it saved before (--save-trace FILE among FLAGS)
  --help           print this

exit status: 0 equal, 1 different or failing, 2 bad settings
"""


@dataclass
class Own:
    """The tool's own flags."""

    world_size: int | None = None
    steps: int = 4
    max_ranks: int = 8
    quick: bool = False
    json: str | None = None
    traces: list[str] = field(default_factory=list)


_NUMBERS = {"world-size": LARGEST_WORLD, "steps": 1000, "max-ranks": 64}
_FILES = ("json", "trace")


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status. Nothing that needs torch is imported before the settings are known to be right."""
    try:
        rest, own = take(argv)
        if rest is None:
            sys.stdout.write(HELP)
            return 0
        if len(own.traces) == 2 and not rest:
            from megatron.verification.traces.compare import compare_files

            apart, lines = compare_files(*own.traces)
            print("\n".join(lines))
            return 1 if apart else 0
        loaded, world_size = settings(rest, own)
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    return verify(loaded, world_size, own)


def take(argv: Sequence[str]) -> tuple[list[str] | None, Own]:
    """Part the tool's own flags from those of the run.

    Returns:
        the flags of the run, None where help is asked for; and the tool's own.

    Raises:
        ConfigError: the tool's own are wrong.
    """
    stray, given = split(argv)
    own, rest, problems = Own(), list(stray), []
    for item in given:
        if item.name in ("help", "h"):
            return None, own
        if item.name == "quick" and not item.values:
            own.quick = True
        elif item.name in _NUMBERS and len(item.values) == 1 and is_count(item.values[0], _NUMBERS[item.name]):
            setattr(own, item.name.replace("-", "_"), int(item.values[0]))
        elif item.name == "trace" and len(item.values) == 1:
            own.traces.append(item.values[0])
        elif item.name == "json" and len(item.values) == 1:
            own.json = item.values[0]
        elif item.name in ("quick", *_NUMBERS, *_FILES):
            most = _NUMBERS.get(item.name)
            takes = f"one whole number from 1 to {most:,}" if most else "no value" if item.name == "quick" else "one file"
            problems.append(Violation((f"--{item.name}",), f"{item}: --{item.name} takes {takes}."))
        else:
            rest += [item.spelled, *item.values]
    if len(own.traces) > 2 or (len(own.traces) == 2 and rest):
        told = "Two --trace files are compared without any other flags, one with what the flags of a run give."
        problems.append(Violation(("--trace",), told))
    if len(own.traces) == 1 and not rest:
        told = "One --trace is compared with a run, whose flags are missing here; two are compared with each other."
        problems.append(Violation(("--trace",), told))
    if problems:
        raise ConfigError(problems)
    return rest, own


def settings(rest: Sequence[str], own: Own) -> tuple[LoadedConfig, int]:
    """The settings of the run, and its number of ranks.

    Raises:
        ConfigError: with all that is wrong with them.
    """
    world_size = own.world_size
    if world_size is None:
        try:
            parallel = parse(rest).parallel
            world_size = max(1, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
        except ConfigError:
            world_size = 1  # `load` tells of this and of all else
    loaded = load(rest, world_size)
    if loaded.dry_run is not None:
        raise ConfigError([Violation(("--dry-run",), "--dry-run is for pretrain_gpt.py: this tool runs what it proves.")])
    return loaded, world_size


def verify(loaded: LoadedConfig, world_size: int, own: Own) -> int:
    """Run, compare, tell."""
    from megatron.verification.observing.vocabulary import vocabulary_of
    from megatron.verification.report import format_report, report_json
    from megatron.verification.verify import Effort, verify_layout

    started = time.monotonic()
    try:
        if own.json is not None:
            _try_to_write(own.json)
        vocab_size = vocabulary_of(loaded.config.data)
        effort = Effort(steps=own.steps, max_ranks=own.max_ranks, isolates=not own.quick)
        proofs = verify_layout(loaded.config, world_size, vocab_size, effort, trace=own.traces[0] if own.traces else None)
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    if own.json is not None:
        Path(own.json).write_text(json.dumps(report_json(proofs), indent=1, allow_nan=False) + "\n")
    try:
        print("\n".join([*format_report(proofs), f"all together {time.monotonic() - started:.1f} s"]), flush=True)
    except BrokenPipeError:  # `| head`: nobody reads on, and Python must not try to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if all(proof.equal and not proof.parts_from_trace for proof in proofs) else 1


def _try_to_write(path: str) -> None:
    """Before anything is run.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        Path(path).touch()
    except OSError as error:
        raise ValueError(
            f"--json {path} cannot be written ({error.strerror}). Give a path in a folder that you may write to."
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
