"""Texts of messages in the code, and whether a text of a document is one of them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
VARIES = "..."
_FORMATTED = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgf]")


def _text(node: ast.AST) -> str | None:
    """Return a string expression with `...` for each part that is computed."""
    match node:
        case ast.Constant(value=str() as value):
            return _FORMATTED.sub(VARIES, value)
        case ast.JoinedStr(values=values):
            return "".join(
                _text(value) or "" if isinstance(value, ast.Constant) else VARIES
                for value in values
            )
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            texts = (_text(left), _text(right))
            return None if texts == (None, None) else "".join(text or VARIES for text in texts)
    return None


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield strings that stand alone, which are nobody's message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


@functools.cache
def texts() -> tuple[str, ...]:
    """Return every string in the code that is no docstring."""
    found = set()
    for path in sorted(SRC.glob("turnwright*/**/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {id(node) for node in _docstrings(tree)}
        for node in ast.walk(tree):
            text = _text(node)
            if text and id(node) not in documentation:
                found.add(text)
    return tuple(sorted(found))


def is_in_the_code(written: str) -> bool:
    """Whether a message of the code fits a text, whose `...` stands for anything."""
    parts = [re.escape(part) for part in written.split(VARIES)]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts())
