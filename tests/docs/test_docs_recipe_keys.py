"""The pages of docs/reference are those that the code makes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import metric_tables
import recipe_keys

from turnwright.config.fields import field_docs, known_keys


def test_the_keys_are_those_of_the_schema():
    assert recipe_keys.PAGE.read_text(encoding="utf-8") == recipe_keys.page(), (
        "run `python tests/docs/recipe_keys.py`"
    )


def test_the_metrics_are_those_of_the_code():
    assert metric_tables.PAGE.read_text(encoding="utf-8") == metric_tables.page(), (
        "run `python tests/docs/metric_tables.py`"
    )


def test_every_key_says_what_it_means():
    assert set(known_keys()) <= set(field_docs())
