"""Overlap of words."""

from __future__ import annotations

import re
import string
from collections import Counter

CLOSED = ("yes", "no", "noanswer")


def normalize_answer(s: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    letters = "".join(char for char in str(s).lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", letters).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words; 0 for `yes`, `no` and `noanswer` against anything else."""
    given, right = normalize_answer(prediction or ""), normalize_answer(ground_truth)
    shared = sum((Counter(given.split()) & Counter(right.split())).values())
    if not shared or (given != right and (given in CLOSED or right in CLOSED)):
        return 0, 0, 0
    precision, recall = shared / len(given.split()), shared / len(right.split())
    return 2 * precision * recall / (precision + recall), precision, recall
