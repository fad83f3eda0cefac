r"""Answers compared as texts, as the MATH dataset's checker does: after its rewriting of
LaTeX they are equal, or not.

verl's `math_reward` is this comparison alone; slime's graders and mathruler's begin with it.
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
"""Replacements before units are cut, in order: a backslash that is left by
one is read by the next."""


class UnreadableError(ValueError):
    """The rewriting does not apply to a text: it breaks off in the middle of a command."""


def same_text(given: str | None, truth: str | None, *, percent: bool = False) -> bool:
    """Whether two answers are equal after rewriting."""
    return normalize(given, percent=percent) == normalize(truth, percent=percent)


def normalize(answer: str | None, *, percent: bool = False) -> str | None:
    r"""Return an answer without an enclosing ``\text{}``, rewritten; as it is where the
    rewriting does not apply."""
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
    """Return a text in the checker's form: no spaces, units or degree signs;
    fractions and roots with braces.

    A percent sign goes with its backslash, and with `percent` (mathruler) also without one.

    Raises:
        UnreadableError: for a text that ends after a command, or has several units.
    """
    for old, new in _REMOVED:
        text = text.replace(old, new)
    text = _without_units(text).replace("\\%", "")
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


def _without_units(text: str) -> str:
    before, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise UnreadableError("several units")
    return before


def _with_braces_after_roots(text: str) -> str:
    before, *pieces = text.split("\\sqrt")
    for piece in pieces:
        if not piece:
            raise UnreadableError("nothing after a root")
        before += "\\sqrt" + (piece if piece[0] == "{" else f"{{{piece[0]}}}{piece[1:]}")
    return before


def _with_braces_after_fractions(text: str) -> str:
    before, *pieces = text.split("\\frac")
    for piece in pieces:
        if not piece:
            raise UnreadableError("nothing after a fraction")
        if piece[0] == "{":
            before += "\\frac" + piece
        elif len(piece) < 2:
            return text
        else:
            second = piece[1] if piece[1] == "{" else f"{{{piece[1]}}}"
            before += f"\\frac{{{piece[0]}}}{second}{piece[2:]}"
    return before


def _as_fraction(text: str) -> str:
    r"""Return ``\frac{a}{b}`` for two integers with a slash between them;
    another text unchanged."""
    if text.count("/") != 1:
        return text
    try:
        above, below = map(int, text.split("/"))
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
