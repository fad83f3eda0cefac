"""Answers of the MATH dataset in boxes, compared as texts."""

from __future__ import annotations


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` or ``\fbox{...}`` of a text, or what follows ``\boxed`` and a space."""
    from turnwright_compat.graders.boxes import last_box

    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    return last_box(string)


def remove_boxed(s: str) -> str:
    r"""Return the content of a box; raise `ValueError` for another text."""
    from turnwright_compat.graders.boxes import content_of

    if "\\boxed " in s:
        if not s.startswith("\\boxed "):
            raise ValueError(f"{s!r:.80} does not begin with a box")
        return s.removeprefix("\\boxed ")
    content = content_of(s)
    if content is None:
        raise ValueError(f"{s!r:.80} is not a box")
    return content


def strip_string(string: str) -> str:
    """Return an answer as `is_equiv` compares it."""
    from turnwright_compat.graders.hendrycks import rewrite

    return rewrite(string)


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are the same text after rewriting, or as they are where it does not apply."""
    if str1 is None or str2 is None:
        return str1 is str2
    try:
        return strip_string(str1) == strip_string(str2)
    except ValueError:
        return str1 == str2


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1.0 for the right answer in the last box, else 0.0."""
    box = last_boxed_only_string(solution_str)
    if box is None:
        return 0.0
    try:
        return float(is_equiv(remove_boxed(box), ground_truth))
    except ValueError:
        return 0.0
