"""Former names of modules give the modules of today, with a warning; whoever uses none of them notices nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron import moved

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {former: today for former, today in moved.NEW_NAMES.items() if former.count(".") == 1}
"""Those that were packages directly in `megatron`."""
POINTER = '''"""Former name of the package `{today}`. Importing this name returns the package, with a DeprecationWarning."""

from megatron.moved import take_place

take_place(__name__)
'''


def modules_today() -> list[str]:
    """Every module that has a former name, by its name of today."""
    names = []
    for today in moved.NEW_NAMES.values():
        place = ROOT.joinpath(*today.split("."))
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        names += [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return names


def former(today: str) -> str:
    """The former name of a module."""
    old, new = next((old, new) for old, new in moved.NEW_NAMES.items() if today == new or today.startswith(f"{new}."))
    return old + today.removeprefix(new)


@pytest.fixture(autouse=True)
def _nothing_was_imported() -> Iterator[None]:
    """No former name is known before a test, nor after it."""

    def forget() -> None:
        for name in [name for name in sys.modules if moved.find_new_name(name) is not None]:
            del sys.modules[name]
        for name in PACKAGES:
            vars(importlib.import_module("megatron")).pop(name.rpartition(".")[2], None)

    forget()
    yield
    forget()


def warned(name: str) -> tuple[ModuleType, dict[str, str]]:
    """A module by a former name, and the files that were warned, by the warnings' words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module = importlib.import_module(name)
    assert all(one.category is DeprecationWarning for one in found)
    return module, {str(one.message): one.filename for one in found}


@pytest.mark.parametrize("today", modules_today())
def test_a_former_name_is_the_module_of_today(today: str) -> None:
    module, words = warned(former(today))
    assert module is sys.modules[today] and module.__name__ == today
    assert module.__spec__ is not None and module.__spec__.name == today
    assert f"{former(today)} has moved: use {today}" in words
    assert warned(former(today)) == (module, {}), "once is enough"


def test_there_are_some() -> None:
    assert len(modules_today()) > 60


@pytest.mark.parametrize("finder", [False, True], ids=["file", "finder"])
def test_who_imports_is_warned(finder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a package by its file where nothing of ours was imported before, else by the finder."""
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if one is not moved._FINDER])
    if finder:
        moved.find_moved()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        from megatron.planner.cluster import Cluster  # type: ignore[import-not-found]
    from megatron_lab.planner import cluster

    assert Cluster is cluster.Cluster
    assert [(str(one.message).split()[0], one.filename) for one in found] == [
        ("megatron.planner", __file__),
        ("megatron.planner.cluster", __file__),
    ]


def test_a_module_that_left_a_package_which_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moved.NEW_NAMES, "megatron.data.left", "megatron_lab.planner.cluster")
    module, words = warned("megatron.data.left")
    assert module is importlib.import_module("megatron_lab.planner.cluster")
    assert [*words] == ["megatron.data.left has moved: use megatron_lab.planner.cluster"]
    assert vars(importlib.import_module("megatron.data")).pop("left") is module
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'megatron\.data\.left_behind'"):
        importlib.import_module("megatron.data.left_behind")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["megatron.planner.none", "megatron.planner.none.below", "megatron.nothing"])
def test_what_never_was_is_not_found_by_its_own_name(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(name)
    assert error.value.name == name.removesuffix(".below")


@pytest.mark.filterwarnings("error:megatron:DeprecationWarning")
def test_a_warning_may_be_an_error() -> None:
    with pytest.raises(DeprecationWarning, match=r"use megatron_lab\.flight$"):
        importlib.import_module("megatron.flight.record")
    assert not [name for name in sys.modules if name.startswith("megatron.flight")]


def test_former_packages_are_files_that_point_to_those_of_today() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "megatron").glob("*.py") if path.stem != "moved"}
    assert files == {former.rpartition(".")[2]: POINTER.format(today=today) for former, today in PACKAGES.items()}


def test_packages_that_have_lost_modules_find_them() -> None:
    lost = {".".join(former.split(".")[:2]) for former in moved.NEW_NAMES if former not in PACKAGES}
    silent = [name for name in lost if "find_moved()" not in ROOT.joinpath(*name.split("."), "__init__.py").read_text()]
    assert len(lost) >= 7 and not silent


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_a_run_uses_no_former_name() -> None:
    """Nothing warns among the modules of a run and of all programs, and packages of the core load nothing of what has moved."""
    code = (
        "import sys; import megatron.data, megatron.checkpoint; "
        "loaded = [name for name in sys.modules if name.startswith('megatron_lab') or 'torch' == name]; assert not loaded, loaded; "
        "import pretrain_gpt, megatron.training.trainer, megatron_lab.planner.dry_run, megatron_lab.resilience.supervisor; "
        "import importlib; from megatron_lab.__main__ import list_programs; "
        "[importlib.import_module(f'megatron_lab.commands.{name}') for name in list_programs()]; "
        "from megatron.moved import find_new_name; old = [*filter(find_new_name, sys.modules)]; assert not old, old"
    )
    done = python("-W", "error:megatron:DeprecationWarning", "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_program_is_run_by_its_former_name() -> None:
    """Launch scripts of users have such a line; the warning is shown there, though Python shows others to developers alone."""
    done = python("-m", "megatron.resilience.supervisor", "--help")
    assert done.returncode == 0 and "--nproc-per-node" in done.stdout, done.stderr
    assert "DeprecationWarning: megatron.resilience.supervisor has moved: use megatron_lab.resilience.supervisor" in done.stderr
    unknown = python("-m", "megatron.resilience.none")
    assert unknown.returncode == 1 and "No module named megatron.resilience.none" in unknown.stderr
