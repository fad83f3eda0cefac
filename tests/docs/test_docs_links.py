"""Every link of the documents to a file or a heading leads there, and what
README prints was printed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks" / "results").glob("*.md"),
    ]
)


def prose(page: Path) -> str:
    return re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def headings(page: Path) -> set[str]:
    """As GitHub names them in links."""
    rendered = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    ]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in rendered}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in headings(there)
        ):
            lost.append(target)
    assert not lost


def test_readme_shows_the_last_lines_that_the_script_wrote():
    """`python benchmarks/quickstart.py` writes both."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "quickstart.py"))
    shown = script["BLOCK"].search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert shown.group() == script["RESULT"].read_text(encoding="utf-8")
