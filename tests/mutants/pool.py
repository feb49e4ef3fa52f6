"""Run mutants in several processes, each with a copy of the repository."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.mutations import Mutation
from tests.mutants.trial import Copy, Trial, read_test_table


def run_all(root: Path, mutants: Sequence[Mutation], earlier: dict[str, Trial], workers: int) -> Iterator[Trial]:
    """Run the tests of every mutant, in several copies of the repository at a time.

    Args:
        root: the repository.
        earlier: trials of an earlier run; the test that found a mutant there runs first.
    """
    tests = read_test_table(root)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (root,)) as pool:
        jobs = []
        for mutation in mutants:
            known = earlier.get(mutation.identity)
            first = [known.by] if known is not None and known.by else []
            jobs.append(pool.submit(_run, mutation, first, tests[mutation.package]))
        yield from (job.result() for job in as_completed(jobs))


def failing_unchanged(root: Path, packages: Iterable[str], workers: int) -> list[Trial]:
    """Run the tests of some packages without any mutation. Return the trials in which a test fails: it would find every mutant."""
    tests = read_test_table(root)
    paths = sorted({path for package in packages for path in tests[package]})
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (root,)) as pool:
        return [trial for trial in pool.map(_run_unchanged, paths) if trial.killed]


_copy: Copy


def _start(root: Path) -> None:
    """Make this process's copy of the repository, and import what all tests need before the forks."""
    global _copy
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for module in ("hypothesis", "pytest", "torch._dynamo", "transformers"):
        importlib.import_module(module)
    folder = tempfile.TemporaryDirectory(prefix="mutants-")
    atexit.register(folder.cleanup)
    Path(folder.name).chmod(0o755)  # tests that drop their rights read here
    _copy = Copy(root, Path(folder.name))


def _run_unchanged(path: str) -> Trial:
    """Run the tests of a file or folder without a mutation."""
    return _copy.run(None, [path])


def _run(mutation: Mutation, first: Sequence[str], tests: Sequence[str]) -> Trial:
    """Run the tests that found the mutation earlier, then, unless one fails, all tests of its package."""
    trial = None
    with contextlib.suppress(LookupError):  # a test of an earlier run need no longer be there
        trial = _copy.run(mutation, first) if first else None
    return trial if trial is not None and trial.killed else _copy.run(mutation, tests)
