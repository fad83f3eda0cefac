r"""Answers compared as texts, as the MATH dataset's checker does: after its rewriting of LaTeX they
are equal, or not.

`same_text` compares, `normalize` rewrites an answer where it can be, and `rewrite` has the steps in
their order. verl's `math_reward` is this comparison alone; slime's graders and mathruler's begin
with it.
"""

from __future__ import annotations

import re

_ENCLOSED = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_REMOVED = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
"""Replacements before units are cut, in order: a backslash that is left by one is read by the
next."""


class UnreadableError(ValueError):
    """The rewriting does not apply to a text: it breaks off in the middle of a command."""


def same_text(given: str | None, truth: str | None, *, percent: bool = False) -> bool:
    """Return whether two answers are equal after rewriting."""
    return normalize(given, percent=percent) == normalize(truth, percent=percent)


def normalize(answer: str | None, *, percent: bool = False) -> str | None:
    r"""Return an answer without an enclosing ``\text{}``, rewritten; as it is where the rewriting
    does not apply."""
    if answer is None:
        return None

    answer = answer.strip()
    enclosed = _ENCLOSED.search(answer)
    if enclosed is not None:
        answer = enclosed["text"].strip()

    try:
        return rewrite(answer, percent=percent)
    except UnreadableError:
        return answer


def rewrite(text: str, *, percent: bool = False) -> str:
    """Return a text in the checker's form: no spaces, units or degree signs; fractions and roots
    with braces.

    A percent sign goes with its backslash, and with `percent` (mathruler) also without one.

    Raises:
        UnreadableError: for a text that ends after a command, or has several units.
    """
    for old, new in _REMOVED:
        text = text.replace(old, new)

    # A unit stands in `\text{ ...}`, at the end of the answer.
    number, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise UnreadableError("several units")
    text = number.replace("\\%", "")
    if percent:
        text = text.replace("%", "")

    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    if not text:
        return text

    # The name of an unknown, as in `x=5`: at most two characters before the only equals sign.
    left, *rest = text.split("=")
    if len(rest) == 1 and len(left) <= 2:
        text = rest[0]

    text = _with_braces_after_roots(text).replace(" ", "")
    text = _with_braces_after_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return _as_fraction(text)


def _with_braces_after_roots(text: str) -> str:
    r"""Return a text in which what is under a root has braces: ``\sqrt3`` becomes ``\sqrt{3}``."""
    rewritten, *pieces = text.split("\\sqrt")
    for piece in pieces:
        if not piece:
            raise UnreadableError("nothing after a root")

        if piece[0] == "{":
            rewritten += "\\sqrt" + piece
        else:
            rewritten += f"\\sqrt{{{piece[0]}}}{piece[1:]}"
    return rewritten


def _with_braces_after_fractions(text: str) -> str:
    r"""Return a text in which both parts of a fraction have braces: ``\frac12`` becomes
    ``\frac{1}{2}``; unchanged where a part is missing."""
    rewritten, *pieces = text.split("\\frac")
    for piece in pieces:
        if not piece:
            raise UnreadableError("nothing after a fraction")

        if piece[0] == "{":
            rewritten += "\\frac" + piece
            continue
        if len(piece) < 2:
            return text

        denominator = piece[1] if piece[1] == "{" else f"{{{piece[1]}}}"
        rewritten += f"\\frac{{{piece[0]}}}{denominator}{piece[2:]}"
    return rewritten


def _as_fraction(text: str) -> str:
    r"""Return ``\frac{a}{b}`` for two integers with a slash between them.

    Another text is unchanged.
    """
    if text.count("/") != 1:
        return text

    try:
        numerator, denominator = map(int, text.split("/"))
    except ValueError:
        return text

    # Python reads more texts as integers than are written so, such as `+1` and `1_0`.
    if text != f"{numerator}/{denominator}":
        return text
    return f"\\frac{{{numerator}}}{{{denominator}}}"
