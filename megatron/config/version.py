"""Version of the project, and the commands that install its extras.

`megatron` is a namespace package and therefore has no `__version__`: use `from megatron.config.version import __version__`.
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
"""Name of the distribution in pyproject.toml. It is installed from its source tree, never by this name from a package index."""
_TREE = Path(__file__).resolve().parents[2]


def _read_project() -> dict[str, Any] | None:
    """Return the [project] table of pyproject.toml in a source tree of this project, or None if the package is installed without a
    tree."""
    try:
        with (_TREE / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]
    except (OSError, ValueError, KeyError):
        return None
    return project if project.get("name") == DISTRIBUTION else None


def _find_version() -> str:
    """Return the version of the source tree, which may be newer than the installed version, or of the installed distribution."""
    project = _read_project()
    if project is not None:
        return str(project["version"])
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = _find_version()


def format_version() -> str:
    """Return the text that --version prints: versions of the project, Python and torch, and the folder of the code."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"{DISTRIBUTION} {__version__} (Python {platform.python_version()}, torch {torch}) in {_TREE}"


def get_extra_install_command(extra: str) -> str:
    """Return the pip command that installs an extra of this project. In a source tree it installs the tree with the extra,
    otherwise the libraries of the extra by name."""
    if _read_project() is not None:
        return f"pip install -e {shlex.quote(f'{_TREE}[{extra}]')}"
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    of_extra = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    names = [text.partition(";")[0].strip() for text in required if of_extra.search(text)]
    return " ".join(["pip install", *map(shlex.quote, names or [extra])])
