"""What a person or a model probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest_or_list(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest choice, else the choices, or nothing where there are none.

    Example: ``did_you_mean("expresion", ["expression"]) == "did you mean 'expression'?"``
    """
    known = [choice for choice in choices if choice]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(known[:20]) if known else ""
