"""Escape untrusted text: text from a model must not control a terminal or reorder itself."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

# C0 except newline and tab, DEL, C1; then characters that reorder or hide text: bidi controls,
# zero-width characters, line separators, Unicode tags, the byte-order mark, and lone surrogates,
# which UTF-8 cannot encode.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_HIDDEN = (
    "\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_NAMES = {0: "NUL", 7: "BEL", 8: "BS", 13: "CR", 27: "ESC", 127: "DEL"}
_UNSAFE = re.compile(f"[{_CONTROL}{_HIDDEN}]")
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])"  # noqa: E501
)


def visible(text: str) -> str:
    """Replace control and hidden characters by visible names (`⟨ESC⟩`, `⟨U+202E⟩`),
    except newline and tab."""
    return _UNSAFE.sub(_name, text)


def single_line(text: str, limit: int | None = None) -> str:
    """Return one line for a terminal: no escape sequences, no control or hidden characters, at
    most `limit` characters."""
    if limit is not None and len(text) > 4 * limit:
        text = text[: 4 * limit]  # avoids searching megabytes
    line = _UNSAFE.sub(
        "\ufffd", _ANSI.sub("", text).replace("\n", " ").replace("\r", " ").replace("\t", " ")
    )
    return line if limit is None or len(line) <= limit else line[: max(0, limit - 1)] + "…"


def text_of(value: Any) -> str:
    """Return a text of a record, any other value as JSON; empty for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def csp_digest(text: str) -> str:
    """Return the SHA-256 of a script or style sheet as a content security policy names it."""
    return b64encode(sha256(text.encode()).digest()).decode()


def _name(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"⟨{_NAMES.get(code) or f'U+{code:04X}'}⟩"
