"""The page of error texts has texts that the code prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from error_texts import is_in_the_code

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("text", ROWS)
def test_a_listed_text_is_printed(text):
    assert is_in_the_code(text)


def test_texts_are_found_by_their_fixed_words():
    assert len(ROWS) > 50
    assert len(set(ROWS)) == len(ROWS)
    for text in ROWS:
        assert len(re.sub(r"[\W_]|\.\.\.", "", text)) >= 7, f"{text!r} says too little"
    assert not is_in_the_code("... already contains a walk; ...")
