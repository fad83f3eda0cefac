"""Reads an answer."""

import re


def boxed(text: str) -> str | None:
    found = re.search(r"\\boxed\{(\d+)\}", text)
    return found[1] if found else None
