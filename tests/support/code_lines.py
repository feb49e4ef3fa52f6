"""Count lines of code, independently of documentation and of where the formatter wraps a line."""

from __future__ import annotations

import ast
import io
import tokenize


def count_code_lines(source: str) -> int:
    """Return the number of logical lines of Python source that are not docstrings.

    A statement that the formatter wraps over several lines counts once, so that neither a better name nor a better docstring costs
    anything.
    """
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    count, starts_line = 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            starts_line = True
        elif starts_line and token.type not in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):
            count += token.start[0] not in docstrings
            starts_line = False
    return count
