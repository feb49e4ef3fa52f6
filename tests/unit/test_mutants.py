"""The tool for mutation testing: what it changes, which tests it runs, and that it tells a found mutant from a survivor."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants import pool
from tests.mutants.__main__ import EQUIVALENT, PACKAGES, ROOT, equivalents, main, table
from tests.mutants.mutations import KINDS, draw, mutations_in, mutations_of
from tests.mutants.trial import Copy, Trial, read_test_table

SOURCE = '''"""A module of 2 lines."""


def share(x: int, scale: float = 0.5) -> float:
    """Return a share of 1."""
    if x < 2:
        raise ValueError(f"{x + 1} is too small")
    log(x)
    return x * scale
'''


@pytest.mark.parametrize(
    "line, kind, mutated",
    [
        ("y = a + b", "operator", "y = a - b"),
        ("y = (a + 1) * b", "scale", "y = (a + 1)"),
        ("y = (a) - (b)", "operator", "y = (a) + (b)"),
        ("y = a is None", "operator", "y = a is not None"),
        ("y = not a", "operator", "y = (a)"),
        ("y = a and b", "operator", "y = a or b"),
        ("y = a <= b < c", "bound", "y = a < b < c"),
        ("y = 7", "constant", "y = 8"),
        ("y = f(x, dim=-1)", "axis", "y = f(x, dim=-2)"),
        ("y = x.sum(0)", "axis", "y = x.sum(1)"),
        ('y = context.group("tp")', "group", 'y = context.group("dp")'),
        ("y = -x", "scale", "y = (x)"),
        ("work.start(a)", "dropped call", "pass"),
        ("y = work.wait()", "dropped call", "y = work"),
        ("y = f(a, b, c)", "swapped arguments", "y = f(b, a, c)"),
    ],
)
def test_each_kind_of_mutation(line: str, kind: str, mutated: str) -> None:
    assert mutated in [mutation.apply(line) for mutation in mutations_in("megatron/spec/x.py", line) if mutation.kind == kind]


def test_texts_for_readers_are_left_alone() -> None:
    mutants = [mutation.apply(SOURCE).splitlines() for mutation in mutations_in("megatron/spec/x.py", SOURCE)]
    changed = {line.strip() for mutant in mutants for line in set(mutant) - set(SOURCE.splitlines())}
    assert changed == {
        "def share(x: int, scale: float = 1.0) -> float:",
        "if x <= 2:",
        "if x < 3:",
        "return x + scale",
        "return (x)",
    }


def test_a_draw_takes_all_packages_and_kinds_and_stays_where_other_functions_change() -> None:
    packages = ("parallel", "context_parallel")
    drawn = draw(ROOT, packages, 40, seed=1)
    assert {mutation.package for mutation in drawn} == {*packages}
    assert {mutation.kind for mutation in drawn} == {*KINDS}
    assert drawn == draw(ROOT, packages, 40, seed=1) != draw(ROOT, packages, 40, seed=2)
    before, after = (mutations_in("megatron/spec/x.py", text + SOURCE) for text in ("", "def more(x):\n    return x + 1\n\n\n"))
    assert {mutation.identity for mutation in before} < {mutation.identity for mutation in after}


def test_each_package_has_tests_that_exist() -> None:
    tests = read_test_table(ROOT)
    assert not [(package, path) for package in PACKAGES for path in tests[package] if not (ROOT / path).exists()]
    assert all(len(tests[package]) >= 2 for package in PACKAGES)


def test_each_equivalent_mutant_exists_and_has_a_reason() -> None:
    identities = {mutation.identity for mutation in mutations_of(ROOT, PACKAGES)}
    unknown = equivalents().keys() - identities
    assert not unknown, (
        f"{EQUIVALENT.name}: the functions of {', '.join(sorted(unknown))} have changed; look at these mutants again"
    )
    assert all(len(reason) > 10 for reason in equivalents().values())


def test_a_mutant_is_found_or_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    (repository / "megatron/spec").mkdir(parents=True)
    (repository / "megatron/spec/x.py").write_text(SOURCE.replace("    log(x)\n", ""))
    (repository / "megatron/spec/__init__.py").touch()
    (repository / "test_x.py").write_text("from megatron.spec.x import share\n\n\ndef test_share():\n    assert share(8) == 4.0\n")
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    mutants = mutations_in("megatron/spec/x.py", (repository / "megatron/spec/x.py").read_text())
    copy = Copy(repository, tmp_path / "work")
    trials = {mutation.identity: copy.run(mutation, ["test_x.py"]) for mutation in mutants}
    survivors = [mutation for mutation in mutants if not trials[mutation.identity].killed]
    assert {mutation.kind for mutation in survivors} == {"bound", "constant"}  # both of the comparison that no test reaches
    assert {trial.by for trial in trials.values()} == {"", "test_x.py::test_share"}
    assert not copy.run(None, ["test_x.py"]).killed, "no mutant is left behind in the copy"
    with pytest.raises(LookupError, match=r"test_x\.py::test_that_was_renamed"):
        copy.run(mutants[0], ["test_x.py::test_that_was_renamed"])
    monkeypatch.setattr(pool, "_copy", copy, raising=False)
    found = next(mutation for mutation in mutants if trials[mutation.identity].killed)
    renamed = [pool._run(mutation, ["test_x.py::test_that_was_renamed"], ["test_x.py"]) for mutation in (survivors[0], found)]
    assert [trial.by for trial in renamed] == ["", "test_x.py::test_share"]
    assert "| all | 5 | 1 | 3 | 1 | 75.0% |" in table(mutants, trials, {survivors[0].identity})


def test_tests_that_fail_without_a_mutant_are_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [Trial("", True, "tests/unit/moe/test_x.py::test_y", "assert 1 == 2", 1.0)]
    asked: list[set[str]] = []

    def failing_unchanged(root: Path, packages: set[str], workers: int) -> list[Trial]:
        asked.append(packages)
        return failing

    monkeypatch.setattr("tests.mutants.__main__.failing_unchanged", failing_unchanged)
    with pytest.raises(SystemExit, match=r"fail without a change.*\n  tests/unit/moe/test_x\.py::test_y: assert 1 == 2"):
        main(["--count", "3", "--packages", "moe"])
    assert asked == [{"moe"}]


def test_tests_of_packages_run_without_a_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "AGENTS.md").write_text("| `megatron/moe/` | `tests/test_good.py`, `tests/test_bad.py` |\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_good.py").write_text("def test_good():\n    assert True\n")
    (tmp_path / "tests/test_bad.py").write_text("def test_bad():\n    assert 1 == 2\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    # In threads of this process, which has torch; and two processes would each import it anew.
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda workers, context, start, args: ThreadPoolExecutor(1))
    monkeypatch.setattr(pool, "_copy", Copy(tmp_path, tmp_path / "work"), raising=False)
    assert [trial.by for trial in pool.failing_unchanged(tmp_path, ["moe"], workers=1)] == ["tests/test_bad.py::test_bad"]
