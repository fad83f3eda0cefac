"""Google docstrings: what a function does, and what its arguments mean."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|References|Todo)\s*:\s*$"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description (all before the first section) and the text of each argument; empty where there is none.

    Example: ``("Evaluate arithmetic.", {"expression": 'for example "(3 + 4) * 5".'})``
    """
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line)]
    description = " ".join(" ".join(lines[: starts[0] if starts else len(lines)]).split())
    arguments: dict[str, str] = {}
    for start in starts:
        if lines[start].strip().rstrip(": ") in ("Args", "Arguments", "Parameters", "Params"):
            end = next((index for index in starts if index > start), len(lines))
            arguments |= _arguments(lines[start + 1 : end])
    return description, arguments


def _arguments(lines: list[str]) -> dict[str, str]:
    """Arguments stand at the section's own indentation; what is further in continues the one before."""
    found: dict[str, str] = {}
    current = ""
    indent = next((len(line) - len(line.lstrip()) for line in lines if line.strip()), 0)
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        match = _ARGUMENT.match(line.strip()) if depth <= indent else None
        if match:
            current = match[1]
            found[current] = match[2].strip()
        elif current:
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found
