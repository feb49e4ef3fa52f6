"""`tools/verify_layout.py` with a fault planted in functions of the framework, for as long as a `with` block lasts.

A function that is there gets the code that the changed source gives it. So nothing is imported anew, ranks that stay from call to
call can have a fault too, and behind the block everything is as it was before.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import marshal
import shlex
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron_lab.commands import verify_layout
from megatron_lab.verification.prove import import_before_fork
from tests.support.cli import ROOT
from tests.support.warm import RankPool

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 "
    "--train-iters 100 --eval-iters 1 --data-path /nowhere/corpus --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 8"
)
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.5 --moe-ffn-hidden-size 32"
_RANKS = RankPool()
"""Apart from those of other tests: a fault may leave something behind."""


Replaced = tuple[str, str]
"""A text that stands once in `megatron/`, within a function, and what takes its place."""


@dataclass(frozen=True)
class Fault:
    """Texts that are replaced in the source, and what the first finding then is."""

    replaced: tuple[Replaced, ...]
    flags: str
    kind: str
    place: str
    group: str | None
    says: tuple[str, ...]
    """In the verdict."""
    step: int = 1
    stages: tuple[int, ...] | None = None


def verify(tmp_path: Path, replaced: Sequence[Replaced], flags: str, *own: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what is printed, and the JSON of the tool, which runs in this process and on ranks that stay."""
    import_before_fork()
    found, faulty = tmp_path / "found.json", faulty_functions(replaced)
    argv = [*shlex.split(FLAGS), *shlex.split(flags), *own, "--json", str(found)]

    def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float, init: bool = True) -> list[Any]:
        """Run in place of `run_ranks`; the reference runs in this process."""
        return _RANKS.run(world_size, _with_faults, faulty, function, args, timeout=timeout) if init else [function(0, *args)]

    with (
        planted(faulty),
        patch("megatron_lab.verification.prove.run_ranks", run),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        status = verify_layout.main(argv)
    assert found.exists(), said.getvalue()
    return status, said.getvalue(), json.loads(found.read_text())


def _with_faults(rank: int, faulty: Sequence[FaultyFunction], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    with planted(faulty):
        return function(rank, *args)


def assert_found(fault: Fault, tmp_path: Path) -> None:
    """The tool finds the fault, and names its place."""
    status, text, found = verify(tmp_path, fault.replaced, fault.flags, "--quick", "--steps", str(max(1, fault.step)))
    assert status == 1, text
    assert not found["equal"], text
    verdict, first = text.splitlines()[0], next(run["findings"][0] for run in found["runs"] if run["findings"])
    assert verdict.startswith("DIFFERENT"), text
    assert (first["kind"], first["step"], first["group"]) == (fault.kind, fault.step, fault.group), text
    assert fault.place in verdict and all(words in verdict for words in fault.says), text
    assert fault.stages is None or tuple(first["stages"]) == fault.stages, text


class FaultyFunction(NamedTuple):
    """A function of the framework that gets other code."""

    module: str
    name: str
    """With the classes around it."""
    faulty: bytes
    """Marshalled, as a code object cannot be pickled."""
    right: bytes
    """The code that the source gives it. A process that is forked while a fault is planted has that code from nowhere else."""


def faulty_functions(replaced: Sequence[Replaced]) -> list[FaultyFunction]:
    """Every function that differs where all texts are replaced.

    Raises:
        AssertionError: a text is not there once, or not within a function.
    """
    texts = _texts()
    changed: dict[Path, str] = {}
    for old, new in replaced:
        holders = [path for path, text in texts.items() for _ in range(text.count(old))]
        assert len(holders) == 1, f"the text that a fault replaces stands {len(holders)} times in megatron/: {old}"
        assert not holders[0].is_relative_to(ROOT / "megatron/config"), "what settings have come to is kept"
        changed[holders[0]] = changed.get(holders[0], texts[holders[0]]).replace(old, new)
    return [found for path, text in changed.items() for found in _differing(path, texts[path], text)]


@functools.cache
def _texts() -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / "megatron").rglob("*.py")}


def _differing(path: Path, before: str, after: str) -> Iterator[FaultyFunction]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    texts = before.splitlines(), after.splitlines()
    trees = [ast.parse(text) for text in (before, after)]
    imports = [each for each in trees[0].body if isinstance(each, ast.Import | ast.ImportFrom)]
    for old, new in zip(*(tree.body for tree in trees), strict=True):
        if _lines(old, texts[0]) != _lines(new, texts[1]):
            # The code of a function depends on what the file imports, and to compile the whole file would take longer.
            parts = [ast.Module([*imports, each], []) for each in (new, old)]
            codes = [compile(part, str(path), "exec", dont_inherit=True) for part in parts]
            for name in _differing_names([old], [new], texts):
                yield FaultyFunction(module, name, *(marshal.dumps(_code(code, name)) for code in codes))


def _code(code: types.CodeType, name: str) -> types.CodeType:
    """The code of a function in that of its module."""
    for part in name.split("."):
        (code,) = [each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == part]
    return code


def _differing_names(
    before: Sequence[ast.stmt], after: Sequence[ast.stmt], texts: tuple[list[str], list[str]], around: str = ""
) -> Iterator[str]:
    """Names of the functions that differ in two forms of the same statements, with the classes around them.

    Args:
        texts: the lines of both files. Nearly all statements have the same, and to write out their trees takes long.
    """
    for old, new in zip(before, after, strict=True):
        same_kind = isinstance(old, ast.ClassDef) and isinstance(new, ast.ClassDef)
        if _lines(old, texts[0]) == _lines(new, texts[1]) or (not same_kind and ast.dump(old) == ast.dump(new)):
            continue
        assert isinstance(old, ast.ClassDef | ast.FunctionDef) and isinstance(new, ast.ClassDef | ast.FunctionDef), ast.dump(new)
        bodies, name = (old.body, new.body), f"{around}{old.name}"
        old.body = new.body = []
        assert ast.dump(old) == ast.dump(new), f"{name} differs in more than its body, which is not planted"
        if isinstance(old, ast.ClassDef):
            yield from _differing_names(*bodies, texts, f"{name}.")
        else:
            yield name


def _lines(statement: ast.stmt, text: list[str]) -> list[str]:
    """The lines of a statement, with its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    return text[min(each.lineno for each in (statement, *decorators)) - 1 : statement.end_lineno]


@contextlib.contextmanager
def planted(faulty: Sequence[FaultyFunction]) -> Iterator[None]:
    """Give functions of this process their faulty code, until the block ends.

    What the framework's functions keep of earlier calls is forgotten before and afterwards: it may be of the other code.
    """
    functions = [_function(each) for each in faulty]
    try:
        for function, each in zip(functions, faulty, strict=True):
            function.__code__ = marshal.loads(each.faulty)
        _forget_calls()
        yield
    finally:
        for function, each in zip(functions, faulty, strict=True):
            function.__code__ = marshal.loads(each.right)
        _forget_calls()


def _function(faulty: FaultyFunction) -> types.FunctionType:
    """The function in this process, without what decorates it."""
    found: Any = importlib.import_module(faulty.module)
    for part in faulty.name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(found.func if isinstance(found, functools.cached_property) else found)
    assert isinstance(found, types.FunctionType) and found.__qualname__ == faulty.name
    return found


def _forget_calls() -> None:
    """Clear all `functools.cache` of the framework's modules, but of the flags, which take a while to make and have no faults."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(("megatron.", "megatron_lab.")) and not name.startswith("megatron.config."):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
