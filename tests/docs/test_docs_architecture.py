"""The architecture page: its layers are those that import-linter checks, and its links
name code that exists."""

from __future__ import annotations

from architecture import PAGE, generated


def test_layers_and_links_are_those_of_the_code():
    page = PAGE.read_text(encoding="utf-8")
    assert page == generated(page), "run python tests/docs/architecture.py"
