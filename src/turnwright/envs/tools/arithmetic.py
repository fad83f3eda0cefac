"""Safe evaluation of arithmetic: no names, no calls, no `eval`, and limits on length, depth and
size."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 500
"""Maximum characters of an expression."""

MAX_DEPTH = 60
"""Maximum nesting of operations."""

MAX_BITS = 4096
"""Maximum bits of any intermediate integer, about 1,200 digits."""

_FOREIGN = re.compile(r"[^0-9eE_.+\-*/%()\s]")
_HINTS = {"^": "; write powers as **", ",": "; write 1000, not 1,000"}
"""What to write in place of a character, in an error."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def arithmetic(expression: str) -> int | float:
    """Evaluate an expression of numbers, ``+ - * / // % **`` and parentheses with Python's
    semantics.

    Raises:
        ValueError: for other syntax, a division by zero, or a value that is too large or not a real
            number.

    Example::

        >>> arithmetic("(3 + 4) * 5")
        35
    """
    if not isinstance(expression, str):
        raise ValueError(f"an expression is a string, not {type(expression).__name__}")
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed"
        )
    foreign = _FOREIGN.search(expression)
    if foreign:
        hint = _HINTS.get(foreign[0], "")
        raise ValueError(
            f"{foreign[0]!r} is not arithmetic; use numbers, + - * / // % ** and parentheses{hint}"
        )
    text = " ".join(expression.split())
    if not text:
        raise ValueError("the expression is empty")

    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression.strip()[:80]!r} is not a complete expression") from None
    return _value(tree.body, 0)


def _value(node: ast.expr, depth: int) -> int | float:
    if depth > MAX_DEPTH:
        raise ValueError(f"the expression is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _apply(node.op, _value(node.left, depth + 1), _value(node.right, depth + 1))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _apply(op: ast.operator, left: int | float, right: int | float) -> int | float:
    """Apply an operator to two values."""
    # Check the size of a power before computing it, so that 9**9**9 costs nothing.
    if isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
        least_bits = (int(abs(left)).bit_length() - 1) * right
        if abs(left) > 1 and least_bits > MAX_BITS:
            raise ValueError("the value is too large")
    try:
        return _bounded(_BINARY[type(op)](left, right))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the value is too large") from None


def _bounded(value: Any) -> int | float:
    """Return a value after checking its size."""
    if isinstance(value, complex):
        raise ValueError("the value is not a real number")
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    is_long = isinstance(value, int) and value.bit_length() > MAX_BITS
    if is_infinite or is_long:
        raise ValueError("the value is too large")
    number: int | float = value
    return number
