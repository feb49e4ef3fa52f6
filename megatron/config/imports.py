"""Imports by name: modules of the user's own (--imports), and parts that few runs use, in tables."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.config.errors import Violation


def named(text: str) -> Any:
    """Import what a text such as `package.module:Name` names. A table of such texts imports only what is taken from it."""
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


def import_modules(names: Iterable[str]) -> Iterator[Violation]:
    """Import the user's modules, each once in a process; gives a problem for each that cannot be.

    Args:
        names: dotted names, found also in the current folder, or paths of .py files.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(name)
            else:
                _look_in(os.getcwd())
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises is told as a problem of the settings
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            rule = "It takes names of modules (my_optimizers, found in the current folder too) or files (parts/mine.py)."
            yield Violation(("--imports",), f"--imports {name} cannot be imported: {what.rstrip('.')}.", rule)


def _look_in(folder: str) -> None:
    """Find modules in a folder too; behind all others, so that nothing there hides what is installed."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_file(path: str) -> None:
    name = os.path.splitext(os.path.basename(path))[0]
    known = sys.modules.get(name)
    if known is not None and os.path.realpath(known.__file__ or "") == os.path.realpath(path):
        return
    if known is not None:
        raise ImportError(f"another module is called {name} already; rename the file")
    _look_in(os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that it is tried again
        raise
