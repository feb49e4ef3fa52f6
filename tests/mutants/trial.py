"""Run the tests of a package against mutants, each in a fork of a process that has torch, in a copy of the repository."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.mutations import Mutation

TIMEOUT = 900.0
"""Seconds after which a mutant counts as found: it hangs, or makes the tests several times as slow."""
_TEST_TIMEOUT = 120
"""The same for a single test."""
_HERE = str(Path(__file__).resolve().parents[2])
_replaced: list[object] = []
"""Modules that a fork imports anew from its copy. They are kept, since to free them would copy the memory of the parent."""
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """What the tests made of a mutant."""

    identity: str
    killed: bool
    by: str
    """The test that failed first; empty for a survivor, and for a run that ended without a summary."""
    error: str
    """The first line of its error."""
    seconds: float


def read_test_table(root: Path) -> dict[str, list[str]]:
    """Read which tests AGENTS.md names for each package, the folder of its unit tests first."""
    found: dict[str, list[str]] = {}
    for line in (root / "AGENTS.md").read_text().splitlines():
        packages = re.findall(r"`megatron(?:_lab)?/(\w+)/`", line.split("|")[1]) if line.startswith("| `megatron") else []
        for package in packages:
            unit = f"tests/unit/{package}"
            named = re.findall(r"`(tests/[\w/.]+)`", line)
            found[package] = [*([unit] if (root / unit).is_dir() else []), *(test for test in named if test != unit)]
    return found


class Copy:
    """A copy of the repository's files, in which one file at a time is mutated."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder / "repository"
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for name in filter(None, names.split("\0")):
            if (source / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.root / name)
        # Programs and tests that look at the repository find one.
        for command in (
            ["init", "--quiet"],
            ["add", "--all"],
            ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "copy"],
        ):
            subprocess.run(["git", *command], cwd=self.root, check=True)

    def run(self, mutation: Mutation | None, tests: Sequence[str]) -> Trial:
        """Run tests against a mutation, or without one, until one fails.

        Raises:
            LookupError: there are no such tests.
        """
        if mutation is None:
            began = time.monotonic()
            return Trial("", *self._pytest(tests), time.monotonic() - began)
        path = self.root / mutation.path
        source = path.read_text()
        compiled = Path(importlib.util.cache_from_source(str(path)))
        began = time.monotonic()
        try:
            path.write_text(mutation.apply(source))
            compiled.unlink(missing_ok=True)  # a cache is valid for one second and one size, which two mutants can share
            killed, by, error = self._pytest(tests)
        finally:
            path.write_text(source)
            compiled.unlink(missing_ok=True)
        return Trial(mutation.identity, killed, by, error, time.monotonic() - began)

    def _pytest(self, tests: Sequence[str]) -> tuple[bool, str, str]:
        output = self.root.parent / "output"
        child = os.fork()
        if child == 0:
            _live(self.root, output, tests)
        deadline = time.monotonic() + TIMEOUT
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
            return True, "", f"not done after {TIMEOUT:g} s"
        code = os.waitstatus_to_exitcode(status)
        text = output.read_text(errors="replace")
        if code == 0:
            return False, "", ""
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise LookupError(f"pytest finds none of {', '.join(tests)}: {text[-1000:]}")
        failed = _SUMMARY.search(text)
        return (True, failed[1], failed[2] or "") if failed else (True, "", f"pytest ended with {code}: {text[-300:]}")


def _live(root: Path, output: Path, tests: Sequence[str]) -> None:
    """Life of the fork: run pytest in the copy. Never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb"), line_buffering=True), os.fdopen(2, "w")
        os.chdir(root)
        os.environ |= {"PYTHONPATH": str(root), "TMPDIR": str(root.parent)}
        tempfile.tempdir = None  # to be read again
        sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", _HERE))]
        gc.freeze()
        again = [name for name in sys.modules if name.split(".")[0] in ("tests", "megatron", "megatron_lab", "pretrain_gpt")]
        _replaced.extend(sys.modules.pop(name) for name in again)
        options = ["-x", "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main(
            [*options, f"--timeout={_TEST_TIMEOUT}", f"--basetemp={root.parent / 'tmp'}", "--rootdir", str(root), *tests]
        )
    finally:
        sys.stdout.flush()
        os._exit(code)
