"""Imports by name: the user's modules (--imports), and objects that few runs need, whose modules other runs therefore do not
import."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.config.errors import Violation


def import_object(path: str) -> Any:
    """Import the object that a path such as `package.module:Name` names.

    Modules keep tables of these paths instead of the objects, so that a module is imported only when one of its objects is used.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def import_modules(names: Iterable[str]) -> Iterator[Violation]:
    """Import the user's modules, each once per process, and yield a problem for each module that cannot be imported.

    Args:
        names: dotted module names, also searched in the current folder, or paths of .py files.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(name)
            else:
                _add_to_path(os.getcwd())
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any error of the user's code is reported as a problem of the settings
            error_text = f"{type(error).__name__}: {error}".rstrip(": ")
            reason = "It takes module names (my_optimizers, also found in the current folder) or files (parts/mine.py)."
            yield Violation(("--imports",), f"--imports {name} cannot be imported: {error_text.rstrip('.')}.", reason)


def _add_to_path(folder: str) -> None:
    """Append a folder to the module search path. It is the last entry, so that its files do not shadow installed modules."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_file(path: str) -> None:
    name = os.path.splitext(os.path.basename(path))[0]
    imported = sys.modules.get(name)
    if imported is not None and os.path.realpath(imported.__file__ or "") == os.path.realpath(path):
        return
    if imported is not None:
        raise ImportError(f"another module with the name {name} is already imported; rename the file {path}")
    _add_to_path(os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that the next import tries again
        raise
