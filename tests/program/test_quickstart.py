"""The parts of the quick start and of its set-up, and the whole on a user's own text, with what it says to do next. test_readme.py
runs it without, with a small model; --full and .ci/run as it is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.make_corpus import list_source_files, write_corpus
from examples.own_text import describe_text
from megatron.config.cli import load
from megatron.config.version import get_extra_install_command
from megatron_lab.commands import checkpoint, generate_text
from megatron_lab.data_tools.preprocess.text_encoding import TextEncoding
from megatron_lab.resilience.launcher_flags import parse_launcher_flags
from tests.program.test_readme import SMALLER, shell, write_program
from tests.support.cli import ROOT
from tests.support.warm_python import warm_python

SOURCES = {
    "b.py": "def second():\n    return '2'\n",
    "a.py": "def first():\n\treturn  1\n",
    "package/c.py": "# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n",
    "empty.py": "\n",
    "test/left_out.py": "assert True\n",
    "package/tests/left_out.py": "assert True\n",
    "site-packages/left_out.py": "other = True\n",
    "encodings/left_out.py": "table = []\n",
    "html/entities.py": "table = {}\n",
    "notes.txt": "no source",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library."""
    for name, text in SOURCES.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    return tmp_path / "library"


def texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text().splitlines()]


def test_the_corpus_is_the_sources_without_tests_and_tables(library: Path, tmp_path: Path) -> None:
    assert write_corpus(library, tmp_path / "corpus.jsonl")[0] == 3
    assert sorted(texts(tmp_path / "corpus.jsonl")) == sorted(SOURCES[name] for name in ("a.py", "b.py", "package/c.py"))


def test_the_order_is_fixed_and_mixed(library: Path, tmp_path: Path) -> None:
    for i in range(40):
        (library / f"module{i:02d}.py").write_text(f"number = {i}\n")
    found = list_source_files(library)
    assert found == list_source_files(library)
    assert sorted(found) != found


def test_a_folder_without_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source"):
        write_corpus(tmp_path, tmp_path / "corpus.jsonl")
    assert not list(tmp_path.iterdir())


def fake_python(
    folder: Path,
    *,
    name: str = "fake-python",
    version: str = "Python 3.12.0",
    old: bool = False,
    venv: bool = True,
    fast: bool = False,
) -> Path:
    """A program that answers as an interpreter would that the set-up asks about itself."""
    program = folder / name
    program.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        f"    *enable-optimizations*) exit {int(not fast)} ;;\n"
        f'    -V) echo "{version}" ;;\n'
        f"    *version_info*) exit {int(old)} ;;\n"
        f"    *ensurepip*) exit {int(not venv)} ;;\n"
        "    *) echo unexpected: $* >&2; exit 9 ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    return program


def set_up(repository: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Source the set-up script of a copy of the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_SETUP"}
    return subprocess.run(
        ["bash", "-c", "set -euo pipefail; source tools/setup_env.sh; echo reached; command -v python"],
        cwd=repository,
        env={**environment, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What the set-up script reads."""
    for name in ("tools/setup_env.sh", "tools/constraints.txt", "pyproject.toml", "setup.py", "requirements.txt"):
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes())
    return tmp_path / "repository"


def test_set_up_refuses_an_old_python(repository: Path, tmp_path: Path) -> None:
    finished = set_up(repository, str(fake_python(tmp_path, version="Python 3.9.1", old=True)))
    assert finished.returncode == 1
    assert "Python 3.9.1, but Python 3.11 or newer is needed" in finished.stderr
    assert "reached" not in finished.stdout


def test_set_up_without_the_venv_module(repository: Path, tmp_path: Path) -> None:
    finished = set_up(repository, str(fake_python(tmp_path, venv=False)))
    assert finished.returncode == 1
    assert "python3-venv" in finished.stderr
    assert not (repository / ".venv").exists()


def test_set_up_without_python(repository: Path) -> None:
    finished = set_up(repository, "no-such-python")
    assert finished.returncode == 1
    assert "there is no 'no-such-python'" in finished.stderr


@pytest.mark.parametrize(
    ("fast", "taken"), [((False, True), "two/python3"), ((True, True), "one/python3"), ((False, False), "python3")]
)
def test_set_up_prefers_a_python_that_was_built_with_optimization(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: tuple[bool, bool], taken: str
) -> None:
    for folder, is_fast in zip(("one", "two", "others"), (*fast, None), strict=True):
        (tmp_path / folder).mkdir()
        if is_fast is not None:
            fake_python(tmp_path / folder, name="python3", fast=is_fast, venv=False)
    for program in ("bash", "cat", "cksum", "dirname"):
        (tmp_path / "others" / program).symlink_to(shutil.which(program) or program)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / folder) for folder in ("one", "two", "others")))
    finished = set_up(repository, "")
    assert finished.stderr.startswith(f"setup: {tmp_path / taken if '/' in taken else taken} cannot create environments"), finished
    said = f"setup: using {tmp_path}/two/python3, because {tmp_path}/one/python3 was built without optimization"
    assert (said in finished.stdout) == (taken == "two/python3")


def test_set_up_installs_once(repository: Path) -> None:
    """With a pip that only notes what it was asked: what is installed is remembered until the requirements change."""
    environment = repository / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    package = next(environment.glob("lib/python3*/site-packages")) / "pip"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nprint('pip', *sys.argv[1:])\n")
    first = set_up(repository, sys.executable)
    assert first.returncode == 0, first.stderr
    assert "making .venv" not in first.stdout
    assert f"--constraint {repository}/tools/constraints.txt --editable {repository}" in first.stdout
    assert first.stdout.splitlines()[-1] == f"{environment}/bin/python"
    assert set_up(repository, sys.executable).stdout.splitlines()[0] == "reached"
    for name in ("requirements.txt", "tools/constraints.txt"):
        (repository / name).write_text("torch\n")
        assert "--editable" in set_up(repository, sys.executable).stdout
        assert set_up(repository, sys.executable).stdout.splitlines()[0] == "reached"


# ---- one's own text


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Texts of several kinds, and what cannot be read."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    for name in ("tour.md", "data.md"):
        (folder / name).write_bytes((ROOT / "docs" / name).read_bytes()[:19_000])  # a longer page changes no expected size
    (folder / "table.csv").write_text("text,n\n" + "a row of a table,1\n" * 100)
    (folder / "code.py").write_text("print('hello')\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "picture.png").touch()
    return folder


ALONE = """#!/usr/bin/env bash
one=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-sequence-parallel --no-report --no-loss-picture)
[[ $2 != --nproc ]] || set -- "$1" "${{@:4}}" "${{one[@]}}"
exec {python} "$@"
"""
"""A python that trains in one process. The layout that the quick start writes down is its own."""


def test_ones_own_text_and_what_comes_next(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands at the end work as they stand. A call after the run was made longer keeps it. It trains in one process, without
    pictures: test_readme.py has four."""
    write_program(tmp_path / "smaller", SMALLER.format(python=warm_python()))
    write_program(tmp_path / "python", ALONE.format(python=tmp_path / "smaller"))
    call = f"bash examples/quickstart.sh --short --text {shlex.quote(str(own))} --folder {tmp_path}/'my run'"
    said = shell(call, tmp_path)
    for words in (
        "1 of csv, 4 of text",
        "skipped, unknown format: 1 ending with .png",
        "1 read as cp1252 (detected)",
        "latin.txt",
        "0 bad lines",
    ):
        assert words in said
    assert "resuming from" in said and re.search(r"validation loss \S+ at iteration 12, \S+ at iteration 16", said)
    written = re.sub(r"\d+ tokens in .* a second\n", "", said)  # it may stand amid the sample, which comes by way of a pipe
    assert "".join((tmp_path / "my run/run/sample.txt").read_text().split()) in "".join(written.split())
    blocks = said.partition("== Next steps")[2].strip().split("\n\n")
    steps = {block.split()[1].rstrip(":"): re.sub(r"^#.*\n|\\\n", "", block, flags=re.MULTILINE) for block in blocks}
    assert list(steps) == ["Longer", "Bigger", "More", "Export", "Install", "Upload"]
    for line in (line for block in blocks for line in block.splitlines()):
        assert len(line) < 80 or len(shlex.split(line.removesuffix("\\"))) <= 2, "only a long path does not fit"
    for block in blocks[:2]:
        assert re.search(r" About [\d a-z]+, \d+ MB of disk\. ?", " ".join(block.replace("\n# ", "\n").split())), block
    # The path of modules is only for the warm Python, which runs none of another tree.
    longer = shell(f"cd {tmp_path} && {steps['Longer']}", tmp_path, PYTHONPATH=str(ROOT))
    assert "resuming from" in longer and "done after 48 iterations" in longer
    program = next(word for word in shlex.split(steps["Bigger"]) if word.endswith("pretrain_gpt.py"))
    bigger = parse_launcher_flags(shlex.split(steps["Bigger"].partition(program)[2]))
    assert bigger.nproc == "8" and load(bigger.flags, 8).config.model.num_layers == 8 and program == f"{ROOT}/pretrain_gpt.py"
    for step, main in (("More", generate_text.main), ("Export", checkpoint.main)):
        assert main(shlex.split(steps[step])[2:]) == 0, capsys.readouterr().err
    exported = shlex.split(steps["Upload"])[-1]
    assert (Path(exported) / "config.json").exists() and shlex.split(steps["Upload"])[:3] == ["hf", "upload", "my-run"]
    assert shlex.split(steps["Install"])[-5:] == ["-m", *shlex.split(get_extra_install_command("transformers"))]

    write_program(tmp_path / "python", f'#!/bin/sh\n[ "${{1##*/}}" != own_text.py ] || exec {sys.executable} "$@"\n')
    again = shell(call, tmp_path)
    assert "built from these files already" in again and f"is now in {tmp_path}/my run/run-48" in again
    assert (tmp_path / "my run/run-48/checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "48"


def test_the_end_names_only_files_that_are_there(tmp_path: Path) -> None:
    """The picture needs a library, and the report can be switched off."""
    script = (ROOT / "examples/quickstart.sh").read_text()
    lines = script[script.index("curves=$(") : script.index('echo "  checkpoints')]
    checkpoints = tmp_path / "run/checkpoints"
    checkpoints.mkdir(parents=True)
    for files, told in (
        ([], "history.jsonl"),
        (["report.html"], "report.html"),
        (["loss.png"], "loss.png and run/checkpoints/report.html"),
    ):
        for name in files:
            (checkpoints / name).touch()
        said = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"folder={tmp_path}\n{lines}"], capture_output=True, text=True, check=True
        )
        assert said.stdout.splitlines() == [f"Everything is in {tmp_path}:", f"  curves       run/checkpoints/{told}"]


def test_what_suits_a_text(own: Path, tmp_path: Path) -> None:
    """A digest that follows the files and the flags, and sizes that follow how much there is."""
    detected = TextEncoding()
    told, words = describe_text(str(own), "text", detected)
    assert "5 of" not in told and words.split()[:3] == ["512", "2048", "500"]
    assert describe_text(str(own), "text", detected)[1] == words
    for other in (
        describe_text(str(own), "body", detected),
        describe_text(str(own), "text", TextEncoding("cp1251")),
        describe_text(str(own), "text", TextEncoding(errors="replace")),
    ):
        assert other[1] != words
    (own / "more.txt").write_text("word " * 500_000)
    assert describe_text(str(own), "text", detected)[1].split()[:2] == ["4096", "16384"]
    (tmp_path / "short.txt").write_text("word")
    with pytest.raises(ValueError, match=r"4 bytes of text; a model needs at least 20,000"):
        describe_text(str(tmp_path / "short.txt"), "text", detected)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--text", "none"], "--text none: there is no such file or folder"),
        (["--column", "body"], "--column body applies only to --text, which is not set"),
        (["--texts", "x"], "unknown argument --texts; --help lists"),
    ],
)
def test_wrong_words_of_the_quick_start(words: list[str], told: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "examples/quickstart.sh"), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and told in done.stderr and not list(tmp_path.iterdir())


def test_the_help_of_the_quick_start_fits_a_terminal() -> None:
    done = subprocess.run(["bash", str(ROOT / "examples/quickstart.sh"), "--help"], capture_output=True, text=True, check=True)
    assert "--text PATH" in done.stdout and max(map(len, done.stdout.splitlines())) < 80 and "set -" not in done.stdout
