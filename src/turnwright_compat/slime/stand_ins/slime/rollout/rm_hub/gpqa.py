"""Multiple choice by letter."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_PATTERNS = (
    r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
    r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)",
    r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
)
LETTERS = string.ascii_uppercase[:10]
"""Letters of an answer where neither the choices nor their letters are known."""


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1 if a reply names the letter of the answer, or where no letter is known, contains its text; else 0.

    `metadata` may have `choices`, `valid_letters`, `correct_letter`, and `correct_answer` or `answer_text`.
    """
    if response is None:
        return 0.0
    info = dict(metadata or {})
    choices = info.get("choices") or ()
    texts = [str(one) for one in (choices.values() if isinstance(choices, Mapping) else choices)]
    letters = [str(one).upper() for one in info.get("valid_letters") or string.ascii_uppercase[: len(texts)] or LETTERS]

    right = _letter_of_label(label, info.get("correct_letter"), letters)
    if right is None and isinstance(label, str) and label.strip():
        right = _letter_of_choice(label, texts, letters)

    reply = response.rpartition("</think>")[2]
    named = _named_letter(reply, letters)
    if named and right:
        return float(named == right)

    answers = [texts[letters.index(right)]] if right in letters[: len(texts)] else []
    answers += [str(info[key]) for key in ("correct_answer", "answer_text") if info.get(key)]
    answers += [label] if isinstance(label, str) else []
    return float(any(one and one in _plain(reply) for one in map(_plain, answers)))


def _letter_of_label(label: Any, given: Any, letters: Sequence[str]) -> str | None:
    """Return the right letter: as `correct_letter` gives it, or as the label is one, or its number."""
    if isinstance(label, (int, float)):
        if 0 <= int(label) < len(letters):
            return letters[int(label)]
    elif isinstance(label, str) and not (isinstance(given, str) and given.strip()):
        letter = label.strip().upper()
        return letter if len(label.strip()) == 1 and letter in letters else None
    return given.strip().upper() or None if isinstance(given, str) else None


def _letter_of_choice(label: str, texts: Sequence[str], letters: Sequence[str]) -> str | None:
    for number, text in enumerate(texts):
        if _plain(text) == _plain(label):
            return letters[number]
    return None


def _named_letter(text: str, letters: Collection[str]) -> str | None:
    for pattern in _PATTERNS:
        found = re.search(pattern, text, flags=re.IGNORECASE)
        if found and found[1].upper() in letters:
            return found[1].upper()
    alone = [one for one in re.findall(r"\b([A-Z])\b", text) if one in letters]
    return alone[-1] if alone else None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
