r"""The checker of answers: numbers, expressions, words, units and lists, in whatever wrapper they
come.

An answer is read as what it is, and compared with another of its kind alone:

- a letter or words: `A`, `(A)`, `A.`, ``\text{A}``; `no solution`. Equal in letters, whatever their
  case. A verifier of LaTeX drops words, so all of them would be equal to it.
- a number, with a unit or without: `3.5`, `7/2`, ``3\frac{1}{2}``, `1,000`, ``50\%``, ``30^\circ``,
  `5 cm`. Two units have to be the same; one alone does not matter. A decimal answer allows half of
  its last place, so the checker is symmetric but for that.
- an expression or relation: by math-verify.
- several: a set or a list in any order, tuples and intervals in theirs and with their brackets.

Nothing is equal to an empty answer. Answers come from models and datasets: what cannot be bounded
by its length runs in a helper process (`call_bounded`), and one that exceeds its bounds is compared
as text.

`is_correct` is the whole: `_plain` drops wrappers and spellings, `read` says what an answer is, and
`_same` compares.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from turnwright.envs.isolation.bounded import BoundExceeded, CallFailed, call_bounded
from turnwright.errors import EnvError

LONGEST = 80
"""Characters of an answer that a tool takes."""

READ = 400
"""Characters of an answer that are read as mathematics; a longer one is compared as text."""

EXACT = 1e-6
"""Absolute and relative tolerance of exact answers; rounded answers allow half of the last decimal
place."""


def boxed(text: str) -> str | None:
    r"""Return the content of the only ``\boxed{...}`` of a text; None if there is none, several, or
    an unclosed one.

    Example::

        >>> boxed(r"So x is \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    _, command, rest = text.partition("\\boxed")
    rest = rest.lstrip()
    if not command or "\\boxed" in rest or not rest.startswith("{"):
        return None
    depth = 0
    for position, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:position].strip()
    return None


def is_correct(given: str, right: str) -> bool:
    """Whether an answer is correct; see the module for what is equal. An empty one never is.

    Raises:
        EnvError: without the packages of the extra `math`, where they are needed.

    Example::

        >>> is_correct("x = 3.50", "7/2 cm"), is_correct("(A)", "A."), is_correct("", "")
        (True, True, False)
    """
    given = _plain(given)
    right = _plain(right)
    if not given or not right:
        return False
    if _as_text(given) == _as_text(right):
        return True
    if max(len(given), len(right)) > READ:
        return False
    return _same(read(given), read(right))


# Reading


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer is."""

    text: str
    """Words in lower case, or LaTeX without a unit and without the name of what is asked for."""
    words: bool = False
    name: str = ""
    """The left side of `x=5`."""
    unit: str = ""
    parts: tuple[Answer, ...] = ()
    """Members of a set, list, tuple or interval."""
    brackets: str = ""
    """Those of a tuple or interval; empty for a set or list, whose order does not matter."""


@lru_cache(maxsize=4096)
def read(text: str) -> Answer:
    """Read an answer that `_plain` returned."""
    text = _MEMBER.sub("", text)
    several = _several(text)
    if several is not None:
        brackets, members = several
        parts = tuple(read(_plain(member)) for member in members)
        return Answer(text, parts=parts, brackets=brackets)

    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return Answer(letter[1].casefold(), words=True)

    name, value = _without_name(text)
    number, unit = _without_unit(value)
    number = _as_latex(number)
    if _has_words(number):
        return Answer(_as_text(text), words=True)
    return Answer(number, name=name, unit=unit)


_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boxed|fbox)\s*\{"
)
_SIGNS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u2010": "-",
    "\u2011": "-",
    "\u00d7": r"\times ",
    "\u22c5": r"\cdot ",
    "\u00b7": r"\cdot ",
    "\u00f7": "/",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u222a": r"\cup ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u221a": r"\sqrt ",
    "\u00b1": r"\pm ",
    "\u2205": r"\emptyset ",
    "\u00b0": r"^\circ",
    "\u00b2": "^2",
    "\u00b3": "^3",
}
_SIGN = re.compile("|".join(_SIGNS))
_SPELLINGS = (
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"(?<=\d)(?:\\[,!;]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|&nbsp;"), " "),
    (re.compile(r"\\[$]|[$\u20ac\u00a3]|\\[()\[\]]"), " "),
    (re.compile(r"\*\*"), "^"),
)
_PERIOD = re.compile(r"(?<!\\)[\s.;:,?]+$")


def _plain(text: str) -> str:
    """Return an answer without the wrappers and spellings that mean nothing; empty where nothing is
    left."""
    if len(text) > 10 * READ:  # neither read nor rewritten
        return text.strip()
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], text)
    text = unicodedata.normalize("NFKC", text)
    text = _unwrapped(text)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = " ".join(text.split())

    while True:
        shorter = _PERIOD.sub("", _without_braces(text)).strip()
        if shorter == text:
            break
        text = shorter
    return text if any(char.isalnum() for char in text) else ""


def _unwrapped(text: str) -> str:
    r"""Return a text with ``\text{...}`` and its kin replaced by what they hold, between spaces."""
    pieces: list[str] = []
    wrapper_depths: list[int] = []  # of wrappers that are open
    depth = 0
    position = 0
    while position < len(text):
        is_command = text[position] == "\\"
        wrapper = _WRAPPERS.match(text, position) if is_command else None
        if wrapper is not None:
            depth += 1
            wrapper_depths.append(depth)
            pieces.append(" ")
            position = wrapper.end()
            continue

        piece = text[position : position + 2] if is_command else text[position]
        position += len(piece)
        if piece == "{":
            depth += 1
        elif piece == "}":
            if wrapper_depths and wrapper_depths[-1] == depth:
                wrapper_depths.pop()
                piece = " "
            depth -= 1
        pieces.append(piece)
    return "".join(pieces)


def _without_braces(text: str) -> str:
    """Return a text without one pair of braces around all of it."""
    if not (text.startswith("{") and text.endswith("}") and not text.endswith("\\}")):
        return text
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            is_last = position == len(text) - 1
            return text[1:-1] if is_last else text
    return text


def _as_text(text: str) -> str:
    """Return an answer for the comparison as text: in one case, without spaces."""
    return "".join(text.split()).casefold()


_LETTER = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\].:]?")
_MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![a-zA-Z])\s*")
_NAME = re.compile(r"(\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\(\w\))?)\s*=\s*([^=<>]+)")
_UNIT_TEXT = re.compile(
    r"(?P<number>.*(?:[\d)}]|\\pi(?![a-zA-Z])))\s*(?:"
    r"(?P<percent>\\?%|percent)"
    r"|(?P<degrees>\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|degrees?|deg)"
    r"|(?P<unit>[A-Za-z][A-Za-z]*(?:\s*/\s*[A-Za-z]+|\s+[A-Za-z]+)*(?:\s*\^\s*\{?\s*-?\d\s*\}?)?)"
    r")",
    re.DOTALL,
)
_LETTER_UNITS = frozenset("msghlLNJWVAKCF")
"""Letters that are units after a space; others are unknowns."""
_SHORT_UNITS = re.compile(
    r"(?:[cmkd]?m|km|in|ft|yd|mi|[mk]?g|lb|oz|[cm]?l|mL|min|sec|hr|mph|kph|k?Hz|k?Pa|k?W|deg|rad)s?(?![a-zA-Z])"
)
"""Units that may follow a number without a space; other letters there are unknowns.

Other short ones need three letters.
"""
_FUNCTIONS = (
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "sqrt",
    "pi",
    "min",
    "max",
    "gcd",
    "lcm",
    "det",
    "inf",
    "infty",
)
_SAME_UNITS = {
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "millimetre": "mm",
    "kilometer": "km",
    "kilometre": "km",
    "meter": "m",
    "metre": "m",
    "inches": "in",
    "inche": "in",
    "inch": "in",
    "feet": "ft",
    "foot": "ft",
    "yard": "yd",
    "mile": "mi",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "gram": "g",
    "kilogram": "kg",
    "liter": "l",
    "litre": "l",
    "dollar": "$",
    "unit": "",
}


def _without_name(text: str) -> tuple[str, str]:
    """Return the left side of `x=5`, without spaces, and the right side; no name for another
    text."""
    named = _NAME.fullmatch(text)
    if named is None:
        return "", text
    return "".join(named[1].split()).casefold(), named[2].strip()


def _without_unit(text: str) -> tuple[str, str]:
    """Return an answer without its unit, and the unit in one spelling."""
    match = _UNIT_TEXT.fullmatch(text)
    if match is None:
        return text, ""
    if match["percent"]:
        return match["number"], "%"
    if match["degrees"]:
        return match["number"], "degree"

    unit = match["unit"]
    letters = re.sub(r"\s*\^.*", "", unit)
    is_function = any(word in _FUNCTIONS or word in _JOINING for word in letters.split())
    is_apart = text[match.start("unit") - 1] in " }"
    if is_function or not _is_unit(letters, apart=is_apart):
        return text, ""
    return match["number"], _unit(unit)


def _is_unit(letters: str, *, apart: bool) -> bool:
    """Whether letters after a number are a unit; `apart` if a space or a brace is between them."""
    if len(letters) == 1:
        return apart and letters in _LETTER_UNITS
    return _SHORT_UNITS.match(letters) is not None or (apart and len(letters) > 2)


def _unit(text: str) -> str:
    """Return a unit in one spelling: `square meters` and ``m^{2}`` are `m^2`."""
    base, _, power = re.sub(r"[\s{}]+", " ", text).strip().partition("^")
    powers = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
    units = []
    for word in base.lower().replace("/", " / ").split():
        if word in powers:
            power = powers[word]
            continue
        singular = word.removesuffix("s") or word
        units.append(_SAME_UNITS.get(singular, singular))
    unit = "".join(units)
    return f"{unit}^{power.strip()}" if power.strip() and unit else unit


_SCIENTIFIC = re.compile(r"(?<![\dA-Za-z])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,2})(?![\dA-Za-z.])")
_MIXED = re.compile(
    r"(?<![\d.^_/}{])(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)(\d))"
)
_MIXED_SLASH = re.compile(r"(?<![\d.^_/])(\d+) (\d+) ?/ ?(\d+)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?")
_ROOT = re.compile(r"(?<!\\)sqrt\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_PLAIN_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)})(?![A-Za-z])")


def _as_latex(text: str) -> str:
    r"""Return an expression as LaTeX: `sqrt(3)` as ``\sqrt{3}``, `1 1/2` as a sum, `1,000` without
    the comma."""
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _MIXED.sub(lambda m: rf"({m[1]}+\frac{{{m[2] or m[4]}}}{{{m[3] or m[5]}}})", text)
    text = _MIXED_SLASH.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1", text)
    return re.sub(r"\\sqrt\s+(\d+|[a-z])", r"\\sqrt{\1}", text).strip()


_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}|[^\W\d_a-zA-Z]")
_PRODUCT = re.compile(r"(?<=[\d+*^=(])[a-z]{2,3}(?![A-Za-z])|(?<![A-Za-z])[a-z]{2,3}(?=[+*^=])")
"""Unknowns beside each other, as in `2ab` and `xy+1`; without a number or sign they are a word."""
_JOINING = ("and", "or")


def _has_words(latex: str) -> bool:
    """Whether a text has words, or letters that are no unknowns; commands and names of functions
    are none."""
    letters = re.sub(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+", " ", latex)
    return _WORD.search(_PRODUCT.sub(" ", letters)) is not None


_OPEN, _CLOSE = "([{", ")]}"


def _several(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and members of a set, list, tuple or interval; None for one answer."""
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
        return ("", _split(inner)) if inner.strip() else None
    unions = _split_at(text, r"\cup")
    if len(unions) > 1:
        return "", unions

    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        members = _split_at(text[1:-1], ",")
        return (text[0] + text[-1], members) if len(members) > 1 else None

    if _THOUSANDS.fullmatch(_without_unit(text)[0].lstrip("-+ ")):
        return None
    members = _split(text)
    if len(members) > 1:
        return "", members
    return _plus_and_minus(text)


def _plus_and_minus(text: str) -> tuple[str, list[str]] | None:
    r"""Return the two values of ``a \pm b``."""
    before, sign, after = text.partition("\\pm")
    if not sign or "\\pm" in after or _depth(before):
        return None
    return "", [f"{before} + {after}" if before.strip() else after, f"{before} - {after}"]


def _depth(text: str) -> int:
    """Return how many brackets of a text are open at its end."""
    return sum((char in _OPEN) - (char in _CLOSE) for char in text)


def _closes_at_end(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth == 0:
            return position == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Return the members of a list: between commas, `and` and `or`; words in it are no list unless
    all have a number."""
    members = _split_at(re.sub(r",?\s+(?:and|or)\s+", ",", text), ",")
    if len(members) > 1 and all(_is_member(member) for member in members):
        return members
    return [text]


def _is_member(text: str) -> bool:
    """Whether a text is a letter or has no words beside name and unit."""
    if _LETTER.fullmatch(text) is not None:
        return True
    _, value = _without_name(text)
    number, _ = _without_unit(value)
    return not _has_words(_as_latex(number))


def _split_at(text: str, mark: str) -> list[str]:
    """Return the parts of a text between marks that are in no brackets."""
    parts = []
    depth = 0
    start = 0
    for position, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth == 0 and text.startswith(mark, position):
            parts.append(text[start:position].strip())
            start = position + len(mark)
    parts.append(text[start:].strip())
    return [part for part in parts if part]


# Comparing


def _same(given: Answer, right: Answer) -> bool:
    """Whether two answers are equal."""
    if given.parts or right.parts:
        return _same_parts(given, right)
    if given.words or right.words:
        return given.words == right.words and given.text == right.text
    if given.name and right.name and given.name != right.name:
        return False
    if given.unit and right.unit and given.unit != right.unit:
        return False
    if _same_value(given.text, right.text):
        return True
    has_one_percent = (given.unit == "%") != (right.unit == "%")
    return has_one_percent and _same_as_percent(given, right)


def _same_parts(given: Answer, right: Answer) -> bool:
    """Whether the parts of two answers are equal, in order where there are brackets."""
    if len(given.parts) != len(right.parts):
        return False
    if given.brackets and right.brackets and given.brackets != right.brackets:
        return False
    if given.brackets or right.brackets:
        return all(map(_same, given.parts, right.parts))

    unmatched = list(given.parts)
    for right_part in right.parts:
        match = next((part for part in unmatched if _same(part, right_part)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _same_value(given: str, right: str) -> bool:
    """Compare as numbers, within half of the last decimal place; else as expressions."""
    given_value = value(given)
    right_value = value(right)
    if given_value is None and right_value is None:
        return _same_expression(given, right)
    if given_value is None or right_value is None:
        return False

    decimals = len(right.partition(".")[2]) if _NUMBER.fullmatch(right) else 0
    if decimals:
        tolerance = 0.5 * 10.0**-decimals + EXACT
    else:
        tolerance = EXACT * max(1.0, abs(right_value))
    return abs(given_value - right_value) <= tolerance


def _same_as_percent(given: Answer, right: Answer) -> bool:
    """Whether a share is the percentage that the other answer is: 0.5 and 50%."""
    given_value = value(given.text)
    right_value = value(right.text)
    if given_value is None or right_value is None:
        return False
    if given.unit == "%":
        given_value /= 100
    else:
        right_value /= 100
    return abs(given_value - right_value) <= EXACT * max(1.0, abs(right_value))


_NUMBER = re.compile(r"[-+]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})", re.ASCII)
_GREEK = (
    r"alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi|omega|"
    r"Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega"
)
_OPERATORS = r"frac|cdot|times|div|le|ge|lt|gt|ne|pm|cup|cap|emptyset|circ|binom|begin|end|in"
_KNOWN = re.compile(rf"{_GREEK}|{_OPERATORS}|{'|'.join(_FUNCTIONS)}")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_UNREADABLE = re.compile(r"\d\s+\d|!\s*!|\d{16,}|\d_")
_GROWS = re.compile(r"!|\\binom")
"""What makes large numbers of small ones."""
_POWER = re.compile(r"\^\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(-?\w+))")
_LARGE = re.compile(r"\d{3,}|[\^!]")


def _is_bounded(latex: str) -> bool:
    """Whether an expression is one to evaluate: commands of mathematics alone, no towers of powers,
    no large ones."""
    if len(latex) > READ or not all(map(_KNOWN.fullmatch, _COMMAND.findall(latex))):
        return False
    if _UNREADABLE.search(latex):
        return False
    if _GROWS.search(latex) and re.search(r"\d{4}", latex):
        return False
    powers = [power for groups in _POWER.findall(latex) for power in groups if power]
    return len(powers) == latex.count("^") and not any(map(_LARGE.search, powers))


@lru_cache(maxsize=4096)
def value(text: str) -> float | None:
    """Return the value of a number or LaTeX expression; None for other text, and for what is not
    finite or real."""
    if len(text) > READ:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not any(char.isdigit() for char in text) and "\\pi" not in text:
        return None
    return _evaluated("_value_of", text) if _is_bounded(text) else None


@lru_cache(maxsize=4096)
def _same_expression(given: str, right: str) -> bool:
    if not _is_bounded(given) or not _is_bounded(right):
        return False
    return bool(_evaluated("_are_equal", given, right))


def _evaluated(name: str, *args: str) -> float | None:
    """Call a function below in the helper process; None for what exceeds its bounds or cannot be
    read."""
    try:
        result: float | None = call_bounded(globals()[name], *args)
    except BoundExceeded:
        return None
    except CallFailed as error:
        if "ModuleNotFoundError" in str(error):
            raise EnvError(
                f"answers of mathematics need math-verify ({error}); pip install 'turnwright[math]'"
            ) from error
        return None
    return result


def _value_of(latex: str) -> float | None:
    """Return the value of an expression, by SymPy."""
    parsed = _parsed(latex)
    if not parsed:
        return None
    number = complex(parsed[0].evalf())
    return number.real if math.isfinite(number.real) and number.imag == 0 else None


def _are_equal(given: str, right: str) -> bool:
    """Whether two expressions are equal, by math-verify."""
    from math_verify import verify

    parsed_given = _parsed(given)
    parsed_right = _parsed(right)
    if not parsed_given or not parsed_right:
        return False
    # The verifier reads its first argument as the right one; equality has no direction.
    if not verify(parsed_given, parsed_right, timeout_seconds=None):
        return False
    return bool(verify(parsed_right, parsed_given, timeout_seconds=None))


def _parsed(latex: str) -> list[Any]:
    """Return what math-verify reads out of an expression."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # By default the library takes unknowns after a number for a unit, and drops them.
    normalization = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=False,
        boxed="last",
        equations=False,
    )
    extraction = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    # The library's timeout uses a signal; the helper process has bounds of its own.
    parsed: list[Any] = parse(
        f"\\boxed{{{latex}}}",
        extraction_config=[extraction],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return parsed
