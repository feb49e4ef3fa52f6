"""What a user installs: pure Python in one namespace package, with the same requirements everywhere."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.cli import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SOURCES = sorted((ROOT / "megatron").rglob("*.py"))


def test_requirements_file_repeats_the_project() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert [line for line in lines if line] == PROJECT["dependencies"]


def test_requirements_name_what_is_imported() -> None:
    distributions = {"yaml": "PyYAML", "tiktoken_ext": "tiktoken"}
    optional = {"apex", *PROJECT["optional-dependencies"]} - {"dev"}  # looked for at run time
    texts = [path.read_text() for path in [*SOURCES, ROOT / "pretrain_gpt.py", *(ROOT / "tools").rglob("*.py")]]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found = {name.partition(".")[0] for name in names}
    import sys

    needed = {
        distributions.get(name, name)
        for name in found - set(sys.stdlib_module_names) - optional - {"megatron", "pretrain_gpt", "tools"}
    }
    required = {re.split("[><=]", text)[0] for text in PROJECT["dependencies"]}
    assert needed <= required


def test_megatron_is_a_namespace_package() -> None:
    assert not (ROOT / "megatron/__init__.py").exists(), "it would hide other packages that live under megatron"
    assert not (ROOT / "megatron/core").exists(), "that is the name of another package"
    for path in SOURCES:
        assert (path.parent / "__init__.py").exists(), f"{path.parent} is no package"


def test_nothing_is_compiled() -> None:
    kinds = {path.suffix for path in (ROOT / "megatron").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert kinds <= {".py", ".typed", ".yaml"}
    assert "ext_modules" not in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize(
    "path", [Path("tools/setup_env.sh"), *(p.relative_to(ROOT) for p in (ROOT / "examples").glob("*.sh"))], ids=str
)
def test_scripts_name_no_machine(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert not re.search(r"https?://|--(extra-)?index-url|/home/|/root/|/tmp/", text)


def test_each_tool_finds_its_own_tree_before_it_imports_it() -> None:
    """`python tools/NAME.py` works from any folder, installed or not: the tree is on the path before anything of it is imported."""
    first_import = re.compile(r"^(?:from|import) (?:megatron|tools)\b", re.MULTILINE)
    late = []
    for path in sorted((ROOT / "tools").glob("*.py")):
        text = path.read_text()
        found = first_import.search(text)
        before = text[: found.start()] if found else text
        if '__name__ == "__main__"' in text and "sys.path.insert(0, " not in before:
            late.append(path.name)
    assert not late
