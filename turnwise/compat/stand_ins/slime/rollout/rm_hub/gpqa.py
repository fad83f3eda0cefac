"""Multiple choice by letter."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

_PATTERNS = (
    r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
    r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)",
    r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
)


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1 if a reply names the letter of the answer, or where no letter is known, contains its text; else 0.

    `metadata` may have `choices`, `valid_letters`, `correct_letter`, and `correct_answer` or `answer_text`.
    """
    info = dict(metadata or {})
    choices = info.get("choices") or ()
    texts = [str(one) for one in (choices.values() if isinstance(choices, Mapping) else choices)]
    letters = [str(one).upper() for one in info.get("valid_letters") or string.ascii_uppercase[: len(texts) or 10]]
    right = _right_letter(label, info, texts, letters)
    text = (response or "").rpartition("</think>")[2]
    found = _letter(text, letters)
    if found and right:
        return float(found == right)
    named = [texts[letters.index(right)]] if right in letters[: len(texts)] else []
    named += [str(info[key]) for key in ("correct_answer", "answer_text") if info.get(key)]
    named += [label] if isinstance(label, str) else []
    return float(any(one and one in _plain(text) for one in map(_plain, named)))


def _right_letter(label: Any, info: Mapping[str, Any], texts: Sequence[str], letters: Sequence[str]) -> str | None:
    given = info.get("correct_letter")
    if isinstance(given, str):
        return given.strip().upper()
    if isinstance(label, (int, float)):
        return letters[int(label)] if 0 <= int(label) < len(letters) else None
    text = str(label or "").strip()
    if text.upper() in letters:
        return text.upper()
    return next((letter for letter, one in zip(letters, texts, strict=False) if text and _plain(one) == _plain(text)), None)


def _letter(text: str, letters: Sequence[str]) -> str | None:
    for pattern in _PATTERNS:
        found = re.search(pattern, text, flags=re.IGNORECASE)
        if found and found[1].upper() in letters:
            return found[1].upper()
    alone = [one for one in re.findall(r"\b([A-Z])\b", text) if one in letters]
    return alone[-1] if alone else None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
