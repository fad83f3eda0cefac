"""docs/recipes.md tells of every key, in the words of the schema."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from recipe_keys import PAGE, with_tables

from turnwise.config.fields import field_docs, known_keys


def test_the_tables_are_those_of_the_schema():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run `python tests/docs/recipe_keys.py` and commit docs/recipes.md"


def test_every_key_says_what_it_means():
    assert set(known_keys()) <= set(field_docs())
