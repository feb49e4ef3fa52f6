"""Change one thing at a time in the source of the core, and list the changes that its tests do not notice.

    python -m tests.mutants --count 300 --seed 1
    python -m tests.mutants --only 3fa1b2c4            one mutant again, by its identity
    python -m tests.mutants --list --count 20          the mutants alone, as diffs

Each mutant changes an operator, bound, constant, axis, process group or scale, drops a call or swaps two arguments. It runs against
the tests that AGENTS.md names for its package, in a copy of the working tree, until one fails. These tests run first without a
mutant, since a test that fails anyway finds everything. Exit status 1 if a mutant survives
that `equivalent.txt` does not explain.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutations import KINDS, Mutation, draw, mutations_of
from tests.mutants.pool import failing_unchanged, run_all
from tests.mutants.trial import Trial

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "spec",
    "model",
    "attention",
    "parallel",
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "data_parallel",
    "moe",
    "memory",
    "precision",
    "optimizer",
    "data",
    "checkpoint",
    "foreign",
)
EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw mutants, run their tests, and print survivors and the table by package."""
    args = _parse(argv)
    if args.only:
        mutants = [mutation for mutation in mutations_of(ROOT, PACKAGES) if mutation.identity in args.only]
        if missing := {*args.only} - {mutation.identity for mutation in mutants}:
            raise SystemExit(f"--only: no mutant has the identity {', '.join(sorted(missing))}; its function has changed")
    else:
        mutants = draw(ROOT, args.packages, args.count, args.seed)
    if args.list:
        for mutation in mutants:
            print(mutation.identity, mutation.diff((ROOT / mutation.path).read_text()), sep="\n", end="\n\n")
        return 0
    if not args.no_unchanged_run and (failing := failing_unchanged(ROOT, {mutation.package for mutation in mutants}, args.workers)):
        lines = [f"  {trial.by}: {trial.error}" for trial in failing]
        raise SystemExit("\n".join(["These tests fail without a change, and would find every mutant. Mend them first:", *lines]))
    earlier = {trial.identity: trial for path in args.known for trial in read_trials(path)}
    reasons = equivalents()
    trials: dict[str, Trial] = {}
    by_identity = {mutation.identity: mutation for mutation in mutants}
    for trial in run_all(ROOT, mutants, earlier, args.workers):
        trials[trial.identity] = trial
        mutation = by_identity[trial.identity]
        outcome = (
            f"found by {trial.by or trial.error}" if trial.killed else "equivalent" if trial.identity in reasons else "SURVIVES"
        )
        print(
            f"{len(trials)}/{len(mutants)} {trial.identity} {mutation.path}:{mutation.line} {mutation.kind}: {outcome}", flush=True
        )
        if args.json:
            args.json.write_text(json.dumps([vars(each) for each in trials.values()], indent=1))
    survivors = [by_identity[trial.identity] for trial in trials.values() if not trial.killed and trial.identity not in reasons]
    for mutation in sorted(survivors, key=lambda mutation: (mutation.path, mutation.line)):
        print(f"\n{mutation.identity} survives: {mutation.path}:{mutation.line}")
        print(mutation.diff((ROOT / mutation.path).read_text()))
    print(f"\n{table(mutants, trials, set(reasons))}")
    return 1 if survivors else 0


def equivalents() -> dict[str, str]:
    """Read the mutants that change nothing a test could see, each with its reason."""
    lines = (line.split(None, 1) for line in EQUIVALENT.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return dict(line for line in lines)  # type: ignore[misc]


def read_trials(path: Path) -> list[Trial]:
    """Read the results that `--json` wrote."""
    return [Trial(**each) for each in json.loads(path.read_text())]


def table(mutants: Sequence[Mutation], trials: dict[str, Trial], equivalent: set[str]) -> str:
    """Build a Markdown table of the share of mutants found, by package and over all."""

    def row(name: str, some: Sequence[Mutation]) -> str:
        killed = sum(trials[mutation.identity].killed for mutation in some)
        same = sum(not trials[mutation.identity].killed and mutation.identity in equivalent for mutation in some)
        counted = len(some) - same
        share = f"{killed / counted:.1%}" if counted else ""
        return f"| {name} | {len(some)} | {same} | {killed} | {counted - killed} | {share} |"

    tried = [mutation for mutation in mutants if mutation.identity in trials]
    lines = ["| | mutants | equivalent | found | survive | found of those that differ |", "|---|---|---|---|---|---|"]
    lines += [row(f"`{package}`", some) for package in PACKAGES if (some := [m for m in tried if m.package == package])]
    lines += [row(kind, some) for kind in KINDS if (some := [m for m in tried if m.kind == kind])]
    return "\n".join([*lines, row("all", tried)])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument(
        "--packages", nargs="+", choices=PACKAGES, default=PACKAGES, metavar="PACKAGE", help="draw from these alone"
    )
    parser.add_argument("--only", nargs="+", metavar="IDENTITY", help="these mutants, instead of a draw")
    parser.add_argument("--list", action="store_true", help="print the diffs and run nothing")
    parser.add_argument(
        "--known",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results of earlier runs: the test that found a mutant runs first",
    )
    parser.add_argument(
        "--no-unchanged-run", action="store_true", help="do not run all tests first to see that they pass without a mutant"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="copies of the repository that run at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, for --known")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
