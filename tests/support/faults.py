"""Faults planted in the source of modules, in a forked child that imports them anew.

The child has torch already, and of ours all modules that have nothing to do with a fault; their users come from compiled files.
Nothing is copied, and this process keeps the modules that it has.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from megatron.verification.local_ranks import die_with, kill_group
from tests.support.cli import ROOT, forget_children

Replaced = tuple[str, str]
"""A text that stands once in `megatron/`, and what takes its place."""
_PACKAGES = ("megatron", "tools")


def run_with_faults(module: str, argv: Sequence[str], replaced: Sequence[Replaced], *, timeout: float = 240.0) -> tuple[int, str]:
    """Call `main(argv)` of a module in a child in which the texts are replaced.

    Returns:
        the exit status, and what was printed on either stream.

    Raises:
        AssertionError: a text is not there once.
        TimeoutError: the child was not done in time; it is killed.
    """
    sources = faulty_sources(replaced)
    users = _users_of({_name_of(path) for path in sources})
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread
            child = os.fork()
        if child == 0:
            _live(parent, output.fileno(), module, argv, sources, users)
        status = _wait(child, timeout)
        output.seek(0)
        return status, output.read().decode()


def faulty_sources(replaced: Sequence[Replaced]) -> dict[Path, str]:
    """The source of each file that holds a text, with all its texts replaced."""
    texts = {path: path.read_text() for path in (ROOT / "megatron").rglob("*.py")}
    found: dict[Path, str] = {}
    for old, new in replaced:
        holders = [path for path, text in texts.items() for _ in range(text.count(old))]
        assert len(holders) == 1, f"the text that a fault replaces stands {len(holders)} times in megatron/: {old}"
        found[holders[0]] = found.get(holders[0], texts[holders[0]]).replace(old, new)
    return found


@functools.cache
def _imported() -> dict[str, set[str]]:
    """The modules of ours that the source of each of them imports, anywhere in it."""
    statement = re.compile(r"^\s*(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)
    found: dict[str, set[str]] = {}
    for path in (path for package in _PACKAGES for path in (ROOT / package).rglob("*.py")):
        names = found[_name_of(path)] = set()
        for package, members, module in statement.findall(path.read_text()):
            names |= {package or module, *(f"{package}.{member}" for member in re.findall(r"\w+", members))}
    return found


def _name_of(path: Path) -> str:
    """The dotted name of the module in a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _users_of(faulty: set[str]) -> set[str]:
    """These modules, and all that import one of them or of their users."""
    users = {name for name, imported in _imported().items() if not imported.isdisjoint(faulty)}
    return faulty if users <= faulty else _users_of(faulty | users)


class _FaultFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that have a fault, before anybody else does."""

    def __init__(self, sources: dict[Path, str]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of ours that has one."""
        file = ROOT / (fullname.replace(".", "/") + ".py")
        if file not in self._sources:
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=_FaultLoader(fullname, str(file), self._sources[file]))


class _FaultLoader(importlib.machinery.SourceFileLoader):
    """Compiles the source that it is given; what is compiled is kept nowhere."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        """The code of the given source."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


def _live(parent: int, output: int, module: str, argv: Sequence[str], sources: dict[Path, str], users: set[str]) -> NoReturn:
    """Life of the child.

    Args:
        sources: that have a fault.
        users: modules that are imported anew.
    """
    status = 70
    try:
        os.setpgid(0, 0)
        die_with(parent, signal.SIGKILL)
        forget_children()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)  # pytest has its own
        torch.set_num_threads(1)
        for name in sorted(users & {*sys.modules}, reverse=True):
            package, _, last = name.rpartition(".")
            vars(sys.modules[package]).pop(last, None)  # or `from package import last` would find it there
            del sys.modules[name]
        sys.meta_path.insert(0, _FaultFinder(sources))
        status = importlib.import_module(module).main(argv)
    except BaseException:  # noqa: BLE001, the child ends here whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, timeout: float) -> int:
    """The exit status."""
    deadline = time.monotonic() + timeout
    pause = 0.01
    try:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {timeout:g} s")
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)
    except BaseException:
        kill_group(child)
        os.waitpid(child, 0)
        raise
