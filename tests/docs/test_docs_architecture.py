"""The architecture page: its layers are those that import-linter checks, and its links name code that exists."""

from __future__ import annotations

import re

from architecture import PAGE, generated


def without_lines(page: str) -> str:
    """Line numbers move with every edit; the script renews them."""
    return re.sub(r"#L\d+", "", page)


def test_layers_and_links_are_those_of_the_code():
    page = PAGE.read_text(encoding="utf-8")
    assert without_lines(page) == without_lines(generated(page)), "run python tests/docs/architecture.py"
