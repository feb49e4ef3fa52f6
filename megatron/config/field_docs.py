"""What the docstring below a field says of it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap


@functools.cache
def field_docs(topic: type) -> dict[str, str]:
    """The texts below the fields of a dataclass, each as one line, by the fields' names."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(topic))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found
