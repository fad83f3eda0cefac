"""The site has every page and every public name, and finds what is wrong with itself. `make docs`
builds and crawls it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import turnwright as tw

sys.path.append(str(Path(__file__).parents[2]))

from contrib.docs_site import staging
from contrib.docs_site.crawl import problems
from contrib.docs_site.navigation import SECTIONS, TOPICS, full_name

ROOT = staging.ROOT
PAGES = staging.all_pages()


def test_every_page_is_in_one_section():
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    written = {str(path.relative_to(ROOT)) for path in documents}
    assert Counter(page for page in PAGES if page.startswith("docs/")) == Counter(written)
    assert len(set(PAGES)) == len(PAGES)
    assert all((ROOT / page).is_file() for page in PAGES)


def test_readme_lists_pages_under_the_names_of_their_sections():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## More")[2]
    sections = {section.title: section.pages for section in SECTIONS}
    rows = re.findall(r"^- \*\*(.+?):\*\* (.*)$", text, re.MULTILINE)
    assert [title for title, _ in rows] == list(sections)
    for title, row in rows:
        linked = re.findall(r"\]\(([^)#]+)\)", row)
        assert linked
        assert set(linked) <= set(sections[title])


def test_every_public_name_is_in_the_reference_once():
    names = Counter(full_name(name) for topic in TOPICS for name in topic.names)
    assert max(names.values()) == 1
    public = {f"turnwright.{name}" for name in tw.__all__} - {"turnwright.__version__"}
    assert public == {name for name in names if name.count(".") == 1} & public


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """The sources of the site, without a published repository."""
    folder = tmp_path_factory.mktemp("sources")
    staging.stage(folder)
    return folder


def test_every_link_of_the_sources_leads_to_a_page(staged):
    lost = []
    for page in staged.rglob("*.md"):
        if page.is_relative_to(staged / "files"):
            continue
        text = staging.FENCED.sub("", page.read_text(encoding="utf-8"))
        for link in staging.LINK.finditer(text):
            path = link["target"].partition("#")[0]
            if path and "://" not in path and not (page.parent / path).is_file():
                lost.append(f"{page.relative_to(staged)}: {path}")
    assert not lost


def test_pages_keep_their_words(staged):
    """But for what links lead to."""

    def words(text: str) -> str:
        return staging.LINK.sub(lambda link: link["text"], text)

    for page in PAGES:
        if page.endswith(".md"):
            copied = (staged / page).read_text(encoding="utf-8")
            assert words(copied) == words((ROOT / page).read_text(encoding="utf-8")), page


def test_links_to_files_lead_to_the_repository_where_it_is_published(tmp_path):
    stager = staging.Stager(tmp_path, "https://example.org/turnwright")
    text = "[code](../src/turnwright/simple.py) and [start](start.md#install)\n"
    assert stager.with_links(text, "docs/training.md") == (
        "[code](https://example.org/turnwright/blob/main/src/turnwright/simple.py) "
        "and [start](start.md#install)\n"
    )
    assert not stager.linked


def test_code_is_no_link(tmp_path):
    stager = staging.Stager(tmp_path, "")
    text = "`[a](../src/b.py)`\n\n```text\n[a](../src/b.py)\n```\n"
    assert stager.with_links(text, "docs/training.md") == text


def test_the_crawler_finds_what_is_wrong(tmp_path):
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="#top"></a><a href="there.html#here"></a>'
        '<a href="gone.html"></a><a href="https://example.org"></a>'
        '<script src="https://example.org/a.js"></script><img src="a.png">'
    )
    (tmp_path / "there.html").write_text("<p>no anchor</p>")
    (tmp_path / "alone.html").write_text("<p>no way to it</p>")
    (tmp_path / "a.css").write_text("@font-face { src: url(//example.org/a.woff2) }")
    assert problems(tmp_path) == [
        "a.css: loads //example.org/a.woff2 from another machine",
        "alone.html: no link leads to it",
        "index.html: gone.html leads nowhere",
        "index.html: loads a.png, which is not there",
        "index.html: loads https://example.org/a.js from another machine",
        "index.html: there.html#here leads to no heading",
    ]
