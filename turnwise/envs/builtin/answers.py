r"""Comparison of math answers as numbers: `3.5`, `7/2`, ``\frac{1}{2}``, ``2\sqrt{3}``, ``30^\circ``.

math-verify parses the LaTeX. Answers come from a model or a dataset, so only bounded text is parsed: short expressions of
numbers, fractions, roots, pi and the four operations. Powers are excluded, since `9^{9^{9}}` has no bound.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from threading import Lock

LONGEST = 80  # maximum characters of an answer
EXACT = 1e-6
"""Absolute and relative tolerance of exact answers; rounded answers allow half of the last decimal place."""
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_UNITS = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree|\\(?:text|mathrm)\s*\{[^{}]{0,20}\}|\\[,;!]|\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,)(?=\d{3}(?!\d))")
_EXPRESSION = re.compile(
    r"(?:\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right)(?![a-zA-Z])|\\sqrt\[\d\]|\d{1,9}(?:\.\d{1,9})?(?![\d.])|[-+*/(){}\s])+",
    re.ASCII,
)
_READING = Lock()


def boxed(text: str) -> str | None:
    r"""Return the content of the only ``\boxed{...}`` of a text; None if there is none, several, or an unclosed one."""
    _, found, rest = text.partition("\\boxed")
    rest = rest.lstrip()
    if not found or "\\boxed" in rest or not rest.startswith("{"):
        return None
    depth = 0
    for at, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:at].strip()
    return None


def is_correct(given: str, right: str) -> bool:
    """Whether an answer is correct: compared as numbers, within half of the last decimal place; else as texts."""
    given, right = _bare(given), _bare(right)
    target = value(right)
    if target is None:
        return "".join(given.split()) == "".join(right.split())
    found = value(given)
    if found is None:
        return False
    decimals = len(right.partition(".")[2]) if _NUMBER.fullmatch(right) else 0
    return abs(found - target) <= (0.5 * 10.0**-decimals + EXACT if decimals else EXACT * max(1.0, abs(target)))


def _bare(text: str) -> str:
    """Remove units, degree signs, dollar signs and thousands separators."""
    return _THOUSANDS.sub("", _UNITS.sub("", text)).strip() if len(text) <= 2 * LONGEST else text


@lru_cache(maxsize=4096)
def value(text: str) -> float | None:
    """Return the value of a number or LaTeX expression; None for other text and for non-finite values."""
    if len(text) > LONGEST:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _EXPRESSION.fullmatch(text) or re.search(r"\d\s+\d", text):
        return None
    from math_verify import LatexExtractionConfig, parse

    try:
        with _READING, _quiet():
            config = [LatexExtractionConfig(boxed_match_priority=0)]
            # The library's timeout uses a signal, which works only in the main thread.
            read = parse(f"\\boxed{{{text}}}", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
            number = complex(read[0].evalf()) if read else complex("nan")
    except Exception:  # the parser may raise anything
        return None
    return number.real if math.isfinite(number.real) and number.imag == 0 else None


class _quiet:
    """Suppresses the library's warnings about its timeout and about unparsable texts."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("math_verify")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)

    def __exit__(self, *error: object) -> None:
        self._logger.setLevel(self._level)
