"""Private names of torch: all in one module, which reports the missing ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.parallel import torch_private
from megatron.parallel.torch_private import PRIVATE_MODULES, MissingTorchName, find_function, find_module, list_missing
from megatron.parallel.torch_private import find_symmetric_memory_op as operation

ROOT = Path(__file__).resolve().parents[3]
MODULE = Path(torch_private.__file__)
SOURCES = [
    path
    for package in ("megatron", "megatron_lab")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path != MODULE and path.parent.name != "benchmarks"
]


@pytest.fixture
def _restored() -> Iterator[None]:
    """Remove planted names from the report."""
    before = list_missing()
    yield
    torch_private._missing[:] = before


def is_private(dotted: str) -> bool:
    """Whether a component of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def first_name(node: ast.expr) -> str:
    """The name that a chain of attributes, calls and subscripts begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source: str) -> list[str]:
    """Return the private names of torch that a file uses: attributes, names as text for `getattr`, and imports.

    Chains of attributes count from names that the file imports from torch, or assigns from such a chain.
    """
    if "torch" not in source:
        return []
    nodes = [*ast.walk(ast.parse(source))]
    modules, names = {}, []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if alias.name.split(".")[0] == "torch"):
                modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                names += [alias.name] if is_private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_private(f"{node.module}.{alias.name}"):
                    names.append(str(node.module) if is_private(str(node.module)) else f"{node.module}.{alias.name}")
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            chain = ast.unparse(node.value) if first_name(node.value) in modules else ""
            for target in (target for target in node.targets if isinstance(target, ast.Name)):
                if chain.split(".")[0] in modules and chain.startswith("torch.ops"):
                    modules[target.id] = chain
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and first_name(node) in modules:
            root, _, rest = ast.unparse(node).partition(".")
            names += [f"{modules[root]}.{rest}"] if root in modules else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            owner, name = ast.unparse(node.args[0]), ast.unparse(node.args[1]).strip("f'\"")
            names += [f"{owner}.{name}"] if owner.split(".")[0] in modules and is_private(name) else []
    return names


def test_private_names_are_used_in_one_module() -> None:
    """Private modules may be imported elsewhere, if they are in its list."""
    names = {name: path for path in SOURCES for name in private_names(path.read_text())}
    assert not {str(path.relative_to(ROOT)): name for name, path in names.items() if name not in PRIVATE_MODULES}
    unused = set(PRIVATE_MODULES) - set(names) - set(private_names(MODULE.read_text()))
    assert not unused, "a private module is listed that no file imports"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._scaled_mm(1)", ["torch._scaled_mm"]),
        ("import torch\ntorch.ops.aten._unsafe_view(1)", ["torch.ops.aten._unsafe_view"]),
        ("import torch\naten = torch.ops.aten\naten._unsafe_view(1)", ["torch.ops.aten._unsafe_view"]),
        ("import torch\nx = getattr(torch, '_grouped_mm', None)", ["torch._grouped_mm"]),
        ("import torch.distributed as dist\ndist._x.y()", ["torch.distributed._x"]),
        ("from torch import _foreach_mul_", ["torch._foreach_mul_"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree"]),
        ("import torch\nself._torch = torch.__version__", []),
    ],
)
def test_private_names_are_seen(source: str, names: list[str]) -> None:
    assert private_names(source) == names


def test_this_torch_lacks_nothing() -> None:
    assert list_missing() == []


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("path", ["torch._planted", "torch.ops.aten._planted", "torch.cpu._planted", "torch._planted.function"])
def test_a_missing_function_is_reported_and_raises_when_it_is_called(path: str) -> None:
    function = find_function(path, "the planted feature")
    assert list_missing() == [(path, "the planted feature")]
    message = f"torch {torch.__version__} has no {path}, so this is unavailable: the planted feature"
    with pytest.raises(MissingTorchName, match=message.replace("+", r"\+")):
        function(torch.zeros(2), alpha=1)


@pytest.mark.usefixtures("_restored")
def test_a_missing_module_is_reported() -> None:
    assert torch_private.format_missing_note() == []
    find_module("torch.utils._planted", "plans")
    assert list_missing() == [("torch.utils._planted", "plans")]
    (line,) = torch_private.format_missing_note()
    assert line.endswith("lacks private names. Unavailable: plans (torch.utils._planted)")


def test_symmetric_memory_is_imported_where_it_is_used() -> None:
    """In a new process: the import of the module does not import it, nor the compiler."""
    program = (
        "import sys, megatron.parallel.torch_private as names\n"
        "slow = ('torch.distributed._symmetric_memory', 'torch._dynamo', 'torch._inductor')\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "[]", done.stderr
    assert str(operation("fused_all_gather_matmul")) == "symm_mem.fused_all_gather_matmul"
    with pytest.raises(MissingTorchName, match="has no torch.ops.symm_mem.planted, so this is unavailable: --tp-comm-overlap"):
        operation("planted")()
