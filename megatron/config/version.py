"""Which version this is, and how its extras are installed.

`megatron` is a namespace package, so it has no `__version__` of its own: `from megatron.config.version import __version__`.
"""

from __future__ import annotations

import platform
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "megatron-3d"
"""Name of the distribution, as pyproject.toml has it. It is installed from its own tree, never by this name from an index."""
_TREE = Path(__file__).resolve().parents[2]


def _project() -> dict[str, Any] | None:
    """What pyproject.toml says, in a tree of the project; None where the package is installed without one."""
    try:
        with (_TREE / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]
    except (OSError, ValueError, KeyError):
        return None
    return project if project.get("name") == DISTRIBUTION else None


def _find_version() -> str:
    """That of the tree, which may be newer than what was installed of it."""
    project = _project()
    if project is not None:
        return str(project["version"])
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = _find_version()


def version_line() -> str:
    """The answer to --version: the project, Python, torch, and where the code lies."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"{DISTRIBUTION} {__version__} (Python {platform.python_version()}, torch {torch}) in {_TREE}"


def how_to_install(extra: str) -> str:
    """The command that installs what an extra holds: from this tree, or without one by the names of its libraries."""
    if _project() is not None:
        return f"pip install -e {shlex.quote(f'{_TREE}[{extra}]')}"
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    of_extra = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    names = [text.partition(";")[0].strip() for text in required if of_extra.search(text)]
    return " ".join(["pip install", *map(shlex.quote, names or [extra])])
