"""Safe evaluation of arithmetic: no names, no calls, no `eval`, and limits on
length, depth and size."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 500  # maximum characters of an expression
MAX_DEPTH = 60  # maximum nesting of operations
MAX_BITS = 4096  # maximum bits of any intermediate integer, about 1,200 digits

_FOREIGN = re.compile(r"[^0-9eE_.+\-*/%()\s]")
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
    """Evaluate an expression of numbers, ``+ - * / // % **`` and parentheses
    with Python's semantics.

    Example: ``arithmetic("(3 + 4) * 5") == 35``

    Raises:
        ValueError: for other syntax, a division by zero, or a value that is too
            large or not a real number.
    """
    if not isinstance(expression, str):
        raise ValueError(f"an expression is a string, not {type(expression).__name__}")
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed"
        )
    if foreign := _FOREIGN.search(expression):
        hint = (
            "; write powers as **"
            if foreign[0] == "^"
            else "; write 1000, not 1,000"
            if foreign[0] == ","
            else ""
        )
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
    # check the size of a power before computing it, so that 9**9**9 costs nothing
    integer_power = isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    if integer_power and abs(left) > 1 and (int(abs(left)).bit_length() - 1) * right > MAX_BITS:
        raise ValueError("the value is too large")
    try:
        return _bounded(_BINARY[type(op)](left, right))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the value is too large") from None


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ValueError("the value is not a real number")
    if (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and value.bit_length() > MAX_BITS
    ):
        raise ValueError("the value is too large")
    number: int | float = value
    return number
