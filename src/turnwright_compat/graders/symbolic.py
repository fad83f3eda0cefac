r"""Answers compared by SymPy, as the checkers do that descend from PRM800K's: slime's `math` and
`deepscaler`, mathruler's.

`equal` compares by text and then by SymPy, `equal_by_sympy` by SymPy alone. `normalize` rewrites an
answer, and `_parsed` makes an expression of it.

Two answers are equal if they are the same text after normalization, or if part by part their
difference simplifies to 0. An integer is equal to an integer alone, and a fraction has to be
reduced in the same way. Those checkers run what SymPy's parser makes of an answer as Python code;
here its syntax tree is walked, with the operations and functions of expressions alone, in a helper
process with bounds (`turnwright.envs.isolation.bounded`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from turnwright.envs.isolation.bounded import BoundExceeded, CallFailed, call_bounded
from turnwright.errors import EnvError
from turnwright_compat.graders import hendrycks

_ENCLOSED = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_WORDS = (
    ("\\%", "%"),
    ("\\$", "$"),
    ("$", ""),
    ("%", ""),
    (" or ", " , "),
    (" and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
)
_UNITS = (
    "degree",
    "cm",
    "centimeter",
    "meter",
    "mile",
    "second",
    "minute",
    "hour",
    "day",
    "week",
    "month",
    "year",
    "foot",
    "feet",
    "inch",
    "yard",
)
# One after another: `centimeter` loses `meter`.
_UNIT_PATTERNS = tuple(re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS)
_SIGNS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"
_TOO_HARD = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that are not evaluated."""
_LETTERS = 2
"""Different letters that an expression may have besides those of `sqrt` and `frac`; other
text is not evaluated."""


def equal(given: str, truth: str | None, *, percent: bool = False) -> bool:
    """Return whether an answer is the right one by the text (`hendrycks`; `percent` as there) or by
    SymPy."""
    return hendrycks.same_text(given, truth, percent=percent) or equal_by_sympy(given, truth)


def equal_by_sympy(given: str, truth: str | None) -> bool:
    """Return whether an answer is the right one by SymPy; false where that cannot be decided within
    the bounds of a call."""
    if truth is None:
        return False

    try:
        return bool(call_bounded(_equal, given, truth))
    except BoundExceeded:
        return False
    except CallFailed as error:
        if "ImportError" in str(error) or "ModuleNotFoundError" in str(error):
            raise EnvError(
                f"this grader needs SymPy and pylatexenc ({error}); pip install 'turnwright[math]'"
            ) from error
        raise


def _equal(given: str, truth: str) -> bool:
    """Compare two answers part by part; this runs in the helper process."""
    given = normalize(given)
    truth = normalize(truth)
    if given == truth:
        return True
    if not given:
        return False

    given_parts, truth_parts = _parts(given), _parts(truth)
    if len(given_parts) != len(truth_parts):
        return False

    # An open interval is not a closed one.
    if len(truth_parts) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return bool(truth_parts) and all(map(_equal_part, given_parts, truth_parts))


def _equal_part(given: str, truth: str) -> bool:
    if _FRACTION.search(truth) and _FRACTION.search(given):
        return given == truth
    if _is_integer(truth) != _is_integer(given):
        return False
    return _difference_is_zero(truth, given)


def normalize(text: str) -> str:
    r"""Return an answer in lower case, without ``\text{}``, units, signs of currency and
    percent, spaces and braces."""
    enclosed = _ENCLOSED.search(text)
    if enclosed is not None:
        text = enclosed["text"]

    for old, new in _WORDS:
        text = text.replace(old, new)
    for unit in _UNIT_PATTERNS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]

    text = re.sub(",\\\\! *", "", text)
    value = _float(text)
    if value is not None and _is_close_to_integer(value):
        text = str(round(value))
    if "\\" in text:
        text = _latex_as_text(text)

    text = re.sub("- *", "-", text)
    # A mixed number is a sum.
    text = re.sub("([0-9]) +([0-9])", "\\1+\\2", text)
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()

    if _is_integer(text):
        text = str(int(float(text.replace(",", ""))))
    return text


def _latex_as_text(latex: str) -> str:
    from pylatexenc import latex2text

    # A blank before a fraction keeps a mixed number apart.
    plain_fractions = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text: str = plain_fractions.replace("\\frac", " \\frac")
    try:
        text = latex2text.LatexNodes2Text().latex_to_text(text)
    except Exception:
        # The parser may raise anything for malformed LaTeX, which is then compared as it is.
        return latex

    for sign, word in _SIGNS.items():
        text = text.replace(sign, word)
    return text.strip()


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_close_to_integer(value: float) -> bool:
    try:
        return abs(value - round(value)) <= 1e-7
    except (OverflowError, ValueError):
        # It is infinite, or not a number.
        return False


def _is_integer(text: str) -> bool:
    value = _float(_without_thousands(text))
    return value is not None and _is_close_to_integer(value)


def _without_thousands(text: str) -> str:
    # One pass takes every other comma of `1,000,000`.
    while True:
        shorter = _THOUSANDS.sub("\\1\\3\\4", text)
        if shorter == text:
            return text
        text = shorter


def _parts(text: str) -> list[str]:
    """Return the members of a tuple or interval; another text is one part."""
    text = _without_thousands(text)
    if not text:
        return []

    inside = text[1:-1]
    is_bracketed = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if is_bracketed and not any(char in _BRACKETS for char in inside):
        return [part.strip() for part in inside.split(",")]
    return [text]


def _difference_is_zero(truth: str, given: str) -> bool:
    import sympy

    difference = f"({truth})-({given})"
    without_commands = difference.replace("sqrt", "").replace("frac", "")
    letters = {char for char in without_commands if char.isalpha()}
    if len(letters) > _LETTERS or _TOO_HARD.search(difference):
        return False

    try:
        return bool(sympy.simplify(_parsed(difference)) == 0)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        # The parser and what it calls may raise anything.
        return False


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_READ_TEXT = ("Symbol", "Integer", "Float", "Number", "Rational", "Function")
"""What SymPy's parser makes of names and numbers; other functions would read a text as code."""


def _parsed(text: str) -> Any:
    """Return the expression of a text, as `sympy.parsing.sympy_parser.parse_expr` does with
    implicit multiplication."""
    import sympy
    from sympy.parsing import sympy_parser

    rules = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
    code = sympy_parser.stringify_expr(text.replace("^", "**"), {}, names, rules)
    return _value(ast.parse(code.strip(), mode="eval").body, names)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a syntax tree; raise `ValueError` for what no expression has."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, names))
    if isinstance(node, ast.Name):
        return _named(node.id, names)
    if isinstance(node, ast.Call) and not node.keywords:
        if isinstance(node.func, ast.Name) and node.func.id in _READ_TEXT:
            literals = [ast.literal_eval(argument) for argument in node.args]
            return names[node.func.id](*literals)
        function = _value(node.func, names)
        return function(*(_value(argument, names) for argument in node.args))
    raise ValueError(f"{type(node).__name__} is not part of an expression")


def _named(name: str, names: dict[str, Any]) -> Any:
    """Return a constant or function of SymPy."""
    import sympy

    value = names[name]
    is_function = isinstance(value, sympy.FunctionClass) or name in ("sqrt", "root", "cbrt")
    if not is_function and not isinstance(value, sympy.Basic):
        raise ValueError(f"{name} is neither a constant nor a function of numbers")
    return value
