"""Find the single changes that can be made to a source file, and make one of them."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("operator", "bound", "constant", "axis", "group", "scale", "dropped call", "swapped arguments")
"""What a mutation changes."""

_GROUPS = {"tp": "dp", "dp": "tp", "pp": "dp", "cp": "tp", "ep": "etp", "etp": "ep"}
"""Names of process groups and axes of the topology, each with the one that takes its place."""
_FOLDERS = {"data": ("megatron/data", "megatron_lab/data_tools/preprocess"), "foreign": ("megatron_lab/foreign",)}
"""Folders of packages that are not, or not only, in `megatron/`."""
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("bound", "<="),
    ast.LtE: ("bound", "<"),
    ast.Gt: ("bound", ">="),
    ast.GtE: ("bound", ">"),
    ast.Eq: ("operator", "!="),
    ast.NotEq: ("operator", "=="),
    ast.Is: ("operator", "is not"),
    ast.IsNot: ("operator", "is"),
    ast.In: ("operator", "not in"),
    ast.NotIn: ("operator", "in"),
}
_AXIS_KEYWORDS = ("dim", "axis", "dim0", "dim1")
_AXIS_METHODS = {
    "all", "amax", "amin", "any", "argmax", "argsort", "chunk", "cumsum", "flatten", "index_add_", "index_copy_", "index_select",
    "mean", "movedim", "narrow", "roll", "select", "size", "softmax", "sort", "squeeze", "sum", "transpose", "unbind", "unflatten",
    "unsqueeze",
}  # fmt: skip
"""Methods of tensors whose integer arguments are mostly dimensions."""
_SYMMETRIC = {
    "add", "allclose", "dict", "equal", "frozenset", "gcd", "isinstance", "issubclass", "lcm", "max", "maximum", "min", "minimum",
    "set", "hasattr", "getattr", "cast",
}  # fmt: skip
"""Functions for which swapped arguments give the same, or can only crash."""
_FOR_READERS = {"debug", "info", "warning", "error", "warn", "print", "log", "NotImplementedError", "field", "setting", "TypeVar"}
"""Calls whose arguments are texts for people or declarations."""


@dataclass(frozen=True)
class Mutation:
    """A replacement of one piece of a source file."""

    path: str
    """Of the file, from the root of the repository."""
    line: int
    start: int
    """Offset in bytes of the replaced piece."""
    stop: int
    replacement: str
    kind: str
    """One of `KINDS`."""
    identity: str
    """Eight hexadecimal digits that stay the same while the function around the piece does."""

    @property
    def package(self) -> str:
        """The package below `megatron/` or `megatron_lab/`."""
        return self.path.split("/")[1]

    def apply(self, source: str) -> str:
        """Return the source with the piece replaced."""
        content = source.encode()
        return (content[: self.start] + self.replacement.encode() + content[self.stop :]).decode()

    def diff(self, source: str) -> str:
        """Return a unified diff of the mutation."""
        lines = difflib.unified_diff(
            source.splitlines(), self.apply(source).splitlines(), self.path, f"{self.path} ({self.kind})", lineterm="", n=2
        )
        return "\n".join(lines)


def mutations_of(root: Path, packages: Sequence[str]) -> list[Mutation]:
    """List every mutation of every module in some packages of `megatron/`, and of what these have in `megatron_lab/`."""
    found: list[Mutation] = []
    for package in packages:
        for folder in _FOLDERS.get(package, (f"megatron/{package}",)):
            for path in sorted((root / folder).rglob("*.py")):
                found += mutations_in(str(path.relative_to(root)), path.read_text())
    return found


@functools.cache
def mutations_in(path: str, source: str) -> Sequence[Mutation]:
    """List every mutation of one module. A few do not compile."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.mutations


def draw(root: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """Draw mutations that compile, equally many of each package and, within a package, of each kind.

    The draw orders mutations by a digest of the seed and their identity, so a change of one function hardly changes it.
    """
    mutations = mutations_of(root, packages)

    def order(mutation: Mutation) -> str:
        return hashlib.sha256(f"{seed} {mutation.identity}".encode()).hexdigest()

    by_package: dict[str, dict[str, list[Mutation]]] = {}
    for mutation in sorted(mutations, key=order):
        by_package.setdefault(mutation.package, {}).setdefault(mutation.kind, []).append(mutation)
    turns = [_in_turns([by_package[package][kind] for kind in sorted(by_package[package])]) for package in sorted(by_package)]
    compiling = (mutation for mutation in _in_turns(turns) if _compiles(mutation.apply((root / mutation.path).read_text())))
    return list(itertools.islice(compiling, count))


def _in_turns(lists: Sequence[Sequence[Mutation]]) -> list[Mutation]:
    """Merge lists by taking one item of each in turn."""
    longest = max(map(len, lists), default=0)
    return [items[i] for i in range(longest) for items in lists if i < len(items)]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Collects the mutations of a module. Skips annotations, docstrings, errors, log lines and f-strings."""

    def __init__(self, path: str, source: str) -> None:
        self.mutations: list[Mutation] = []
        self._path = path
        self._content = source.encode()
        lines = source.splitlines(keepends=True)
        self._line_starts = [0]
        for line in lines:
            self._line_starts.append(self._line_starts[-1] + len(line.encode()))
        self._scope: list[str] = []
        self._counts: dict[tuple[str, ...], int] = {}

    # What holds nothing to mutate.

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    # Scopes.

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._in_scope(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__"):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.visit(default)
            self._in_scope(node.name, node.body)

    def _in_scope(self, name: str, body: Sequence[ast.stmt]) -> None:
        self._scope.append(name)
        for statement in body:
            self.visit(statement)
        self._scope.pop()

    # Mutations.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            if _called(node.value) in _FOR_READERS:
                return
            self._add(node, "pass", "dropped call")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATORS and not _is_text(node.left) and not _is_text(node.right):
            self._add_between(node.left, node.right, _OPERATORS[type(node.op)], "operator")
            if isinstance(node.op, ast.Mult | ast.Div) and not isinstance(node.left, ast.List):
                self._add(node, f"({self._text(node.left)})", "scale")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({self._text(node.operand)})", "operator")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add(node, f"({self._text(node.operand)})", "scale")
        if not (isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)):
            self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = "or" if isinstance(node.op, ast.And) else "and"
        self._add_between(node.values[0], node.values[1], word, "operator")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            kind, word = _COMPARISONS[type(operator)]
            self._add_between(left, right, word, kind)
            left = right
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1), "constant")
        elif isinstance(node.value, float) and node.value:
            self._add(node, repr(node.value * 2), "constant")
        elif isinstance(node.value, str) and node.value in _GROUPS:
            self._add(node, f'"{_GROUPS[node.value]}"', "group")

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name in _FOR_READERS or name.endswith(("Error", "Warning")):
            return
        self.visit(node.func)
        for argument in node.args:
            if not (name in _AXIS_METHODS and self._add_axis(argument)):
                self.visit(argument)
        for keyword in node.keywords:
            if not (keyword.arg in _AXIS_KEYWORDS and self._add_axis(keyword.value)):
                self.visit(keyword.value)
        if len(node.args) >= 2 and name not in _SYMMETRIC and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            first, second = (self._text(argument) for argument in node.args[:2])
            if first != second:
                self._add_span(node, node.args[0], node.args[1], f"{second}, {first}", "swapped arguments")
        if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords and name in _DROPPABLE:
            self._add(node, self._text(node.func.value), "dropped call")

    def _add_axis(self, node: ast.expr) -> bool:
        """Replace an integer that says which dimension is meant; return whether it was one."""
        try:
            dimension = ast.literal_eval(node)
        except ValueError:
            return False
        if isinstance(dimension, bool) or not isinstance(dimension, int):
            return False
        self._add(node, str({0: 1, 1: 0, 2: 1, -1: -2, -2: -1}.get(dimension, 0)), "axis")
        return True

    def _add(self, node: ast.expr | ast.stmt, replacement: str, kind: str) -> None:
        self._add_span(node, node, node, replacement, kind)

    def _add_span(
        self, node: ast.expr | ast.stmt, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, replacement: str, kind: str
    ) -> None:
        start, stop = self._begin(first), self._end(last)
        self._append(node.lineno, start, stop, replacement, kind)

    def _add_between(self, left: ast.expr, right: ast.expr, word: str, kind: str) -> None:
        """Replace the operator between two operands, and keep parentheses that stand beside it."""
        start, stop = self._end(left), self._begin(right)
        between = self._content[start:stop].decode()
        operator = between.strip(" ()\n\t\\")
        if "#" in between or not operator:
            return
        self._append(left.end_lineno or left.lineno, start, stop, between.replace(operator, word, 1), kind)

    def _append(self, line: int, start: int, stop: int, replacement: str, kind: str) -> None:
        old = self._content[start:stop].decode()
        key = (self._path, ".".join(self._scope), kind, old, replacement)
        occurrence = self._counts[key] = self._counts.get(key, 0) + 1
        identity = hashlib.sha256(repr((*key, occurrence)).encode()).hexdigest()[:8]
        self.mutations.append(Mutation(self._path, line, start, stop, replacement, kind, identity))

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._content[self._begin(node) : self._end(node)].decode()


_DROPPABLE = {"abs", "clone", "contiguous", "detach", "double", "float", "sqrt", "t", "wait"}
"""Methods without arguments that give something of their object's kind: `x.clone()` becomes `x`."""


def _called(node: ast.Call) -> str:
    """Return the last name of what a call calls, or an empty text."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
