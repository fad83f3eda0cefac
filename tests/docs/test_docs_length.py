"""The documents stay short: what people wrote, without code blocks and pages that a command writes."""

from __future__ import annotations

import re

from test_docs_links import ROOT, prose

MOST_WORDS = 27_000
WRITTEN_BY_A_BENCHMARK = "template_table.md"


def test_readme_and_docs_have_at_most_half_of_their_former_words():
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != WRITTEN_BY_A_BENCHMARK)]
    words = {page.name: len(re.findall(r"\S*\w\S*", prose(page))) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])
