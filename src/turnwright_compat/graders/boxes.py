"""Boxes in replies, as the graders of slime and verl find them."""

from __future__ import annotations

BOX = "\\boxed{"


def to_last_brace(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the first group after it; None where no
    brace does."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start : position + 1]
    return None


def last_box(text: str, names: tuple[str, ...] = ("\\boxed", "\\fbox")) -> str | None:
    """Return the last box with its command, of the first name that the text has; None without one,
    or for an unclosed one."""
    for name in names:
        start = text.rfind(name)
        if start >= 0:
            return to_last_brace(text, start)
    return None


def content_of(box: str | None) -> str | None:
    r"""Return the content of ``\boxed{...}``; None for another command."""
    if box is None or not box.startswith(BOX) or not box.endswith("}"):
        return None
    return box[len(BOX) : -1]
