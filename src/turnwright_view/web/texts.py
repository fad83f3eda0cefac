"""Texts of a run on their way to the page: none is too long, and none has hidden characters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnwright.display.text import visible

MAX_TEXT = 20_000
"""Maximum characters of one text."""


def truncate(text: str, limit: int = MAX_TEXT) -> str:
    """Truncate a text with a note."""
    if len(text) > limit:
        return text[:limit] + f"\n\u2026 {len(text) - limit:,} more characters are left out"
    return text


def one_line(text: str, limit: int) -> str:
    """Return a text as one line of at most so many characters, of which the last says that there
    are more."""
    # Words far behind the limit need not be looked at, and texts may have megabytes.
    line = " ".join(text[: 8 * limit].split())
    is_whole = len(line) <= limit and len(text) <= 8 * limit
    return line if is_whole else line[: limit - 1] + "\u2026"


def escape_json(value: Any) -> Any:
    """Return JSON with control and hidden characters escaped in all texts and keys; everything sent
    to the page passes here."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(name)): escape_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in (int, float) else escape_json(item) for item in value]
    return value


def embed_json(data: Any) -> str:
    """Return JSON that cannot end its HTML element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
